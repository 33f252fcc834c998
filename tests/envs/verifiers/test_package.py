"""The real `verifiers`, where it is installed: its tasksets play in an environment here and, from outside, against the server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl.batching import rollout_to_samples
from jaxrl.config.env import VerifiersEnvConfig
from jaxrl.envs.build import build_environment
from jaxrl.envs.play import play_rollout
from jaxrl.envs.verifiers.environment import VerifiersEnvironment
from jaxrl.errors import ConfigError, EngineError
from jaxrl.inference.endpoint import GenerateRequest
from jaxrl.types import Boundary, Rollout, Task
from tests.engine.server.scripted import WINDOW, Served, served
from tests.envs.policies import open_session, path_ids
from tests.fakes import ScriptedEndpoint
from tests.golden.make_templates import DIRECTORY
from tests.inference.rendering.styles import renderer_of, their_ids

vf = pytest.importorskip("verifiers.v1", reason="needs `pip install 'jaxrl[verifiers]'`")
pytestmark = pytest.mark.filterwarnings("default")

STYLE = renderer_of("chatml")
CONFIGS = Path(__file__).parents[3] / "configs" / "verifiers"

TASKS = """
import verifiers.v1 as vf

__all__ = ["ToyTaskset"]

class ToyData(vf.TaskData):
    difficulty: int = 0
    fails: str = ""

class ToyTask(vf.Task[ToyData]):
    @vf.reward(weight=0.5)
    async def said_it(self, trace: vf.Trace) -> float:
        if self.data.fails == "reward":
            raise KeyError("no such answer")
        return float(trace.last_reply == "four")

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.fails == "finalize":
            raise OSError("the disk is full")

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

class ToyConfig(vf.TasksetConfig):
    fails: str = ""
    prompt: str = "one"

class ToyTaskset(vf.Taskset[ToyTask, ToyConfig]):
    def load(self):
        for n in range(3):
            data = ToyData(prompt=self.config.prompt, system_prompt="Count.", difficulty=n, fails=self.config.fails)
            yield ToyTask(data, self.config.task)
"""

ENDLESS = """
import itertools
import verifiers.v1 as vf

__all__ = ["Endless"]

