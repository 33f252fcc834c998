"""`jaxrl.launch.measuring`: what evaluations in training play, write down and leave alone."""

import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxrl.config.env import ReasoningGymEnvConfig, ReverseTextEnvConfig, SamplingConfig
from jaxrl.config.evals import EvalSectionConfig
from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.config.model import PolicyModelConfig
from jaxrl.config.monitors import MonitorsConfig
from jaxrl.config.orchestrator import OrchestratorConfig, TrainSectionConfig
from jaxrl.config.run import RunConfig, RunSection
from jaxrl.config.trainer import TrainerConfig
from jaxrl.envs.base import Environment, TaskSpec
from jaxrl.evals.compare import compare
from jaxrl.evals.result import EvalResult
from jaxrl.inference.pool import PolicyPool
from jaxrl.launch.measuring import Measuring, eval_config, is_owed
from jaxrl.monitors import MonitorSet
from jaxrl.monitors.jsonl import read_lines
from tests.fakes import ScriptedEndpoint, ToyEnv
from tests.orchestrator.wiring import make_run, renderer

SPENT = {"training_episodes": 16.0, "training_cost": 40.0}


def config_of(run_dir: Path, envs: Mapping[str, dict[str, Any]], **settings: Any) -> RunConfig:
    """Return a run with these held-out environments; further keywords go to `orchestrator.eval`."""
    heldout = [ReverseTextEnvConfig(name=name, **own) for name, own in envs.items()]
    return RunConfig(
        run=RunSection(output_dir=str(run_dir)),
        orchestrator=OrchestratorConfig(
            model=PolicyModelConfig(name="tiny"),
            train=TrainSectionConfig(env=[ReverseTextEnvConfig(name="toy")]),
            sampling=SamplingConfig(max_tokens=8),
            eval=EvalSectionConfig(**({"env": heldout, "sampling": SamplingConfig(temperature=0.0, max_tokens=8)} | settings)),
        ),
        inference=EmbeddedInferenceConfig(max_model_len=48),
        trainer=TrainerConfig(row_length=64),
        monitors=MonitorsConfig(terminal=False, plot=False),
    )


Measure = Callable[..., Measuring]


@pytest.fixture
def measuring() -> Iterator[Measure]:
    """Return a function that makes what a run with a configuration measures with; its files are closed in the end."""
    with contextlib.ExitStack() as stack:

        def make(config: RunConfig, *envs: Environment, **options: Any) -> Measuring:
            resume_step = options.pop("resume_step", None)
            monitors = MonitorSet(config.run_dir, config.monitors, name="run", max_steps=9, resume_step=resume_step)
            stack.callback(monitors.close)
            settings = {"pool": PolicyPool([ScriptedEndpoint()], 0), "spent_by": lambda version: SPENT} | options
            return Measuring(config, envs, settings["pool"], renderer(), monitors, settings["spent_by"])

        yield make


async def test_scores_stand_in_the_row_of_the_step_next_to_what_training_had_taken_and_results_can_be_compared(
    measuring: Measure, tmp_path: Path
) -> None:
    pool = PolicyPool([ScriptedEndpoint()], 0)
    config = config_of(tmp_path, {"a": {}, "b": {}}, num_tasks=3, success_threshold=0.5)
    spent = {0: {"training_episodes": 0.0}, 1: SPENT}
    measure = measuring(config, ToyEnv("a"), ToyEnv("b", reward=lambda text: None), pool=pool, spent_by=spent.__getitem__)
    await measure(step=0, version=0)
    await pool.update(1)
    await measure(step=1, version=1)
    base, later = read_lines(tmp_path / "metrics.jsonl")
    assert (base["step"], later["step"]) == (0, 1) and base["eval/a/n_planned"] == base["eval/a/n_scored"] == 3
    assert (base["eval/a/training_episodes"], later["eval/a/training_episodes"], later["eval/b/training_cost"]) == (0, 16, 40)
    assert (base["eval/a/policy_version"], later["eval/a/policy_version"], later["eval/a/n_other_version"]) == (0, 1, 0)
    assert base["eval/b/n_unscored"] == 3 and "eval/b/success_rate" not in base
    assert sorted(path.name for path in (tmp_path / "evals").iterdir()) == [
        f"step_00000{step}.{name}.{ending}" for step in (0, 1) for name in ("a", "b") for ending in ("json", "jsonl")
    ]
    rows = read_lines(tmp_path / "evals" / "step_000001.a.jsonl")
    assert [row["task_id"] for row in rows] == ["a-0", "a-1", "a-2"] and {row["version"] for row in rows} == {1}
    before, after = (EvalResult.from_json(tmp_path / "evals" / f"step_00000{step}.a.json") for step in (0, 1))
    assert compare(before, after).num_compared == 3 and compare(before, after).remarks == ()
    assert before.scores["success_rate"] == base["eval/a/success_rate"]


