"""`type = "agent"`: from a table of the configuration to an environment."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from jaxrl.config.env import AgentEnvConfig, EnvConfig
from jaxrl.envs.agent import AgentEnvironment
from jaxrl.envs.build import build_environment
from jaxrl.errors import ConfigError

HERE = "tests.envs.test_agent_build"


async def agent(spec: dict[str, Any], base_url: str, api_key: str, *, tries: int = 1) -> float:
    return float(tries)


NOTHING = 3


def config(tmp_path: Path, *rows: Any, **more: Any) -> AgentEnvConfig:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    table = {"type": "agent", "import_path": f"{HERE}:agent", "path": str(path), **more}
    return TypeAdapter(EnvConfig).validate_python(table)


def test_the_tasks_are_the_rows_and_one_without_a_name_is_named_by_what_it_holds(tmp_path: Path) -> None:
    rows = [{"id": "a", "goal": 1}, "", {"goal": 2, "x": 3}, {"x": 3, "goal": 4}]
    env = build_environment(config(tmp_path, *rows, name="mine", kwargs={"tries": 2}))
    assert isinstance(env, AgentEnvironment) and env.name == "mine"
    first, second, third = env.tasks()
    assert first == {"id": "a", "goal": 1} and second["goal"] == 2 and len({spec["id"] for spec in env.tasks()}) == 3
    again = build_environment(config(tmp_path, {"x": 3, "goal": 2}))
    assert again.tasks()[0]["id"] == second["id"] and third["id"] != second["id"]
    assert env.demonstration(first) is None
    env.close()


@pytest.mark.parametrize(("rows", "words"), [
    ([], "the file has no rows"),
    (["{"], "line 1: not JSON"),
    ([{"a": 1}, "[]"], r"line 2: expected a JSON object, got \[\] \(list\)"),
    (['{"a": NaN}'], "line 1: not JSON .NaN is no JSON number"),
    ([r'{"a": "\ud800"}'], "line 1: what is under 'a' is no Unicode text"),
    ([{"id": 3}], "line 1: `id` must be a text"),
    ([{"a": 1}, {"b": 1}, {"a": 1}], "lines 1 and 3 are one task"),
])  # fmt: skip
def test_a_file_that_holds_no_tasks_is_refused_with_its_line(tmp_path: Path, rows: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_environment(config(tmp_path, *rows))


@pytest.mark.parametrize(("more", "words"), [
    ({"path": "nowhere.jsonl"}, "there is no such file; paths are seen from where the run is started"),
    ({"import_path": f"{HERE}:missing"}, "cannot be imported"),
    ({"import_path": f"{HERE}:NOTHING"}, "is a int; name a class or a function"),
    ({"kwargs": {"other": 1}}, r"cannot be called as \(spec, base_url, api_key, other=\.\.\.\).*see `kwargs`"),
    ({"kwargs": {"spec": 1}}, "multiple values for argument 'spec'"),
    ({"reward": {"type": "python", "import_path": "a:b"}}, "scores itself; leave it out"),
])  # fmt: skip
def test_an_agent_that_cannot_play_is_refused_before_the_run(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_environment(config(tmp_path, {"a": 1}, **more))


@pytest.mark.parametrize("more", [{"system_prompt": "Be brief."}, {"examples": [{"question": "q", "answer": "a"}]}])
def test_an_agent_words_its_own_prompts(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="words its own prompts; leave it out"):
        config(tmp_path, {"a": 1}, **more)
