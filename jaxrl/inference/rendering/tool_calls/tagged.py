"""The text of a reply with its tags, each found in the way in which the vocabulary holds it.

In: sampled ids. Out: their text, and where a tag stands. A tag that is one token of the vocabulary stands only where that token was
sampled; the same letters spelt with ordinary tokens are text. A tag that is no token is looked for in the text.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Tag:
    """One tag of a reply."""

    name: str
    """The tag, such as `<tool_call>`."""
    begin: int
    """Index of its first character."""
    end: int
    """Index after its last character."""


class TaggedText:
    """A reply's text, and which of its characters are tags.

    Args:
      text: the text.
      tokens: the tags that were sampled as one token each, in order.
      token_names: the tags that are a token of the vocabulary; any other is looked for in the text.
    """

    def __init__(self, text: str, tokens: Sequence[Tag] = (), token_names: Collection[str] = ()) -> None:
        self.text = text
        self._token_begins = [tag.begin for tag in tokens]
        # Where each tag begins. A policy may write one thousands of times, so no question may cost more than the bisection of a list.
        self._begins: dict[str, list[int]] = {name: [] for name in token_names}
        for tag in tokens:
            self._begins[tag.name].append(tag.begin)

    def first(self, names: Collection[str], start: int, end: int | None = None) -> Tag | None:
        """Return the first of some tags that begins in `text[start:end]`; None if none does."""
        found: Tag | None = None
        for name in names:
            begins = self._begins_of(name)
            index = bisect.bisect_left(begins, start)
            if index < len(begins) and (end is None or begins[index] < end) and (found is None or begins[index] < found.begin):
                found = Tag(name, begins[index], begins[index] + len(name))
        return found

    def limit(self, start: int) -> int:
        """Return where the next token that is a tag begins, or the length of the text: no value reaches over a tag."""
        index = bisect.bisect_left(self._token_begins, start)
        return self._token_begins[index] if index < len(self._token_begins) else len(self.text)

    def _begins_of(self, name: str) -> list[int]:
        if name not in self._begins:
            self._begins[name] = [match.start() for match in re.finditer(re.escape(name), self.text)]
        return self._begins[name]


class Tagger:
    """Finds some tags in sampled ids.

    Args:
      tokenizer: the policy's.
      names: the tags to find.
    """

    def __init__(self, tokenizer: Tokenizer, names: Collection[str]) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._tags = {token_id: token.content for token_id, token in added.items() if token.content in names}
        self._tag_ids = np.asarray(sorted(self._tags), np.int64)
        self._token_names = frozenset(self._tags.values())

    def tag(self, token_ids: np.ndarray) -> TaggedText:
        """Return the text of [N] sampled ids and its tags."""
        ids = np.asarray(token_ids, np.int64)
        cuts = np.flatnonzero(np.isin(ids, self._tag_ids))
        pieces: list[str] = []
        tags: list[Tag] = []
        length, begin = 0, 0
        for cut in [*cuts.tolist(), len(ids)]:
            pieces.append(self._run_text(ids[begin:cut].tolist(), int(ids[begin - 1]) if begin else None))
            length += len(pieces[-1])
            if cut < len(ids):
                name = self._tags[int(ids[cut])]
                tags.append(Tag(name, length, length + len(name)))
                pieces.append(name)
                length += len(name)
            begin = cut + 1
        return TaggedText("".join(pieces), tags, self._token_names)

    def _run_text(self, ids: Sequence[int], before: int | None) -> str:
        """Return the text of ids as it reads after the tag `before`: at the beginning of a text some tokenizers leave out a space."""
        if before is None or not ids:
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)
        alone = self._tokenizer.decode([before], skip_special_tokens=False)
        return self._tokenizer.decode([before, *ids], skip_special_tokens=False)[len(alone) :]
