"""Small real implementations of our protocols, for tests: a scripted policy, a toy world, a trainer without a model, a
clock.

Each fake does what its protocol promises and nothing else: replies are pure functions of (prompt, seed, version), so
two runs that ask the same questions get the same answers whatever the timing. None of them imports JAX.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl.envs.base import Demonstration, Outcome, Session, TaskSpec
from jaxrl.inference.endpoint import EndpointHealth, FinishReason, GenerateRequest, Generation
from jaxrl.types import Rollout, StepReport, TrainBatch

Reply = Callable[[GenerateRequest, int], Sequence[int]]
"""(request, policy version) -> sampled token ids, the stop id included if the reply stops."""
Latency = Callable[[GenerateRequest], float]
"""request -> seconds until the reply is complete."""
SCRIPTED_DEADLINE_S = 20.0


def hashed_reply(
    request: GenerateRequest, version: int, *, low: int = 65, high: int = 91, max_length: int = 4
) -> list[int]:
    """Return 1 to `max_length` ids in `[low, high)` and a stop id, fixed by the prompt, the seed and the version
    alone."""
    text = f"{request.sampling.seed}/{version}/".encode() + np.asarray(request.token_ids, np.int32).tobytes()
    digest = hashlib.blake2b(text, digest_size=32).digest()
    length = 1 + digest[0] % max_length
    return [low + byte % (high - low) for byte in digest[1 : 1 + length]] + list(request.sampling.stop_ids[:1])


class ScriptedEndpoint:
    """An `Endpoint` that answers from a script, with a version, pauses, latencies and failures of its own.

    The first half of a reply is sampled when the request starts and the rest when it ends, so a reply that a weight
    update overtakes holds tokens of two versions.
    """

    def __init__(self, reply: Reply = hashed_reply, *, version: int = 0, latency: Latency | None = None) -> None:
        self.reply = reply
        self.version = version
        self.latency = latency
        self.failure: Exception | None = None
        """Raised by every request while it is set."""
        self.requests: list[GenerateRequest] = []
        self.loads: list[int] = []
        self.num_running = 0
        self.num_cancelled = 0
        self._running = asyncio.Event()
        self._running.set()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Answer from the script."""
        self.requests.append(request)
        self.num_running += 1
        try:
            await self._running.wait()
            if self.failure is not None:
                raise self.failure
            first_version = self.version
            ids = list(self.reply(request, first_version))[: request.sampling.max_tokens]
            await asyncio.sleep(self.latency(request) if self.latency else 0)
            await self._running.wait()
            return self._generation(request, ids, first_version)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

    def _generation(self, request: GenerateRequest, ids: list[int], first_version: int) -> Generation:
        versions = [first_version if 2 * t < len(ids) else self.version for t in range(len(ids))]
        is_stopped = bool(ids) and ids[-1] in request.sampling.stop_ids
        return Generation(
            token_ids=np.asarray(ids, np.int32),
            logprobs=np.full(len(ids), -1.0, np.float32),
            versions=np.asarray(versions, np.int32),
            finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        )

    async def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Score every token but the first with -1."""
        scores = np.full(len(token_ids), -1.0, np.float32)
        scores[:1] = 0.0
        return scores

    async def pause(self) -> None:
        """Hold replies."""
        self._running.clear()

    async def resume(self) -> None:
        """Let replies go on."""
        self._running.set()

    async def load(self, version: int) -> None:
        """Answer as `version` from now on."""
        self.loads.append(version)
        self.version = version

    async def health(self) -> EndpointHealth:
        """Report the version and the number of running requests."""
        return EndpointHealth(is_ready=True, version=self.version, num_running=self.num_running)

    async def close(self) -> None:
        """Do nothing: there is nothing to give back."""


class ScriptedPool:
    """A policy pool over one `ScriptedEndpoint`: what sessions, algorithms and the orchestrator see of a policy."""

    def __init__(self, reply: Reply = hashed_reply, *, version: int = 0, latency: Latency | None = None) -> None:
        self.endpoint = ScriptedEndpoint(reply, version=version, latency=latency)
        self.version = version
        self.versions_seen: list[int] = [version]
        self._free = asyncio.Lock()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Pass the request on."""
        return await self.endpoint.generate(request)

    async def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Pass the tokens on."""
        return await self.endpoint.score(token_ids, temperature)

    async def update(self, version: int) -> None:
        """Pause, load, resume, and only then say so."""
        async with self._free:
            await self.endpoint.pause()
            await self.endpoint.load(version)
            await self.endpoint.resume()
            self.version = version
            self.versions_seen.append(version)

    @contextlib.asynccontextmanager
    async def hold_version(self) -> AsyncIterator[int]:
        """Delay updates while the block runs."""
        async with self._free:
            yield self.version

    async def health(self) -> list[EndpointHealth]:
        """Report the one endpoint."""
        return [await self.endpoint.health()]

    async def close(self) -> None:
        """Close the endpoint."""
        await self.endpoint.close()


def share_of_even_letters(text: str) -> float:
    """Return the share of characters with an even code: a reward that differs between the replies of a group."""
    return sum(ord(c) % 2 == 0 for c in text) / len(text) if text else 0.0


class ToyEnv:
    """An `Environment` of `num_tasks` one-question tasks; the reward is a function of the last reply."""

    def __init__(
        self,
        name: str = "toy",
        *,
        num_tasks: int = 8,
        num_turns: int = 1,
        reward: Callable[[str], float | None] = share_of_even_letters,
        before_play: Callable[[TaskSpec], Any] | None = None,
        demonstration: Callable[[TaskSpec], Demonstration | None] = lambda spec: None,
    ) -> None:
        self.name = name
        self.demonstration = demonstration
        """Task spec -> the reference reply."""
        self.num_turns = num_turns
        self.reward = reward
        self.before_play = before_play
        """Awaited with the task's spec before the first question; may raise or hang."""
        self._tasks: list[TaskSpec] = [{"id": f"{name}-{i}", "question": f"q{i}"} for i in range(num_tasks)]

    def tasks(self) -> Sequence[TaskSpec]:
        """Return the tasks in order."""
        return self._tasks

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""

    async def play(self, spec: TaskSpec, session: Session) -> Outcome:
        """Ask `num_turns` times and score the last reply."""
        if self.before_play is not None:
            await self.before_play(spec)
        reply = None
        for turn in range(self.num_turns):
            content = spec["question"] if turn == 0 else f"again {turn}"
            reply = await session.ask([{"role": "user", "content": content}])
        if reply is None:
            return Outcome(reward=None, stop_reason="no_turns")
        return Outcome(
            reward=self.reward(reply.text), is_truncated=not reply.is_stopped, metrics={"turns": float(self.num_turns)}
        )


