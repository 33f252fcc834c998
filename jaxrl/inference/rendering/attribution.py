"""Which tokens of a prompt are a message's own text, and which are what the chat template puts around it.

The place of a text is found by rendering the same messages with a mark in its place, never by looking for the text itself: whatever it
quotes, tags or headers or itself, moves nothing. In: a template and what it rendered. Out: characters, or one bool per token. A text that
the template writes in another way than trimmed or escaped has no place that is known, and is said to have none.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer, decoders

from jaxrl.errors import EnvError

Span = tuple[int, int]
"""Index of the first character, and index after the last."""


@dataclass(frozen=True, slots=True)
class Bodies:
    """Where the texts of messages stand in what a template rendered."""

    spans: Mapping[int, tuple[Span, ...]]
    """By index of the message, in order; a message whose place is not known is missing."""
    left_out: frozenset[int]
    """Messages whose text the template does not write at all."""


def unused_mark(*texts: str) -> str:
    """Return a word that occurs in none of the texts, and that no template has a reason to change.

    Example:
      >>> unused_mark("hello"), unused_mark("zqmark, zqmarkq")
      ('zqmark', 'zqmarkqq')
    """
    mark = "zqmark"
    while any(mark in text for text in texts):
        mark += "q"
    return mark


def find_bodies(
    render: Callable[[Sequence[dict[str, Any]]], str],
    messages: Sequence[dict[str, Any]],
    first: int,
    text: str,
    spellings: Mapping[int, Sequence[str]],
) -> Bodies:
    """Find where the contents of `messages[first:]` stand in `text`.

    Args:
      render: the template, as it rendered `text`.
      messages: the conversation.
      first: the first message that is looked for.
      text: `render(messages)`.
      spellings: what a content may have become, beside trimmed and escaped, by index of the message.

    Example:
      >>> messages = [{"role": "user", "content": "user: hi"}]
      >>> find_bodies(lambda told: f"user: {told[0]['content']};", messages, 0, "user: user: hi;", {}).spans
      {0: ((6, 14),)}
    """
    mark = unused_mark(text)
    wanted = [index for index in range(first, len(messages)) if messages[index]["content"]]
    found: dict[int, tuple[Span, ...]] = {index: () for index in range(first, len(messages)) if not messages[index]["content"]}
    left_out: set[int] = set()

    def look_for(those: Sequence[int]) -> bool:
        try:
            marked_text = render([{**m, "content": f"{mark}{index}z"} if index in those else m for index, m in enumerate(messages)])
        except EnvError:
            return False
        marks = [(int(match[1]), match.start(), match.end()) for match in re.finditer(rf"{mark}(\d+)z", marked_text)]
        missing = set(those) - {index for index, _, _ in marks}
        if len(those) == 1:
            left_out.update(missing)
        if missing:
            return False
        places = _replaced(marked_text, marks, text, lambda index: _spellings(messages[index]["content"], spellings.get(index, ())))
        if places is None:
            return False
        found.update({index: tuple(span for whose, span in places if whose == index) for index in those})
        return True

    # All at once is enough unless the template does something of its own with one of them, which halving finds in few renderings.
    waiting = [wanted] if wanted else []
    while waiting:
        those = waiting.pop()
        if not look_for(those) and len(those) > 1:
            waiting += [those[len(those) // 2 :], those[: len(those) // 2]]
    return Bodies(found, frozenset(left_out))


def _spellings(content: str, others: Sequence[str]) -> Iterator[str]:
    """Yield what a content may have become, the likeliest first; contents can be long, so the rest is made only if it is asked for."""
    plain = (content, *others)
    yield from plain
    for text in plain:
        yield from (text.strip(), text.rstrip(), text.lstrip())
    for text in plain:
        yield from (json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))


def _replaced(
    marked_text: str, marks: Sequence[tuple[int, int, int]], text: str, options: Callable[[int], Iterator[str]]
) -> list[tuple[int, Span]] | None:
    """Return the place in `text` of each mark; None if `text` cannot be had by replacing marks."""
    places: list[tuple[int, Span]] = []
    at = marks[0][1]
    if text[:at] != marked_text[:at]:
        return None
    for number, (index, _, end) in enumerate(marks):
        is_last = number + 1 == len(marks)
        after = marked_text[end:] if is_last else marked_text[end : marks[number + 1][1]]
        for option in options(index):
            stop = at + len(option)
            if text.startswith(option, at) and text.startswith(after, stop) and (not is_last or stop + len(after) == len(text)):
                places.append((index, (at, stop)))
                at = stop + len(after)
                break
        else:
            return None
    return places


class TokenPlaces:
    """Says where tokens stand in the text that they encode.

    Offsets of a tokenizer may be trimmed: a token " a" is said to begin at the "a". Where tokens are bytes, their lengths tell exactly.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def of(self, encoding: Encoding, text: str) -> tuple[np.ndarray, np.ndarray, Callable[[int], int]]:
        """Return where each token begins and ends, and how to count characters in the same unit.

        Returns:
          [n] int64 begins and [n] int64 ends, and a function from an index into `text` to that unit.
        """
        if self._num_bytes is not None:
            ends = np.cumsum(self._num_bytes[np.asarray(encoding.ids, np.int64)])
            if len(ends) and ends[-1] == len(text.encode()):
                begins = np.concatenate([[0], ends[:-1]])
                return begins, ends, (lambda index: index) if text.isascii() else (lambda index: len(text[:index].encode()))
        offsets = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
        ends = np.maximum.accumulate(offsets[:, 1])
        # What lies between two tokens is a space that was trimmed off the second.
        begins = np.minimum(offsets[:, 0], np.concatenate([[0], ends[:-1]])[: len(ends)])
        return begins, ends, lambda index: index

    @functools.cached_property
    def _num_bytes(self) -> np.ndarray | None:
        """[num_ids] int64, the bytes of each token; None if tokens are not made of bytes."""
        if not isinstance(self._backend.decoder, decoders.ByteLevel):
            return None
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        num_bytes = np.zeros(1 + max(vocabulary.values()), np.int64)
        for token, token_id in vocabulary.items():
            num_bytes[token_id] = len(token)  # one character of the byte alphabet for each byte
        for token_id, added in self._backend.get_added_tokens_decoder().items():
            num_bytes[token_id] = len(added.content.encode())
        return num_bytes
