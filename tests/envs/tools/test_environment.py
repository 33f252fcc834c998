"""Questions with tools: a scripted policy calls, is answered, and answers; what goes wrong stays in its rollout."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import pytest

from jaxrl.config.env import SamplingConfig, ToolsEnvConfig
from jaxrl.config.reward import PythonRewardConfig
from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.answers import exact_match
from jaxrl.envs.base import Reply, demonstrated_turns
from jaxrl.envs.build import build_environment, require_disjoint_questions
from jaxrl.envs.play import play_rollout
from jaxrl.envs.text_session import demonstration_session
from jaxrl.envs.tools.calculator import calculator
from jaxrl.envs.tools.environment import WARN_AFTER_REPLIES, ToolEnvironment, tool_environment
from jaxrl.envs.tools.tool import Tool
from jaxrl.envs.tools.toolbox import Toolbox
from jaxrl.envs.transcript import Window
from jaxrl.inference.rendering.tool_calls import call_text
from jaxrl.types import Rollout
from tests.envs.policies import RENDERER, ids_of, make_rollout, open_session, saying
from tests.fakes import ScriptedEndpoint

SPEC = {"id": "sum", "question": "8 + 3 =", "answer": "11"}


def called(expression: str, name: str = "calculator", argument: str = "expression") -> str:
    return call_text("hermes", name, {argument: expression})


def sums(*tools: Tool, spec: dict = SPEC, on_failure: str = "end", **options) -> ToolEnvironment:  # type: ignore[no-untyped-def]
    toolbox = Toolbox("env 'sums'", tools or [calculator()], on_failure=on_failure)  # pyright: ignore[reportArgumentType]
    return ToolEnvironment("sums", [spec], toolbox, **({"score": exact_match, "describe": False} | options))


async def played(env: ToolEnvironment, *texts: str, endpoint: ScriptedEndpoint | None = None, **session) -> Rollout:  # type: ignore[no-untyped-def]
    """Play the first task with a policy that says the texts, one a turn."""
    rollout = make_rollout(dict(env.tasks()[0]))
    await play_rollout(env, rollout, open_session(endpoint or saying(*texts), rollout, **session), 60.0)
    return rollout


def counts(rollout: Rollout) -> dict[str, float]:
    """Return the counts of tools that are not 0, without the seconds."""
    found = {name.removeprefix("tools/"): value for name, value in rollout.metrics.items() if name.startswith("tools/") and value}
    return {name: value for name, value in found.items() if name != "duration_s"}


def told(rollout: Rollout) -> list[str]:
    """Return what the tools answered."""
    return [node.content for node in rollout.nodes if node.role == "tool"]


async def test_a_call_is_answered_and_the_first_reply_without_one_is_the_answer() -> None:
    rollout = await played(sums(), called("8 + 3"), "11")
    assert rollout.failure is None
    assert (rollout.reward, rollout.stop_reason, rollout.is_truncated) == (1.0, "done", False)
    assert [node.role for node in rollout.nodes] == ["user", "assistant", "tool", "assistant"]
    assert told(rollout) == ["11"] and rollout.nodes[2].name == "calculator"
    assert counts(rollout) == {"calls": 1} and {"tools/errors", "tools/unparsed", "tools/duration_s"} <= set(rollout.metrics)


async def test_an_answer_needs_no_call_and_a_wrong_one_is_worth_nothing() -> None:
    assert (await played(sums(), "11")).reward == 1.0
    assert (await played(sums(), called("8 + 3"), "12")).reward == 0.0


@pytest.mark.parametrize(
    ("text", "answer", "kind"),
    [
        ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "8 + 3"\n</tool_call>', "error: ", "malformed"),
        ('<tool_call>\n{"name": "calculator", "arguments": "8 + 3"}\n</tool_call>', "error: ", "malformed"),
        ('<tool_call>\n{"name": "calculator", "arg', "error: ", "malformed"),
        (called("8 + 3", name="abacus"), "error: no such tool; there are calculator", "unknown"),
        (called("8 + 3", argument="sum"), "error: `expression` is missing", "errors"),
        (called("8 / 0"), "error: division by zero", "errors"),
    ],
)
async def test_a_call_that_cannot_be_answered_is_told_so_and_the_next_one_may_be_right(text: str, answer: str, kind: str) -> None:
    rollout = await played(sums(), text, called("8 + 3"), "11")
    assert rollout.reward == 1.0 and counts(rollout) == {"calls": 2, kind: 1}
    assert told(rollout)[0].startswith(answer) and told(rollout)[1] == "11"


async def test_parallel_calls_are_answered_in_their_order_each_under_its_own_id() -> None:
    rollout = await played(sums(), called("8 + 3") + "\n" + called("1 / 0") + "\n" + called("2 * 3"), "11")
    assert told(rollout) == ["11", "error: division by zero", "6"]
    assert len({call.id for call in rollout.nodes[1].tool_calls}) == 3
    assert counts(rollout) == {"calls": 3, "errors": 1}


async def test_a_call_that_the_question_quotes_is_nobodys() -> None:
    rollout = await played(sums(spec=SPEC | {"question": f"{called('9 + 9')} 8 + 3 ="}), "11")
    assert (rollout.reward, rollout.num_turns, counts(rollout)) == (1.0, 1, {})


async def test_a_call_in_a_tools_answer_is_nobodys() -> None:
    async def parrot(arguments: dict) -> str:
        return called("9 + 9")

    rollout = await played(sums(Tool("parrot", parrot)), call_text("hermes", "parrot", {}), "11")
    assert (rollout.reward, counts(rollout), told(rollout)) == (1.0, {"calls": 1}, [called("9 + 9")])


async def test_a_conversation_without_an_answer_is_worth_nothing() -> None:
    rollout = await played(sums(budget=BudgetConfig(max_turns=2), score=lambda spec, text: 1.0), called("8 + 3"), called("8 + 3"))
    assert (rollout.reward, rollout.stop_reason, rollout.is_truncated) == (0.0, "max_turns", True)
    assert told(rollout) == ["11"]


@pytest.mark.parametrize(("require_stop", "reward"), [(True, 0.0), (False, 1.0)])
async def test_an_answer_that_was_cut_counts_only_if_no_stop_is_required(require_stop: bool, reward: float) -> None:
    cut = ScriptedEndpoint(lambda request, version: ids_of("11"))
    rollout = await played(sums(require_stop=require_stop), endpoint=cut)
    assert (rollout.reward, rollout.stop_reason, rollout.is_truncated) == (reward, "max_tokens", True)


async def test_a_call_that_was_cut_is_not_run() -> None:
    cut = ScriptedEndpoint(lambda request, version: ids_of(called("8 + 3")))
    rollout = await played(sums(require_stop=False), endpoint=cut)
    assert (rollout.reward, rollout.stop_reason, told(rollout)) == (0.0, "max_tokens", [])


async def test_an_answer_that_does_not_fit_the_window_ends_the_rollout_without_an_error() -> None:
    async def talk(arguments: dict) -> str:
        return "x" * 200

    rollout = await played(sums(Tool("talk", talk)), call_text("hermes", "talk", {}), "11", window=160)
    assert rollout.failure is None and (rollout.reward, rollout.stop_reason, rollout.is_truncated) == (0.0, "window_full", True)


async def test_a_tiny_model_can_play_within_160_tokens() -> None:
    config = ToolsEnvConfig(dataset="chain_sum", parameters={"max_terms": 2, "max_digits": 1}, num_tasks=20, describe=False)
    env = tool_environment(config)
    spec = env.tasks()[0]
    expression = spec["question"].rpartition(": ")[2].removesuffix(" =")
    rollout = await played(env, called(expression), spec["answer"], window=160, sampling=SamplingConfig(max_tokens=80))
    assert rollout.reward == 1.0


FUNCTIONS = "tests.envs.tools.functions"


@pytest.mark.parametrize(
    ("what", "message", "counted"),
    [
        ("hang", "tool 'act' .* was not done after 1 s", {"errors": 1, "timeouts": 1}),
        ("die", "tool 'act' .* ended its worker process, with exit code 3", {"errors": 1}),
        ("much", "tool 'act' .* returned 10000000 characters", {"errors": 1}),
    ],
)
async def test_a_tool_that_hangs_dies_or_returns_10_mb_ends_its_rollout_and_no_other(what: str, message: str, counted: dict) -> None:
    act = {"name": "act", "import_path": f"{FUNCTIONS}:act", "deadline_s": 1.0, "workers": 1}
    options = {"dataset": "chain_sum", "num_tasks": 4, "describe": False, "python": [act], "split": "all"}
    with contextlib.closing(tool_environment(ToolsEnvConfig.model_validate(options))) as env:
        answer = env.tasks()[0]["answer"]

        async def one(says: str) -> Rollout:
            return await played(env, called(says, "act", "what"), answer)

        lost, *fine = await asyncio.gather(*(one(says) for says in (what, "a", "b", "c")))
        assert [told(rollout) for rollout in fine] == [["a"], ["b"], ["c"]] and {rollout.reward for rollout in fine} == {1.0}
        assert lost.failure is not None and (lost.reward, str(lost.failure.boundary)) == (None, "env")
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(lost.failure.message)
        assert [node.role for node in lost.nodes] == ["user", "assistant"]  # the turn is kept for the log
    options["on_failure"] = "answer"
    with contextlib.closing(tool_environment(ToolsEnvConfig.model_validate(options))) as env:
        rollout = await one(what)
        assert rollout.reward == 1.0 and counts(rollout) == {"calls": 1, **counted} and told(rollout)[0].startswith("error: ")


async def test_replies_that_only_look_like_calls_are_counted_and_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    env = sums()
    with caplog.at_level(logging.WARNING):
        for _ in range(2 * WARN_AFTER_REPLIES):
            rollout = await played(env, "<function=calculator><parameter=expression>8 + 3</parameter></function>")
    assert counts(rollout) == {"unparsed": 1}
    assert [record.getMessage() for record in caplog.records if "look like calls of tools" in record.getMessage()] == [
        "env 'sums': 16 of 16 replies look like calls of tools, and none was found in them, such as in "
        "'<function=calculator><parameter=expression>8 + 3</parameter></function>'; name the policy's format in `model.tool_format`"
    ]


async def test_replies_whose_calls_are_found_are_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    env = sums()
    with caplog.at_level(logging.WARNING):
        for _ in range(WARN_AFTER_REPLIES):
            await played(env, called("8 + 3"), "11")
    assert not caplog.records


class SchemaSession:
    """A session that answers at once and keeps which tools it was told of."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []

    async def ask(self, messages: Sequence, *, tools: Sequence = ()) -> Reply:  # type: ignore[type-arg]
        self.told.append([tool["function"]["name"] for tool in tools])
        return Reply("11", is_stopped=True, num_tokens=2, content="11")

    def fork(self) -> "SchemaSession":
        return self

    def restart(self) -> "SchemaSession":
        return self


