"""The memory of a server: which ids a conversation in words goes on from."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl.inference.chat.conversations import CHARS_PER_TOKEN, ConversationMemory, hear
from jaxrl.inference.chat.wire import read_messages, reply_message
from jaxrl.inference.rendering import Renderer
from jaxrl.inference.rendering.turns import RenderState
from jaxrl.types import ToolCall

RENDERER = Renderer.from_pretrained(Path(__file__).parents[2] / "golden" / "tokenizer")
TOOLS = [{"type": "function", "function": {"name": "add"}}]
USER = {"role": "user", "content": "3 + 4?"}
CALL = ToolCall("call_0", "add", {"a": 3, "b": 4.0}, '{"a": 3, "b": 4.0}')
ASKED = {"role": "user", "content": "sure?"}


def state(*sampled: int) -> RenderState:
    """Return a conversation whose prompt has 18 tokens."""
    turn = RENDERER.open_turn(None, [USER])
    assert len(turn.prompt_ids) == 18
    return RENDERER.close_turn(turn, np.asarray(sampled, np.int32))


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def remembering(*replies: str, max_conversations: int = 100, max_tokens: int = 10_000) -> ConversationMemory:
    """Return a memory with one reply of one token to `USER` after another, the n-th of id 20 + n."""
    memory = ConversationMemory(max_conversations, max_tokens)
    for index, text in enumerate(replies):
        memory.remember(hear([USER]).with_reply(said(text)), state(20 + index))
    return memory


def last_id(memory: ConversationMemory, *messages: dict[str, Any], **more: Any) -> int | None:
    """Return the last id that a conversation goes on from; None if nothing of it is remembered."""
    found, _ = memory.recall(hear(read_messages(messages), **more))
    return None if found is None else int(found.token_ids[-1])


def test_the_longest_remembered_beginning_goes_on() -> None:
    memory = remembering("7")
    longer = hear([USER, said("7"), ASKED]).with_reply(said("yes"))
    memory.remember(longer, state(30, 31))
    found, num_messages = memory.recall(hear([USER, said("7"), ASKED, said("yes"), USER, said("not ours"), USER]))
    assert found is not None and (found.token_ids[-2:].tolist(), num_messages) == ([30, 31], 4)
    found, num_messages = memory.recall(hear([USER, said("7"), ASKED, said("no"), USER]))
    assert found is not None and (int(found.token_ids[-1]), num_messages) == (20, 2)


def test_a_conversation_that_nothing_follows_is_no_beginning() -> None:
    memory = remembering("7")
    assert memory.recall(hear([USER, said("7")])) == (None, 0)
    assert memory.recall(hear([USER])) == (None, 0)
    assert memory.recall(hear([])) == (None, 0)


def test_other_words_other_tools_and_another_salt_are_other_conversations() -> None:
    memory = remembering("7")
    memory.remember(hear([USER], TOOLS, "a").with_reply(said("7")), state(40))
    assert last_id(memory, USER, said("7"), ASKED) == 20
    assert last_id(memory, USER, said("7"), ASKED, tools=TOOLS, salt="a") == 40
    assert last_id(memory, USER, said("7"), ASKED, tools=TOOLS) is None
    assert last_id(memory, USER, said("7"), ASKED, salt="a") is None
    assert last_id(memory, USER, said("8"), ASKED) is None
    assert last_id(memory, {**USER, "name": "ann"}, said("7"), ASKED) is None
    assert last_id(memory, {"role": "system", "content": ""}, USER, said("7"), ASKED) is None


@pytest.mark.parametrize(
    "back",
    [
        {"content": None},
        {},
        {"content": ""},
        {"content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None, "name": None, "reasoning_content": "x"},
    ],
)
@pytest.mark.parametrize("arguments", ['{"a": 3, "b": 4.0}', '{"b":4,"a":3}', '{\n  "b" : 4.0, "a" : 3\n}'])
def test_a_reply_is_known_in_every_spelling_in_which_clients_send_it_back(back: dict[str, Any], arguments: str) -> None:
    memory = ConversationMemory(10, 1000)
    memory.remember(hear([USER], TOOLS).with_reply(reply_message("", "thinking", [CALL])), state(50))
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "call_0", "content": [{"type": "text", "text": "7"}]}
    assert last_id(memory, USER, {"role": "assistant", "tool_calls": [call], **back}, answer, tools=TOOLS) == 50
    other = {**call, "function": {"name": "add", "arguments": '{"a": 3, "b": true}'}}
    assert last_id(memory, USER, {"role": "assistant", "tool_calls": [other], **back}, answer, tools=TOOLS) is None
    assert last_id(memory, USER, {"role": "assistant", "tool_calls": [{**call, "id": "call_1"}], **back}, answer, tools=TOOLS) is None


def test_replies_of_other_words_are_kept_apart_and_of_the_same_words_the_newest_wins() -> None:
    memory = remembering("7", "8", "7")
    assert last_id(memory, USER, said("7"), ASKED) == 22
    assert last_id(memory, USER, said("8"), ASKED) == 21
    assert memory.stats() == {"conversations": 2, "tokens": 38, "remembered": 3}


def test_what_was_not_used_for_longest_makes_room_for_entries() -> None:
    memory = remembering("a", "b", max_conversations=2)
    assert last_id(memory, USER, said("a"), ASKED) == 20  # and so it is used
    memory.remember(hear([USER]).with_reply(said("c")), state(22))
    assert [last_id(memory, USER, said(text), ASKED) for text in "abc"] == [20, None, 22]
    assert memory.stats() == {"conversations": 2, "tokens": 38, "remembered": 3, "forgotten": 1}


def test_what_was_not_used_for_longest_makes_room_for_tokens() -> None:
    memory = remembering("a", "b", "c", max_tokens=3 * 19)
    memory.remember(hear([USER]).with_reply(said("d")), state(23, 24))  # 20 tokens: two of 19 must go
    assert [last_id(memory, USER, said(text), ASKED) for text in "abcd"] == [None, None, 22, 24]
    assert memory.stats() == {"conversations": 2, "tokens": 39, "remembered": 4, "forgotten": 2}


def test_a_memory_of_nothing_and_a_reply_beyond_the_memory_forget_nothing_else() -> None:
    assert last_id(remembering("7", max_conversations=0), USER, said("7"), ASKED) is None
    memory = remembering("7", max_tokens=19)
    memory.remember(hear([USER]).with_reply(said("8")), state(21, 22))
    assert last_id(memory, USER, said("7"), ASKED) == 20
    assert memory.stats() == {"conversations": 1, "tokens": 19, "remembered": 1}


def test_words_that_no_template_shows_count_too() -> None:
    """A template that shows no tools must not make a conversation with a megabyte of them as cheap as one without."""
    memory = ConversationMemory(10, 10_000)
    memory.remember(hear([USER], [{"x": "y" * 1600 * CHARS_PER_TOKEN}]).with_reply(said("7")), state(20))
    assert 1600 < memory.stats()["tokens"] < 1620


def test_threads_leave_the_counts_right() -> None:
    memory = ConversationMemory(8, 10_000)

    def use(index: int) -> None:
        memory.remember(hear([USER]).with_reply(said(str(index % 16))), state(20))
        memory.recall(hear([USER, said(str(index % 16)), ASKED]))
        memory.count("continued")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(200)))
    stats = memory.stats()
    assert (stats["conversations"], stats["tokens"], stats["remembered"], stats["continued"]) == (8, 8 * 19, 200, 200)


def test_half_a_surrogate_pair_and_json_beyond_floats_have_keys() -> None:
    odd = {"role": "user", "content": json.loads('"\\ud83d"')}
    assert hear([odd]).keys == hear([odd]).keys
    assert hear([USER], [{"n": float("inf")}]).keys != hear([USER]).keys
