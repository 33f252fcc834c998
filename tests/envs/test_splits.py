"""Which split a question belongs to."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from jaxrl.envs.splits import split_of


@given(st.text(), st.sampled_from([0.0, 0.001, 0.25, 0.999]))
def test_the_split_is_the_hash_of_the_text(question: str, heldout_frac: float) -> None:
    bucket = int(hashlib.sha256(question.encode("utf-8")).hexdigest()[:8], 16) % 1000
    assert split_of(question, heldout_frac) == ("heldout" if bucket < 1000 * heldout_frac else "train")