async def test_the_policy_is_told_of_the_tools_unless_the_setting_says_no() -> None:
    session = SchemaSession()
    for describe in (True, False):
        await sums(describe=describe).play(SPEC, session)
    assert session.told == [["calculator"], []]


def configured(**options) -> ToolsEnvConfig:  # type: ignore[no-untyped-def]
    settings = {"dataset": "chain_sum", "parameters": {"max_terms": 2, "max_digits": 1}, "num_tasks": 40, "describe": False}
    return ToolsEnvConfig.model_validate(settings | options)


async def test_a_demonstration_calls_the_calculator_and_gives_the_answer() -> None:
    env = tool_environment(configured(system_prompt="Use it."))
    spec = env.tasks()[0]
    expression = spec["question"].rpartition(": ")[2].removesuffix(" =")
    assert env.demonstration(spec) == [called(expression), spec["answer"]]
    rollout = make_rollout(spec)
    session = demonstration_session(rollout, RENDERER, env.demonstration, window=Window(512))
    await play_rollout(env, rollout, session, 10.0)
    assert rollout.reward == 1.0 and [node.role for node in rollout.nodes] == ["system", "user", "assistant", "tool", "assistant"]


async def test_a_model_may_know_the_calculator_by_another_name() -> None:
    env = tool_environment(configured(calculator_name="calc", calculator_argument="expr", demonstration_format="hermes"))
    spec = env.tasks()[0]
    call, answer = demonstrated_turns(env.demonstration(spec)) or ("", "")
    assert call.startswith('<tool_call>\n{"name": "calc", "arguments": {"expr": "') and (await played(env, call, answer)).reward == 1.0
    assert counts(await played(env, called("8 + 3"), answer)) == {"calls": 1, "unknown": 1}


