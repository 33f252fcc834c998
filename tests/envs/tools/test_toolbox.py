"""The toolbox: every call gets one message, and what went wrong is the policy's or the tool's."""

import asyncio

import pytest

from jaxrl.envs.tools.calculator import calculator
from jaxrl.envs.tools.tool import Tool, ToolFailedError
from jaxrl.envs.tools.toolbox import Toolbox
from jaxrl.monitors.rollouts import without_times
from jaxrl.types import ToolCall
from tests.fakes import FakeClock


def call(name: str, arguments: dict | None, *, id: str = "call_0_0", error: str = "") -> ToolCall:
    return ToolCall(id, name, arguments, raw="", error=error)


def tool(name: str, answer, **options) -> Tool:  # type: ignore[no-untyped-def]
    async def called(arguments: dict):  # type: ignore[no-untyped-def]
        return await answer(**arguments)

    return Tool(name, called, **options)


async def answered(toolbox: Toolbox, one: ToolCall) -> tuple[str, dict[str, float]]:
    """Return the content of the answer, and the counts that are not 0."""
    counts = toolbox.empty_counts()
    message = await toolbox.answer(one, counts)
    told = {name: value for name, value in counts.items() if value and name != "tools/duration_s"}
    return message["content"], {name.removeprefix("tools/"): value for name, value in told.items()}


async def test_a_right_call_is_answered_with_the_result_alone_under_its_id_and_name() -> None:
    toolbox = Toolbox("env 'toy'", [calculator()])
    message = await toolbox.answer(call("calculator", {"expression": "8 + 3"}, id="call_4_1"), toolbox.empty_counts())
    assert message == {"role": "tool", "tool_call_id": "call_4_1", "name": "calculator", "content": "11"}


@pytest.mark.parametrize(
    ("one", "content", "kind"),
    [
        (call("calculator", None, error="no closing brace"), "error: no closing brace", "malformed"),
        (call("", None, error="no closing brace"), "error: no closing brace", "malformed"),
        (call("weather", {}), "error: no such tool; there are calculator", "unknown"),
        (call("calculator", {}), "error: `expression` is missing", "errors"),
        (call("calculator", {"expression": 8}), "error: `expression` must be of type string, got 8", "errors"),
        (call("calculator", {"expression": "1", "digits": 2}), "error: there is no `digits`; there are `expression`", "errors"),
        (call("calculator", {"expression": "1 / 0"}), "error: division by zero", "errors"),
    ],
)
async def test_what_the_policy_did_wrong_is_told_to_it_and_counted(one: ToolCall, content: str, kind: str) -> None:
    assert await answered(Toolbox("env 'toy'", [calculator()]), one) == (content, {"calls": 1, kind: 1})


async def test_a_malformed_call_is_never_run() -> None:
    ran = []

    async def note() -> str:
        ran.append(True)
        return ""

    await answered(Toolbox("env 'toy'", [tool("note", note)]), call("note", None, error="e"))
    assert not ran


@pytest.mark.parametrize(("name", "told"), [("calculator", "calculator"), ("", None), ("<|im_end|>", None)])
async def test_an_answer_has_the_name_of_its_tool_and_never_one_that_the_policy_made_up(name: str, told: str | None) -> None:
    toolbox = Toolbox("env 'toy'", [calculator()])
    for arguments in (None, {"expression": "1"}):
        message = await toolbox.answer(call(name, arguments, error="e"), toolbox.empty_counts())
        assert message.get("name") == told and "im_end" not in message["content"]


async def test_whatever_a_tool_raises_is_an_answer() -> None:
    async def lose() -> str:
        raise KeyError("place")

    async def late() -> str:
        raise TimeoutError("the server was slow")

    toolbox = Toolbox("env 'toy'", [tool("lose", lose), tool("late", late)])
    assert await answered(toolbox, call("lose", {})) == ("error: KeyError: 'place'", {"calls": 1, "errors": 1})
    assert await answered(toolbox, call("late", {})) == ("error: TimeoutError: the server was slow", {"calls": 1, "errors": 1})


async def hang() -> str:
    await asyncio.sleep(60)
    return ""


async def number() -> int:
    return 3


async def much() -> str:
    return "x" * 10_000_000


@pytest.mark.parametrize(
    ("answer", "message", "told", "counts"),
    [
        (hang, "env 'toy': tool 'odd' was not done after 0.01 s", "error: not done after 0.01 s", {"errors": 1, "timeouts": 1}),
        (number, "env 'toy': tool 'odd' returned int, expected a text", "error: the tool failed", {"errors": 1}),
        (much, "env 'toy': tool 'odd' returned 10000000 characters; at most 262144 are read", "error: the tool failed", {"errors": 1}),
    ],
)
async def test_what_a_tool_did_wrong_is_raised_or_told_as_the_setting_says(answer, message: str, told: str, counts: dict) -> None:  # type: ignore[no-untyped-def]
    odd = tool("odd", answer, deadline_s=0.01)
    with pytest.raises(ToolFailedError, match=message):
        await answered(Toolbox("env 'toy'", [odd]), call("odd", {}))
    assert await answered(Toolbox("env 'toy'", [odd], on_failure="answer"), call("odd", {})) == (told, {"calls": 1, **counts})


async def test_a_long_result_is_cut_with_a_note() -> None:
    async def say(text: str) -> str:
        return text

    toolbox = Toolbox("env 'toy'", [tool("say", say, parameters={"type": "object"})], max_result_chars=4)
    assert (await answered(toolbox, call("say", {"text": "abcd"})))[0] == "abcd"
    assert (await answered(toolbox, call("say", {"text": "abcdefg"})))[0] == "abcd [3 more characters]"


async def test_the_seconds_that_tools_take_add_up() -> None:
    clock = FakeClock()

    async def work() -> str:
        clock.advance(1.5)
        return ""

    toolbox = Toolbox("env 'toy'", [tool("work", work)], clock=clock)
    counts = toolbox.empty_counts()
    for _ in range(2):
        await toolbox.answer(call("work", {}), counts)
    assert counts["tools/duration_s"] == 3.0


async def test_calls_that_are_repeated_report_the_same_but_for_the_time_that_they_took() -> None:
    async def counted(seconds: float) -> dict[str, float]:
        clock = FakeClock()

        async def work() -> str:
            clock.advance(seconds)
            return ""

        toolbox = Toolbox("env 'toy'", [tool("work", work)], clock=clock)
        counts = toolbox.empty_counts()
        await toolbox.answer(call("work", {}), counts)
        return counts

    once, again = await counted(1.5), await counted(2.0)
    assert once != again
    assert without_times({"metrics": once, "duration_s": 1.6}) == without_times({"metrics": again, "duration_s": 2.1})


def test_closing_it_closes_every_tool() -> None:
    closed = []
    tools = [tool(name, hang, close=lambda name=name: closed.append(name)) for name in ("a", "b")]
    Toolbox("env 'toy'", tools).close()
    assert closed == ["a", "b"]
