"""A world of sums with every kind of trouble, and policies for it that need no model, for tests of evaluation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from jaxrl.config.env import SamplingConfig
from jaxrl.config.evals import EvalConfig, EvalParameters
from jaxrl.config.turns import History
from jaxrl.envs.base import Outcome, Session, TaskSpec
from jaxrl.envs.session import eval_seed_scope
from jaxrl.envs.words import WordsPrompt, WordsReply, WordsSession
from jaxrl.errors import EngineError, EnvUnreachableError
from jaxrl.evals import EnvEvalHarness, LivePolicy
from jaxrl.inference.endpoint import GenerateRequest, sampling_seed
from jaxrl.inference.pool import PolicyPool
from jaxrl.types import Rollout
from tests.envs.policies import IM_END, RENDERER, ids_of
from tests.fakes import ScriptedEndpoint

GREEDY = SamplingConfig(temperature=0.0, max_tokens=16)


class Sums:
    """Asks a + a for each task; some tasks break, hang, or are not scored."""

    name = "sums"

    def __init__(self, num_tasks: int = 6, *, odd: dict[int, str] | None = None, fields: dict | None = None) -> None:
        self._tasks: list[TaskSpec] = [{"id": f"s{a}", "a": a, **(fields or {})} for a in range(num_tasks)]
        self.odd = odd or {}
        self.played: list[TaskSpec] = []
        self.num_open = self.most_open = 0

    def tasks(self) -> list[TaskSpec]:
        return self._tasks

    def demonstration(self, spec: TaskSpec) -> None:
        return None

    def close(self) -> None:
        pass

    def question(self, spec: TaskSpec) -> str:
        return f"{spec['a']} + {spec['a']} ="

    async def play(self, spec: TaskSpec, session: Session) -> Outcome:
        self.played.append(spec)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            odd = self.odd.get(spec["a"])
            if odd == "raises":
                raise RuntimeError("no such sum")
            if odd == "is gone":
                raise EnvUnreachableError("nobody answers at port 1")
            if odd == "hangs":
                await asyncio.sleep(60)
            reply = await session.ask([{"role": "user", "content": self.question(spec)}])
            reward = None if odd == "unscored" else float(reply.text == str(2 * spec["a"]))
            return Outcome(reward=reward, is_truncated=not reply.is_stopped, metrics={"sums/a": float(spec["a"]), "sums/duration_s": 0.5})
        finally:
            self.num_open -= 1


def right_below_four(request: GenerateRequest, version: int) -> list[int]:
    """Answer sums of a < 4 correctly and others with 0."""
    a = int(RENDERER.decode(request.token_ids).split("user\n")[1].split(" ")[0])
    return [*ids_of(str(2 * a) if a < 4 else "0"), IM_END]


def live(endpoint: ScriptedEndpoint | None = None, *, pool: PolicyPool | None = None, hold_deadline_s: float = 600.0) -> LivePolicy:
    """Return the policy of a run whose engine answers from a script."""
    pool = pool or PolicyPool([endpoint or ScriptedEndpoint(right_below_four)], 0)
    return LivePolicy(pool, RENDERER, run_seed=11, window=128, hold_deadline_s=hold_deadline_s)


def asking(**parameters: object) -> EvalConfig:
    """Return an evaluation of sums at temperature 0; further keywords are its parameters."""
    settings: dict = {"sampling": GREEDY} | parameters
    return EvalConfig(dataset="sums", eval_parameters=EvalParameters(**settings))


def harness(env: Sums, endpoint: ScriptedEndpoint | None = None, **options) -> EnvEvalHarness:  # type: ignore[no-untyped-def]
    """Return a harness on a scripted engine that makes no probes, unless told to."""
    settings = {"should_probe": False} | options
    return EnvEvalHarness(env, settings.pop("policy", None) or live(endpoint), **settings)


class Coin:
    """A policy that knows the sums and answers by the toss of a coin, told from the seed of the turn; it may fail or be slow."""

    def __init__(self, version: int | None = 3) -> None:
        self.version = version
        self.latency_s: dict[str, float] = {}
        """By question: how long its answer takes."""
        self.failing: set[str] = set()
        """Questions that get no answer."""
        self.answered: list[str] = []
        self.stall_after: int | None = None
        """So many answers are given; whoever asks later waits for good."""
        self.stalled = asyncio.Event()

    @asynccontextmanager
    async def hold(self, holder: str) -> AsyncIterator[int | None]:
        yield self.version

    def open_session(self, rollout: Rollout, sampling: SamplingConfig, history: History) -> WordsSession:
        return _CoinSession(self, rollout, sampling)

    async def answer(self, prompt: WordsPrompt, seed: int) -> WordsReply:
        question = prompt.messages[-1]["content"]
        await asyncio.sleep(self.latency_s.get(question, 0.0))
        if self.stall_after is not None and len(self.answered) >= self.stall_after:
            self.stalled.set()
            await asyncio.sleep(60)
        if question in self.failing:
            raise EngineError("nobody is there")
        self.answered.append(question)
        a = int(question.split(" ")[0])
        return WordsReply(str(2 * a) if seed % 2 else "no idea", num_tokens=2)


class _CoinSession(WordsSession):
    def __init__(self, coin: Coin, rollout: Rollout, sampling: SamplingConfig) -> None:
        super().__init__(rollout, temperature=sampling.temperature)
        self._coin = coin

    async def _write(self, prompt: WordsPrompt) -> WordsReply:
        rollout = self.rollout
        seed = sampling_seed(0, eval_seed_scope(rollout.env_name), rollout.draw_index, rollout.member, int(prompt.turn))
        return await self._coin.answer(prompt, seed)


def files_of(directory: Path) -> dict[str, bytes]:
    """Return what a finished evaluation left in its folder, but for what a clock said."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.name != "timings.jsonl"}
