"""What follows a reply: only new ids behind those that were seen, what closes the turn once, or a fork where history is rewritten."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.errors import EnvError
from jaxrl.inference.rendering import Renderer
from jaxrl.inference.rendering.turns import RenderState
from tests.inference.rendering.handmade import (
    ADD,
    BOS,
    CALL_TEXT,
    CALLS,
    CHATML,
    ENDOFTEXT,
    GROUPS_RESULTS,
    IM_END,
    NEEDS_CALLS,
    NO_THINKING,
    STRIPS_THINKING,
    TAKES_TURNS,
    TRIMS,
    WRITES_TOOLS,
    added,
    after,
    assistant,
    bodies,
    ids_of,
    result,
    user,
    with_template,
)

OPENS_THINKING = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""Turns end in a line break; replies are told apart from their name by white space."""
ASKED = "<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("history", ["template", "keep"])
@pytest.mark.parametrize(
    ("reply", "stop", "closing"),
    [
        ("4", [IM_END], "\n"),
        ("4", [ENDOFTEXT], "<|im_end|>\n"),
        ("4", [], "<|im_end|>\n"),
        ("4\nUser:", [], "<|im_end|>\n"),
        ("", [IM_END], "\n"),
        ("", [], "<|im_end|>\n"),
        ("4 \n", [IM_END], "\n"),
        ("4 \n", [], "<|im_end|>\n"),
        ("a<think>b", [IM_END], "\n"),
    ],
    ids=["own stop", "another stop", "token limit", "stop string", "only a stop", "nothing", "space", "space and token limit", "tag"],
)
@pytest.mark.parametrize("template", [CHATML, TRIMS, CALLS])
def test_what_closes_a_turn_stands_there_once_however_the_reply_ended(
    template: str, reply: str, stop: list[int], closing: str, history: str
) -> None:
    renderer = with_template(template)
    state = after(renderer, renderer.open_turn(None, [user("hi")]), reply, stop)
    assert added(renderer.open_turn(state, [user("ok")], history=history), state) == closing + ASKED


@pytest.mark.parametrize(("stop", "closing"), [([IM_END], "\n"), ([ENDOFTEXT], "<|im_end|>\n"), ([], "<|im_end|>\n")])
@pytest.mark.parametrize("reply", ["<think>2+2</think>4", "<think>2+2", ""])
@pytest.mark.parametrize("template", [STRIPS_THINKING, NO_THINKING, OPENS_THINKING])
def test_kept_history_is_closed_likewise_where_the_template_would_rewrite_it(
    template: str, reply: str, stop: list[int], closing: str
) -> None:
    renderer = with_template(template)
    first = renderer.open_turn(None, [user("hi")])
    state = after(renderer, first, reply, stop)
    asks = renderer.decode(first.generation_prompt)
    second = renderer.open_turn(state, [user("ok")], history="keep")
    assert added(second, state) == f"{closing}<|im_start|>user\nok<|im_end|>\n{asks}"
    again = after(renderer, second, reply, stop)
    third = renderer.open_turn(again, [user("so?"), user("well?")], history="keep")
    assert added(third, again) == f"{closing}<|im_start|>user\nso?<|im_end|>\n<|im_start|>user\nwell?<|im_end|>\n{asks}"


def test_a_template_without_a_token_at_the_end_of_turns_goes_on_behind_eos_or_a_cut_reply() -> None:
    renderer = with_template(PLAIN)
    assert renderer.turn_end_id == IM_END, "the tokenizer's eos"
    first = renderer.open_turn(None, [user("hi")])
    assert first.text == "user: hi\nassistant:"
    for reply in (" 4", "4"):
        for stop in ([IM_END], [ENDOFTEXT], []):
            state = after(renderer, first, reply, stop)
            assert added(renderer.open_turn(state, [user("ok")]), state) == "\nuser: ok\nassistant:"


