"""The host's book of slots, in numpy: what to feed each one next, what it has sampled, and when it must stop.

`SlotTable.open` writes a request into a slot, `take` books the tokens of one decode call for all slots at once and says
which slots are done. Stop strings need text and are not looked for here.

Shape letters: S slots, W window, Q decode steps of one call, A active slots, M stop ids, K alternatives.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxrl.inference.endpoint import GenerateRequest

NO_STOP_ID = -1
"""Fill of the stop-id table; no token has this id."""


class Taken(NamedTuple):
    """What one decode call gave; A is the number of active slots."""

    slots_A: np.ndarray
    """[A] slots that were decoding."""
    num_tokens_A: np.ndarray
    """[A] tokens kept of each, 1..Q."""
    is_stopped_A: np.ndarray
    """[A] bool, the last kept token is a stop id."""
    is_spent_A: np.ndarray
    """[A] bool, the token limit or the window's end was reached without a stop id."""
    is_broken_A: np.ndarray
    """[A] bool, a kept logprob is not finite: the policy's logits were not."""
    needs_look_A: np.ndarray
    """[A] bool, one of the three above, or the request has stop strings or is followed token by token."""
    num_near_ties: int
    """Kept tokens that rounding could have swapped for another."""


class SampledTokens(NamedTuple):
    """Consecutive tokens of one slot; the fields of `Generation` that are known while it goes on."""

    token_ids: np.ndarray
    """[N] int32."""
    logprobs: np.ndarray
    """[N] float32."""
    versions: np.ndarray
    """[N] int32."""
    top_ids: np.ndarray | None
    """[N, K] int32, K as the request asked for; None for 0."""
    top_logprobs: np.ndarray | None
    """[N, K] float32."""


