"""The embedded engine: continuous batching over fixed slots, driven one tick at a time by the device thread.

In go generation and scoring requests, from any thread; out come `concurrent.futures` futures. `tick` applies what was
asked since the last one (new requests, cancels, pause, resume, new weights), prefills into free slots, and decodes
every slot. New weights are a swap of a reference between ticks: running requests go on, keep their keys and values, and
each token records the version that sampled it. The engine does not render chats, retry, or know where weights come
from.

| what waits               | for what                                         | ends by                          |
|--------------------------|--------------------------------------------------|----------------------------------|
| a request in the queue   | a free slot, in an engine that is not paused     | `inference.request_deadline_s`   |
| a running request        | a stop, its token limit, the end of the window   | `inference.request_deadline_s`   |
| a score, a load, a pause | the next tick                                    | the caller's own deadline        |
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.engine.cache import clear_slots, decode_and_sample, init_cache, prefill_into_slots, score_rows, score_rows_with_top
from jaxrl.engine.requests import ScoreTicket, Ticket, running_future, settle, why_not_generate, why_not_score
from jaxrl.engine.sampling import SamplingArrays
from jaxrl.engine.scheduler import PrefillCall, Scheduler, bucket_lengths, plan_prefills, smallest_bucket
from jaxrl.engine.slots import SampledTokens, SlotTable
from jaxrl.engine.stops import end_of_stop
from jaxrl.errors import DeadlineError, EngineError
from jaxrl.inference.endpoint import FinishReason, GenerateRequest, Generation, PromptScores
from jaxrl.models.decode import DecodeParams
from jaxrl.models.spec import ModelSpec

COUNTS = ("ticks", "decode_steps", "generated_tokens", "prefill_calls", "prefill_tokens", "scored_tokens", "near_ties")
"""What the engine counts from its start on; the keys of `Engine.stats` beside its present state."""


class Engine:
    """Generates and scores with one policy version at a time.

    `tick`, `has_work` and `warm_up` belong to the device thread, and so does building one; everything else may be
    called from any thread and takes effect in the next tick, in the order of the calls.
    """

    def __init__(
        self,
        spec: ModelSpec,
        decode_params: DecodeParams,
        config: EmbeddedInferenceConfig,
        *,
        version: int,
        decode_text: Callable[[list[int]], str] | None = None,
        max_logprobs: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocate the cache on the device that holds the weights.

        Args:
          spec: the architecture.
          decode_params: the policy, as `weights.WeightStore` publishes it.
          config: slots, window, buckets and deadline.
          version: which policy version `decode_params` is.
          decode_text: turns token ids into text; needed for stop strings, which are refused without it.
          max_logprobs: the most alternatives per token that a request may ask for; 0 leaves them out of the programs.
          clock: monotonic time in seconds.
        """
        self.spec = spec
        self.config = config
        self.version = version
        self.is_paused = False
        self.failure: Exception | None = None
        self.max_logprobs = min(max_logprobs, spec.vocab_size)
        self._decode_text = decode_text
        self._clock = clock
        self._device = next(iter(decode_params.embed_VD.devices()))
        self._params = jax.device_put(decode_params, self._device)
        cache = init_cache(spec, config.num_slots, config.max_model_len, decode_params.embed_VD.dtype)
        self._cache = jax.device_put(cache, self._device)
        self._buckets = bucket_lengths(config.min_prefill_bucket, config.max_model_len)
        # Every second one: scores are rarer than prompts, and each bucket is one more program to compile before the
        # first request.
        self._score_buckets = self._buckets[::-2][::-1]
        self._slots = SlotTable(config.num_slots, config.max_model_len, self.max_logprobs)
        self._scheduler: Scheduler[Ticket] = Scheduler(config.num_slots)
        self._tickets: dict[str, Ticket] = {}
        self._scores: deque[ScoreTicket] = deque()
        self._inbox: deque[Callable[[], None]] = deque()
        self._sampling: SamplingArrays | None = None
        self._counts = dict.fromkeys(COUNTS, 0)

    def submit(self, request: GenerateRequest, on_tokens: Callable[[SampledTokens], None] | None = None) -> Future[Generation]:
        """Queue a request; the completion ends at the window even if `max_tokens` asks for more.

        Args:
          request: prompt and settings; its id must not be in use.
          on_tokens: told of the tokens of each tick, on the device thread, the last ones before the future is done; it must be
            quick and never raise.

        Returns:
          A future of the generation, or of why there is none: `PromptTooLongError`, `EngineError` (senseless settings,
          an id in use, logits that are not finite, a failed engine) or `DeadlineError`. The future itself cannot be
          cancelled: call `cancel`.
        """
        future = running_future()
        refusal = self._failed() or self.why_not(request)
        if refusal is not None:
            future.set_exception(refusal)
            return future
        deadline_s = self._clock() + self.config.request_deadline_s
        self._post(partial(self._accept, Ticket(request, future, deadline_s, on_tokens)))
        return future

    def why_not(self, request: GenerateRequest) -> EngineError | None:
        """Return why `submit` would refuse a request whatever the engine's state, or None."""
        return why_not_generate(
            request,
            window=self.config.max_model_len,
            vocab_size=self.spec.vocab_size,
            has_text=self._decode_text is not None,
            max_logprobs=self.max_logprobs,
        )

    def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> Future[np.ndarray]:
        """Queue a sequence to be scored by the weights of the tick that serves it, while paused too.

        Args:
          token_ids: [L] int32, 1 <= L <= `max_model_len`.
          temperature: > 0; the logits are divided by it.

        Returns:
          A future of [L] float32 logprobs, each token given those before it; index 0 is 0.0. Fails with `EngineError`
          on bad arguments. Cancelling it before its turn has come saves the work.
        """
        return self._queue_score(token_ids, temperature, None)

    def score_with_top(self, token_ids: np.ndarray, temperature: float = 1.0, *, num_top: int) -> Future[PromptScores]:
        """Do what `score` does, with ranks and the `num_top` likeliest tokens at each place; at most `max_logprobs`."""
        return self._queue_score(token_ids, temperature, num_top)

    def _queue_score(self, token_ids: np.ndarray, temperature: float, num_top: int | None) -> Future[Any]:
        future, token_ids = Future(), np.array(token_ids, np.int32)
        refusal = self._failed() or why_not_score(
            token_ids,
            temperature,
            num_top or 0,
            window=self.config.max_model_len,
            vocab_size=self.spec.vocab_size,
            max_logprobs=self.max_logprobs,
        )
        if refusal is not None:
            future.set_exception(refusal)
        else:
            self._post(partial(self._accept_score, ScoreTicket(token_ids, temperature, future, num_top)))
        return future

    def cancel(self, request_id: str) -> None:
        """End a request: its future gets the tokens so far with finish reason `cancelled`. Unknown ids are ignored."""
        self._post(partial(self._cancel, request_id))

    def pause(self) -> Future[None]:
        """Hold prefill and decode; requests stay where they are. The future is done once it holds."""
        return self._between_ticks(partial(setattr, self, "is_paused", True))

    def resume(self) -> Future[None]:
        """Decode again."""
        return self._between_ticks(partial(setattr, self, "is_paused", False))

    def load(self, decode_params: DecodeParams, version: int) -> Future[None]:
        """Swap the weights; every token sampled after the future is done is from `version`. Running requests go on.

        Args:
          decode_params: of the same shapes and dtypes as those being served.
          version: which policy version they are.

        Returns:
          A future; fails with `EngineError` if a shape differs, and then the old version stays.
        """
        return self._between_ticks(partial(self._swap, decode_params, version))

    def stats(self) -> dict[str, float]:
        """Return the present state and the `COUNTS` since the start, by name."""
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
            f"engine {state}, serving version {self.version}: {len(self._scheduler.running)} of {self.config.num_slots} slots running, "
            f"{self._scheduler.num_waiting} requests waiting, {self._counts['ticks']} ticks done"
        )

    def has_work(self) -> bool:
        """Say whether `tick` would do anything now."""
        if self.failure is not None:
            return bool(self._inbox)
        can_decode = not self.is_paused and bool(self._scheduler.running or self._scheduler.num_waiting)
        return can_decode or bool(self._inbox) or bool(self._scores) or self._oldest_expired() is not None

    def tick(self) -> None:
        """Apply what was asked, score, prefill, and decode every slot by `decode_steps_per_tick` tokens.

        After a failure it only refuses what is asked.

        Raises:
          Exception: whatever the device raised; every outstanding future gets an `EngineError` caused by it first.
        """
        try:
            self._counts["ticks"] += 1
            self._read_inbox()
            if self.failure is not None:
                return
            while (ticket := self._oldest_expired()) is not None:
                self._expire(ticket)
            if self._scores:
                self._score_some()
            if not self.is_paused:
                self._admit()
                if self._scheduler.running:
                    self._decode()
        except Exception as error:
            self._fail(error)
            raise

    @property
    def num_programs(self) -> int:
        """How many programs `warm_up` goes through."""
        return len(self._programs())

    def warm_up(self, on_progress: Callable[[str, int, int], None] | None = None, *, includes_scoring: bool = True) -> None:
        """Compile every program of the closed set, so that no later tick compiles anything.

        Args:
          on_progress: called before each program with (its name, how many are done, how many there are); may raise to stop.
          includes_scoring: False leaves out what scores given tokens, for who only generates; the first score then compiles.
        """
        assert not self._scheduler.running, "`warm_up` writes into the cache: call it before the first request"
        for done, (name, run) in enumerate(programs := self._programs(includes_scoring)):
            if on_progress is not None:
                on_progress(name, done, len(programs))
            run()

    def _programs(self, includes_scoring: bool = True) -> list[tuple[str, Callable[[], object]]]:
        """Name every program and what runs it on nobody's slots and rows."""
        rows, slots = self.config.prefill_rows, self.config.num_slots
        programs: list[tuple[str, Callable[[], object]]] = [("decode", self._run_decode), ("clear", partial(self._run_clear, []))]
        for bucket in self._buckets:
            token_ids, nowhere = np.zeros((rows, bucket), np.int32), np.full(slots, slots, np.int32)
            call = PrefillCall(token_ids, rows=np.zeros(slots, np.int32), slots=nowhere, num_tokens=0)
            programs.append((f"prefill {bucket}", partial(self._run_prefill, call)))
        for bucket in self._score_buckets if includes_scoring else ():
            # Rows of temperature 0 are nobody's, and are not run.
            arrays = np.zeros((rows, bucket), np.int32), np.zeros(rows, np.float32)
            programs.append((f"score {bucket}", partial(self._run_score, *arrays, wants_top=False)))
        return programs

    def _post(self, action: Callable[[], None]) -> None:
        """Leave an action for the next tick. After a failure there may be none, so it is run, and refused, at once."""
        self._inbox.append(action)
        if self.failure is not None:
            self._read_inbox()

    def _read_inbox(self) -> None:
        while True:
            try:
                action = self._inbox.popleft()
            except IndexError:
                return
            action()

    def _failed(self) -> EngineError | None:
        return None if self.failure is None else EngineError(f"the engine failed earlier: {self.failure!r}")

    def _between_ticks(self, action: Callable[[], None]) -> Future[None]:
        future = running_future()

        def run() -> None:
            if (refusal := self._failed()) is not None:
                future.set_exception(refusal)
                return
            try:
                action()
            except EngineError as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._post(run)
        return future

    def _accept(self, ticket: Ticket) -> None:
        refusal = self._failed()
        if refusal is None and ticket.key in self._tickets:
            refusal = EngineError(f"request id {ticket.key!r} is in use; ids must be unique among live requests")
        if refusal is not None:
            ticket.future.set_exception(refusal)
            return
        self._tickets[ticket.key] = ticket
        self._scheduler.add(ticket.key, ticket)

    def _accept_score(self, ticket: ScoreTicket) -> None:
        if (refusal := self._failed()) is not None:
            settle(ticket.future, refusal)
        else:
            self._scores.append(ticket)

    def _cancel(self, request_id: str) -> None:
        if (ticket := self._tickets.get(request_id)) is not None:
            self._finish(ticket, FinishReason.CANCELLED)

    def _swap(self, decode_params: DecodeParams, version: int) -> None:
        def shape_of(params: DecodeParams) -> dict[str, str]:
            leaves = jax.tree_util.tree_leaves_with_path(params)
            return {jax.tree_util.keystr(path): f"{leaf.shape} {leaf.dtype}" for path, leaf in leaves}

        served, came = shape_of(self._params), shape_of(decode_params)
        if served != came:
            name = next(name for name in {**served, **came} if served.get(name) != came.get(name))
            raise EngineError(
                f"version {version} does not fit the engine: {name} is {came.get(name)}, expected {served.get(name)} as in version "
                f"{self.version}, which stays; it was published by another model or in another dtype"
            )
        self._params = jax.device_put(decode_params, self._device)
        self.version = version

    def _oldest_expired(self) -> Ticket | None:
        """Return the oldest ticket if its deadline has passed; all have the same allowance, so no other is earlier."""
        oldest = next(iter(self._tickets.values()), None)
        return oldest if oldest is not None and oldest.deadline_s <= self._clock() else None

    def _expire(self, ticket: Ticket) -> None:
        state = "was waiting for a slot" if ticket.slot is None else f"had sampled {self._slots.num_sampled_S[ticket.slot]} tokens"
        error = DeadlineError(
            f"request {ticket.key!r} did not finish within `inference.request_deadline_s`={self.config.request_deadline_s:g} s: "
            f"it {state}; {self.describe()}"
        )
        self._drop(ticket)
        ticket.future.set_exception(error)

    def _admit(self) -> None:
        admitted = self._scheduler.admit()
        if not admitted:
            return
        for slot, ticket in admitted:
            ticket.slot = slot
            self._slots.open(slot, ticket.request, is_followed=ticket.on_tokens is not None)
        self._sampling = None
        prompts = [(slot, np.asarray(ticket.request.token_ids, np.int32)) for slot, ticket in admitted]
        calls = plan_prefills(prompts, buckets=self._buckets, num_rows=self.config.prefill_rows, num_slots=self.config.num_slots)
        for call in calls:
            self._run_prefill(call)
            self._counts["prefill_tokens"] += call.num_tokens
        self._counts["prefill_calls"] += len(calls)

    def _decode(self) -> None:
        taken = self._slots.take(self._run_decode(), self.version)
        self._counts["decode_steps"] += self.config.decode_steps_per_tick
        self._counts["generated_tokens"] += int(taken.num_tokens_A.sum())
        self._counts["near_ties"] += taken.num_near_ties
        if taken.is_broken_A.any():
            self._run_clear(taken.slots_A[taken.is_broken_A])
        for i in np.flatnonzero(taken.needs_look_A):
            ticket = self._scheduler.running[int(taken.slots_A[i])]
            if taken.is_broken_A[i]:
                self._drop(ticket)
                reason = f"the logits of version {self.version} are not finite"
                ticket.future.set_exception(EngineError(f"request {ticket.key!r}: {reason}"))
                continue
            is_stopped = self._cut_at_stop_string(ticket, int(taken.num_tokens_A[i])) or taken.is_stopped_A[i]
            self._tell(ticket)
            if is_stopped:
                self._finish(ticket, FinishReason.STOP)
            elif taken.is_spent_A[i]:
                self._finish(ticket, FinishReason.LENGTH)

    def _tell(self, ticket: Ticket) -> None:
        """Hand new tokens to whoever follows the request."""
        if ticket.on_tokens is not None and ticket.slot is not None:
            ticket.on_tokens(self._slots.sampled(ticket.slot, ticket.num_told))
            ticket.num_told = int(self._slots.num_sampled_S[ticket.slot])

    def _cut_at_stop_string(self, ticket: Ticket, num_new: int) -> bool:
        """Shorten the slot after the first new token that completes a stop string; say whether there is one."""
        stops, slot, decode_text = ticket.request.sampling.stop, ticket.slot, self._decode_text
        if not stops:
            return False
        assert slot is not None and decode_text is not None
        if (end := end_of_stop(self._slots.token_ids(slot), num_new, stops, decode_text)) is not None:
            self._slots.shorten(slot, end)
        return end is not None

    def _score_some(self) -> None:
        """Serve the oldest scoring request that is still wanted, and with it others of its bucket, in one call."""
        self._scores = deque(ticket for ticket in self._scores if not ticket.future.cancelled())
        if not self._scores:
            return
        bucket = smallest_bucket(self._score_buckets, len(self._scores[0].token_ids))
        batch: list[ScoreTicket] = []
        rest: deque[ScoreTicket] = deque()
        for ticket in self._scores:
            fits = len(batch) < self.config.prefill_rows and smallest_bucket(self._score_buckets, len(ticket.token_ids)) == bucket
            (batch if fits else rest).append(ticket)
        token_ids = np.zeros((self.config.prefill_rows, bucket), np.int32)
        temperatures = np.zeros(self.config.prefill_rows, np.float32)
        for row, ticket in enumerate(batch):
            token_ids[row, : len(ticket.token_ids)] = ticket.token_ids
            temperatures[row] = ticket.temperature
        scores = self._run_score(token_ids, temperatures, wants_top=any(ticket.num_top is not None for ticket in batch))
        self._scores = rest
        for row, ticket in enumerate(batch):
            self._counts["scored_tokens"] += len(ticket.token_ids)
            mine = [array[row, : len(ticket.token_ids)].copy() for array in scores]
            settle(ticket.future, mine[0] if ticket.num_top is None else _prompt_scores(mine, ticket.num_top))

    def _run_prefill(self, call: PrefillCall) -> None:
        self._cache = prefill_into_slots(self._params, self._cache, call.token_ids, call.rows, call.slots, spec=self.spec)

    def _run_clear(self, slots: Sequence[int] | np.ndarray) -> None:
        self._cache = clear_slots(self._cache, np.isin(range(self.config.num_slots), slots))

    def _run_decode(self) -> np.ndarray:
        """Decode every slot; return [3 + 2K, S, Q] int32 on the host."""
        slots, sampling = self._slots, self._sampling
        if sampling is None:
            settings = [slots.temperature_S, slots.top_k_S, slots.top_p_S, slots.min_p_S, slots.seed_S2]
            settings += [slots.num_top_S] if self.max_logprobs else []
            # Invariant: copies. A CPU device may keep the numpy buffer itself, and the table changes in place.
            sampling = self._sampling = SamplingArrays(*jax.device_put([x.copy() for x in settings], self._device))
        self._cache, packed_XSQ = decode_and_sample(
            self._params,
            self._cache,
            slots.token_ids_S.copy(),
            slots.position_ids_S.copy(),
            sampling,
            spec=self.spec,
            num_steps=self.config.decode_steps_per_tick,
            num_top=self.max_logprobs,
        )
        return np.asarray(packed_XSQ)

    def _run_score(self, token_ids_RT: np.ndarray, temperatures_R: np.ndarray, *, wants_top: bool) -> list[np.ndarray]:
        """Return [R, T] logprobs and, in an engine that reports alternatives, the other arrays of `RowScores`."""
        if not self.max_logprobs:
            return [np.asarray(score_rows(self._params, token_ids_RT, temperatures_R, spec=self.spec))]
        scores = score_rows_with_top(
            self._params, token_ids_RT, temperatures_R, np.bool_(wants_top), spec=self.spec, num_top=self.max_logprobs
        )
        return [np.asarray(array) for array in scores]

    def _drop(self, ticket: Ticket) -> None:
        """Forget a ticket and free its slot; its future is the caller's to settle."""
        del self._tickets[ticket.key]
        if ticket.slot is None:
            self._scheduler.withdraw(ticket.key)
        else:
            self._scheduler.release(ticket.slot)
            self._slots.close(ticket.slot)
            self._sampling = None

    def _finish(self, ticket: Ticket, reason: FinishReason) -> None:
        if ticket.slot is None:
            generation = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), finish_reason=reason)
        else:
            generation = Generation(**self._slots.sampled(ticket.slot)._asdict(), finish_reason=reason)
        self._drop(ticket)
        ticket.future.set_result(generation)

    def _fail(self, error: Exception) -> None:
        """Settle every outstanding future with an error, once and for all."""
        outstanding = [ticket.future for ticket in (*self._tickets.values(), *self._scores)]
        self._tickets.clear()
        self._scores.clear()
        # Invariant: the failure comes before the last look at the inbox. Whoever posts looks at them in the reverse order, so one
        # of the two sees what is posted meanwhile.
        self.failure = error
        for future in outstanding:
            failure = EngineError(f"the engine failed: {error!r}")
            failure.__cause__ = error
            settle(future, failure)
        self._read_inbox()


def _prompt_scores(arrays: list[np.ndarray], num_top: int) -> PromptScores:
    """Return the arrays of one scored sequence, with its own number of alternatives."""
    logprobs, *rest = arrays
    if not rest:
        return PromptScores(logprobs)
    ranks, *tops = rest
    return PromptScores(logprobs, ranks, *(top[:, :num_top] for top in tops))