def test_white_space_that_a_template_trims_stays_in_the_ids_over_many_turns() -> None:
    renderer = with_template(TRIMS)
    turn = renderer.open_turn(None, [user(" hi ")])
    assert turn.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for reply in (" \n4", "5\n\n", "  ", "6 <think> 7 \n"):
        state = after(renderer, turn, reply)
        turn = renderer.open_turn(state, [user("ok")])
        assert added(turn, state) == "\n" + ASKED
    whole = "".join(f"<|im_start|>assistant\n{reply}<|im_end|>\n<|im_start|>user\nok<|im_end|>\n" for reply in (" \n4", "5\n\n", "  "))
    assert whole in turn.text and renderer.decode(turn.prompt_ids) == turn.text


def test_white_space_inside_of_a_generation_prompt_and_before_a_stop_is_no_difference_either() -> None:
    spaced = CHATML.replace("message['content'] + '<|im_end|>", "message['content'] + ' <|im_end|>")
    renderer = with_template(spaced)
    state = after(renderer, renderer.open_turn(None, [user("hi")]), "4")
    assert added(renderer.open_turn(state, [user("ok")]), state) == "\n" + ASKED.replace("ok", "ok ")


def test_other_text_in_place_of_what_was_said_is_a_fork_even_if_only_a_letter_differs() -> None:
    renderer = with_template(CHATML.replace("message['content']", "message['content'] | replace('x', 'y')"))
    state = after(renderer, renderer.open_turn(None, [user("hi")]), "x")
    second = renderer.open_turn(state, [user("ok")])
    assert second.is_fork and second.text.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\ny<|im_end|>")
    assert added(renderer.open_turn(state, [user("ok")], history="keep"), state) == "\n" + ASKED


def test_dropped_thinking_forks_or_is_kept_and_a_fork_shows_what_the_template_shows() -> None:
    renderer = with_template(STRIPS_THINKING)
    state = after(renderer, renderer.open_turn(None, [user("hi")]), "<think>2+2</think>4")
    forked = renderer.open_turn(state, [user("ok")])
    assert forked.is_fork and forked.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n" + ASKED
    np.testing.assert_array_equal(forked.prompt_ids, ids_of(forked.text))
    np.testing.assert_array_equal(np.concatenate([*forked.spans, forked.generation_prompt]), forked.prompt_ids)
    kept = renderer.open_turn(state, [user("ok")], history="keep")
    assert "<think>2+2</think>4<|im_end|>\n<|im_start|>user" in kept.text and added(kept, state) == "\n" + ASKED
    assert forked.template_text == forked.text and kept.template_text is None, "the template would not write this"
    assert state.messages[-1]["content"] == "<think>2+2</think>4" and state.reply.reasoning == "2+2" and state.reply.content == "4"


def test_thinking_that_a_template_drops_at_once_is_no_history_that_it_keeps() -> None:
    renderer = with_template(CHATML.replace("message['content']", "message['content'].split('</think>')[-1]"))
    state = after(renderer, renderer.open_turn(None, [user("hi")]), "<think>2+2</think>4")
    assert renderer.open_turn(state, [user("ok")]).is_fork


def test_a_generation_prompt_that_opens_thinking_is_written_once_for_each_reply() -> None:
    renderer = with_template(OPENS_THINKING)
    state = after(renderer, renderer.open_turn(None, [user("hi")]), "2+2</think>4")
    assert state.reply.reasoning == "2+2" and state.reply.content == "4"
    kept = renderer.open_turn(state, [user("ok")], history="keep")
    assert kept.text.count("<think>") == 2 and kept.text.endswith("<|im_start|>assistant\n<think>\n")
    forked = renderer.open_turn(state, [user("ok")])
    assert forked.is_fork and forked.text.count("<think>") == 1


CALL_IDS = ids_of(CALL_TEXT.replace(" ", ""))
"""A call that is not spelled as a template spells it."""


def called(template: str, *, tools: tuple = ()) -> tuple[Renderer, RenderState]:
    """A conversation whose only reply calls a tool."""
    renderer = with_template(template)
    return renderer, after(renderer, renderer.open_turn(None, [user("hi")], tools=tools), CALL_IDS)


