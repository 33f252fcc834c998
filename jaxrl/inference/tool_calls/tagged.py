"""The text of a reply with its tags, each found in the way in which the vocabulary holds it.

In: sampled ids. Out: their text, and where a tag stands. A tag that is one token of the vocabulary stands only where that token was
sampled; the same letters spelt with ordinary tokens are text. A tag that is no token is looked for in the text.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class TaggedText:
    """A reply's text, and which of its characters are tags."""

    text: str
    tokens: tuple[Tag, ...] = ()
    """The tags that were sampled as one token each, in order."""
    token_names: frozenset[str] = frozenset()
    """The tags that are a token of the vocabulary."""
    _begins: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._begins.extend(tag.begin for tag in self.tokens)

    def first(self, names: Collection[str], start: int, end: int | None = None) -> Tag | None:
        """Return the first of some tags that begins in `text[start:end]`; None if none does."""
        end = len(self.text) if end is None else end
        found: list[Tag] = []
        for index in range(bisect.bisect_left(self._begins, start), bisect.bisect_left(self._begins, end)):
            if self.tokens[index].name in names:
                found.append(self.tokens[index])
                break
        for name in names:
            if name not in self.token_names and (begin := self.text.find(name, start, end + len(name) - 1)) >= 0:
                found.append(Tag(name, begin, begin + len(name)))
        return min(found, key=lambda tag: tag.begin, default=None)

    def limit(self, start: int) -> int:
        """Return where the next token that is a tag begins, or the length of the text: no value reaches over a tag."""
        index = bisect.bisect_left(self._begins, start)
        return self._begins[index] if index < len(self._begins) else len(self.text)


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
        return TaggedText("".join(pieces), tuple(tags), self._token_names)

    def _run_text(self, ids: Sequence[int], before: int | None) -> str:
        """Return the text of ids as it reads after the tag `before`: at the beginning of a text some tokenizers leave out a space."""
        if before is None or not ids:
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)
        alone = self._tokenizer.decode([before], skip_special_tokens=False)
        return self._tokenizer.decode([before, *ids], skip_special_tokens=False)[len(alone) :]
