"""Where a stop string ends among the tokens of a reply.

In go token ids and a decoder, out comes a number of tokens. Only the end of the reply is decoded: doing it all again for
each token would make a long reply cost the square of its length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MARGIN_TOKENS = 8
"""Tokens decoded beyond a stop string's bytes: for a character that the cut breaks, and for a decoder that strips the
first space."""


def end_of_stop(token_ids: list[int], num_new: int, stops: Sequence[str], decode_text: Callable[[list[int]], str]) -> int | None:
    """Find the first of the new tokens that completes a stop string.

    Args:
      token_ids: the reply so far, `num_new` of them new; the text before those holds no stop string.
      num_new: >= 0.
      stops: not empty, none of them empty.
      decode_text: token ids to text.

    Returns:
      How many tokens there are up to and with it; None if there is none.

    Example:
      >>> end_of_stop([97, 98, 99], 2, ["b"], lambda ids: bytes(ids).decode())
      2
    """
    # The string must lie in a tail of as many tokens as it has bytes: a token is a byte at least.
    tail = MARGIN_TOKENS + max(len(stop.encode()) for stop in stops)
    for end in range(len(token_ids) - num_new + 1, len(token_ids) + 1):
        text = decode_text(token_ids[max(0, end - tail) : end])
        if any(stop in text for stop in stops):
            return end
    return None