@pytest.mark.parametrize("history", ["template", "keep"])
@pytest.mark.parametrize(
    ("template", "suffix"),
    [
        (CHATML, "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"),
        (CALLS, "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"),
        (NEEDS_CALLS, "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"),
        (GROUPS_RESULTS, "\n<|im_start|>user\n<tool_response>3</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        (TAKES_TURNS, "<tool_response>3</tool_response>"),
    ],
    ids=["chatml", "calls", "needs calls", "groups results", "takes turns"],
)
def test_the_result_of_a_tool_follows_the_call_as_it_was_sampled(template: str, suffix: str, history: str) -> None:
    renderer, state = called(template)
    turn = renderer.open_turn(state, [result("3")], history=history)
    assert added(turn, state) == suffix and bodies(turn) == ["3"]
    assert state.reply.tool_calls[0].arguments == {"a": 1} and state.reply.content == ""


@pytest.mark.parametrize("history", ["template", "keep"])
def test_replies_that_are_refused_as_text_are_told_apart_and_their_ids_stay(history: str) -> None:
    renderer, state = called(TAKES_TURNS)
    turn = renderer.open_turn(state, [result("3")], history=history)
    for question in ("sure?", "so?"):
        state = after(renderer, turn, " three ")
        turn = renderer.open_turn(state, [user(question)], history=history)
        assert added(turn, state) == f"<|im_start|>{question}\n" and bodies(turn) == [question]
    state = after(renderer, turn, "cut", [])
    assert added(renderer.open_turn(state, [user("ok")], history=history), state) == "<|im_end|><|im_start|>ok\n"
    assert '"arguments":{"a":1}' in state.text, "the call as it was sampled"


def test_replies_told_apart_fork_too_where_the_template_rewrites_them() -> None:
    shows_last = TAKES_TURNS.replace("{{ m.content | trim", "{{ ((m.reasoning_content or '') if loop.last else '') + m.content | trim")
    renderer, state = called(shows_last)
    turn = renderer.open_turn(state, [result("3")])
    plain = after(renderer, turn, "three")
    assert not renderer.open_turn(plain, [user("ok")]).is_fork
    thought = after(renderer, turn, "<think>hm</think>three")
    assert (thought.reply.reasoning, thought.reply.content) == ("hm", "three")
    forked = renderer.open_turn(thought, [user("ok")])
    assert forked.is_fork and forked.text.endswith("<tool_response>3</tool_response>three<|im_end|><|im_start|>ok\n")


def test_kept_history_shows_results_also_where_the_template_wants_the_calls_and_drops_the_thinking() -> None:
    renderer = with_template(NEEDS_CALLS)
    state = after(renderer, renderer.open_turn(None, [user("hi")]), f"<think>hm</think>{CALL_TEXT}")
    turn = renderer.open_turn(state, [result("3")], history="keep")
    assert added(turn, state) == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n" and bodies(turn) == ["3"]
    forked = renderer.open_turn(state, [result("3")])
    assert forked.is_fork and "<think>" not in forked.text and "<|im_start|>tool\n3" in forked.text, "a fork shows the result too"


def test_results_of_parallel_calls_end_where_the_template_goes_on_differently() -> None:
    renderer, state = called(GROUPS_RESULTS)
    turn = renderer.open_turn(state, [result("3"), result("four", "call_0_1"), user("ok")])
    texts = [renderer.decode(span) for span in turn.spans]
    assert texts == [
        "\n<|im_start|>user\n<tool_response>3</tool_response>",
        "<tool_response>four</tool_response><|im_end|>\n",
        "<|im_start|>user\nok<|im_end|>\n",
    ]
    assert bodies(turn) == ["3", "four", "ok"]


def test_other_tools_rewrite_the_beginning_whatever_is_to_be_kept() -> None:
    other = {"type": "function", "function": {"name": "subtract"}}
    renderer, state = called(WRITES_TOOLS, tools=(ADD,))
    assert state.tools == (ADD,)
    for history in ("template", "keep"):
        assert not renderer.open_turn(state, [result("3")], tools=[ADD], history=history).is_fork
        forked = renderer.open_turn(state, [result("3")], tools=[other], history=history)
        assert forked.is_fork and "subtract" in forked.text and '"add", "parameters"' not in forked.text
        assert renderer.open_turn(state, [result("3")], history=history).is_fork


def test_tools_that_a_template_moves_to_the_last_question_stay_where_they_were_seen_if_history_is_kept() -> None:
    moves = CHATML.replace("{{ '<|im_start|>' +", "{{ (tools | tojson if tools and loop.last else '') + '<|im_start|>' +", 1)
    renderer = with_template(moves)
    first = renderer.open_turn(None, [user("hi")], tools=[ADD])
    state = after(renderer, first, "4")
    assert first.text.startswith('[{"type"') and renderer.open_turn(state, [user("ok")], tools=[ADD]).is_fork
    assert added(renderer.open_turn(state, [user("ok")], tools=[ADD], history="keep"), state) == "\n" + ASKED


def test_what_the_template_refuses_in_every_way_is_the_environments_error() -> None:
    renderer, state = called(TAKES_TURNS)
    for history in ("template", "keep"):
        with pytest.raises(EnvError, match=r"roles \['user', 'assistant', 'user', 'user'\]: roles must take turns"):
            renderer.open_turn(state, [user("ok"), user("ok")], history=history)


def test_replies_that_the_environment_made_up_are_messages_like_others() -> None:
    renderer = with_template(CALLS)
    turn = renderer.open_turn(None, [user("hi"), assistant("let me see", {"a": 1}), result("3"), user("ok")])
    assert bodies(turn) == ["hi", "let me see", "3", "ok"]
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert renderer.decode(turn.spans[1]) == f"<|im_start|>assistant\nlet me see{call}<|im_end|>\n"
    state = after(renderer, turn, "4")
    assert added(renderer.open_turn(state, [assistant(None, '{"a": 2}'), result("5")]), state).startswith(
        "\n<|im_start|>assistant\n<tool_call>"
    )


def test_two_turns_opened_from_one_state_know_nothing_of_each_other() -> None:
    renderer, state = called(CALLS)
    one, other = renderer.open_turn(state, [result("3")]), renderer.open_turn(state, [result("4")])
    ended = after(renderer, one, "three")
    assert bodies(one) == ["3"] and bodies(other) == ["4"] and set(state.replies) == {1} and set(ended.replies) == {1, 3}
    np.testing.assert_array_equal(renderer.open_turn(state, [result("3")]).prompt_ids, one.prompt_ids)


TEMPLATES = (CHATML, STRIPS_THINKING, TRIMS, NO_THINKING, CALLS, GROUPS_RESULTS, TAKES_TURNS, OPENS_THINKING, PLAIN)
replies = st.lists(st.integers(min_value=3, max_value=319), max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    template=st.sampled_from(
        [
            CHATML,
            BOS.replace("bos_token", "'<think>'"),
            STRIPS_THINKING,
            TRIMS,
            NO_THINKING,
            CALLS,
            GROUPS_RESULTS,
            TAKES_TURNS,
            OPENS_THINKING,
            PLAIN,
        ]
    ),
    history=st.sampled_from(["template", "keep"]),
    turns=st.lists(st.tuples(st.text(max_size=6), replies, st.sampled_from([[], [IM_END], [ENDOFTEXT]])), min_size=2, max_size=4),
)
def test_every_prompt_extends_what_the_model_saw_or_is_a_whole_rendering(
    template: str, history: str, turns: list[tuple[str, list[int], list[int]]]
) -> None:
    renderer = with_template(template)
    state = None
    for text, body, stop in turns:
        turn = renderer.open_turn(state, [user(text)], history=history)
        new = np.concatenate([*turn.spans, turn.generation_prompt])
        assert [None if mask is None else len(mask) for mask in turn.content_masks] == [
            None if mask is None else len(span) for mask, span in zip(turn.content_masks, turn.spans, strict=True)
        ]
        if state is not None and not turn.is_fork:
            np.testing.assert_array_equal(turn.prompt_ids, np.concatenate([state.token_ids, new]))
        else:
            np.testing.assert_array_equal(turn.prompt_ids, ids_of(turn.text))
            np.testing.assert_array_equal(turn.prompt_ids, new)
        assert not (turn.is_fork and history == "keep")
        state = after(renderer, turn, body, stop)
        np.testing.assert_array_equal(state.token_ids, np.concatenate([turn.prompt_ids, np.array(body + stop, np.int32)]))
