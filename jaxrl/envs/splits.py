"""Which split a question belongs to: a hash of its text, so that it depends on no seed, size, order or file."""

from __future__ import annotations

import hashlib

OTHER_PART = {"train": "heldout", "heldout": "train"}
"""Where a question is that is not in a part."""


def split_of(question: str, heldout_frac: float) -> str:
    """Say which split a question text belongs to: `heldout` for a share `heldout_frac` of all texts, else `train`.

    The first 32 bits of the text's SHA-256, modulo 1000, are compared with `1000 * heldout_frac`.
    """
    bucket = int(hashlib.sha256(question.encode()).hexdigest()[:8], 16) % 1000
    return "heldout" if bucket < 1000 * heldout_frac else "train"


def split_in_words(num_kept: int, num_questions: int, split: str, heldout_frac: float) -> str:
    """Say how many questions a split keeps, and where the others are.

    Args:
      num_kept: questions of the split.
      num_questions: all questions.
      split: `train`, `heldout` or `all`.
      heldout_frac: the share that belongs to `heldout`.

    Example:
      >>> split_in_words(89, 100, "train", 0.1)
      "89 of 100 questions (split 'train'; `heldout_frac`=0.1 keeps 11 for 'heldout')"
      >>> split_in_words(100, 100, "all", 0.1)
      "100 of 100 questions (split 'all')"
    """
    rest = "" if split == "all" else f"; `heldout_frac`={heldout_frac:g} keeps {num_questions - num_kept} for {OTHER_PART[split]!r}"
    return f"{num_kept} of {num_questions} questions (split {split!r}{rest})"


def question_id(question: str) -> str:
    """Return the name of a question that has none of its own: 16 hexadecimal digits of its text's SHA-256."""
    return hashlib.sha256(question.encode()).hexdigest()[:16]
