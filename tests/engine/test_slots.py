"""The book of slots: what is kept of a decode call and which slots are done."""

from __future__ import annotations

import numpy as np

from jaxrl.engine.slots import SlotTable
from tests.engine.tiny import make_request


def packed(token_ids_SQ: list[list[int]], logprob: float = -0.5, near_ties: int = 0) -> np.ndarray:
    """Return [3, S, Q] as a decode call gives it, with `near_ties` as every near-tie flag."""
    token_ids = np.array(token_ids_SQ, np.int32)
    return np.stack([token_ids, np.full(token_ids.shape, logprob, np.float32).view(np.int32), np.full_like(token_ids, near_ties)])


def test_a_request_feeds_its_last_prompt_token_at_its_position_with_its_settings() -> None:
    table = SlotTable(2, window=16)
    table.open(1, make_request(prompt=(4, 5, 6), temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=(7 << 32) + 9))
    assert (table.token_ids_S[1], table.position_ids_S[1]) == (6, 2)
    assert (table.top_k_S[1], table.seed_S2[1].tolist()) == (3, [9, 7])
    np.testing.assert_allclose([table.temperature_S[1], table.top_p_S[1], table.min_p_S[1]], [0.5, 0.9, 0.1], rtol=1e-6)
    table.close(1)
    assert not table.is_active_S.any() and (table.top_k_S[1], table.top_p_S[1], table.min_p_S[1]) == (0, 1, 0)


def test_tokens_after_a_stop_id_or_past_the_limit_are_cut() -> None:
    table = SlotTable(4, window=16)
    table.open(0, make_request(max_tokens=9, stop_ids=(50,)))
    table.open(2, make_request(max_tokens=2, stop_ids=(50, 51, 52)))
    table.open(3, make_request(max_tokens=2, stop_ids=(50,)))
    taken = table.take(packed([[1, 50, 2], [9, 9, 9], [3, 4, 52], [5, 50, 6]], near_ties=1), version=7)
    assert taken.slots_A.tolist() == [0, 2, 3]
    assert taken.num_tokens_A.tolist() == [2, 2, 2]
    assert taken.is_stopped_A.tolist() == [True, False, True], "a stop id on the last allowed token is a stop"
    assert taken.is_spent_A.tolist() == [False, True, False]
    assert taken.num_near_ties == 6, "surplus tokens and empty slots are not counted"
    token_ids, logprobs, versions = table.sampled(0)[:3]
    assert (token_ids.tolist(), logprobs.tolist(), versions.tolist()) == ([1, 50], [-0.5, -0.5], [7, 7])


def test_a_slot_that_goes_on_feeds_its_last_token_next() -> None:
    table = SlotTable(1, window=16)
    table.open(0, make_request(prompt=(4, 5, 6), max_tokens=9))
    taken = table.take(packed([[21, 22]]), version=0)
    assert not (taken.is_stopped_A | taken.is_spent_A | taken.is_broken_A | taken.needs_look_A).any()
    table.take(packed([[23, 24]]), version=1)
    assert (table.token_ids_S[0], table.position_ids_S[0]) == (24, 6)
    token_ids, _, versions = table.sampled(0)[:3]
    assert (token_ids.tolist(), versions.tolist()) == ([21, 22, 23, 24], [0, 0, 1, 1])
    table.shorten(0, 3)
    assert table.sampled(0)[0].tolist() == [21, 22, 23]


def test_the_window_limits_what_may_be_sampled() -> None:
    table = SlotTable(1, window=5)
    table.open(0, make_request(prompt=(1, 2, 3), max_tokens=100))
    taken = table.take(packed([[7, 8, 9]]), version=0)
    assert taken.num_tokens_A.tolist() == [2] and taken.is_spent_A.tolist() == [True]


def test_only_a_kept_logprob_breaks_a_slot() -> None:
    table = SlotTable(2, window=8)
    for slot in (0, 1):
        table.open(slot, make_request(max_tokens=1 + slot))
    call = packed([[1, 2], [1, 2]])
    call[1, :, 1] = np.float32(np.nan).view(np.int32)
    assert table.take(call, version=0).is_broken_A.tolist() == [False, True]


def test_stop_ids_of_an_earlier_request_do_not_linger() -> None:
    table = SlotTable(1, window=16)
    table.open(0, make_request(stop_ids=(50, 51)))
    table.close(0)
    table.open(0, make_request(stop_ids=()))
    assert not table.take(packed([[51]]), version=0).is_stopped_A.any()