class SlotTable:
    """Per-slot arrays of the engine. Not thread-safe: the device thread owns it."""

    def __init__(self, num_slots: int, window: int, num_top: int = 0) -> None:
        """Start with every slot closed.

        Args:
          num_slots: S.
          window: prompt plus completion tokens of one sequence.
          num_top: K, the most alternatives per token that a request may want.
        """
        self.window = window
        self.token_ids_S = np.zeros(num_slots, np.int32)
        """Token to feed next."""
        self.position_ids_S = np.zeros(num_slots, np.int32)
        """Its position."""
        self.temperature_S = np.ones(num_slots, np.float32)
        self.top_k_S = np.zeros(num_slots, np.int32)
        self.top_p_S = np.ones(num_slots, np.float32)
        self.min_p_S = np.zeros(num_slots, np.float32)
        self.seed_S2 = np.zeros((num_slots, 2), np.uint32)
        self.is_active_S = np.zeros(num_slots, bool)
        self.num_sampled_S = np.zeros(num_slots, np.int32)
        self.limit_S = np.zeros(num_slots, np.int32)
        """Tokens that the slot's request may sample in all."""
        self.num_top_S = np.zeros(num_slots, np.int32)
        self._is_watched_S = np.zeros(num_slots, bool)
        self._stop_ids_SM = np.full((num_slots, 1), NO_STOP_ID, np.int32)
        self._token_ids_SW = np.zeros((num_slots, window), np.int32)
        self._logprobs_SW = np.zeros((num_slots, window), np.float32)
        self._versions_SW = np.zeros((num_slots, window), np.int32)
        self._top_ids_SWK = np.zeros((num_slots, window, num_top), np.int32)
        self._top_logprobs_SWK = np.zeros((num_slots, window, num_top), np.float32)

    def open(self, slot: int, request: GenerateRequest, *, is_followed: bool = False) -> None:
        """Write a request into a closed slot; its prompt must leave room for one token.

        Args:
          slot: which.
          request: prompt and settings.
          is_followed: whether someone wants to see its tokens as they come.
        """
        sampling, num_prompt = request.sampling, len(request.token_ids)
        assert num_prompt < self.window and not self.is_active_S[slot]
        self.token_ids_S[slot] = request.token_ids[-1]
        self.position_ids_S[slot] = num_prompt - 1
        self.temperature_S[slot] = sampling.temperature
        self.top_k_S[slot] = sampling.top_k
        self.top_p_S[slot] = sampling.top_p
        self.min_p_S[slot] = sampling.min_p
        self.seed_S2[slot] = sampling.seed & 0xFFFFFFFF, sampling.seed >> 32
        self.num_sampled_S[slot] = 0
        self.limit_S[slot] = min(sampling.max_tokens, self.window - num_prompt)
        self.num_top_S[slot] = request.num_top_logprobs
        self._is_watched_S[slot] = is_followed or bool(sampling.stop)
        missing = len(sampling.stop_ids) - self._stop_ids_SM.shape[1]
        if missing > 0:
            self._stop_ids_SM = np.pad(self._stop_ids_SM, ((0, 0), (0, missing)), constant_values=NO_STOP_ID)
        self._stop_ids_SM[slot] = NO_STOP_ID
        self._stop_ids_SM[slot, : len(sampling.stop_ids)] = sampling.stop_ids
        self.is_active_S[slot] = True

    def close(self, slot: int) -> None:
        """Stop decoding in a slot, and make its settings neutral, so that an empty slot never asks for a sort."""
        self.is_active_S[slot] = False
        self.token_ids_S[slot] = self.position_ids_S[slot] = 0
        self.temperature_S[slot] = self.top_p_S[slot] = 1.0
        self.top_k_S[slot] = self.min_p_S[slot] = self.num_top_S[slot] = 0

    def take(self, packed_XSQ: np.ndarray, version: int) -> Taken:
        """Book the tokens of one decode call.

        Tokens after a slot's first stop id or past its limit are surplus of the fixed number of steps and are cut.

        Args:
          packed_XSQ: [3 + 2K, S, Q] int32: token ids, the bits of float32 logprobs, near-tie flags, K alternatives and the
            bits of their logprobs.
          version: the policy version that sampled them.

        Returns:
          Which slots got how many tokens, and which are done.
        """
        slots_A = np.flatnonzero(self.is_active_S)
        token_ids_AQ, is_near_tie_AQ = packed_XSQ[0, slots_A], packed_XSQ[2, slots_A]
        logprobs_AQ = packed_XSQ[1, slots_A].view(np.float32)
        num_steps = token_ids_AQ.shape[1]
        is_stop_AQ = (token_ids_AQ[:, :, None] == self._stop_ids_SM[slots_A][:, None, :]).any(axis=2)
        first_stop_A = np.where(is_stop_AQ.any(axis=1), is_stop_AQ.argmax(axis=1) + 1, num_steps + 1)
        left_A = self.limit_S[slots_A] - self.num_sampled_S[slots_A]
        num_tokens_A = np.minimum(np.minimum(first_stop_A, left_A), num_steps)
        is_kept_AQ = np.arange(num_steps)[None, :] < num_tokens_A[:, None]

        rows, steps = np.nonzero(is_kept_AQ)
        slots, columns = slots_A[rows], self.num_sampled_S[slots_A[rows]] + steps
        self._token_ids_SW[slots, columns] = token_ids_AQ[rows, steps]
        self._logprobs_SW[slots, columns] = logprobs_AQ[rows, steps]
        self._versions_SW[slots, columns] = version
        if self.num_top_S.any():
            tops_XKN = packed_XSQ[3:, slots, steps].reshape(2, -1, len(slots))
            self._top_ids_SWK[slots, columns] = tops_XKN[0].T
            self._top_logprobs_SWK[slots, columns] = tops_XKN[1].view(np.float32).T
        self.num_sampled_S[slots_A] += num_tokens_A
        self.position_ids_S[slots_A] += num_tokens_A
        self.token_ids_S[slots_A] = token_ids_AQ[np.arange(len(slots_A)), num_tokens_A - 1]
        is_stopped_A = first_stop_A == num_tokens_A
        is_spent_A = ~is_stopped_A & (num_tokens_A == left_A)
        is_broken_A = (is_kept_AQ & ~np.isfinite(logprobs_AQ)).any(axis=1)
        return Taken(
            slots_A,
            num_tokens_A,
            is_stopped_A=is_stopped_A,
            is_spent_A=is_spent_A,
            is_broken_A=is_broken_A,
            needs_look_A=is_stopped_A | is_spent_A | is_broken_A | self._is_watched_S[slots_A],
            num_near_ties=int(is_near_tie_AQ[is_kept_AQ].sum()),
        )

    def shorten(self, slot: int, num_sampled: int) -> None:
        """Forget the tokens of a slot after the first `num_sampled`."""
        assert num_sampled <= self.num_sampled_S[slot]
        self.num_sampled_S[slot] = num_sampled

    def token_ids(self, slot: int) -> list[int]:
        """Return a slot's token ids so far."""
        return self._token_ids_SW[slot, : self.num_sampled_S[slot]].tolist()

    def sampled(self, slot: int, start: int = 0) -> SampledTokens:
        """Return a copy of what a slot has sampled so far, from its `start`-th token on."""
        part, num_top = np.s_[slot, start : self.num_sampled_S[slot]], self.num_top_S[slot]
        return SampledTokens(
            self._token_ids_SW[part].copy(),
            self._logprobs_SW[part].copy(),
            self._versions_SW[part].copy(),
            self._top_ids_SWK[part][:, :num_top].copy() if num_top else None,
            self._top_logprobs_SWK[part][:, :num_top].copy() if num_top else None,
        )
