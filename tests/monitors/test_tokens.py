"""`jaxrl.monitors.tokens`: who wrote each token, what the loss multiplies it by, and why it is not trained."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl.batching import rollout_to_samples
from jaxrl.monitors.rollouts import rollout_record
from jaxrl.monitors.tokens import ORIGINS, REASONS, TokenTexts, origins
from jaxrl.types import Boundary, Bucket, Failure, PackedSample, Rollout, Training, TrainingSample, filtered
from tests.builders import make_node, make_rollout, make_sample


def trained(rollout: Rollout, *, training: Training = Training.APPLIED) -> Rollout:
    """Return a rollout as it is after its step, with credit 1 where its algorithm gave none."""
    rollout.bucket, rollout.training, rollout.is_frozen = Bucket.TRAINED, training, True
    for sample in rollout.samples:
        sample.advantages = np.ones(len(sample), np.float32) if sample.advantages is None else sample.advantages
    return rollout


def whys(rollout: Rollout) -> list[list[str | None]]:
    """Return, for each branch, why its tokens are not trained."""
    return [sample["why_untrained"] for sample in rollout_record(1, rollout)["samples"]]


def forked(*, masked: bool = False) -> Rollout:
    """Return a question, a reply that two branches share, and two further turns: [1 2][3 4] then [5][6] or [7][8 9]."""
    rollout = make_rollout(turns=(((1, 2), (3, 4)), ((5,), (6,))), with_samples=False)
    rollout.nodes += [make_node(1, [7]), make_node(4, [8, 9], num_sampled=2)]
    if masked:
        rollout.nodes[5].loss_mask = np.array([False, True])
    rollout.samples = rollout_to_samples(rollout)
    return rollout


def test_input_is_of_its_messages_role_and_a_sampled_token_of_whoever_wrote_it() -> None:
    seen: set[str] = set()
    for role in ("system", "user", "assistant", "tool"):
        assert origins(make_node(None, [1, 2], role=role)) == [role, role]
        seen.add(role)
    node = make_node(None, [1, 2, 3], role="user")
    node.is_content = np.array([False, True, False])
    assert origins(node) == ["scaffold", "user", "scaffold"]
    for source in ("policy", "frozen", "demonstrations"):
        reply = make_node(0, [1, 2, 3], num_sampled=1)
        reply.source = source
        assert origins(reply) == ["scaffold", "scaffold", source]
        seen |= set(origins(reply))
    empty = make_node(0, [1, 2])
    empty.sampled, empty.role = True, "assistant"
    assert origins(empty) == ["scaffold", "scaffold"], "an empty reply still has its generation prompt"
    assert seen == set(ORIGINS)


@pytest.mark.parametrize(
    ("streams", "expected"),
    [
        ({}, {"rl": [0, 0, 1, 1, 1], "ce": [0] * 5, "ref_kl": [0] * 5}),
        ({"rl_weights": [9, 9, 0.5, 0, -2]}, {"rl": [0, 0, 0.5, 0, -2], "ce": [0] * 5, "ref_kl": [0] * 5}),
        ({"rl_weights": 0.0, "ce_weights": [0, 0.1, 1, 1, 1]}, {"rl": [0] * 5, "ce": [0, 0.1, 1, 1, 1], "ref_kl": [0] * 5}),
        (
            {"rl_weights": 0.0, "ref_kl_weights": 2.0, "ref_logprobs": -0.7},
            {"rl": [0] * 5, "ce": [0] * 5, "ref_kl": [0, 0, 2, 2, 2]},
        ),
        ({"rl_weights": 1.25e-9}, {"rl": [0, 0, *[1.25e-9] * 3], "ce": [0] * 5, "ref_kl": [0] * 5}),
        (
            {"rl_weights": [0, 0, 0.5, 0.5, 0], "ce_weights": [0, 0.25, 0, 0, 0], "ref_kl_weights": [0, 0, 0, 3, 3]},
            {"rl": [0, 0, 0.5, 0.5, 0], "ce": [0, 0.25, 0, 0, 0], "ref_kl": [0, 0, 0, 3, 3]},
        ),
    ],
    ids=["plain rl", "rl with a coefficient", "ce, also on a token of the prompt", "ref_kl", "tiny", "mixed"],
)  # fmt: skip
def test_weights_are_what_the_loss_multiplies_by(streams, expected) -> None:
    sample = make_sample(2, 3, **streams)
    rollout = make_rollout()
    rollout.samples = [sample]
    (branch,) = rollout_record(1, trained(rollout))["samples"]
    assert branch["weights"] == {name: values for name, values in expected.items() if any(values)}
    is_trained = [any(values[t] for values in expected.values()) for t in range(5)]
    assert [why is None for why in branch["why_untrained"]] == is_trained


def test_a_rollout_that_no_algorithm_was_done_with_has_no_weights() -> None:
    (branch,) = rollout_record(1, of_bucket(Bucket.UNSCORED, reward=None))["samples"]
    assert branch["weights"] == {} and branch["loss_mask"] == [0, 0, 1]


def of_bucket(bucket: str, **settings) -> Rollout:
    rollout = make_rollout(turns=(((1, 2), (3,)),), **settings)
    rollout.bucket = bucket
    return rollout


def cut() -> Rollout:
    rollout = trained(make_rollout())
    rollout.packed = [PackedSample(0, 4)]
    return rollout


def one_dropped() -> Rollout:
    rollout = trained(forked())
    rollout.packed = [PackedSample(0, 6), None]
    return rollout


def weightless() -> Rollout:
    rollout = make_rollout(turns=(((1, 2), (3, 4)),))
    rollout.samples[0].rl_weights = np.float32([0, 0, 1, 0])
    return trained(rollout)


FAILURE = Failure(Boundary.ENV, "KeyError", "'x'")
CASES = {
    "trained": (trained(make_rollout()), [["input", "input", None, None, None]]),
    "a skipped step": (trained(make_rollout(), training=Training.SKIPPED), [["input", "input", *["skipped"] * 3]]),
    "a step never reported": (trained(make_rollout(), training=Training.UNREPORTED), [["input", "input", *["unreported"] * 3]]),
    "cut by the row": (cut(), [["input", "input", None, None, "truncated"]]),
    "no weight": (weightless(), [["input", "input", None, "zero_weight"]]),
    "a shared reply": (
        trained(forked()),
        [["input", "input", None, None, "input", None], ["input", "input", "other_branch", "other_branch", "input", None, None]],
    ),
    "a masked token": (
        trained(forked(masked=True)),
        [["input", "input", None, None, "input", None], ["input", "input", "other_branch", "other_branch", "input", "masked", None]],
    ),
    "one branch did not fit": (one_dropped(), [["input", "input", None, None, "input", None], ["overlong_dropped"] * 7]),
    "filtered": (of_bucket(filtered("zero_advantage")), [["filtered/zero_advantage"] * 3]),
    "overlong": (of_bucket(Bucket.OVERLONG_DROPPED), [["overlong_dropped"] * 3]),
    "errored": (of_bucket(Bucket.ERRORED, reward=None, failure=FAILURE, with_samples=False), [["errored"] * 3]),
    "gated": (of_bucket(Bucket.GATED), [["gated"] * 3]),
    "stale": (of_bucket(Bucket.STALE), [["stale"] * 3]),
    "unscored": (of_bucket(Bucket.UNSCORED, reward=None), [["unscored"] * 3]),
    "cancelled": (of_bucket(Bucket.CANCELLED), [["cancelled"] * 3]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_token_that_is_not_trained_says_why(name: str) -> None:
    rollout, expected = CASES[name]
    assert whys(rollout) == expected


def test_every_reason_has_a_meaning_and_a_case() -> None:
    given = {why for _, branches in CASES.values() for branch in branches for why in branch if why is not None}
    assert {"filtered/<name>" if why.startswith("filtered/") else why for why in given} == {str(reason) for reason in REASONS}


def test_a_member_whose_advantage_is_zero_is_trained_all_the_same() -> None:
    rollout = make_rollout()
    rollout.assign_advantages(0.0)
    assert whys(trained(rollout)) == [["input", "input", None, None, None]]


def test_a_branch_without_anything_of_its_own_to_train_shows_that_an_earlier_one_has_it() -> None:
    rollout = make_rollout(turns=(((1, 2), (3, 4)),), with_samples=False)
    rollout.nodes += [make_node(1, [5]), make_node(1, [6])]
    rollout.samples = rollout_to_samples(rollout)
    first, second = rollout_record(1, trained(rollout))["samples"]
    assert first["why_untrained"] == ["input", "input", None, None, "input"] and first["loss_mask"] == [0, 0, 1, 1, 0]
    assert second["why_untrained"] == ["input", "input", "other_branch", "other_branch", "input"]
    assert second["loss_mask"] == [0] * 5 and second["weights"] == {} and second["token_ids"] == [1, 2, 3, 4, 6]


def test_the_trainers_logprobs_stand_on_trained_tokens_only_and_what_is_no_number_is_null() -> None:
    rollout = trained(forked())
    rollout.samples[0].rl_weights = np.float32([0, 0, 1, 0, 0, 1])
    rollout.packed = [PackedSample(1, 6, -np.arange(6, dtype=np.float32)), PackedSample(0, 6, np.float32([0, -1, -2, -3, -4, np.nan]))]
    first, second = rollout_record(1, rollout)["samples"]
    assert first["streams"]["trainer_logprobs"] == [None, None, -2, None, None, -5]
    assert second["why_untrained"][-2:] == [None, "truncated"] and second["streams"]["trainer_logprobs"] == [None] * 7


def test_sampling_logprobs_are_null_where_no_live_policy_sampled() -> None:
    live = make_rollout(logprob=0.0)
    frozen = make_rollout(logprob=None, version=None)
    assert rollout_record(1, live)["samples"][0]["streams"]["inference_logprobs"] == [None, None, 0, 0, 0]
    assert rollout_record(1, frozen)["samples"][0]["streams"]["inference_logprobs"] == [None] * 5
    assert rollout_record(1, frozen)["samples"][0]["versions"] == [None] * 5


def test_all_lists_of_a_branch_are_of_one_length() -> None:
    rollout = trained(forked())
    for sample in rollout.samples:
        sample.ce_weights = sample.ref_kl_weights = sample.ref_logprobs = np.full(len(sample), 0.5, np.float32)
    rollout.packed = [PackedSample(i, len(s), np.zeros(len(s), np.float32)) for i, s in enumerate(rollout.samples)]
    for branch, length in zip(rollout_record(1, rollout, texts=TokenTexts(str))["samples"], (6, 7), strict=True):
        lists = {name: values for name, values in branch.items() if isinstance(values, list) and name != "nodes"}
        assert set(lists) == {"token_ids", "text", "loss_mask", "origin", "versions", "why_untrained"}
        lists |= branch["streams"] | branch["weights"]
        assert {name: len(values) for name, values in lists.items()} == dict.fromkeys(lists, length)


def test_each_token_is_decoded_once() -> None:
    decoded: list[int] = []

    def decode(token_id: int) -> str:
        decoded.append(token_id)
        return f"<{token_id}>"

    texts = TokenTexts(decode)
    for _ in range(3):
        (branch,) = rollout_record(1, make_rollout(turns=(((1, 2), (2, 1)),)), texts=texts)["samples"]
        assert branch["text"] == ["<1>", "<2>", "<2>", "<1>"]
    assert decoded == [1, 2]


def test_without_a_token_export_a_branch_is_ids_mask_versions_and_streams() -> None:
    rollout = trained(make_rollout())
    rollout.packed = [PackedSample(0, 5, np.zeros(5, np.float32))]
    (branch,) = rollout_record(1, rollout, token_export=False, texts=TokenTexts(str))["samples"]
    assert set(branch) == {"nodes", "token_ids", "loss_mask", "versions", "streams"}
    assert set(branch["streams"]) == {"inference_logprobs", "advantages"}


def test_a_sample_of_another_temperature_shows_it() -> None:
    rollout = make_rollout(temperature=0.7)
    sample: TrainingSample = rollout.samples[0]
    (branch,) = rollout_record(1, rollout)["samples"]
    assert branch["streams"]["temperatures"] == [1.0, 1.0, 0.7, 0.7, 0.7] and len(sample) == 5
