"""`jaxrl.launch.environments`: from a configuration to who writes the replies and who credits them."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl.blame import component_of_error
from jaxrl.config.algorithm import CoefficientsConfig, EchoConfig, GRPOConfig, OPDConfig, OPSDConfig, SFTConfig
from jaxrl.config.env import ReverseTextEnvConfig, SamplingConfig
from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.config.model import FrozenModelConfig, PolicyModelConfig
from jaxrl.config.orchestrator import OrchestratorConfig, TrainSectionConfig
from jaxrl.config.run import RunConfig
from jaxrl.config.trainer import TrainerConfig
from jaxrl.envs.build import build_environment
from jaxrl.errors import ConfigError, EngineError
from jaxrl.inference.pool import PolicyPool
from jaxrl.launch import build_worlds
from jaxrl.launch.environments import EnvironmentBuilder, check_sources, check_tasks, probe_environments
from jaxrl.orchestrator import algo as algorithms
from jaxrl.orchestrator import connections
from jaxrl.orchestrator.algo import GRPO
from jaxrl.orchestrator.sampler import TrainEnv
from jaxrl.orchestrator.sources import DemonstrationSource, FrozenSource, PolicySource
from jaxrl.tasks import CurriculumSampler
from jaxrl.types import Rollout, Task
from tests.e2e.runs import small_run
from tests.envs.test_transcript import STRIPPING_RENDERER
from tests.fakes import ScriptedEndpoint, ToyEnv
from tests.inference.wire_server import FakeModel, WireServer
from tests.orchestrator.wiring import renderer

URL = "http://127.0.0.1:9/v1"
GREEDY = SamplingConfig(temperature=0.0, top_k=1, max_tokens=8)


def frozen(**settings: Any) -> FrozenModelConfig:
    return FrozenModelConfig(name="big", base_url=[URL], **settings)


def sft(source: Any) -> SFTConfig:
    return SFTConfig.model_validate({"sampling": {"source": source}})


def config_of(*envs: ReverseTextEnvConfig, **settings: Any) -> RunConfig:
    orchestrator = OrchestratorConfig(
        model=PolicyModelConfig(name="tiny"),
        train=TrainSectionConfig(env=list(envs)),
        sampling=SamplingConfig(max_tokens=8),
        **settings,
    )
    return RunConfig(orchestrator=orchestrator, inference=EmbeddedInferenceConfig(max_model_len=48), trainer=TrainerConfig(row_length=64))


def built(config: RunConfig) -> list[TrainEnv]:
    pool = PolicyPool([ScriptedEndpoint()], 0)
    builder = EnvironmentBuilder(config, pool, renderer(), asyncio.Semaphore(2))
    return [builder.build(index, env, build_environment(env)) for index, env in enumerate(config.orchestrator.train.env)]


@pytest.mark.parametrize(("history", "forks"), [("template", 1), ("keep", 0)])
async def test_what_a_later_turn_makes_of_history_is_the_environments_whoever_writes(history: Any, forks: int) -> None:
    thinking = [*renderer().encode("<think>x</think>A", add_special_tokens=False), renderer().stop_ids[0]]
    pool = PolicyPool([ScriptedEndpoint(lambda request, version: thinking)], 0)
    config = config_of(
        ReverseTextEnvConfig(name="played", history=history),
        ReverseTextEnvConfig(name="shown", history=history, algo=sft("demonstrations")),
        algo=GRPOConfig(),
    )
    config = config.model_copy(update={"inference": EmbeddedInferenceConfig(max_model_len=128), "trainer": TrainerConfig(row_length=128)})
    builder = EnvironmentBuilder(config, pool, STRIPPING_RENDERER, asyncio.Semaphore(2))
    for index, env_config in enumerate(config.orchestrator.train.env):
        env = ToyEnv(str(env_config.name), num_turns=2, demonstration=lambda spec: ["<think>x</think>A", "B"])
        rollout = Rollout(Task(env.name, "t", env.tasks()[0]), "g", member=0, draw_index=0)
        await builder.build(index, env_config, env).sampler.play(rollout)
        assert rollout.failure is None and rollout.num_turns == 2 and rollout.metrics["forks"] == forks


async def test_each_environment_gets_the_source_and_the_algorithm_that_it_is_configured_with() -> None:
    own = {"num_tasks": 3, "max_chars": 4}
    envs = built(
        config_of(
            ReverseTextEnvConfig(name="played", coefficients=CoefficientsConfig(rl=0.5), **own),
            ReverseTextEnvConfig(name="shown", algo=sft("demonstrations"), **own),
            ReverseTextEnvConfig(name="taught", algo=sft(frozen(max_concurrency=3)), sampling=GREEDY, **own),
            algo=GRPOConfig(),
        )
    )
    sources = [env.sampler.source for env in envs]
    assert [type(source) for source in sources] == [PolicySource, DemonstrationSource, FrozenSource]
    assert [env.sampler.samples_from_live_policy for env in envs] == [True, False, False]
    assert [type(env.algorithm.config) for env in envs] == [GRPOConfig, SFTConfig, SFTConfig]
    contexts = [env.algorithm.context for env in envs]
    assert [context.env_name for context in contexts] == ["played", "shown", "taught"]
    assert contexts[0].coefficients.rl == 0.5 and {context.window for context in contexts} == {48}
    assert all(context.renderer is renderer() for context in contexts)
    text = envs[0].sampler.environment.tasks()[0]["text"]
    assert contexts[0].demonstration({"text": text}) == text[::-1]


async def test_a_demonstration_is_played_from_the_configuration_alone() -> None:
    (env,) = built(config_of(ReverseTextEnvConfig(num_tasks=3, max_chars=4, algo=sft("demonstrations"))))
    await env.sampler.setup()
    spec = env.sampler.environment.tasks()[0]
    rollout = Rollout(Task(env.name, spec["id"], spec), f"{env.name}/0", member=0, draw_index=0)
    await env.sampler.play(rollout)
    assert (rollout.reward, rollout.completion_text, rollout.nodes[-1].source) == (1.0, spec["text"][::-1], "demonstrations")


def test_an_environment_that_has_no_demonstration_at_all_is_refused_before_any_device() -> None:
    config = config_of(ReverseTextEnvConfig(num_tasks=3, algo=sft("demonstrations")))
    with pytest.raises(ConfigError, match=r"`orchestrator.train.env.0.algo.sampling.source`='demonstrations', but none of the 8 tasks of"):
        check_sources(config, [ToyEnv()])
    check_sources(config, [ToyEnv(demonstration=lambda spec: "x" if spec["id"] == "toy-7" else None)])


@pytest.mark.parametrize(
    ("algo", "field"),
    [
        (sft(frozen(api_key_var="NO_SUCH_KEY")), "sampling.source"),
        (OPDConfig(teacher=frozen(api_key_var="NO_SUCH_KEY")), "teacher"),
    ],
    ids=["source", "teacher"],
)
def test_a_key_that_is_not_set_is_refused_before_any_device(algo: Any, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    config = config_of(ReverseTextEnvConfig(num_tasks=3), algo=algo)
    with pytest.raises(ConfigError, match=rf"`orchestrator.algo.{field}.api_key_var`='NO_SUCH_KEY'"):
        check_sources(config, [ToyEnv()])
    monkeypatch.setenv("NO_SUCH_KEY", "k")
    check_sources(config, [ToyEnv()])


async def probed(*algos: Any) -> None:
    """Probe one environment for each algorithm."""
    envs = [ReverseTextEnvConfig(name=f"env{index}", num_tasks=3, max_chars=4, algo=algo) for index, algo in enumerate(algos)]
    await probe_environments(config_of(*envs), renderer(), [build_environment(env) for env in envs])


async def test_what_no_waiting_can_mend_is_found_before_any_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "wrong")
    async with WireServer(FakeModel(key="right", models=("big",))).running() as server:
        model = FrozenModelConfig(name="big", base_url=[server.base_url], api_key_var="TEACHER_KEY")
        for algo in (OPDConfig(teacher=model), sft(model)):
            with pytest.raises(EngineError, match="refused the key in the environment variable TEACHER_KEY"):
                await probed(GRPOConfig(), algo)
        monkeypatch.setenv("TEACHER_KEY", "right")
        with pytest.raises(EngineError, match=r"does not serve 'other'; it serves 'big'"):
            await probed(sft(model.model_copy(update={"name": "other"})))
        await probed(GRPOConfig(), OPDConfig(teacher=model), sft(model), sft("demonstrations"), OPSDConfig(template="{demonstration}"))
    assert not caplog.messages, "that no vocabularies can be compared is said once, by the set-up proper"
    with pytest.raises(ConfigError, match=r"`algo\.template` with a demonstration of one word has"):
        await probed(OPSDConfig())


async def test_a_server_that_does_not_answer_yet_is_only_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "PROBE_DEADLINE_S", 0.2)
    await probed(OPDConfig(teacher=frozen()), sft(frozen()), OPDConfig(teacher=frozen(ready_deadline_s=0.1)))
    assert caplog.messages == [
        f"frozen model 'big' at {URL} is not ready within 0.2 s; the run waits for it after compiling, up to its `ready_deadline_s`"
    ]


async def test_an_algorithm_may_ask_the_policy_in_its_set_up_though_none_is_served_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Curious(GRPO):
        async def setup(self) -> None:
            asked.append(self.policy_pool.version)
            try:
                await self.policy_pool.score(np.zeros(3, np.int32))
            except EngineError as error:
                raise RuntimeError("the policy is not well") from error

    monkeypatch.setitem(algorithms.ALGORITHM_CLASSES, "grpo", Curious)
    await probed(GRPOConfig())
    assert asked == [0]


async def test_a_config_without_an_algorithm_names_the_file_where_a_line_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(algorithms.ALGORITHM_CLASSES, "grpo")
    with pytest.raises(ConfigError, match=r"'grpo' has a config class .GRPOConfig., but no line .* jaxrl/orchestrator/algo/__init__.py"):
        await probed(GRPOConfig())


@pytest.mark.parametrize("truncated", ["train", "mask", "drop"])
def test_what_becomes_of_truncated_rollouts_is_the_environments_own_setting(truncated: Any) -> None:
    envs = built(config_of(ReverseTextEnvConfig(truncated=truncated), ReverseTextEnvConfig(name="other")))
    assert [env.truncated for env in envs] == [truncated, "train"]


@pytest.mark.filterwarnings("ignore:.* learns from what an environment says")
async def test_a_filter_that_cannot_be_imported_is_found_before_the_policy_is_loaded() -> None:
    missing = EchoConfig.model_validate({"filter": {"import_path": "no_such_module:keep"}})
    with pytest.raises(ConfigError, match=r"`algo.filter.import_path`='no_such_module:keep' cannot be imported: ModuleNotFoundError"):
        await probed(missing)


def tasks_of(**settings: Any) -> RunConfig:
    return config_of(ReverseTextEnvConfig.model_validate({"name": "words", "num_tasks": 3, "max_chars": 4} | settings), algo=GRPOConfig())


def test_tasks_costs_and_gates_are_those_of_the_environment() -> None:
    gates = [{"type": "advantage_range"}, {"type": "python", "name": "mine", "import_path": "operator:truth"}]
    tasks = {"type": "curriculum", "key": "id", "cost": "service_spend", "gates": gates}
    (env,) = built(tasks_of(tasks=tasks, success_threshold=0.5))
    assert isinstance(env.tasks, CurriculumSampler)
    state = env.tasks.state_dict()
    assert (state["group_size"], state["success_threshold"], state["rng_seed"]) == (8, 0.5, 0)
    assert env.cost == "service_spend" and [gate.name for gate in env.gates] == ["advantage_range", "mine"]
    (plain,) = built(tasks_of(tasks={"type": "curriculum", "key": "id"}))
    assert plain.tasks.state_dict()["success_threshold"] == 1.0
    assert (plain.cost, plain.gates) == ("completion_tokens", ())


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ({"type": "python", "import_path": "no_such_module:Sampler"}, "no_such_module"),
        ({"type": "python", "import_path": "builtins:list"}, "rng_seed"),
        ({"type": "uniform", "gates": [{"type": "python", "name": "mine", "import_path": "operator:no_such_gate"}]}, "no_such_gate"),
    ],
)
def test_a_sampler_or_a_gate_that_cannot_be_built_is_refused_before_any_device(tasks: Any, words: str) -> None:
    config = tasks_of(tasks=tasks)
    with pytest.raises(ConfigError, match=rf"env 'words', `orchestrator\.train\.env\.0\.tasks`: .*{words}") as caught:
        check_tasks(config, [build_environment(config.orchestrator.train.env[0])])
    assert component_of_error(caught.value) == "environment 'words'"


def test_tasks_of_which_only_some_have_a_difficulty_are_refused_before_any_device() -> None:
    env = ToyEnv("words", num_tasks=3)
    env.tasks()[1]["difficulty"] = 2
    with pytest.raises(ConfigError, match=r"2 of 3 tasks have no `difficulty` \('words-0', 'words-2'\)"):
        check_tasks(tasks_of(tasks={"type": "curriculum"}), [env])


def test_worlds_are_not_built_where_a_task_sampler_cannot_be() -> None:
    tasks = '--orchestrator.train.env.0.tasks={type = "python", import_path = "nowhere:Sampler"}'
    with pytest.raises(ConfigError, match=r"`orchestrator\.train\.env\.0\.tasks`: .*'nowhere:Sampler'"):
        build_worlds(small_run(Path("unused"), tasks))
