"""What a rollout holds when its replies are known as words alone."""

import asyncio

import pytest

from jaxrl.envs.base import Message, Outcome, Session, TaskSpec
from jaxrl.envs.play import play_rollout
from jaxrl.envs.words import WordsPrompt, WordsReply, WordsSession
from jaxrl.errors import EngineError, EnvError
from jaxrl.types import Boundary, Rollout, ToolCall
from tests.envs.policies import make_rollout

HI: list[Message] = [{"role": "user", "content": "hi"}]
LOOK = ToolCall("call-1", "look", {"at": "sky"}, raw='{"at": "sky"}')


class Writer(WordsSession):
    """Gives replies from a list, in the order in which they are asked for."""

    def __init__(self, rollout: Rollout, *replies: WordsReply | Exception, stop: tuple[str, ...] = ()) -> None:
        super().__init__(rollout, temperature=0.5, stop=stop)
        self.replies = list(replies)
        self.prompts: list[WordsPrompt] = []

    async def _write(self, prompt: WordsPrompt) -> WordsReply:
        self.prompts.append(prompt)
        await asyncio.sleep(0)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


def spoken(rollout: Rollout) -> list[tuple[int | None, str, str]]:
    return [(node.parent, node.role, node.content) for node in rollout.nodes]


async def test_a_conversation_is_told_again_whole_and_recorded_once() -> None:
    rollout = make_rollout()
    session = Writer(rollout, WordsReply("hello", num_tokens=2, num_prompt_tokens=5), WordsReply("bye", is_stopped=False))
    first = await session.ask([{"role": "system", "content": "Be kind."}, *HI])
    assert (first.text, first.content, first.num_tokens, first.num_prompt_tokens, first.is_stopped) == ("hello", "hello", 2, 5, True)
    second = await session.ask([{"role": "user", "content": [{"type": "text", "text": "go"}]}])
    assert not second.is_stopped and second.num_tokens == 0 and rollout.is_truncated
    assert [message["content"] for message in session.prompts[1].messages] == ["Be kind.", "hi", "hello", "go"]
    assert spoken(rollout) == [
        (None, "system", "Be kind."),
        (0, "user", "hi"),
        (1, "assistant", "hello"),
        (2, "user", "go"),
        (3, "assistant", "bye"),
    ]
    assert rollout.num_turns == 2 and rollout.num_completion_tokens == 2 and rollout.completion_text == "bye"
    assert all(len(node.token_ids) == 0 and node.logprobs is None and node.versions is None for node in rollout.nodes)
    assert [node.finish_reason for node in rollout.nodes if node.sampled] == ["stop", "length"]


async def test_calls_of_tools_are_told_apart_and_come_back_as_the_writer_sent_them() -> None:
    rollout = make_rollout()
    broken = ToolCall("call-2", "look", None, raw="{at", error="no JSON object")
    said = WordsReply("<call/>", content="", reasoning="hm", tool_calls=(LOOK, broken))
    session = Writer(rollout, said, WordsReply("blue"))
    reply = await session.ask(HI, tools=[{"type": "function", "function": {"name": "look"}}])
    assert (reply.text, reply.content, reply.reasoning) == ("<call/>", "", "hm") and reply.tool_calls == (LOOK, broken)
    assert reply.tool_calls[0].arguments is not None
    reply.tool_calls[0].arguments["at"] = "sea"  # what a tool does to its arguments stays with it
    await session.ask([{"role": "tool", "tool_call_id": "call-1", "name": "look", "content": "blue"}])
    asked = session.prompts[1].messages[1]
    assert (asked["content"], asked["reasoning_content"]) == ("", "hm")
    assert [call["function"]["arguments"] for call in asked["tool_calls"]] == [{"at": "sky"}, "{at"]
    assert session.prompts[0].tools[0]["function"]["name"] == "look"
    assert rollout.nodes[1].tool_calls == (LOOK, broken) and rollout.nodes[2].name == "look"


async def test_conversations_that_are_begun_beside_the_main_one_do_not_hear_each_other() -> None:
    rollout = make_rollout()
    session = Writer(rollout, WordsReply("a"), WordsReply("b", is_stopped=False), WordsReply("c"), WordsReply("d"))
    await session.ask(HI)
    fork, other = session.fork(), session.restart()
    await fork.ask([{"role": "user", "content": "left"}])
    await session.ask([{"role": "user", "content": "right"}])
    await other.ask([{"role": "user", "content": "anew"}])
    assert [prompt.turn for prompt in session.prompts] == ["0", "0.0", "1", "1.0"]
    assert [[message["content"] for message in prompt.messages] for prompt in session.prompts[1:]] == [
        ["hi", "a", "left"],
        ["hi", "a", "right"],
        ["anew"],
    ]
    assert [node.parent for node in rollout.nodes] == [None, 0, 1, 2, 1, 4, None, 6]
    assert rollout.metrics["sub_conversations"] == 2 and not rollout.is_truncated


async def test_a_stop_string_ends_what_is_shown_and_half_characters_are_replaced() -> None:
    session = Writer(make_rollout(), WordsReply("yes\ud83d END no"), stop=("END",))
    assert (await session.ask(HI)).text == "yes\ufffd "
    assert session.rollout.nodes[-1].content == "yes\ufffd "


async def test_a_session_that_waits_for_a_reply_refuses_a_second_question_and_takes_one_after_a_failure() -> None:
    session = Writer(make_rollout(), EngineError("gone"), WordsReply("a"))
    first = asyncio.create_task(session.ask(HI))
    await asyncio.sleep(0)
    with pytest.raises(EnvError, match=r"turn 1: the session was asked while it waits"):
        await session.ask(HI)
    with pytest.raises(EngineError, match="gone"):
        await first
    assert session.rollout.nodes == []  # what was not answered was not said
    assert (await session.ask(HI)).text == "a" and len(session.rollout.nodes) == 2


async def test_a_writer_that_fails_is_a_failure_of_the_policy() -> None:
    class Asks:
        name = "asks"

        def tasks(self) -> list[TaskSpec]:
            return [{"id": "t"}]

        async def play(self, spec: TaskSpec, session: Session) -> Outcome:
            await session.ask(HI)
            return Outcome(1.0)

        def demonstration(self, spec: TaskSpec) -> None:
            return None

        def close(self) -> None: ...

    rollout = make_rollout()
    await play_rollout(Asks(), rollout, Writer(rollout, EngineError("gone")), 10.0)
    assert rollout.reward is None and rollout.failure is not None and rollout.failure.boundary == Boundary.POLICY
