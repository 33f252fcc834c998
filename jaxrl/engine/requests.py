"""What the engine holds for each accepted request, and why it refuses one.

Plain records and pure checks: nothing here queues, schedules or touches a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.config.env_base import LEAST_TEMPERATURE
from jaxrl.engine.slots import SampledTokens
from jaxrl.errors import EngineError, PromptTooLongError
from jaxrl.inference.endpoint import GenerateRequest, Generation, TokenSampling

MOST_TEMPERATURE = 1e5
"""Beyond this one and `LEAST_TEMPERATURE`, logits divided by the temperature overflow float32 or are all alike."""
BROKEN = "\ufffd"
"""What a decoder writes for bytes that are no character, or not one yet."""


@dataclass(slots=True)
class Ticket:
    """One accepted generation request."""

    request: GenerateRequest
    future: Future[Generation]
    deadline_s: float
    """When it fails, on the engine's clock."""
    on_tokens: Callable[[SampledTokens], None] | None = None
    """Told of new tokens after each tick, on the device thread; quick, and never raises."""
    slot: int | None = None
    """None while it waits."""
    num_told: int = 0
    """Tokens that `on_tokens` has seen."""

    @property
    def key(self) -> str:
        """The request's id."""
        return self.request.request_id


@dataclass(slots=True)
class ScoreTicket:
    """One accepted scoring request."""

    token_ids: np.ndarray
    """[L] int32."""
    temperature: float
    future: Future[Any]
    """Of an array of logprobs, or of `PromptScores`; its holder may cancel it."""
    num_top: int | None = None
    """Alternatives per token; None if the logprobs alone were asked for."""


def running_future() -> Future:
    """Return a future that its holder cannot cancel, so that settling it never fails."""
    future: Future = Future()
    future.set_running_or_notify_cancel()
    return future


def settle(future: Future, outcome: Any) -> None:
    """Give a future its result, or its exception; one that is settled already, or that its holder has cancelled, is left alone."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def why_not_generate(
    request: GenerateRequest, *, window: int, vocab_size: int, has_text: bool, max_logprobs: int = 0
) -> EngineError | None:
    """Return why a request cannot be served, judged by itself alone, or None.

    Args:
      request: prompt and settings.
      window: prompt plus completion tokens of one sequence.
      vocab_size: token ids are below it.
      has_text: whether tokens can be decoded, which stop strings need.
      max_logprobs: alternatives per token that the engine was built to report.
    """
    token_ids, name = request.token_ids, f"request {request.request_id!r}"
    if token_ids.ndim != 1 or len(token_ids) == 0:
        return EngineError(f"{name}: `token_ids` must be [P] with P >= 1, got shape {token_ids.shape}")
    if len(token_ids) >= window:
        return PromptTooLongError(
            f"{name}: a prompt of {len(token_ids)} tokens leaves no room for one token in a window of {window}; shorten it to "
            f"{window - 1} tokens or set `inference.max_model_len` to at least {len(token_ids) + 1}"
        )
    reason = _bad_ids(token_ids, vocab_size) or _bad_settings(request.sampling)
    if reason is None and request.sampling.stop and not has_text:
        reason = "`stop` strings need an engine that was built with `decode_text`; use `stop_ids`"
    reason = reason or _bad_num_top(request.num_top_logprobs, max_logprobs)
    return None if reason is None else EngineError(f"{name}: {reason}")


def why_not_score(
    token_ids: np.ndarray, temperature: float, num_top: int, *, window: int, vocab_size: int, max_logprobs: int = 0
) -> EngineError | None:
    """Return why a sequence cannot be scored, or None; the arguments are those of `Engine.score` and `why_not_generate`."""
    if token_ids.ndim != 1 or not 1 <= len(token_ids) <= window:
        return EngineError(f"`score` takes one sequence of 1 to {window} tokens (`inference.max_model_len`), got shape {token_ids.shape}")
    if not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
        return EngineError(f"`score` needs a temperature in [{LEAST_TEMPERATURE:g}, {MOST_TEMPERATURE:g}], got {temperature!r}")
    reason = _bad_ids(token_ids, vocab_size) or _bad_num_top(num_top, max_logprobs)
    return None if reason is None else EngineError(f"`score`: {reason}")


def _bad_num_top(num_top: int, max_logprobs: int) -> str | None:
    if 0 <= num_top <= max_logprobs:
        return None
    return f"alternatives per token must be in [0, {max_logprobs}] (the engine's `max_logprobs`), got {num_top}"


def _bad_ids(token_ids: np.ndarray, vocab_size: int) -> str | None:
    low, high = int(token_ids.min()), int(token_ids.max())
    if low >= 0 and high < vocab_size:
        return None
    return f"token ids must be in [0, {vocab_size}), got ids from {low} to {high}; they are another model's"


def _bad_settings(sampling: TokenSampling) -> str | None:
    is_temperature = sampling.temperature == 0 or LEAST_TEMPERATURE <= sampling.temperature <= MOST_TEMPERATURE
    are_stops = all(stop and BROKEN not in stop for stop in sampling.stop)
    ranges = {
        "max_tokens": (sampling.max_tokens >= 1, ">= 1"),
        "temperature": (is_temperature, f"0, which takes the likeliest token, or in [{LEAST_TEMPERATURE:g}, {MOST_TEMPERATURE:g}]"),
        "top_p": (0 < sampling.top_p <= 1, "in (0, 1]"),
        "top_k": (sampling.top_k >= 0, ">= 0"),
        "min_p": (0 <= sampling.min_p < 1, "in [0, 1)"),
        "seed": (0 <= sampling.seed < 2**63, "in [0, 2^63)"),
        "stop": (are_stops, "strings that are not empty and hold no U+FFFD, which stands for bytes that are no text"),
    }
    for name, (is_right, expected) in ranges.items():
        if not is_right:
            return f"`{name}` must be {expected}, got {getattr(sampling, name)!r:.200}"
    return None
