"""What a message graph becomes: one sample per trainable branch, each sampled token trained exactly once."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from jaxrl.batching import rollout_to_samples, trainable_branches
from jaxrl.errors import SampleError
from jaxrl.types import OPTIONAL_STREAMS, Node, Rollout, TrainingSample
from tests.builders import make_node, make_rollout


def graph(*nodes: Node) -> Rollout:
    rollout = make_rollout(turns=())
    rollout.nodes = list(nodes)
    return rollout


def test_a_two_turn_chat_becomes_one_sample_with_every_stream_in_place():
    rollout = graph(
        make_node(None, [1, 2]),
        make_node(0, [90, 3, 4], num_sampled=2, logprob=-0.25, temperature=0.7),
        make_node(1, [5]),
        make_node(2, [90, 6], num_sampled=1, logprob=-0.75, temperature=1.2),
    )
    (sample,) = rollout_to_samples(rollout)
    assert sample.token_ids.tolist() == [1, 2, 90, 3, 4, 5, 90, 6]
    assert sample.loss_mask.tolist() == [False, False, False, True, True, False, False, True]
    np.testing.assert_array_equal(sample.inference_logprobs, np.float32([0, 0, 0, -0.25, -0.25, 0, 0, -0.75]))
    np.testing.assert_array_equal(sample.temperatures, np.float32([1, 1, 1, 0.7, 0.7, 1, 1, 1.2]))
    assert (sample.token_ids.dtype, sample.loss_mask.dtype) == (np.int32, np.bool_)
    assert (sample.inference_logprobs.dtype, sample.temperatures.dtype) == (np.float32, np.float32)
    assert sample.env_name == "toy"
    assert [getattr(sample, name) for name in OPTIONAL_STREAMS] == [None] * 5


def test_a_sampled_node_shared_by_two_branches_is_trained_in_the_first_and_context_in_the_second():
    rollout = graph(
        make_node(None, [1]),
        make_node(0, [2, 3], num_sampled=2),
        make_node(1, [4, 5], num_sampled=1),
        make_node(1, [6, 7], num_sampled=1),
    )
    first, second = rollout_to_samples(rollout)
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert first.loss_mask.tolist() == [False, True, True, False, True]
    assert second.token_ids.tolist() == [1, 2, 3, 6, 7]
    assert second.loss_mask.tolist() == [False, False, False, False, True]
    np.testing.assert_array_equal(second.inference_logprobs, np.float32([0, -0.5, -0.5, 0, -0.5]))
    assert [b.path for b in trainable_branches(rollout)] == [(0, 1, 2), (0, 1, 3)]
    assert [b.trained for b in trainable_branches(rollout)] == [(False, True, True), (False, False, True)]


def test_a_branch_that_ends_in_an_unanswered_message_still_trains_its_replies_once():
    rollout = graph(
        make_node(None, [1]),
        make_node(0, [2], num_sampled=1),
        make_node(1, [3]),
        make_node(1, [4]),
        make_node(None, [9]),
    )
    (sample,) = rollout_to_samples(rollout)
    assert sample.token_ids.tolist() == [1, 2, 3]
    assert sample.loss_mask.tolist() == [False, True, False]


def test_a_rollout_without_sampled_tokens_yields_no_sample():
    assert rollout_to_samples(graph()) == []
    assert rollout_to_samples(graph(make_node(None, [1, 2]), make_node(0, [3]))) == []


def test_a_reply_that_is_masked_out_whole_yields_no_sample():
    reply = make_node(0, [3, 4], num_sampled=2)
    reply.loss_mask = np.zeros(2, bool)
    assert rollout_to_samples(graph(make_node(None, [1]), reply)) == []


def test_an_explicit_loss_mask_narrows_the_sampled_tokens_and_keeps_their_logprobs():
    reply = make_node(0, [3, 4, 5], num_sampled=2)
    reply.loss_mask = np.array([False, False, True])
    (sample,) = rollout_to_samples(graph(make_node(None, [1]), reply))
    assert sample.loss_mask.tolist() == [False, False, False, True]
    np.testing.assert_array_equal(sample.inference_logprobs, np.float32([0, 0, -0.5, -0.5]))


def test_a_frozen_source_carries_zero_logprobs_whatever_it_reported():
    for logprob in (None, -0.5):
        (sample,) = rollout_to_samples(make_rollout(version=None, logprob=logprob, with_samples=False))
        assert sample.loss_mask.tolist() == [False, False, True, True, True]
        np.testing.assert_array_equal(sample.inference_logprobs, np.zeros(5, np.float32))


def test_a_sample_says_whether_the_policy_sampled_its_tokens():
    for version, is_policys in ((3, True), (None, False)):
        (sample,) = make_rollout(version=version, logprob=-0.5 if is_policys else None).samples
        assert sample.has_policy_logprobs is is_policys


def test_a_greedy_frozen_source_is_scored_at_temperature_one():
    (sample,) = rollout_to_samples(make_rollout(version=None, logprob=None, temperature=0.0, with_samples=False))
    np.testing.assert_array_equal(sample.temperatures, np.ones(5, np.float32))


def broken(**changes: object) -> Rollout:
    rollout = make_rollout(with_samples=False)
    for name, value in changes.items():
        setattr(rollout.nodes[1], name, value)
    return rollout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": None}, "3 tokens of the live policy came without sampling logprobs"),
        ({"logprobs": np.zeros(2, np.float32)}, r"one logprob per sampled token \(3\), got shape \(2,\)"),
        ({"logprobs": np.float32([-1, np.nan, -1])}, "logprob of sampled token 1 is nan"),
        ({"logprobs": np.float32([-1, -1, -np.inf])}, "logprob of sampled token 2 is -inf"),
        ({"versions": np.zeros(4, np.int32)}, r"one policy version per sampled token \(3\), got 4"),
        ({"temperature": 0.0}, "`temperature`=0.0"),
        ({"temperature": float("nan")}, "`temperature`=nan"),
        ({"loss_mask": np.ones(2, bool)}, r"`loss_mask` has shape \(2,\), expected \(3,\)"),
        ({"num_sampled": 4}, "`num_sampled`=4 does not fit a node of 3 tokens"),
        ({"sampled": False}, "`num_sampled`=3 does not fit .* `sampled`=False"),
        ({"parent": 1}, "`parent`=1 must be an earlier node"),
    ],
)
def test_a_broken_node_is_an_error_that_names_the_env_the_rollout_and_the_node(changes, message):
    with pytest.raises(SampleError, match=message) as caught:
        rollout_to_samples(broken(**changes))
    assert "env 'toy', group 'toy/0', member 0, node 1" in str(caught.value)


def test_a_loss_mask_on_a_token_that_nobody_sampled_is_an_error():
    rollout = make_rollout(with_samples=False)
    rollout.nodes[0].loss_mask = np.array([False, True])
    with pytest.raises(SampleError, match="nobody sampled"):
        rollout_to_samples(rollout)


def test_a_branch_that_starts_with_a_trained_token_is_an_error():
    with pytest.raises(SampleError, match="first token of a branch"):
        rollout_to_samples(graph(make_node(None, [1, 2], num_sampled=2)))


def test_a_sample_without_an_env_name_cannot_be_made():
    with pytest.raises(TypeError, match="env_name"):
        TrainingSample(
            token_ids=np.zeros(1, np.int32),
            loss_mask=np.zeros(1, bool),
            inference_logprobs=np.zeros(1, np.float32),
            temperatures=np.ones(1, np.float32),
        )


@st.composite
def graphs(draw: st.DrawFn) -> Rollout:
    nodes = [make_node(None, [0])]
    for index in range(1, draw(st.integers(1, 9))):
        num_tokens = draw(st.integers(1, 4))
        num_sampled = draw(st.integers(0, num_tokens))
        parent = draw(st.integers(0, index - 1))
        nodes.append(make_node(parent, [100 * index + t for t in range(num_tokens)], num_sampled=num_sampled))
    return graph(*nodes)


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_each_sampled_token_is_trained_exactly_once_and_no_other_token_is(rollout):
    samples = rollout_to_samples(rollout)
    trained = np.concatenate([[], *(s.token_ids[s.loss_mask] for s in samples)])
    sampled = np.concatenate([[], *(n.token_ids[len(n.token_ids) - n.num_sampled :] for n in rollout.nodes)])
    assert sorted(trained) == sorted(sampled)


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_each_sample_is_the_concatenation_of_a_root_to_leaf_path(rollout):
    samples, branches = rollout_to_samples(rollout), trainable_branches(rollout)
    assert len(samples) == len(branches)
    parents = {node.parent for node in rollout.nodes}
    for sample, branch in zip(samples, branches, strict=True):
        nodes = [rollout.nodes[i] for i in branch.path]
        assert sample.token_ids.tolist() == [t for node in nodes for t in node.token_ids.tolist()]
        assert nodes[0].parent is None and branch.path[-1] not in parents
        assert [n.parent for n in nodes[1:]] == list(branch.path[:-1])
        assert any(branch.trained)
