"""`type = "verifiers"`: from a table of the configuration to a taskset; without the package, which continuous integration does not have."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from jaxrl.config.env import EnvConfig, VerifiersEnvConfig
from jaxrl.config.load import load_config
from jaxrl.config.run import RunConfig
from jaxrl.envs.build import build_environment
from jaxrl.envs.verifiers.package import load_world, spec_of
from jaxrl.errors import ConfigError
from tests.envs.verifiers.stand_in import Env, Tasks, package, task

SUMS = Path(__file__).parents[3] / "configs" / "verifiers.toml"


def config(**more: Any) -> VerifiersEnvConfig:
    return TypeAdapter(EnvConfig).validate_python({"type": "verifiers", "taskset": "sums", **more})


def test_without_the_package_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "verifiers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"env 'mine', taskset 'sums': .*needs the package `verifiers`.*pip install 'jaxrl\[verifiers\]'"):
        build_environment(config(name="mine"))


@pytest.mark.parametrize(("more", "words"), [
    ({"system_prompt": "Be brief."}, "whose taskset words the prompts; leave it out"),
    ({"examples": [{"question": "q", "answer": "a"}]}, "whose taskset words the prompts; leave it out"),
    ({"taskset_args": {"id": "other"}}, "`taskset_args` holds an `id`; set `taskset`"),
    ({"harness_args": {"id": "other"}}, "`harness_args` holds an `id`; set `harness`"),
])  # fmt: skip
def test_a_setting_that_has_no_place_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config(**more)


def test_a_run_that_allows_no_import_paths_refuses_a_taskset_and_a_harness() -> None:
    assert load_config(SUMS, (), RunConfig).orchestrator.train.env[0].type == "verifiers"
    with pytest.raises(ConfigError) as refused:
        load_config(SUMS, ["--run.allow_import_paths=false"], RunConfig)
    for key in ("orchestrator.train.env.0.taskset`='chain_sums'", "orchestrator.train.env.0.harness`='one_question'"):
        assert key in str(refused.value)


@pytest.mark.parametrize(("fields", "marks"), [
    ({"question": "2 + 2 ="}, {}),
    ({"difficulty": 3, "group": "sums"}, {"difficulty": 3, "group": "sums"}),
    ({"difficulty": True, "group": ["a"]}, {}),
])  # fmt: skip
def test_a_task_is_its_key_its_place_its_data_and_the_marks_that_a_curriculum_reads(fields: dict[str, Any], marks: dict[str, Any]) -> None:
    spec = spec_of(task("k", idx=4, id="row-9", **fields), 4)
    assert spec == {"id": "k", "index": 4, **marks, "data": {"id": "row-9", **fields}}


def test_what_json_has_no_word_for_is_null_in_the_spec_which_checkpoints_keep() -> None:
    spec = spec_of(task("k", scores=[1.0, float("inf")], table={"n": float("nan"), "text": "half \ud800"}), 0)
    assert spec["data"] == {"scores": [1.0, None], "table": {"n": None, "text": "half \ufffd"}}


Install = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Give a function that puts a stand-in in the place of verifiers, and returns the configurations that it is asked for."""

    def installed(env: Env, **options: Any) -> list[dict[str, Any]]:
        module, asked = package(env, **options)
        monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
        monkeypatch.setitem(sys.modules, "verifiers.v1", module)
        return asked

    return installed


def count() -> Iterator[Any]:
    return (task(f"k{number}") for number in itertools.count())


def test_the_tasks_are_the_first_ones_and_the_budget_becomes_verifiers_own_limits(install: Install) -> None:
    asked = install(Env(Tasks(count, bounded=False)))
    budget = {"max_turns": 3, "max_completion_tokens": 50, "max_duration_s": 9.0}
    env = build_environment(config(num_tasks=2, harness="mine", harness_args={"a": 1}, taskset_args={"b": 2}, budget=budget))
    assert [spec["id"] for spec in env.tasks()] == ["k0", "k1"]
    once = {"max_retries": 0, "rules": []}
    agent = {
        "harness": {"id": "mine", "a": 1}, "runtime": {"type": "subprocess"}, "max_turns": 3, "max_output_tokens": 50,
        "timeout": {"rollout": 9.0}, "retries": once,
    }  # fmt: skip
    assert asked == [{"taskset": {"id": "sums", "b": 2}, "agent": agent, "retries": once}]


@pytest.mark.parametrize(("own", "harness"), [("sums", "sums"), (None, "null")])
def test_without_a_harness_it_is_the_tasksets_own_or_the_chat_loop(install: Install, own: str | None, harness: str) -> None:
    asked = install(Env(Tasks(lambda: [task("k")])), own_harness=own)
    build_environment(config())
    assert asked[0]["agent"]["harness"] == {"id": harness}


def broken() -> Iterator[Any]:
    raise TimeoutError("the hub does not answer")
    yield


def late() -> list[Any]:
    threading.Event().wait(5.0)
    return []


def slowly() -> Iterator[Any]:
    for number in itertools.count():
        threading.Event().wait(0.001)
        yield task(f"k{number}")


@pytest.mark.parametrize(("tasks", "more", "words"), [
    (Tasks(count, bounded=False), {}, "taskset 'sums' has no end: say how many of its tasks to take, with `num_tasks`"),
    (Tasks(list), {}, "has no tasks with these `taskset_args`: {}"),
    (Tasks(broken), {}, "its tasks cannot be listed: TimeoutError: the hub does not answer"),
    (Tasks(lambda: sys.exit(2)), {}, "its tasks cannot be listed: SystemExit: 2"),
    (Tasks(late), {"load_deadline_s": 0.05}, "was not loaded after `load_deadline_s`=0.05 s"),
    (Tasks(lambda: [task("k"), task("k")]), {}, "every task needs an `id` of its own, got 1 ids for 2 tasks"),
])  # fmt: skip
def test_a_taskset_that_gives_no_tasks_is_refused(install: Install, tasks: Tasks, more: dict[str, Any], words: str) -> None:
    install(Env(tasks))
    with pytest.raises(ConfigError, match=words):
        build_environment(config(**more))


def test_a_taskset_that_has_no_end_and_does_not_say_so_is_not_read_on_for_ever(install: Install) -> None:
    install(Env(Tasks(slowly)))
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="was not loaded after"):
        build_environment(config(load_deadline_s=0.05))
    (reader,) = set(threading.enumerate()) - before
    reader.join(10)
    assert not reader.is_alive()


@pytest.mark.parametrize("agents", [(), ("solver", "judge")])
def test_an_environment_of_another_number_of_agents_than_one_is_refused(install: Install, agents: tuple[str, ...]) -> None:
    install(Env(Tasks(count)), agents=agents)
    with pytest.raises(ConfigError, match=rf"is played by {len(agents)} agents \({', '.join(agents)}\)"):
        build_environment(config(num_tasks=1))


async def test_all_episodes_are_given_one_client_since_verifiers_keeps_each(install: Install) -> None:
    env = Env(Tasks(lambda: [task("a"), task("b")]), lambda task: SimpleNamespace(ok=False, traces=[], errors=[]))
    install(env)
    world = load_world(config())
    traces: list[str] = []
    async with world.serving():
        for index in (0, 1):
            await world.play(index, "http://127.0.0.1:1/v1", {"X-Key": "k"}, traces.append)
    assert traces == ["trace of a", "trace of b"]
    first, second = env.contexts
    assert first is second and (first.client.base_url, first.client.headers) == ("http://127.0.0.1:1/v1", {"X-Key": "k"})
    assert first.client.api_key_var not in os.environ, "no key of the user's goes along"