async def test_each_environment_is_played_and_judged_by_its_own_settings(measuring: Measure, tmp_path: Path) -> None:
    endpoint = ScriptedEndpoint()
    config = config_of(
        tmp_path,
        {"own": {"sampling": SamplingConfig(temperature=0.5, max_tokens=2), "success_threshold": -1.0}, "shared": {}},
        sampling=SamplingConfig(temperature=0.9, max_tokens=7),
        seeds=[3, 4],
        samples_per_task=2,
        num_tasks=1,
        success_threshold=2.0,
    )
    await measuring(config, ToyEnv("own"), ToyEnv("shared"), pool=PolicyPool([endpoint], 0))(step=0, version=0)
    asked = [(request.sampling.temperature, request.sampling.max_tokens) for request in endpoint.requests]
    assert asked == [(0.5, 2)] * 4 + [(0.9, 7)] * 4
    assert len({request.sampling.seed for request in endpoint.requests}) == 8
    rows = read_lines(tmp_path / "evals" / "step_000000.own.jsonl")
    assert [row["episode_id"] for row in rows] == ["own-0|s3|n0", "own-0|s3|n1", "own-0|s4|n0", "own-0|s4|n1"]
    (row,) = read_lines(tmp_path / "metrics.jsonl")
    assert (row["eval/own/success_rate"], row["eval/shared/success_rate"], row["eval/own/pass@2"]) == (1, 0, 1)


