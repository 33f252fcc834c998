"""Which split a question belongs to: a hash of its text, so that it depends on no seed, size, order or file."""

from __future__ import annotations

import hashlib


def split_of(question: str, heldout_frac: float) -> str:
    """Say which split a question text belongs to: `heldout` for a share `heldout_frac` of all texts, else `train`.

    The first 32 bits of the text's SHA-256, modulo 1000, are compared with `1000 * heldout_frac`.
    """
    bucket = int(hashlib.sha256(question.encode()).hexdigest()[:8], 16) % 1000
    return "heldout" if bucket < 1000 * heldout_frac else "train"


def question_id(question: str) -> str:
    """Return the name of a question that has none of its own: 16 hexadecimal digits of its text's SHA-256."""
    return hashlib.sha256(question.encode()).hexdigest()[:16]
