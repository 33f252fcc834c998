"""Whether the ids of a served model stand for the same tokens as the policy's.

In: the pool of a frozen model, the policy's renderer. Out: the first difference in words, or None. Ids are compared by the
text that each side makes of them, over the policy's whole vocabulary, in runs that are halved where they differ; so a
vocabulary of 150,000 costs some 150 short requests. A server that tells nothing about its tokenizer is never taken on trust
in silence: a warning says so.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

import numpy as np

from jaxrl.errors import DeadlineError, EndpointDownError, EngineError
from jaxrl.inference.frozen import FrozenEndpoint, FrozenPool
from jaxrl.inference.rendering import Renderer

logger = logging.getLogger(__name__)

RUN_LENGTH = 1024
"""Ids whose text is asked for in one request; a server may refuse more than its model's window."""
PROBE_TEXT = "Why is 12345 + 67 = 12412?\n\n  def f(x):\n\treturn [x, 'naïve', \"東京\"]  # isn't it?"
"""Split by tokenizers in many ways."""
COMPARE_DEADLINE_S = 120.0
"""For the whole comparison with one pool."""
_TIDIED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""Before these, tokenizers that tidy up decoded text (`clean_up_tokenization_spaces`) take the space away."""


class _Difference(NamedTuple):
    """Ids that do not stand for the same text."""

    ids: np.ndarray
    ours: str
    theirs: str

    def __str__(self) -> str:
        which = f"id {self.ids[0]} is" if len(self.ids) == 1 else f"ids {self.ids[0]} to {self.ids[-1]} are"
        return f"{which} {self.ours!r:.80} to the policy and {self.theirs!r:.80} to the server"


async def vocabulary_difference(
    pool: FrozenPool, renderer: Renderer, *, may_be_larger: bool = False, deadline_s: float = COMPARE_DEADLINE_S
) -> str | None:
    """Compare the policy's vocabulary with that of every endpoint of a pool.

    A text that becomes other ids there, of a vocabulary that is the same, is no difference: ids are what is exchanged. It
    is warned of, as is a server that cannot be asked.

    Args:
      pool: it is ready, see `FrozenPool.setup`.
      renderer: the policy's tokenizer.
      may_be_larger: a server may have further tokens above the policy's, which matters only if it writes.
      deadline_s: for all of it, in seconds.

    Returns:
      Which endpoint differs and how, with both tokens; None if no difference was found.

    Raises:
      EngineError: an endpoint does not answer, or its answer cannot be used.
      DeadlineError: the comparison took too long.
    """
    timer = asyncio.timeout(deadline_s)
    try:
        async with timer:
            for name, endpoint in pool.endpoints.items():
                if (difference := await _endpoint_difference(name, endpoint, renderer, may_be_larger=may_be_larger)) is not None:
                    return f"{name}: {difference}"
    except TimeoutError as error:
        if not timer.expired():
            raise
        raise DeadlineError(f"{pool}: its vocabulary could not be compared with the policy's within {deadline_s:g} s") from error
    return None


async def why_in_words(pool: FrozenPool, renderer: Renderer) -> str | None:
    """Say why a frozen model that writes must be asked in words: its ids are not the policy's, or nobody tells; else None.

    Args and errors are those of `vocabulary_difference`.
    """
    for name, endpoint in pool.endpoints.items():
        if await endpoint.detokenize(np.zeros(1, np.int32)) is None:
            return f"{name} does not tell the text of token ids (/detokenize), so they may stand for something else there"
    return await vocabulary_difference(pool, renderer)


async def _endpoint_difference(name: str, endpoint: FrozenEndpoint, renderer: Renderer, *, may_be_larger: bool) -> str | None:
    texts = _Texts(endpoint, renderer)
    found = await _first_difference(texts, np.arange(renderer.num_ids, dtype=np.int32))
    probe = await endpoint.tokenize(PROBE_TEXT)
    ours = renderer.encode(PROBE_TEXT, add_special_tokens=False)
    is_split_alike = probe is None or np.array_equal(probe, ours)
    if texts.is_told:
        if found is None and not may_be_larger:
            found = await _surplus(texts, renderer.num_ids)
        if found is not None:
            return str(found)
        if not is_split_alike:
            logger.warning(
                "%s: every id stands for the same text there, but %r becomes %s and not %s: its tokenizer splits texts in another way",
                name, PROBE_TEXT, _shown(probe), _shown(ours),
            )  # fmt: skip
        return None
    if not is_split_alike:
        return f"the text {PROBE_TEXT!r} becomes the ids {_shown(probe)} there and {_shown(ours)} with the policy's tokenizer"
    logger.warning(
        "%s: the server does not tell the text of token ids (/detokenize), so its vocabulary was %s; see to it yourself that it is the "
        "policy's: an id that stands for something else there is scored or written without any error",
        name, "not compared with the policy's" if probe is None else "compared by the ids of one text only",
    )  # fmt: skip
    return None


class _Texts:
    """What both sides make of a run of ids."""

    def __init__(self, endpoint: FrozenEndpoint, renderer: Renderer) -> None:
        self._endpoint = endpoint
        self._renderer = renderer
        self.is_told = True
        """False once the server is known not to tell."""

    async def difference(self, ids: np.ndarray) -> _Difference | None:
        """Return both texts if they are not the same."""
        ours, theirs = await asyncio.to_thread(self._renderer.decode, ids), await self._endpoint.detokenize(ids)
        if theirs is None:
            self.is_told = False
            return None
        return None if theirs in (ours, _tidied(ours)) else _Difference(ids, ours, theirs)


async def _first_difference(texts: _Texts, ids: np.ndarray) -> _Difference | None:
    """Return the shortest run of ids that differs, where the first run of `RUN_LENGTH` does."""
    for start in range(0, len(ids), RUN_LENGTH):
        found = await texts.difference(ids[start : start + RUN_LENGTH])
        if not texts.is_told:
            return None
        while found is not None and len(found.ids) > 1:
            middle = len(found.ids) // 2
            part = await texts.difference(found.ids[:middle]) or await texts.difference(found.ids[middle:])
            if part is None:  # only together do they differ
                break
            found = part
        if found is not None:
            return found
    return None


async def _surplus(texts: _Texts, num_ids: int) -> _Difference | None:
    """Return the id above the policy's last one if it stands for something to the server."""
    try:
        return await texts.difference(np.array([num_ids], np.int32))
    except EndpointDownError:
        raise
    except EngineError:  # it refuses ids that it does not know
        return None


def _tidied(text: str) -> str:
    for mark in _TIDIED:
        text = text.replace(mark, mark.strip() if mark != " ' " else "'")
    return text


def _shown(ids: np.ndarray | None) -> str:
    return f"{[] if ids is None else ids.tolist()}"
