"""The embedded engine: continuous batching over fixed slots, driven one tick at a time by the device thread.

In go generation and scoring requests, from any thread; out come `concurrent.futures` futures. `tick` applies what was asked since the last one (new
requests, cancels, pause, resume, new weights), prefills into free slots, and decodes every slot once. New weights are a swap of a reference
between ticks: running requests go on, keep their keys and values, and each token records the version that sampled it. It does not render
text, retry, or know where weights come from.

| what waits              | for what                                        | ends by                                  |
|-------------------------|-------------------------------------------------|------------------------------------------|
| a request in the queue  | a free slot, and the engine not being paused    | `inference.request_deadline_s`           |
| a running request       | a stop, its token limit, the end of the window  | `inference.request_deadline_s`           |
| a score, a load, a pause | the next tick                                  | the caller's own deadline                |
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.engine.cache import EnginePrograms, init_cache
from jaxrl.engine.sampling import SamplingArrays
from jaxrl.engine.scheduler import PrefillCall, Scheduler, bucket_lengths, plan_prefills, smallest_bucket
from jaxrl.engine.slots import SlotTable, Taken
from jaxrl.errors import DeadlineError, EngineError, PromptTooLongError
from jaxrl.inference.endpoint import FinishReason, GenerateRequest, Generation, TokenSampling
from jaxrl.models.decode import DecodeParams
from jaxrl.models.spec import ModelSpec


@dataclass(slots=True)
class Ticket:
    """One accepted generation request."""

    request: GenerateRequest
    future: Future[Generation]
    deadline_s: float
    """On the engine's clock."""
    slot: int | None = None


@dataclass(slots=True)
class _ScoreRequest:
    token_ids: np.ndarray
    temperature: float
    future: Future[np.ndarray]


