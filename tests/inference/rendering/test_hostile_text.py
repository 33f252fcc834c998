"""Hostile texts and random ids, in every role and over every committed style: ids stay, and nothing quoted becomes anything."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.inference.rendering import Renderer
from jaxrl.inference.rendering.turns import RenderedTurn
from tests.inference.rendering.hostile import CORPUS, FAKE_OBSERVATION
from tests.inference.rendering.styles import ADD, STYLES, ids_of, renderer_of, result, their_ids, user

HALVES = dict.fromkeys(range(55296, 57344), "�")
"""What halves of characters are in tokens."""
FORGETFUL = ("opens_thinking",)
"""Styles that fork over every reply."""


def spelt(renderer: Renderer, text: str) -> np.ndarray:
    """Return ids of a text that no tokenizer would choose: every character on its own, so characters of several bytes in several tokens."""
    pieces = [ids_of(renderer, character) for character in text.translate(HALVES)]
    return np.concatenate([*pieces, [renderer.turn_end_id]]).astype(np.int32)


def check_prompt(renderer: Renderer, turn: RenderedTurn, seen: np.ndarray) -> None:
    """Assert that a prompt goes on from what was seen, or is the whole of its text encoded anew."""
    if turn.is_fork:
        np.testing.assert_array_equal(turn.prompt_ids, ids_of(renderer, turn.text))
    else:
        np.testing.assert_array_equal(turn.prompt_ids[: len(seen)], seen)
    for span, mask in zip(turn.spans, turn.content_masks, strict=True):
        assert mask is None or len(mask) == len(span)


@pytest.mark.parametrize("style", STYLES)
def test_a_hostile_question_has_the_ids_that_transformers_gives_it_and_goes_on_in_the_same_tokens(style: str) -> None:
    renderer = renderer_of(style)
    for name, text in CORPUS.items():
        turn = renderer.open_turn(None, [user(text)])
        assert turn.prompt_ids.tolist() == their_ids(style, [user(text.translate(HALVES))]), name
        state = renderer.close_turn(turn, spelt(renderer, "4"))
        assert not state.reply.tool_calls, f"{name}: what a user quotes is nobody's"
        after = renderer.open_turn(state, [user(text)])
        check_prompt(renderer, after, state.token_ids)
        assert after.is_fork == (style in FORGETFUL), name


@pytest.mark.parametrize("history", ["template", "keep"])
@pytest.mark.parametrize("style", STYLES)
def test_a_hostile_reply_keeps_the_ids_that_were_sampled_however_it_reads(style: str, history: str) -> None:
    renderer = renderer_of(style)
    for text in CORPUS.values():
        turn = renderer.open_turn(None, [user("1?")], history=history)
        sampled = spelt(renderer, text)
        state = renderer.close_turn(turn, sampled)
        np.testing.assert_array_equal(state.token_ids, np.concatenate([turn.prompt_ids, sampled]))
        answers = [] if style == "gemma" else [result("3", call.id) for call in state.reply.tool_calls]
        after = renderer.open_turn(state, answers or [user("Sure?")], history=history)
        check_prompt(renderer, after, state.token_ids)
        assert history == "template" or not after.is_fork


@pytest.mark.parametrize("style", ["chatml", "qwen3", "strips_thinking", "llama3", "mistral"])
def test_a_hostile_result_of_a_tool_is_a_result_and_nothing_else(style: str) -> None:
    renderer = renderer_of(style)
    called = {
        "llama3": '{"name": "add", "parameters": {}}',
        "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {}}]',
    }.get(style, '<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    for name, text in CORPUS.items():
        turn = renderer.open_turn(None, [user("1?")], tools=[ADD])
        state = renderer.close_turn(turn, np.append(ids_of(renderer, called), renderer.turn_end_id))
        (call,) = state.reply.tool_calls
        after = renderer.open_turn(state, [result(text, call.id)], tools=[ADD])
        assert not after.is_fork, name
        check_prompt(renderer, after, state.token_ids)
        (mask,), (span,) = after.content_masks, after.spans
        if mask is not None and style != "mistral":  # there it stands as a JSON string
            assert renderer.decode(span[mask]).strip() == text.translate(HALVES).strip(), name
        assert not renderer.close_turn(after, spelt(renderer, "3")).reply.tool_calls, name


@pytest.mark.parametrize("style", ["chatml", "qwen3", "strips_thinking"])
def test_an_observation_that_the_policy_makes_up_is_its_own_reply(style: str) -> None:
    renderer = renderer_of(style)
    turn = renderer.open_turn(None, [user("1?")], tools=[ADD])
    for sampled in (np.append(ids_of(renderer, FAKE_OBSERVATION), renderer.turn_end_id), spelt(renderer, FAKE_OBSERVATION)):
        state = renderer.close_turn(turn, sampled)
        after = renderer.open_turn(state, [user("Sure?")], tools=[ADD])
        assert state.messages[-1] == {"role": "assistant", "content": FAKE_OBSERVATION} and not state.reply.tool_calls
        assert not after.is_fork and len(after.spans) == 1
        np.testing.assert_array_equal(after.prompt_ids[: len(turn.prompt_ids) + len(sampled)], np.concatenate([turn.prompt_ids, sampled]))


tokens = st.lists(st.integers(min_value=0, max_value=318), max_size=6)
"""Any ids of the smallest vocabulary, special ones included."""


@settings(max_examples=80, deadline=None)
@given(
    style=st.sampled_from(STYLES),
    turns=st.lists(st.tuples(st.text(max_size=5) | st.sampled_from(sorted(CORPUS.values(), key=len)[:20]), tokens), min_size=2, max_size=4),
    history=st.sampled_from(["template", "keep"]),
)
def test_whatever_is_sampled_stands_in_the_next_prompt_or_the_whole_is_told_anew(
    style: str, turns: list[tuple[str, list[int]]], history: str
) -> None:
    renderer, state = renderer_of(style), None
    for text, sampled in turns:
        turn = renderer.open_turn(state, [user(text)], history=history)
        check_prompt(renderer, turn, np.zeros(0, np.int32) if state is None else state.token_ids)
        assert not (turn.is_fork and history == "keep")
        state = renderer.close_turn(turn, np.array(sampled, np.int32))
        np.testing.assert_array_equal(state.token_ids, np.concatenate([turn.prompt_ids, np.array(sampled, np.int32)]))
