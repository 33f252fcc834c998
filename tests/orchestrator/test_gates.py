"""Gates in a run: what they see, what becomes of a group that one of them turns away, what a run says in which nothing is ever let in."""

import re

import numpy as np
import pytest

from jaxrl.config.filters import MinRewardFilterConfig
from jaxrl.errors import RunFailedError
from jaxrl.monitors.ledger import Ledger
from jaxrl.orchestrator.budgets import EmptyBatchBudget
from jaxrl.orchestrator.filters import build_filters
from jaxrl.orchestrator.metrics import StepTally
from jaxrl.orchestrator.sink import Sink
from jaxrl.tasks import SequentialSampler
from jaxrl.tasks.gates import AdvantageRangeGate, PythonGate, RewardRangeGate
from tests.fakes import ScriptedPool, ToyEnv
from tests.orchestrator.test_sink import _opened
from tests.orchestrator.wiring import make_env, make_run

REWARDS = {"toy-0": 1.0, "toy-1": 0.0}
"""Tasks whose groups carry no signal."""


class Half(ToyEnv):
    """Every task but two has rewards that differ."""

    async def play(self, spec, session):
        outcome = await super().play(spec, session)
        return type(outcome)(reward=REWARDS.get(spec["id"], outcome.reward))


def run_with(*gates, **settings):
    environment = Half(num_tasks=4)
    return make_run(
        envs=lambda pool: [make_env(pool, environment, tasks=SequentialSampler(environment.tasks()), gates=gates)],
        **settings,
    )


@pytest.mark.parametrize("async_level", [0, 1])
async def test_a_group_that_is_turned_away_is_replaced_and_filed_and_its_task_has_been_learnt_from(async_level):
    run = run_with(AdvantageRangeGate(), RewardRangeGate(0.0, 0.999), max_steps=4, async_level=async_level)
    await run.play()
    written = [r for rollouts in run.monitors.rollouts.values() for r in rollouts if r.bucket != "cancelled"]
    assert {r.task.id for r in written if r.bucket == "gated"} == set(REWARDS)
    assert {r.task.id for r in written if r.bucket == "trained"} == {"toy-2", "toy-3"}
    assert [batch.num_samples for batch in run.batches] == [8] * 4
    row = run.monitors.steps[-1][1]
    assert row["ledger/gated"] >= 16 and row["ledger/trained"] == 32 and row["ledger/pending"] == 0
    assert row["tasks/toy/groups"] >= 12, "turned away or not"


async def test_the_shares_that_gates_let_in_are_those_of_the_step():
    run = run_with(AdvantageRangeGate(), RewardRangeGate(0.0, 0.999), max_steps=2)
    await run.play()
    for _, row in run.monitors.steps:  # four groups: two without a signal, one of which has the reward 1 throughout
        assert row["tasks/toy/admission_frac"] == row["tasks/toy/gate/advantage_range/frac"] == 0.5
        assert row["tasks/toy/gate/reward_range/frac"] == 0.75


async def test_without_gates_nothing_is_said_of_them():
    run = run_with(max_steps=1)
    await run.play()
    assert not [name for name in run.monitors.steps[0][1] if name.startswith("tasks/") and ("admission" in name or "gate/" in name)]


async def test_a_run_in_which_nothing_is_ever_let_in_ends_and_names_the_gates_with_their_answers():
    run = run_with(
        RewardRangeGate(2.0, 3.0), PythonGate("mine", lambda rollouts: rollouts[0].task.id != "toy-1", "m:f"), max_empty_batches=3
    )
    with pytest.raises(RunFailedError) as caught:
        await run.play()
    words = str(caught.value)
    assert "3 batches in a row gave nothing to train on; rollouts since the last step: gated 24" in words
    gates = "The gates of environment 'toy' let in 0 of 6 groups ('reward_range' said no to 6, 'mine' said no to 2): widen them"
    assert gates in words and "`tasks.gates`" in words
    assert run.batches == []


def test_of_gates_that_were_not_what_took_the_rollouts_the_advice_does_not_speak():
    tally, budget = StepTally(), EmptyBatchBudget(1)
    tally.add_answers("toy", {"mine": True})
    budget.add_batch(is_shipped=False)
    with pytest.raises(RunFailedError) as caught:
        budget.check(1, 4, tally)
    assert "gate" not in str(caught.value)


