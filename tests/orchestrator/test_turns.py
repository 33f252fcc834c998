"""Conversations of several turns through a whole run: what is learned from them, and what is left of one that fails in the middle."""

from __future__ import annotations

import numpy as np

from jaxrl.config.algorithm import EchoConfig
from jaxrl.config.filters import ZeroAdvantageFilterConfig
from jaxrl.monitors.rollouts import rollout_record
from jaxrl.orchestrator.algo import AlgorithmContext, build_algorithm
from jaxrl.types import Boundary, Bucket
from tests.fakes import ToyEnv
from tests.orchestrator.wiring import make_env, make_run, renderer


def echo(pool):
    config = EchoConfig.model_validate({"roles": {"user": {"alpha": 0.25}}})
    return build_algorithm(config, pool, AlgorithmContext(env_name="toy", renderer=renderer()))


async def test_echo_learns_from_what_is_said_after_the_first_reply_and_counts_it_apart():
    def envs(pool):
        return [make_env(pool, ToyEnv(num_turns=2, reward=lambda text: 1.0), algorithm=echo(pool))]

    run = make_run(envs=envs, max_steps=2, post_batch_filters=[ZeroAdvantageFilterConfig()])
    await run.play()
    rollouts = [rollout for step in run.monitors.rollouts.values() for rollout in step if rollout.bucket == Bucket.TRAINED]
    assert len(rollouts) == 16, "equal rewards, and yet every rollout is kept"
    for rollout in rollouts:
        (sample,) = rollout.samples
        start, learned = 0, np.zeros(len(sample), bool)
        for index, node in enumerate(rollout.nodes):
            end = start + len(node.token_ids)
            if index > 1 and not node.sampled:
                learned[start:end] = True if node.is_content is None else node.is_content
            start = end
        assert sample.ce_weights.tolist() == np.where(learned, 0.25, 0.0).tolist() and learned.any()
        assert not (sample.loss_mask & learned).any() and sample.rl_weights is None
    for batch, (_, row) in zip(run.batches, run.monitors.steps, strict=True):
        rl, ce, ref_kl = batch.member_counts.sum(0).tolist()
        assert (row["tokens/rl/toy"], row["tokens/ce/toy"], ref_kl) == (rl, ce, 0)
        assert ce == sum(r.metrics["observation_tokens/user"] for r in run.monitors.rollouts[batch.step])
        assert rl == sum(r.num_completion_tokens for r in run.monitors.rollouts[batch.step])


async def test_an_error_in_the_middle_is_a_missing_reward_and_the_turns_before_it_are_written_down():
    class Breaking(ToyEnv):
        async def play(self, spec, session):
            outcome = await super().play(spec, session)
            if outcome.reward < 0.5:
                raise RuntimeError("the tool server is gone")
            return outcome

    run = make_run(envs=lambda pool: [make_env(pool, Breaking(num_turns=2))], max_steps=2, max_consecutive_failures=99)
    await run.play()
    failed = [rollout for step in run.monitors.rollouts.values() for rollout in step if rollout.failure is not None]
    assert failed
    for rollout in failed:
        record = rollout_record(1, rollout)
        assert (record["reward"], record["bucket"], record["error"]["boundary"]) == (None, Bucket.ERRORED, Boundary.ENV)
        assert [node["role"] for node in record["nodes"]] == ["user", "assistant"] * 2
        assert record["messages"][2]["content"] == "again 1" and record["num_turns"] == 2
        (sample,) = record["samples"]
        assert len(sample["token_ids"]) == sum(node["num_tokens"] for node in record["nodes"])
        assert set(sample["why_untrained"]) == {Bucket.ERRORED}
