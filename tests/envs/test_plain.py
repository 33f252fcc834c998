"""An environment from tasks and a function: what is asked, what the function sees, which tasks there are."""

from typing import Any

import pytest

from jaxrl.config.env import ExampleConfig, PythonEnvConfig
from jaxrl.envs.base import Environment, TaskSpec
from jaxrl.envs.build import build_environment, require_disjoint_questions
from jaxrl.envs.plain import single_turn
from jaxrl.envs.play import play_rollout
from jaxrl.errors import ConfigError
from tests.envs.policies import make_rollout, open_session, saying

HERE = __name__


@single_turn([{"question": "Say hi.", "word": "hi"}, {"id": "b", "question": "Say yo.", "word": "yo", "demonstration": "yo"}])
def greet(spec: TaskSpec, reply: str) -> float:
    """Greets."""
    return float(reply == spec["word"])


def counted(num: int = 40) -> list[TaskSpec]:
    return [{"question": f"Say {number}.", "difficulty": number % 3} for number in range(num)]


@single_turn(counted)
async def count(spec: TaskSpec, reply: str) -> float | None:
    return None if not reply else len(reply) / 10


@single_turn(counted, require_stop=True)
def strict(spec: TaskSpec, reply: str) -> float:
    return 1.0


@single_turn([{"question": f"Say {number}.", "twist": twist} for number in range(20) for twist in "ab"])
def twice(spec: TaskSpec, reply: str) -> float:
    return 1.0


@single_turn([{"question": "a"}, {"prompt": "b"}])
def nothing_asked(spec: TaskSpec, reply: str) -> float:
    return 0.0


@single_turn([])
def no_task(spec: TaskSpec, reply: str) -> float:
    return 0.0


def build(target: str, **settings: Any) -> Environment:
    return build_environment(PythonEnvConfig(import_path=f"{HERE}:{target}", name="mine", **settings))


async def play(env: Environment, spec: TaskSpec, reply: str) -> Any:
    rollout = make_rollout(spec)
    await play_rollout(env, rollout, open_session(saying(reply), rollout), 10.0)
    return rollout


async def test_a_function_and_tasks_are_an_environment_of_type_python() -> None:
    env = build("greet", system_prompt="Be brief.", examples=[ExampleConfig(question="Say no.", answer="no")])
    first, second = env.tasks()
    assert second["id"] == "b" and len(first["id"]) == 16 and first == {"id": first["id"], "question": "Say hi.", "word": "hi"}
    assert [env.demonstration(spec) for spec in (first, second)] == [None, "yo"]
    rollouts = [await play(env, first, reply) for reply in ("hi", "yo")]
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0]
    assert [node.content for node in rollouts[0].nodes] == ["Be brief.", "Say no.", "no", "Say hi.", "hi"]
    assert greet.__name__ == "greet" and greet.__doc__ == "Greets."


async def test_a_coroutine_function_scores_too_and_none_is_no_reward() -> None:
    env = build("count", kwargs={"num": 1})
    rollouts = [await play(env, env.tasks()[0], reply) for reply in ("abc", "")]
    assert [rollout.reward for rollout in rollouts] == [0.3, None]


def test_kwargs_go_to_the_function_that_makes_the_tasks() -> None:
    assert len(build("count").tasks()) == 40 and [spec["difficulty"] for spec in build("count", kwargs={"num": 2}).tasks()] == [0, 1]


def test_the_parts_of_a_split_share_no_question() -> None:
    parts = [build("count", kwargs={"split": split, "heldout_frac": 0.3}) for split in ("train", "heldout")]
    assert sum(len(part.tasks()) for part in parts) == 40 and min(len(part.tasks()) for part in parts) > 3
    require_disjoint_questions(parts[:1], parts[1:])


def test_a_question_of_two_tasks_is_in_one_part_of_a_split() -> None:
    parts = [build("twice", kwargs={"split": split, "heldout_frac": 0.3}) for split in ("train", "heldout")]
    assert sum(len(part.tasks()) for part in parts) == 40
    require_disjoint_questions(parts[:1], parts[1:])


@pytest.mark.parametrize(
    ("target", "kwargs", "message"),
    [
        ("greet", {"num": 3}, r"its tasks are a list, so `kwargs` has no place for \['num'\]; make them a function"),
        ("count", {"number": 3}, r"raised TypeError: .*unexpected keyword argument 'number'"),
        ("count", {"split": "test"}, "expected `split` 'train', 'heldout' or 'all'"),
        ("count", {"heldout_frac": 1}, "expected .* `heldout_frac` from 0 up to 1, got 'all' and 1"),
        ("count", {"split": "heldout", "heldout_frac": 0.0}, "none of its 40 questions is in split 'heldout' with `heldout_frac`=0.0"),
        ("nothing_asked", {}, r"each task is a dict with a `question`, .*got \{'prompt': 'b'\}"),
        ("no_task", {}, "env 'mine' has no tasks"),
    ],
)
def test_what_cannot_be_is_an_error_of_the_configuration(target: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(target, kwargs=kwargs)


async def test_a_reply_that_was_cut_is_worth_nothing_where_it_must_end() -> None:
    env = build("strict", kwargs={"num": 1})
    rollout = make_rollout(env.tasks()[0])
    await play_rollout(env, rollout, open_session(saying("x" * 5000), rollout), 10.0)
    assert rollout.is_truncated and rollout.reward == 0.0