class Engine:
    """Generates and scores with one policy version at a time.

    `submit`, `score`, `cancel`, `pause`, `resume`, `load`, `has_work`, `stats` and `describe` may be called from any thread; `tick` and
    `warm_up` make every JAX call and belong to the device thread.
    """

    def __init__(
        self,
        spec: ModelSpec,
        decode_params: DecodeParams,
        config: EmbeddedInferenceConfig,
        *,
        version: int,
        decode_text: Callable[[list[int]], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocate the cache; call on the device thread.

        Args:
          spec: the architecture.
          decode_params: the policy, from `models.decode.to_decode_params` (through `weights.WeightStore`).
          config: slots, window and buckets.
          version: which policy version `decode_params` is.
          decode_text: turns token ids into text; without it generations have no text and stop strings are refused.
          clock: seconds, monotonic.
        """
        self.spec = spec
        self.config = config
        self.version = version
        self.is_paused = False
        self.failure: BaseException | None = None
        self._decode_text = decode_text
        self._clock = clock
        self._device = next(iter(decode_params.embed_VD.devices()))
        self._params = jax.device_put(decode_params, self._device)
        self._cache = self._new_cache()
        self._programs = EnginePrograms(spec, config.decode_steps_per_tick)
        self._buckets = bucket_lengths(config.min_prefill_bucket, config.max_model_len)
        self._slots = SlotTable(config.num_slots, config.max_model_len)
        self._scheduler: Scheduler[Ticket] = Scheduler(config.num_slots)
        self._inbox: deque[Callable[[], None]] = deque()
        self._tickets: dict[str, Ticket] = {}
        self._scores: deque[_ScoreRequest] = deque()
        self._sampling: SamplingArrays | None = None
        self._counts = dict.fromkeys(
            ("ticks", "decode_steps", "prefill_calls", "generated_tokens", "prefill_tokens", "scored_tokens", "near_ties"), 0
        )

    # ------------------------------------------------------------------ any thread

    def submit(self, request: GenerateRequest) -> Future[Generation]:
        """Queue a request.

        The completion is cut at the window: `max_tokens` may ask for more than is left.

        Args:
          request: prompt and settings; its id must not be in use.

        Returns:
          A future of the generation, or of the reason why there is none: `PromptTooLongError`, `EngineError` (settings that make no sense, an
          id in use, logits that are not finite, an engine that failed) or `DeadlineError`. Cancelling the future does nothing; use `cancel`.
        """
        future: Future[Generation] = Future()
        future.set_running_or_notify_cancel()
        refusal = self._refusal(request)
        if refusal is not None:
            future.set_exception(refusal)
            return future
        ticket = Ticket(request, future, deadline_s=self._clock() + self.config.request_deadline_s)
        self._inbox.append(partial(self._accept, ticket))
        return future

    def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> Future[np.ndarray]:
        """Queue a scoring request; served while paused too, by the weights of the tick that serves it.

        Args:
          token_ids: [L] int32, 1 <= L <= `max_model_len`.
          temperature: > 0; the logits are divided by it.

        Returns:
          A future of [L] float32 logprobs, each token given those before it; index 0 is 0.0. Fails with `EngineError` on bad arguments.
        """
        future: Future[np.ndarray] = Future()
        future.set_running_or_notify_cancel()
        token_ids = np.array(token_ids, np.int32)
        if token_ids.ndim != 1 or not 1 <= len(token_ids) <= self.config.max_model_len:
            future.set_exception(
                EngineError(
                    f"`score` takes one sequence of 1 to {self.config.max_model_len} tokens (`inference.max_model_len`), got shape "
                    f"{token_ids.shape}"
                )
            )
        elif (reason := self._bad_ids(token_ids)) is not None:
            future.set_exception(EngineError(f"`score`: {reason}"))
        elif not (np.isfinite(temperature) and temperature > 0):
            future.set_exception(EngineError(f"`score` needs a temperature above 0, got {temperature!r}"))
        else:
            self._inbox.append(partial(self._accept_score, _ScoreRequest(token_ids, temperature, future)))
        return future

    def cancel(self, request_id: str) -> None:
        """End a request between ticks: its future gets the tokens so far with finish reason `cancelled`. Unknown ids are ignored."""
        self._inbox.append(partial(self._cancel, request_id))

    def pause(self) -> Future[None]:
        """Hold prefill and decode from the next tick on; requests stay where they are. The future is done once it holds."""
        return self._between_ticks(partial(setattr, self, "is_paused", True))

    def resume(self) -> Future[None]:
        """Decode again."""
        return self._between_ticks(partial(setattr, self, "is_paused", False))

    def load(self, decode_params: DecodeParams, version: int) -> Future[None]:
        """Swap the weights between ticks; every token sampled after the future is done is from `version`.

        Args:
          decode_params: of the same shapes and dtypes as the ones being served.
          version: which policy version they are.

        Returns:
          A future; fails with `EngineError` if the shapes differ, and then the old version stays.
        """
        return self._between_ticks(partial(self._swap, decode_params, version))

    def has_work(self) -> bool:
        """Say whether `tick` would do anything now."""
        can_decode = not self.is_paused and bool(self._scheduler.running or self._scheduler.num_waiting)
        return self.failure is None and (bool(self._inbox or self._scores) or can_decode or bool(self._expired()))

    def stats(self) -> dict[str, float]:
        """Return counts since the start and the present load, by name."""
        return {
            "running": float(len(self._scheduler.running)),
            "waiting": float(self._scheduler.num_waiting),
            "is_paused": float(self.is_paused),
            "version": float(self.version),
            **{name: float(count) for name, count in self._counts.items()},
        }

    def describe(self) -> str:
        """Return the engine's state in one line, for error messages."""
        state = "failed" if self.failure else "paused" if self.is_paused else "decoding"
        return (
            f"engine {state}, serving version {self.version}, {len(self._scheduler.running)} of {self.config.num_slots} slots running, "
            f"{self._scheduler.num_waiting} requests waiting, {self._counts['ticks']} ticks done"
        )

    # ------------------------------------------------------------------ device thread

    def tick(self) -> None:
        """Apply what was asked, prefill, and decode every slot by `decode_steps_per_tick` tokens.

        Raises:
          Exception: whatever the device raised; every outstanding future gets an `EngineError` from it first.
        """
        try:
            self._counts["ticks"] += 1
            while self._inbox:
                self._inbox.popleft()()
            self._fail_expired()
            if self._scores:
                self._score_some()
            if not self.is_paused:
                self._admit()
                if self._scheduler.running:
                    self._decode()
        except Exception as error:
            self._fail(error)
            raise

    def warm_up(self, on_progress: Callable[[str, int, int], None] | None = None) -> None:
        """Compile every program of the closed set, so that no later tick compiles anything.

        Args:
          on_progress: called with (what was compiled, how many are done, how many there are).
        """
        assert not self._scheduler.running, "warm_up writes into the cache; call it before the first request"
        rows, slots = self.config.prefill_rows, self.config.num_slots
        jobs: list[tuple[str, Callable[[], object]]] = [("decode", self._run_decode)]
        for bucket in self._buckets:
            token_ids = np.zeros((rows, bucket), np.int32)
            nothing = PrefillCall(token_ids, np.zeros(slots, np.int32), np.full(slots, slots, np.int32), num_tokens=0)
            jobs.append((f"prefill {bucket}", partial(self._run_prefill, nothing)))
            jobs.append((f"score {bucket}", partial(self._run_score, token_ids, np.ones(rows, np.float32))))
        for done, (name, job) in enumerate(jobs, start=1):
            job()
            if on_progress is not None:
                on_progress(name, done, len(jobs))

    def _new_cache(self) -> list:
        cache = init_cache(self.spec, self.config.num_slots, self.config.max_model_len, self._params.embed_VD.dtype)
        return jax.device_put(cache, self._device)

    def _between_ticks(self, action: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                action()
            except EngineError as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._inbox.append(run)
        return future

    def _refusal(self, request: GenerateRequest) -> EngineError | None:
        """Return why a request cannot be served, judged by itself alone."""
        token_ids, window = request.token_ids, self.config.max_model_len
        if self.failure is not None:
            return EngineError(f"request {request.request_id!r}: the engine failed earlier: {self.failure!r}")
        if token_ids.ndim != 1 or len(token_ids) == 0:
            return EngineError(f"request {request.request_id!r}: `token_ids` must be [P] with P >= 1, got shape {token_ids.shape}")
        if len(token_ids) >= window:
            return PromptTooLongError(
                f"request {request.request_id!r}: a prompt of {len(token_ids)} tokens leaves no room for one token in a window of {window}; "
                f"shorten it to {window - 1}, or set `inference.max_model_len` to at least {len(token_ids) + 1}"
            )
        reason = self._bad_ids(token_ids) or _bad_settings(request.sampling)
        if reason is None and request.sampling.stop and self._decode_text is None:
            reason = "`stop` strings need an engine that was built with `decode_text`; use `stop_ids`"
        return None if reason is None else EngineError(f"request {request.request_id!r}: {reason}")

    def _bad_ids(self, token_ids: np.ndarray) -> str | None:
        low, high = int(token_ids.min()), int(token_ids.max())
        if 0 <= low and high < self.spec.vocab_size:
            return None
        return f"token ids must be in [0, {self.spec.vocab_size}), got ids from {low} to {high}: another model's tokenizer?"

    def _accept(self, ticket: Ticket) -> None:
        key = ticket.request.request_id
        if key in self._tickets:
            ticket.future.set_exception(EngineError(f"request id {key!r} is in use; ids must be unique among live requests"))
            return
        self._tickets[key] = ticket
        self._scheduler.add(key, ticket)

    def _accept_score(self, request: _ScoreRequest) -> None:
        self._scores.append(request)

    def _cancel(self, request_id: str) -> None:
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._finish(ticket, FinishReason.CANCELLED)

    def _swap(self, decode_params: DecodeParams, version: int) -> None:
        expected, came = jax.tree.structure(self._params), jax.tree.structure(decode_params)
        shapes = [
            (f"{old.shape} {old.dtype}", f"{new.shape} {new.dtype}")
            for old, new in zip(jax.tree.leaves(self._params), jax.tree.leaves(decode_params), strict=False)
            if (old.shape, old.dtype) != (new.shape, new.dtype)
        ]
        if expected != came or shapes:
            raise EngineError(
                f"version {version} does not fit the engine: expected the arrays of version {self.version}, "
                + (f"got {shapes[0][1]} instead of {shapes[0][0]}" if shapes else f"got the tree {came} instead of {expected}")
            )
        self._params = jax.device_put(decode_params, self._device)
        self.version = version

    def _expired(self) -> list[Ticket]:
        now = self._clock()
        # `copy` is one bytecode under the interpreter lock, so this may run on any thread.
        return [ticket for ticket in self._tickets.copy().values() if ticket.deadline_s <= now]

    def _fail_expired(self) -> None:
        for ticket in self._expired():
            state = "waiting for a slot" if ticket.slot is None else f"after {self._slots.num_sampled_S[ticket.slot]} tokens"
            error = DeadlineError(
                f"request {ticket.request.request_id!r} did not finish within `inference.request_deadline_s`="
                f"{self.config.request_deadline_s:g} s ({state}); {self.describe()}"
            )
            self._drop(ticket)
            ticket.future.set_exception(error)

    def _admit(self) -> None:
        admitted = self._scheduler.admit()
        if not admitted:
            return
        prompts = []
        for slot, ticket in admitted:
            ticket.slot = slot
            self._slots.open(slot, ticket.request)
            prompts.append((slot, np.ascontiguousarray(ticket.request.token_ids, np.int32)))
        self._sampling = None
        for call in plan_prefills(
            prompts, buckets=self._buckets, num_rows=self.config.prefill_rows, num_slots=self.config.num_slots
        ):
            self._run_prefill(call)
            self._counts["prefill_calls"] += 1
            self._counts["prefill_tokens"] += call.num_tokens

    def _run_prefill(self, call: PrefillCall) -> None:
        self._cache = self._programs.prefill(
            self._params, cache=self._cache, token_ids_RT=call.token_ids, rows_N=call.rows, slots_N=call.slots
        )

    def _run_decode(self) -> np.ndarray:
        """Decode every slot; return [3, S, Q] int32 on the host."""
        slots = self._slots
        if self._sampling is None:
            fields = slots.temperature_S, slots.top_k_S, slots.top_p_S, slots.min_p_S, slots.seed_S2
            # Invariant: copies. A CPU device may keep the numpy buffer itself, and the table changes it in place.
            self._sampling = jax.device_put(SamplingArrays(*(x.copy() for x in fields)), self._device)
        self._cache, packed = self._programs.decode(
            self._params,
            cache=self._cache,
            token_ids_S=slots.token_ids_S.copy(),
            position_ids_S=slots.position_ids_S.copy(),
            sampling=self._sampling,
        )
        return np.asarray(packed)

    def _decode(self) -> None:
        taken = self._slots.take(self._run_decode(), self.version)
        self._counts["decode_steps"] += self.config.decode_steps_per_tick
        self._counts["generated_tokens"] += int(taken.num_tokens_A.sum())
        self._counts["near_ties"] += taken.num_near_ties
        is_done_A = taken.is_stopped_A | taken.is_spent_A | taken.is_broken_A
        for i in np.flatnonzero(is_done_A | self._has_stop_string(taken)):
            ticket = self._scheduler.running[int(taken.slots_A[i])]
            if taken.is_broken_A[i]:
                self._drop(ticket)
                ticket.future.set_exception(
                    EngineError(f"request {ticket.request.request_id!r}: the logits of version {self.version} are not finite")
                )
            elif self._cut_at_stop_string(ticket, int(taken.num_tokens_A[i])) or taken.is_stopped_A[i]:
                self._finish(ticket, FinishReason.STOP)
            elif taken.is_spent_A[i]:
                self._finish(ticket, FinishReason.LENGTH)

    def _has_stop_string(self, taken: Taken) -> np.ndarray:
        return np.array([bool(self._scheduler.running[int(slot)].request.sampling.stop) for slot in taken.slots_A], bool)

    def _cut_at_stop_string(self, ticket: Ticket, num_new: int) -> bool:
        """Shorten the slot after the first new token that completes a stop string; say whether there is one."""
        stops = ticket.request.sampling.stop
        if not stops:
            return False
        token_ids = self._slots.sampled(ticket.slot)[0].tolist()
        for end in range(len(token_ids) - num_new + 1, len(token_ids) + 1):
            text = self._decode_text(token_ids[:end])
            if any(stop in text for stop in stops):
                self._slots.shorten(ticket.slot, end)
                return True
        return False

    def _score_some(self) -> None:
        """Serve the oldest scoring request, and with it others of its bucket, in one call."""
        bucket = smallest_bucket(self._buckets, len(self._scores[0].token_ids))
        batch, rest = [], deque()
        for request in self._scores:
            fits = len(batch) < self.config.prefill_rows and smallest_bucket(self._buckets, len(request.token_ids)) == bucket
            (batch if fits else rest).append(request)
        token_ids = np.zeros((self.config.prefill_rows, bucket), np.int32)
        temperatures = np.ones(self.config.prefill_rows, np.float32)
        for row, request in enumerate(batch):
            token_ids[row, : len(request.token_ids)] = request.token_ids
            temperatures[row] = request.temperature
        logprobs = self._run_score(token_ids, temperatures)
        self._scores = rest
        for row, request in enumerate(batch):
            self._counts["scored_tokens"] += len(request.token_ids)
            request.future.set_result(logprobs[row, : len(request.token_ids)].copy())

    def _run_score(self, token_ids: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
        return np.asarray(self._programs.score(self._params, token_ids_RT=token_ids, temperatures_R=temperatures))

    def _drop(self, ticket: Ticket) -> None:
        """Forget a ticket and free its slot; its future is the caller's to settle."""
        self._tickets.pop(ticket.request.request_id)
        if ticket.slot is None:
            self._scheduler.withdraw(ticket.request.request_id)
            return
        self._scheduler.release(ticket.slot)
        self._slots.close(ticket.slot)
        self._sampling = None

    def _finish(self, ticket: Ticket, reason: FinishReason) -> None:
        arrays = [np.zeros(0, dtype) for dtype in (np.int32, np.float32, np.int32)]
        if ticket.slot is not None:
            arrays = self._slots.sampled(ticket.slot)
        self._drop(ticket)
        token_ids, logprobs, versions = arrays
        text = self._text(token_ids.tolist(), ticket.request.sampling)
        ticket.future.set_result(Generation(token_ids, logprobs, versions, finish_reason=reason, text=text))

    def _text(self, token_ids: list[int], sampling: TokenSampling) -> str:
        if self._decode_text is None or not token_ids:
            return ""
        text = self._decode_text(token_ids[:-1] if token_ids[-1] in sampling.stop_ids else token_ids)
        ends = [end for end in map(text.find, sampling.stop) if end >= 0]
        return text[: min(ends)] if ends else text

    def _fail(self, error: BaseException) -> None:
        """Settle every outstanding future with an error, once and for all."""
        self.failure = error
        futures = [ticket.future for ticket in self._tickets.values()] + [request.future for request in self._scores]
        for future in futures:
            if not future.done():
                failure = EngineError(f"the engine failed: {error!r}")
                failure.__cause__ = error
                future.set_exception(failure)
        self._tickets.clear()
        self._scores.clear()


def _bad_settings(sampling: TokenSampling) -> str | None:
    """Return what is wrong with a request's settings."""
    ranges = {
        "max_tokens": (sampling.max_tokens >= 1, ">= 1"),
        "temperature": (np.isfinite(sampling.temperature) and sampling.temperature >= 0, "finite and >= 0"),
        "top_p": (0 < sampling.top_p <= 1, "in (0, 1]"),
        "top_k": (sampling.top_k >= 0, ">= 0"),
        "min_p": (0 <= sampling.min_p < 1, "in [0, 1)"),
        "seed": (0 <= sampling.seed < 2**63, "in [0, 2^63)"),
    }
    for name, (is_right, expected) in ranges.items():
        if not is_right:
            return f"`{name}` must be {expected}, got {getattr(sampling, name)!r}"
    return None