class BatchChannel(Protocol):
    """The trainer's side of a channel."""

    def receive(self, timeout_s: float) -> TrainBatch | None:
        """Wait for the next batch; None when the channel is closed."""
        ...

    def announce(self, version: int) -> None:
        """Say that `version` exists."""
        ...

    def report(self, report: StepReport) -> None:
        """Say how a step went."""
        ...

    def fail(self, exception: BaseException) -> None:
        """Wake every waiter with `exception`."""
        ...


class FakeTrainer:
    """Takes batches from a channel in a thread of its own and answers at once: no model, the same protocol.

    For each batch it announces the version, calls `on_applied(step)` (where a real trainer commits a checkpoint) and
    then reports.
    """

    def __init__(
        self,
        channel: BatchChannel,
        *,
        step_s: float = 0.0,
        on_applied: Callable[[int], None] | None = None,
        failure_at: int | None = None,
    ) -> None:
        self.batches: list[TrainBatch] = []
        self.failure: BaseException | None = None
        self.token_logprobs: Callable[[TrainBatch], list[np.ndarray]] | None = None
        """Gives the trainer's logprobs of the packed samples of a batch; None reports none."""
        self._channel = channel
        self._step_s = step_s
        self._on_applied = on_applied
        self._failure_at = failure_at
        self._thread = threading.Thread(target=self._run, name="fake-trainer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the thread; the channel must have been closed."""
        self._thread.join(SCRIPTED_DEADLINE_S)
        assert not self._thread.is_alive(), "the fake trainer is still waiting: was the channel closed?"

    def _run(self) -> None:
        try:
            while (batch := self._channel.receive(SCRIPTED_DEADLINE_S)) is not None:
                self._train(batch)
        except BaseException as error:
            self.failure = error
            self._channel.fail(error)

    def _train(self, batch: TrainBatch) -> None:
        if batch.step == self._failure_at:
            raise RuntimeError(f"the trainer broke at step {batch.step}")
        self.batches.append(batch)
        time.sleep(self._step_s)
        self._channel.announce(batch.step)
        if self._on_applied is not None:
            self._on_applied(batch.step)
        metrics = {"loss/total": 0.5, "time/train_s": self._step_s}
        logprobs = None if self.token_logprobs is None else self.token_logprobs(batch)
        self._channel.report(
            StepReport(step=batch.step, version=batch.step, skipped=False, metrics=metrics, token_logprobs=logprobs)
        )


class FakeClock:
    """A clock that moves only when it is told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Move on."""
        self.now_s += seconds


class RecordingMonitors:
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.rollouts: dict[int, list[Rollout]] = {}
        self.updated: list[int] = []
        self.statuses: list[str] = []
        self.progressed: list[tuple[str, int, int]] = []

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Keep a row of metrics."""
        self.steps.append((step, dict(values)))

    def log_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Keep rollouts by step, appended as in the run folder."""
        self.rollouts.setdefault(step, []).extend(rollouts)

    def update_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Keep the rollouts in place of those of the same step."""
        self.rollouts[step] = list(rollouts)
        self.updated.append(step)

    def status(self, text: str) -> None:
        """Keep what is being waited for."""
        self.statuses.append(text)

    def progress(self, phase: str, done: int, total: int) -> None:
        """Keep how far a phase is."""
        self.progressed.append((phase, done, total))
