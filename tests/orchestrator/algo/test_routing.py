import numpy as np
import pytest

from jaxrl.errors import SampleError
from jaxrl.orchestrator.algo.routing import check_streams, stamp_loss_routing
from jaxrl.types import TrainingSample, component_members
from tests.builders import make_sample

MASK = [False, False, True, True, False, True]


def _sample(**streams) -> TrainingSample:
    length = len(MASK)
    return TrainingSample(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.array(MASK),
        inference_logprobs=np.zeros(length, np.float32),
        temperatures=np.ones(length, np.float32),
        env_name="toy",
        **{name: np.asarray(values, np.float32) for name, values in streams.items()},
    )


def test_rl_routing_ships_no_weight_stream():
    sample = _sample()
    stamp_loss_routing(sample, "rl")
    assert (sample.rl_weights, sample.ce_weights, sample.ref_kl_weights) == (None, None, None)


def test_ref_kl_routing_moves_the_sampled_tokens_from_rl_to_ref_kl():
    sample = _sample()
    stamp_loss_routing(sample, "ref_kl")
    assert sample.rl_weights.tolist() == [0.0] * 6
    assert sample.ref_kl_weights.tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    assert sample.ce_weights is None


def test_ce_routing_merges_with_weights_that_the_algorithm_wrote():
    sample = _sample(ce_weights=[0.0, 0.0, 0.0, 0.0, 0.1, 0.0])
    stamp_loss_routing(sample, "ce")
    assert sample.rl_weights.tolist() == [0.0] * 6
    np.testing.assert_array_equal(sample.ce_weights, np.array([0.0, 0.0, 1.0, 1.0, 0.1, 1.0], np.float32))
    members = component_members(sample.loss_mask, sample.rl_weights, sample.ce_weights, None, np.ones(6, bool))
    assert [int(m.sum()) for m in members] == [0, 4, 0]


def test_routing_never_writes_into_an_array_that_the_algorithm_wrote():
    written = np.array([0.0, 0.0, 0.0, 0.0, 0.1, 0.0], np.float32)
    written.flags.writeable = False
    sample = _sample()
    sample.ce_weights = written
    stamp_loss_routing(sample, "ce")
    assert sample.ce_weights is not written and written.tolist()[2] == 0.0


def test_ref_kl_routing_keeps_what_was_written_elsewhere_for_the_gate_to_see():
    sample = _sample(ref_kl_weights=[0.0, 0.0, 0.0, 0.0, 0.1, 0.0], ref_logprobs=[-1.0] * 6)
    stamp_loss_routing(sample, "ref_kl")
    np.testing.assert_array_equal(sample.ref_kl_weights, np.array([0.0, 0.0, 1.0, 1.0, 0.1, 1.0], np.float32))
    with pytest.raises(SampleError, match="at token 4"):
        check_streams(sample)


@pytest.mark.parametrize(("action_loss_type", "stream"), [("ce", "ce_weights"), ("ref_kl", "ref_kl_weights")])
@pytest.mark.parametrize("values", [np.zeros(5, np.float32), [0.0] * 6, np.full(6, np.nan, np.float32)], ids=["length", "list", "nan"])
def test_weights_that_are_none_cannot_be_merged_with(action_loss_type, stream, values):
    sample = _sample()
    setattr(sample, stream, values)
    with pytest.raises(SampleError, match=f"env 'toy': `{stream}`"):
        stamp_loss_routing(sample, action_loss_type)


def test_streams_that_the_loss_can_use_pass():
    check_streams(_sample(advantages=np.zeros(6)))


def test_live_rl_tokens_without_credit_are_refused_and_zeros_are_credit():
    with pytest.raises(SampleError, match=r"env 'toy': it has live rl tokens but no `advantages`.*`assign_advantages`"):
        check_streams(_sample())
    check_streams(_sample(advantages=np.zeros(6)))


@pytest.mark.parametrize("weights", [{"rl_weights": [0.0] * 6}, {"rl_weights": [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]}])
def test_without_a_live_rl_token_no_credit_is_needed(weights):
    check_streams(_sample(**weights))


def test_a_reference_weight_on_a_token_that_nobody_sampled_is_refused():
    sample = _sample(ref_kl_weights=[0, 0, 0, 0, 0.5, 0], ref_logprobs=[-1.0] * 6, advantages=[0.0] * 6)
    with pytest.raises(SampleError, match="`ref_kl_weights` is set at token 4, which is not in the loss mask"):
        check_streams(sample)


@pytest.mark.parametrize("stream", ["ce_weights", "ref_kl_weights"])
def test_a_weight_on_the_first_token_is_refused(stream):
    with pytest.raises(SampleError, match="first token"):
        check_streams(_sample(**{stream: [0.5, 0, 0, 0, 0, 0], "ref_logprobs": [0.0] * 6}))


def test_a_sampled_first_token_is_refused_in_the_rl_loss():
    sample = make_sample(num_prompt=0)
    with pytest.raises(SampleError, match="member of the rl loss"):
        check_streams(sample)


def test_reference_weights_without_reference_logprobs_are_refused():
    sample = _sample()
    stamp_loss_routing(sample, "ref_kl")
    with pytest.raises(SampleError, match="`ref_logprobs` is absent"):
        check_streams(sample)


@pytest.mark.parametrize("values", [[0.0] * 5, [0.0, 0.0, np.nan, 0.0, 0.0, 0.0]])
def test_a_stream_of_another_length_or_not_finite_is_refused(values):
    with pytest.raises(SampleError, match="`advantages`"):
        check_streams(_sample(advantages=values))


@pytest.mark.parametrize(
    ("values", "got"), [(np.zeros(6, np.float64), r"\[6\] float64"), ([0.0] * 6, "a list")], ids=["float64", "a list"]
)
def test_a_stream_of_another_type_is_refused(values, got):
    sample = _sample()
    sample.advantages = values
    with pytest.raises(SampleError, match=rf"must be \[6\] float32, got {got}"):
        check_streams(sample)


def test_tokens_that_the_policy_did_not_sample_feed_cross_entropy_only():
    sample = _sample(advantages=np.ones(6))
    sample.has_policy_logprobs = False
    with pytest.raises(SampleError, match="tokens that the policy did not sample"):
        check_streams(sample)
    stamp_loss_routing(sample, "ce")
    check_streams(sample)
