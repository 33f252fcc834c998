"""The prefix property and exact ids over every committed style: what was seen stays, or the turn is a fork that is rendered anew.

The expected number of forks of a conversation follows from the first line of each template. Where a style continues, its prompt must have
the very ids that transformers gives the whole conversation, although ours was put together turn by turn from what was sampled.
"""

import itertools

import numpy as np
import pytest

from jaxrl.errors import EnvError
from tests.inference.rendering.conversations import ODD, SCRIPTS, TOOL_SCRIPTS, parts, play, tools_of
from tests.inference.rendering.styles import STYLES, renderer_of, their_ids, their_text, user

ODD_JSON = r'{"a": true, "b": null, "c": [1.5, {"d": false}], "e": "é \"\n"}'

FORKS = {
    ("qwen3", "thinking"): 2,  # each question drops what was thought before it
    ("qwen3", "assistant last"): 1,  # the last reply is shown with an empty thought, and without once something follows
    ("qwen3", "tools"): 1,  # results keep the thinking, the next question drops it, an empty one too
    ("qwen3", "parallel"): 1,
    ("qwen3", "thinking tools"): 1,
    ("strips_thinking", "thinking"): 2,
    ("strips_thinking", "thinking tools"): 2,  # results drop it as well
    ("mistral", "system"): 2,  # the system text and the tools stand before the last question
    ("mistral", "tools"): 1,
    ("mistral", "parallel"): 1,
    ("mistral", "thinking tools"): 1,
    ("channels", "assistant last"): 1,  # the last reply ends in another token than an earlier one
    **{("opens_thinking", script): len(steps) - 1 for script, steps in SCRIPTS.items()},  # a prompt opens thinking, history has none
}
REFUSED = {("gemma", "system"), ("gemma", "assistant last"), ("mistral", "assistant last"), *(("gemma", script) for script in TOOL_SCRIPTS)}
SHOWS_TOOLS = ("chatml", "llama3", "qwen3", "mistral")
CASES = [(style, script) for style in STYLES for script in SCRIPTS if (style, script) not in REFUSED]


@pytest.mark.parametrize("history", ["template", "keep"])
@pytest.mark.parametrize(("style", "script"), CASES)
def test_a_prompt_is_all_that_was_seen_and_sampled_before_with_a_new_suffix_or_a_fork(style: str, script: str, history: str) -> None:
    turns = play(style, script, history)
    for before, after in itertools.pairwise(turns):
        new = [*after.turn.spans, after.turn.generation_prompt]
        seen = [] if after.turn.is_fork else [before.turn.prompt_ids, before.sampled]
        np.testing.assert_array_equal(after.turn.prompt_ids, np.concatenate([*seen, *new]))
    assert sum(one.turn.is_fork for one in turns) == (FORKS.get((style, script), 0) if history == "template" else 0)


NOT_WRITTEN = {
    ("mistral", "thinking tools"): "no way to write a thought before a call",
    ("mistral", "empty"): "a reply of nothing is written as a space",
    **{(style, script): "tools are told in words of our own" for style in STYLES if style not in SHOWS_TOOLS for script in TOOL_SCRIPTS},
    **{("channels", script): "another end of a reply, and both stand" for script in SCRIPTS},
}
"""Where the template has no text of its own for what was said."""


@pytest.mark.parametrize(("style", "script"), [case for case in CASES if case not in NOT_WRITTEN])
def test_a_prompt_has_the_ids_that_transformers_gives_the_whole_conversation(style: str, script: str) -> None:
    tools, renderer = tools_of(script), renderer_of(style)
    for one in play(style, script):
        text = renderer.decode(one.turn.prompt_ids)
        assert text == one.turn.text
        told = [messages for messages in (one.told, one.plain) if text == their_text_or_none(style, messages, tools)]
        assert told, "neither taken apart nor as text does transformers write the conversation like this"
        if (style, script) != ("no_turn_end", "thinking"):  # a space and `<` become one token where they are encoded together
            assert one.turn.prompt_ids.tolist() == their_ids(style, told[0], tools=tools)


def test_a_stop_that_the_template_writes_in_another_way_stays_before_the_templates_own() -> None:
    turns = play("channels", "questions")
    prompt = "<|start|>assistant<|channel|>final<|message|>"
    asked = f"<|start|>user<|message|>1+1?<|end|>{prompt}2<|return|><|end|><|start|>user<|message|>Sure?<|end|>{prompt}"
    assert turns[1].turn.text == asked and not turns[1].turn.is_fork


def test_results_of_parallel_calls_share_one_block_and_a_bare_call_has_no_blank_line() -> None:
    _, answered, _ = play("qwen3", "parallel")
    one, other = (f'<tool_call>\n{{"name": "add", "arguments": {a}}}\n</tool_call>' for a in ('{"a": 1, "b": 1}', ODD_JSON))
    assert answered.turn.text.endswith(
        f"<|im_start|>assistant\n<think>\n\n</think>\n\n{one}\n{other}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert [call.arguments for call in play("qwen3", "parallel")[0].state.reply.tool_calls] == [{"a": 1, "b": 1}, ODD]


def test_a_thought_that_the_reply_begins_with_is_not_told_twice() -> None:
    _, answered, *_ = play("qwen3", "thinking tools")
    assert answered.turn.text.count("<think>") == 1 and not answered.turn.is_fork


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_content_in_parts_reads_like_one_text_whoever_says_it(style: str, role: str) -> None:
    renderer, opening = renderer_of(style), [user("1+1?")] if role == "assistant" else []
    joined = [*opening, {"role": role, "content": "4 and 2"}]
    split = [*opening, {"role": role, "content": parts("4 ", "and", " 2")}]
    assert renderer.message_ids(split).tolist() == renderer.message_ids(joined).tolist()
    assert "4 and 2" in renderer.decode(renderer.message_ids(split))


def their_text_or_none(style: str, messages: list, tools: list) -> str | None:
    try:
        return their_text(style, messages, tools=tools)
    except Exception:  # raised by the template
        return None


@pytest.mark.parametrize(("style", "script"), sorted(REFUSED))
def test_what_a_template_refuses_is_the_environments_error(style: str, script: str) -> None:
    with pytest.raises(EnvError, match="the chat template refused messages with the roles"):
        play(style, script)