class Endless(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for n in itertools.count():
            yield vf.Task(vf.TaskData(prompt=f"count to {n}"))
"""

PAIR = (
    TASKS.replace('["ToyTaskset"]', '["ToyTaskset", "PairEnv"]')
    + """
class PairConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()

class PairEnv(vf.Env[PairConfig]):
    async def run(self, task, agents):
        await agents.first.run(task)
"""
)

TWICE = (
    TASKS.replace('["ToyTaskset"]', '["ToyTaskset", "TwiceEnv"]')
    + """
class TwiceEnv(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        await agents.agent.run(task)
        await agents.agent.run(task)
"""
)

HARNESS = """
import json

import httpx
import verifiers.v1 as vf

__all__ = ["Turns"]

class TurnsConfig(vf.HarnessConfig):
    questions: list[str] = ["three"]
    stream: bool = False
    exit_code: int = 0

class Turns(vf.Harness[TurnsConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_text_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        body = {"model": ctx.model, "messages": messages}
        if self.config.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=60, headers={"Authorization": f"Bearer {secret}"}) as client:
            for question in [*self.config.questions, None]:
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                if answer.status_code != 200:
                    return vf.ProgramResult(1, "", answer.text)
                messages.append(self.said(answer))
                if question is not None:
                    messages.append({"role": "user", "content": question})
        return vf.ProgramResult(self.config.exit_code, "", "exited as it was told to")

    def said(self, answer):
        if not self.config.stream:
            return answer.json()["choices"][0]["message"]
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", lines
        deltas = [choice["delta"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
        return {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}
"""

OWN = TASKS.replace('["ToyTaskset"]', '["ToyTaskset", "Turns"]') + "\nfrom toy_turns import Turns\n"

PLUGINS = {"toy_tasks": TASKS, "toy_endless": ENDLESS, "toy_pair": PAIR, "toy_twice": TWICE, "toy_turns": HARNESS, "toy_own": OWN}


@pytest.fixture(autouse=True, scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the tasksets and the harness of this file be imported, and those that the project ships."""
    folder = tmp_path_factory.mktemp("plugins")
    for name, text in PLUGINS.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CONFIGS))
        patch.syspath_prepend(str(folder))
        yield


Build = Callable[..., VerifiersEnvironment]


@pytest.fixture
async def build() -> AsyncIterator[Build]:
    """Give a function that builds an environment; what it took ends with the test."""
    environments: list[VerifiersEnvironment] = []

    def built(taskset: str = "toy_tasks", harness: str | None = "toy_turns", **more: Any) -> VerifiersEnvironment:
        env = build_environment(VerifiersEnvConfig(name="toy", taskset=taskset, harness=harness, **more))
        assert isinstance(env, VerifiersEnvironment)
        environments.append(env)
        return env

    yield built
    for env in environments:
        env.close()


def ids_of(text: str) -> list[int]:
    return [*STYLE.encode(text, add_special_tokens=False).tolist(), STYLE.turn_end_id]


def saying(*texts: str) -> ScriptedEndpoint:
    return ScriptedEndpoint(lambda request, version: ids_of(texts[int(request.request_id.rpartition("/")[2])]))


async def play(env: VerifiersEnvironment, endpoint: ScriptedEndpoint, *, index: int = 0, window: int = 2048) -> Rollout:
    spec = env.tasks()[index]
    rollout = Rollout(Task("toy", spec["id"], spec), group_id="g", member=0, draw_index=0)
    await play_rollout(env, rollout, open_session(endpoint, rollout, renderer=STYLE, window=window), 60.0)
    return rollout


# As an environment


def test_the_tasks_are_verifiers_own_in_their_order_with_what_a_curriculum_reads(build: Build) -> None:
    specs = build(num_tasks=2).tasks()
    tasks = list(vf.load_environment(vf.resolve_env_config({"taskset": {"id": "toy_tasks"}})).taskset)
    assert [(spec["id"], spec["index"], spec["difficulty"]) for spec in specs[1:]] == [(tasks[1].key, 1, 1)]
    assert specs[0]["data"] == {"prompt": "one", "system_prompt": "Count."} and len(specs) == 2


@pytest.mark.parametrize(("taskset", "more", "words"), [
    ("toy_nowhere", {}, r"taskset 'toy_nowhere' cannot be loaded: .*toy_nowhere"),
    ("toy_tasks", {"taskset_args": {"color": "red"}}, r"cannot be loaded: (?s:.*)color"),
    ("toy_tasks", {"harness": "toy_nowhere"}, "cannot be loaded: .*toy_nowhere"),
    ("toy_tasks", {"runtime": {"type": "balloon"}}, r"cannot be loaded: (?s:.*)balloon"),
    ("toy_pair", {}, r"is played by 2 agents \(first, second\)"),
    ("toy_endless", {}, "has no end: say how many of its tasks to take, with `num_tasks`"),
])  # fmt: skip
def test_what_cannot_be_played_is_refused_before_the_run(build: Build, taskset: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(taskset, **more)


def test_a_taskset_without_an_end_gives_its_first_tasks(build: Build) -> None:
    prompts = [spec["data"]["prompt"] for spec in build("toy_endless", num_tasks=3).tasks()]
    assert prompts == ["count to 0", "count to 1", "count to 2"]


def test_the_shipped_taskset_splits_its_sums_by_question(build: Build) -> None:
    train, heldout = (
        {spec["data"]["prompt"] for spec in build("chain_sums", "one_question", taskset_args={"split": split, "num_items": 300}).tasks()}
        for split in ("train", "heldout")
    )
    assert train.isdisjoint(heldout) and 4 < len(heldout) < len(train) / 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("taskset", "harness"), [("toy_tasks", "toy_turns"), ("toy_own", None)])
async def test_two_turns_are_a_rollout_with_the_ids_that_were_sampled(
    build: Build, taskset: str, harness: str | None, stream: bool
) -> None:
    endpoint = saying("two", "four")
    rollout = await play(build(taskset, harness, harness_args={"stream": stream}), endpoint)
    assert (rollout.failure, rollout.reward, rollout.stop_reason, rollout.is_truncated) == (None, 0.5, "done", False)
    assert rollout.metrics == {"turns": 2.0, "forks": 0.0}
    for node, request in zip((2, 4), endpoint.requests, strict=True):
        assert path_ids(rollout, node).tolist() == [*request.token_ids.tolist(), *endpoint.reply(request, 0)]
    (sample,) = rollout_to_samples(rollout)
    assert sample.token_ids[sample.loss_mask].tolist() == [*ids_of("two"), *ids_of("four")]


@pytest.mark.parametrize(("more", "boundary", "words"), [
    ({"taskset_args": {"fails": "reward"}}, Boundary.GRADER, "TaskError: .*KeyError: 'no such answer'"),
    ({"taskset_args": {"fails": "finalize"}}, Boundary.ENV, "TaskError: .*OSError: the disk is full"),
    ({"harness_args": {"exit_code": 3}}, Boundary.ENV, "HarnessError: .*exited 3: exited as it was told to"),
    ({"taskset": "toy_twice"}, Boundary.ENV, "the episode has 2 traces, of these agents: agent"),
])  # fmt: skip
async def test_an_episode_with_an_error_has_no_reward_though_its_trace_says_0(
    build: Build, more: dict[str, Any], boundary: Boundary, words: str
) -> None:
    rollout = await play(build(**more), saying("two", "four"))
    assert rollout.reward is None and rollout.failure is not None and rollout.failure.boundary is boundary
    assert re.search(words, rollout.failure.message) and rollout.nodes, "what was said by then is in the log"


async def test_an_episode_without_rewards_is_not_scored(build: Build) -> None:
    rollout = await play(build("toy_endless", "one_question", num_tasks=1), saying("0"))
    assert (rollout.failure, rollout.reward, rollout.num_turns) == (None, None, 1)


async def test_a_policy_that_fails_is_named(build: Build) -> None:
    def broken(request: GenerateRequest, version: int) -> list[int]:
        raise EngineError("out of memory")

    rollout = await play(build(), ScriptedEndpoint(broken))
    assert rollout.failure is not None
    assert (rollout.failure.boundary, rollout.failure.message) == (Boundary.POLICY, "out of memory")


@pytest.mark.parametrize(("budget", "stop_reason"), [
    ({"max_turns": 1}, "max_turns"),
    ({"max_completion_tokens": 2}, "max_completion_tokens"),
])  # fmt: skip
async def test_a_budget_stops_an_episode_which_is_scored_for_what_it_did(build: Build, budget: dict[str, Any], stop_reason: str) -> None:
    rollout = await play(build(budget=budget), saying("four", "five"))
    assert (rollout.failure, rollout.reward, rollout.stop_reason, rollout.is_truncated) == (None, 0.5, stop_reason, True)
    assert rollout.num_turns == 1


async def test_a_prompt_that_leaves_no_room_is_a_failure_of_that_name(build: Build) -> None:
    rollout = await play(build(taskset_args={"prompt": "long " * 100}), saying(), window=64)
    assert (rollout.stop_reason, rollout.reward) == ("prompt_too_long", None)


async def test_sessions_are_bounded_and_all_are_played(build: Build) -> None:
    env = build(max_sessions=1)
    rollouts = await asyncio.gather(*(play(env, saying("two", "four"), index=index) for index in range(3)))
    assert [rollout.reward for rollout in rollouts] == [0.5] * 3


# Against the server


def answers(request: GenerateRequest) -> list[int]:
    """Reply by how many assistants have spoken."""
    return ids_of("two" if STYLE.decode(request.token_ids.tolist()).count("assistant") == 1 else "four")


@pytest.fixture
def server() -> Iterator[Served]:
    with served(STYLE, answers, max_logprobs=1) as running:
        yield running


def client_of(kind: str, url: str) -> Any:
    where = {"base_url": url, "api_key_var": "NO_KEY"}
    if kind == "eval":
        return vf.EvalClientConfig(**where)
    return vf.TrainClientConfig(**where, renderer_model_name=str(DIRECTORY / "chatml"))


async def run_outside(client: Any, **table: Any) -> Any:
    """Return the trace of an episode that verifiers plays by itself."""
    harness = {"id": "toy_turns", "stream": table.pop("stream", False)}
    config = {"taskset": {"id": "toy_tasks", **table}, "agent": {"harness": harness, "runtime": {"type": "subprocess"}}}
    env = vf.load_environment(vf.resolve_env_config(config))
    context = vf.ModelContext(model="tiny", client=client, sampling=vf.SamplingConfig(temperature=1.0, max_tokens=16))
    async with env.serving():
        (slot,) = env.slots(next(iter(env.taskset)), 1)
        episode = await env.run_slot(slot, context)
    (trace,) = episode.traces
    return trace


@pytest.mark.parametrize(("kind", "stream"), [("eval", False), ("eval", True), ("train", False), ("train", True)])
async def test_a_taskset_plays_against_the_server_as_it_is(server: Served, kind: str, stream: bool) -> None:
    trace = await run_outside(client_of(kind, server.url), stream=stream)
    assert trace.ok, trace.errors
    assert (trace.reward, trace.num_turns, trace.stop_condition) == (0.5, 2, "agent_completed")
    assert [message.content for message in trace.assistant_messages] == ["two", "four"]
    assert trace.usage.completion_tokens == sum(len(ids) for _, ids in server.endpoint.sampled) > 0


async def test_the_tokens_of_verifiers_training_client_are_those_of_the_server_and_those_that_an_environment_records(
    server: Served, build: Build
) -> None:
    trace = await run_outside(client_of("train", server.url))
    (branch,) = trace.branches
    prompt, reply = server.endpoint.sampled[-1]
    assert branch.token_ids == [*prompt, *reply]
    assert np.asarray(branch.logprobs)[np.asarray(branch.sampled_mask)].tolist() == [-0.5] * sum(branch.sampled_mask)
    rollout = await play(build(), saying("two", "four"))
    (sample,) = rollout_to_samples(rollout)
    assert sample.token_ids.tolist() == branch.token_ids
    assert sample.loss_mask.tolist() == branch.sampled_mask


async def test_a_prompt_beyond_the_window_is_refused_by_verifiers_itself_since_the_server_tells_its_window(server: Served) -> None:
    trace = await run_outside(client_of("train", server.url), prompt="long " * WINDOW)
    assert not trace.ok and f"exceeds maximum context length ({WINDOW})" in trace.last_error.message
    assert server.endpoint.sampled == []


@pytest.mark.parametrize("kind", ["eval", "train"])
async def test_a_prompt_that_fills_the_window_is_refused_by_the_server_and_the_trace_is_no_failure_of_reward_0(
    server: Served, kind: str
) -> None:
    num_others = len(their_ids("chatml", [{"role": "system", "content": "Count."}, {"role": "user", "content": ""}]))
    trace = await run_outside(client_of(kind, server.url), prompt="a" * (WINDOW - num_others))
    assert not trace.ok and trace.last_error.status_code == 400 and "leaves no room for a reply" in trace.last_error.message