async def _committed(rewards, *, gates=(), filters=(), truncated="train", is_truncated=()):
    """Return what the real sink makes of one group, which was not committed before."""
    sink = Sink(
        Ledger(), StepTally(), is_ordered=False, pre_batch_filters=filters, max_consecutive_failures=99, on_change=lambda: None
    )  # fmt: skip
    environment = ToyEnv(num_tasks=4)
    tasks = SequentialSampler([{"id": "task-0"}, {"id": "task-1"}])
    env = make_env(ScriptedPool(), environment, tasks=tasks, gates=gates, truncated=truncated)
    opened = _opened(env, len(rewards))
    sink._ledger.dispatch(len(rewards))
    for rollout, reward in zip(opened.members, rewards, strict=True):
        rollout.reward, rollout.samples = reward, []
        rollout.is_truncated = rollout.member in is_truncated
        await sink.add(opened, rollout)
    return sink.commit(opened), opened, sink._tally, tasks


async def test_gates_see_the_scored_survivors_with_their_credit_before_any_filter_does():
    seen = []

    def look(rollouts):
        seen.extend((r.member, r.bucket, r.mean_advantage()) for r in rollouts)
        assert all(r.is_frozen for r in rollouts)
        return True

    filters = build_filters([MinRewardFilterConfig(threshold=0.9)], {"toy": 99})
    kept, opened, *_ = await _committed([1.0, None, 0.0], gates=[PythonGate("look", look, "m:f")], filters=filters)
    assert seen == [(0, "pending", 0.5), (2, "pending", -0.5)]
    assert [r.bucket for r in opened.members] == ["pending", "unscored", "filtered/min_reward"] and [r.member for r in kept.rollouts] == [0]


async def test_only_what_is_still_pending_of_a_group_is_gated():
    gates = [RewardRangeGate(0.9, 1.0)]
    kept, opened, tally, _ = await _committed([1.0, None, 0.0, 0.0], gates=gates, truncated="mask", is_truncated={3})
    assert kept is None
    assert [r.bucket for r in opened.members] == ["gated", "unscored", "gated", "filtered/truncated"]
    assert tally.metrics()["tasks/toy/gate/reward_range/frac"] == 0


async def test_a_truncated_rollout_that_is_in_the_baseline_is_seen_by_the_gates_and_one_that_is_dropped_is_not():
    seen = []
    gates = [PythonGate("look", lambda rollouts: seen.append([r.member for r in rollouts]) is None, "m:f")]
    for truncated in ("mask", "drop"):
        await _committed([1.0, 0.0, 0.0], gates=gates, truncated=truncated, is_truncated={2})
    assert seen == [[0, 1, 2], [0, 1]]


async def test_of_a_group_without_a_scored_rollout_no_gate_is_asked():
    gates = [PythonGate("never", lambda rollouts: 1 / 0, "m:f")]
    kept, opened, tally, _ = await _committed([None, None], gates=gates)
    assert kept is None and [r.bucket for r in opened.members] == ["unscored", "unscored"]
    assert not [name for name in tally.metrics() if "gate" in name]


async def test_what_gates_and_filters_do_downstream_never_changes_what_the_sampler_has_learnt():
    nothing = [PythonGate("nothing", lambda rollouts: False, "m:f")]
    strict = build_filters([MinRewardFilterConfig(threshold=2.0)], {"toy": 99})
    rewards = [1.0, None, 0.0, 0.0]
    settings = [{}, {"gates": nothing}, {"filters": strict}, {"gates": nothing, "filters": strict}]
    outcomes = [await _committed(rewards, **own) for own in settings]
    assert [kept is not None for kept, *_ in outcomes] == [True, False, False, False]
    states = [tasks.state_dict() for *_, tasks in outcomes]
    assert states[0] == states[1] == states[2] == states[3] and states[0]["counters"]["groups"] == 1


async def test_a_masked_rollout_does_not_make_a_group_pass_a_gate_on_advantages():
    kept, opened, *_ = await _committed([1.0, 1.0], gates=[AdvantageRangeGate()], truncated="mask", is_truncated={1})
    assert kept is None and [r.bucket for r in opened.members] == ["gated", "filtered/truncated"]
    assert not np.any(opened.members[1].samples[0].loss_mask)
    assert re.fullmatch("gated|filtered/.*", opened.members[0].bucket)