async def test_environments_are_probed_once_and_one_that_ignores_its_seed_is_told_in_the_metrics(
    measuring: Measure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[str] = []

    class Careless(ToyEnv):
        async def play(self, spec: TaskSpec, session: Any) -> Any:
            begun.append(spec["id"])
            return await super().play({**spec, "question": uuid.uuid4().hex}, session)

    measure = measuring(config_of(tmp_path, {"careless": {}, "fair": {}}, num_tasks=2), Careless("careless"), ToyEnv("fair"))
    with caplog.at_level(logging.WARNING):
        await measure(step=0, version=0)
    assert len(begun) == 2 + 4 and any("began differently when it was played again" in record.message for record in caplog.records)
    await measure(step=1, version=0)
    assert len(begun) == 2 + 4 + 2
    for row in read_lines(tmp_path / "metrics.jsonl"):
        assert (row["eval/careless/reproducible"], row["eval/fair/reproducible"]) == (0, 1)


async def test_an_environment_that_breaks_costs_its_scores_and_says_so_and_the_others_are_measured(
    measuring: Measure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(spec: TaskSpec) -> None:
        raise ConnectionError("no server")

    measure = measuring(config_of(tmp_path, {"broken": {}, "fine": {}}, num_tasks=2), ToyEnv("broken", before_play=broken), ToyEnv("fine"))
    with caplog.at_level(logging.WARNING):
        await measure(step=0, version=0)
    (row,) = read_lines(tmp_path / "metrics.jsonl")
    assert (row["eval/broken/n_error"], row["eval/broken/n_planned"], row["eval/fine/n_scored"]) == (2, 2, 2)
    assert "eval/broken/success_rate" not in row and "eval/broken/mean_reward" not in row
    assert [r["status"] for r in read_lines(tmp_path / "evals" / "step_000000.broken.jsonl")] == ["error", "error"]
    (said,) = [record.getMessage() for record in caplog.records if "have no score" in record.getMessage()]
    assert said.startswith(
        "evaluation of 'broken' at step 0: 2 of 2 rollouts have no score, so there is no success rate; the first that failed: "
        "ConnectionError: no server"
    )


async def test_what_was_measured_before_a_resume_is_not_measured_again_and_what_was_not_is_owed(measuring: Measure, tmp_path: Path) -> None:
    config = config_of(tmp_path, {"a": {}, "b": {}}, num_tasks=2)
    envs = ToyEnv("a"), ToyEnv("b")
    assert is_owed(tmp_path, 4, envs)
    await measuring(config, *envs)(step=4, version=0)
    assert not is_owed(tmp_path, 4, envs) and is_owed(tmp_path, 5, envs)
    (tmp_path / "evals" / "step_000004.b.json").unlink()  # as if the run had ended before it was written
    assert is_owed(tmp_path, 4, envs)
    endpoint = ScriptedEndpoint()
    await measuring(config, *envs, pool=PolicyPool([endpoint], 0), resume_step=4)(step=4, version=0)
    assert {request.request_id.split("/")[1] for request in endpoint.requests} == {"b"}
    assert not is_owed(tmp_path, 4, envs)


async def test_measuring_leaves_draws_prompts_and_sampling_seeds_of_training_as_they_are(measuring: Measure, tmp_path: Path) -> None:
    asked: list[set[tuple[str, int, bytes]]] = []
    for every in (None, 1):
        endpoint = ScriptedEndpoint()
        pool = PolicyPool([endpoint], 0)
        measure = measuring(config_of(tmp_path / str(every), {"toy": {}}), ToyEnv("toy"), pool=pool)
        run = make_run(pool=pool, max_steps=3, evaluate=measure if every else None, eval={"every_n_steps": every})  # type: ignore[arg-type]
        await run.play()
        ids = [(request.request_id, request.sampling.seed, request.token_ids.tobytes()) for request in endpoint.requests]
        asked.append({entry for entry in ids if not entry[0].startswith(("eval/", "probe/"))})
        num_measured = len(ids) - len(asked[-1])
        assert num_measured == (4 * 8 if every else 0)
        assert not {seed for _, seed, _ in asked[-1]} & {seed for name, seed, _ in ids if name.startswith("eval/")}
    assert asked[0] == asked[1] and len(asked[0]) == 3 * 8


def test_an_evaluation_of_a_run_says_what_it_played_so_that_others_can_be_compared_with_it() -> None:
    env = ReasoningGymEnvConfig(dataset="chain_sum", split="heldout", system_prompt="Add.", success_threshold=0.7)
    asked = eval_config(EvalSectionConfig(env=[env], num_tasks=5, seeds=[1, 2]), env, "tiny")
    assert asked.dataset == "reasoning_gym:chain_sum" and asked.env_parameters["split"] == "heldout" and "tasks" not in asked.env_parameters
    assert asked.library_versions.keys() == {"reasoning-gym"}, "a release of it makes other questions"
    told = asked.eval_parameters
    assert (told.split, told.limit, told.seeds, told.system_prompt, told.success_threshold) == ("heldout", 5, (1, 2), "Add.", 0.7)
    assert (told.model, told.samples_per_task, told.sampling.temperature) == ("tiny", 1, 0.0)


async def test_an_environment_that_asks_the_same_whatever_the_task_is_told_in_the_metrics_and_is_reproducible_all_the_same(
    measuring: Measure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Alike(ToyEnv):
        async def play(self, spec: TaskSpec, session: Any) -> Any:
            return await super().play({**spec, "question": "the same"}, session)

    measure = measuring(config_of(tmp_path, {"alike": {}, "fair": {}}, num_tasks=3), Alike("alike"), ToyEnv("fair"))
    with caplog.at_level(logging.WARNING):
        await measure(step=0, version=0)
        await measure(step=1, version=0)
    assert caplog.text.count("different tasks begin alike") == 1
    for row in read_lines(tmp_path / "metrics.jsonl"):
        assert (row["eval/alike/different_tasks"], row["eval/fair/different_tasks"]) == (0, 1)
        assert row["eval/alike/reproducible"] == row["eval/fair/reproducible"] == 1


async def test_after_a_hold_that_ran_out_the_next_environment_is_measured_with_the_version_that_it_says(
    measuring: Measure, tmp_path: Path
) -> None:
    pool = PolicyPool([ScriptedEndpoint()], 0)

    async def late(spec: TaskSpec) -> None:
        if pool.version == 0:
            await pool.update(1)  # as an update that waited for the hold, whose deadline has passed

    @contextlib.asynccontextmanager
    async def expired(holder: str, deadline_s: float) -> AsyncIterator[int]:
        yield pool.version

    pool.hold_version = expired  # type: ignore[method-assign]
    measure = measuring(config_of(tmp_path, {"a": {}, "b": {}}, num_tasks=2), ToyEnv("a", before_play=late), ToyEnv("b"), pool=pool)
    await measure(step=0, version=0)
    (row,) = read_lines(tmp_path / "metrics.jsonl")
    assert (row["eval/a/policy_version"], row["eval/b/policy_version"]) == (0, 1)
    assert row["eval/b/n_other_version"] == 0 and EvalResult.from_json(tmp_path / "evals" / "step_000000.b.json").version == 1