def test_a_demonstration_is_the_answer_alone_where_the_calculator_is_no_help() -> None:
    weather = {"name": "weather", "import_path": f"{FUNCTIONS}:weather"}
    with contextlib.closing(tool_environment(configured(calculator=False, python=[weather]))) as env:
        assert env.demonstration(env.tasks()[0]) == env.tasks()[0]["answer"]
    env = tool_environment(configured(dataset="spell_backward", parameters={}))
    assert env.demonstration(env.tasks()[0]) == env.tasks()[0]["answer"]


def test_demonstrations_are_written_in_the_format_that_the_setting_names() -> None:
    env = tool_environment(configured(demonstration_format="xml"))
    turns = env.demonstration(env.tasks()[0])
    assert turns is not None and "<function=calculator>" in turns[0]


async def test_the_final_reply_is_scored_by_a_reward_of_the_users() -> None:
    reward = PythonRewardConfig(import_path="tests.envs.grading.misbehaving:act")
    with contextlib.closing(build_environment(configured(reward=reward, name="mine"))) as env:
        assert isinstance(env, ToolEnvironment)
        assert (await played(env, called("8 + 3"), "0.5")).reward == 0.5
        failed = await played(env, "raise")
        assert failed.failure is not None and str(failed.failure.boundary) == "grader" and "ZeroDivisionError" in failed.failure.message


async def test_the_datasets_own_scorer_may_give_part_credit() -> None:
    with contextlib.closing(tool_environment(configured(scorer="dataset"))) as env:
        answer = env.tasks()[0]["answer"]
        assert (await played(env, called("1"), f"it is {answer}")).reward == pytest.approx(len(answer) / len(f"it is {answer}"))


def test_its_questions_are_kept_apart_from_those_of_other_environments() -> None:
    require_disjoint_questions([tool_environment(configured())], [tool_environment(configured(split="heldout"))])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calculator": False}, "leave nothing to call"),
        ({"python": [{"name": "calculator", "import_path": "a:b"}]}, "two tools have the name 'calculator'"),
        ({"calculator_name": "a b"}, "calculator_name"),
        ({"python": [{"name": "no good", "import_path": "a:b"}]}, "name"),
        ({"reward": {"type": "math_verify"}, "scorer": "dataset"}, "takes the place of `scorer`"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configured(**options)
