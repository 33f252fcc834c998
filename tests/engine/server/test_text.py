"""The text of replies: what ends it, and pieces that add up to the whole."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.engine.server.text import TextFollower, end_text
from jaxrl.inference.endpoint import FinishReason

PIECES = [b"a", b"b", b"ab", b"\n", "é".encode()[:1], "é".encode()[1:], b" c", b"</s>"]
"""Token ids 0..7; 4 and 5 are two halves of a character, 7 is a stop id."""
STOP_ID = 7


def decode(token_ids: Sequence[int]) -> str:
    return b"".join(PIECES[i] for i in token_ids).decode(errors="replace")


def ended(token_ids: list[int], reason: FinishReason, *stops: str, user: frozenset[int] = frozenset()) -> tuple[str, str | int | None]:
    return tuple(end_text(token_ids, reason, stops=stops, stop_ids=[STOP_ID, 3], user_stop_ids=user, decode=decode))


def test_text_excludes_the_stop_string_and_what_follows_it() -> None:
    assert ended([0, 2, 6, 1], FinishReason.STOP, "b c") == ("aa", "b c")
    assert ended([0, 2, 6], FinishReason.STOP, "never", "c", "b") == ("aa", "b"), "the first in the text, not in the list"


def test_text_excludes_a_final_stop_id_which_is_the_reason_only_if_the_request_named_it() -> None:
    assert ended([0, 1, STOP_ID], FinishReason.STOP) == ("ab", None)
    assert ended([0, 3], FinishReason.STOP, user=frozenset([3])) == ("a", 3)


def test_a_cut_reply_keeps_all_of_its_text() -> None:
    assert ended([0, 1, 4], FinishReason.LENGTH, "zz") == ("ab\ufffd", None)


def stream(chunks: list[list[int]], stops: Sequence[str]) -> list[str]:
    follower = TextFollower(decode, stops, [STOP_ID])
    return [*(follower.push(chunk) for chunk in chunks), follower.push([], is_last=True)]


def test_half_a_character_and_the_beginning_of_a_stop_string_are_held_back() -> None:
    assert stream([[0], [4], [5], [1], [1]], ["bb"]) == ["a", "", "é", "", "", ""]
    assert stream([[0], [1], [0]], ["bb"]) == ["a", "", "ba", ""]
    assert stream([[0], [1]], ["bb"]) == ["a", "", "b"], "what is held back at the end is text after all"
    assert stream([[0, STOP_ID]], []) == ["a", ""]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=12), st.lists(st.sampled_from(["ab", "a\n", "c", "éa", "bb"]), max_size=2), st.randoms())
def test_the_pieces_of_a_stream_add_up_to_the_whole_text(token_ids: list[int], stops: list[str], rng: random.Random) -> None:
    """The engine ends a reply at the first token that completes a stop string."""
    is_stopped = False
    for end in range(1, len(token_ids) + 1):
        if any(stop in decode(token_ids[:end]) for stop in stops):
            token_ids, is_stopped = token_ids[:end], True
            break
    chunks, rest = [], token_ids
    while rest:
        size = rng.randint(1, len(rest))
        chunks.append(rest[:size])
        rest = rest[size:]
    reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
    whole = end_text(token_ids, reason, stops=stops, stop_ids=[STOP_ID], user_stop_ids=set(), decode=decode)
    assert "".join(stream(chunks, stops)) == whole.text


@pytest.mark.parametrize("stops", [[], ["ab"]])
def test_nothing_follows_the_end(stops: list[str]) -> None:
    follower = TextFollower(decode, stops, [STOP_ID])
    follower.push([0, 1, STOP_ID])
    assert follower.push([0]) == follower.push([], is_last=True) == ""
