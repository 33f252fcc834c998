"""N + N steps equal 2N in a synchronous run; in an asynchronous one every drawn task is trained once or has a ledger
line."""

import json
import random
import time
from collections import Counter
from typing import Any

import pytest

from jaxrl.config.algorithm import RAEConfig, ReinforceConfig
from jaxrl.config.filters import ZeroAdvantageFilterConfig
from jaxrl.errors import CheckpointError
from jaxrl.monitors.ledger import Ledger
from jaxrl.orchestrator.algo import RAE, Reinforce
from jaxrl.orchestrator.batcher import Batcher
from jaxrl.orchestrator.checkpoint import RunState, Stateful, decode_state, encode_state, encoded
from jaxrl.orchestrator.draws import Draw, DrawSource
from jaxrl.orchestrator.groups import KeptGroup, OpenGroup
from jaxrl.transport.codec import encode
from tests.builders import make_group
from tests.fakes import ScriptedPool, ToyEnv
from tests.orchestrator.wiring import Run, make_env, make_run

ZERO = ZeroAdvantageFilterConfig()


class Fragile(ToyEnv):
    """Fails on some tasks' replies, and gives groups without signal now and then; a pure function of the reply."""

    async def play(self, spec, session):
        outcome = await super().play(spec, session)
        if outcome.reward == 0.0 and spec["id"].endswith("1"):
            raise ValueError("broken reply")
        return type(outcome)(reward=float(outcome.reward > 0.5))


class TwoSided(Fragile):
    """Says which of two sides played it."""

    async def play(self, spec, session):
        outcome = await super().play(spec, session)
        return type(outcome)(reward=outcome.reward, info={"agent": "even" if len(spec["id"]) % 2 == 0 else "odd"})


def play_part(latency_seed: int, *, start: int = 0, data: bytes | None = None, **settings: Any) -> Run:
    """Return a run of two environments, one with an algorithm that remembers, whose requests take random times."""
    generator = random.Random(latency_seed)
    pool = ScriptedPool(version=start, latency=lambda request: generator.random() * 0.003)

    def two_envs(pool):
        return [
            make_env(pool, Fragile("a", num_tasks=5), ratio=2.0),
            make_env(pool, Fragile("b", num_tasks=3), algorithm=Reinforce(ReinforceConfig(decay=0.9), pool)),
        ]

    run = make_run(pool=pool, **({"envs": two_envs} | settings))
    if data is not None:
        run.orchestrator.restore(data)
    return run


def played(run: Run) -> list[tuple]:
    """Return every rollout that a run wrote down, step by step."""
    return [
        (step, r.group_id, r.member, r.task.id, r.completion_text, r.reward, str(r.bucket), r.mean_advantage())
        for step, rollouts in sorted(run.monitors.rollouts.items())
        for r in rollouts
    ]


SETTINGS = {
    "groups": {"batch_size": 16},
    "tokens": {"batch_size": None, "token_batch_size": 250},
    "tokens of just one group": {"batch_size": None, "token_batch_size": 77},
    "tokens of just over one group": {"batch_size": None, "token_batch_size": 78},
    "few in flight, filtered before": {"batch_size": 12, "max_inflight_groups": 2, "pre_batch_filters": [ZERO]},
    "filtered after": {"batch_size": 16, "post_batch_filters": [ZERO]},
}


@pytest.mark.parametrize("name", SETTINGS)
async def test_n_plus_n_synchronous_steps_equal_two_n(name):
    settings = SETTINGS[name]
    whole = play_part(1, max_steps=6, **settings)
    await whole.play()

    taken: dict[int, bytes] = {}

    def take(step: int) -> None:
        time.sleep(0.005 * (step % 2))  # the next step may have begun by now
        taken[step] = first.orchestrator.snapshot(step)

    first = play_part(2, max_steps=6, on_applied=take, failure_at=4, **settings)
    with pytest.raises(RuntimeError, match="broke at step 4"):
        await first.play()
    assert decode_state(taken[3]).undecided == []
    second = play_part(3, start=3, data=taken[3], max_steps=6, **settings)
    await second.play()

    assert [encode(b) for b in first.batches + second.batches] == [encode(b) for b in whole.batches]
    assert [row for row in played(first) if row[0] <= 3] + played(second) == played(whole)
    totals = [
        {k: v for k, v in run.monitors.steps[-1][1].items() if k.startswith(("ledger/", "tasks/"))}
        for run in (second, whole)
    ]
    assert totals[0] == totals[1]
    assert {metrics["ledger/pending"] for _, metrics in whole.monitors.steps} == {0}
    buckets = Counter(row[6] for row in played(whole))
    assert buckets["trained"] > 0
    assert buckets["errored"] > 0 or name.startswith("tokens of just")


async def test_a_resumed_run_has_the_baselines_of_one_that_was_never_interrupted():
    def envs(pool):
        return [
            make_env(pool, TwoSided("a", num_tasks=12), algorithm=RAE(RAEConfig(decay=0.9), pool)),
            make_env(pool, Fragile("b", num_tasks=3), algorithm=Reinforce(ReinforceConfig(decay=0.9), pool)),
        ]

    def part(latency_seed: int, max_steps: int, **settings: Any) -> Run:
        return play_part(latency_seed, envs=envs, max_steps=max_steps, batch_size=16, **settings)

    def baselines(run: Run) -> list[dict[str, Any]]:
        return [env.algorithm.state_dict() for env in run.envs]

    whole, first = part(1, 4), part(2, 2)
    await whole.play()
    await first.play()
    saved = first.orchestrator.snapshot(2)
    assert json.loads(saved)["algorithms"] == {"a": baselines(first)[0], "b": baselines(first)[1]}
    second = part(3, 4, start=2, data=saved)
    assert baselines(second) == baselines(first)
    await second.play()
    assert baselines(second) == baselines(whole) != baselines(first)
    assert set(baselines(whole)[0]["baselines"]) == {"even", "odd"}
    assert [encode(b) for b in first.batches + second.batches] == [encode(b) for b in whole.batches]


async def test_a_snapshot_of_a_step_is_the_same_however_late_it_is_taken():
    taken: list[bytes] = []

    def take_slowly(step: int) -> None:
        if step == 2:
            taken.append(run.orchestrator.snapshot(2))
            time.sleep(0.1)
            taken.append(run.orchestrator.snapshot(2))

    run = play_part(1, max_steps=3, batch_size=16, on_applied=take_slowly)
    await run.play()
    assert taken[0] == taken[1]
    assert decode_state(taken[0]).undecided == []


async def test_before_the_first_step_there_is_a_snapshot_to_start_again_from():
    run = play_part(1, max_steps=2, batch_size=16, failure_at=1)
    with pytest.raises(RuntimeError):
        await run.play()
    assert run.orchestrator.snapshot(0) == play_part(4).orchestrator.snapshot(0)
    again = play_part(2, data=run.orchestrator.snapshot(0), max_steps=2, batch_size=16)
    await again.play()
    whole = play_part(3, max_steps=2, batch_size=16)
    await whole.play()
    assert played(again) == played(whole)


async def test_in_asynchronous_mode_every_drawn_task_is_trained_once_or_has_a_ledger_line():
    taken: dict[int, bytes] = {}
    settings = {"async_level": 1, "batch_size": 16, "max_steps": 6, "step_s": 0.004, "max_inflight_groups": 6}

    def take(step: int) -> None:
        taken[step] = first.orchestrator.snapshot(step)

    first = play_part(1, on_applied=take, failure_at=4, **settings)
    with pytest.raises(RuntimeError, match="broke at step 4"):
        await first.play()
    state = decode_state(taken[3])
    assert state.undecided, "nothing was in flight: the test proves nothing"
    second = play_part(2, start=3, data=taken[3], **settings)
    await second.play()

    decided = Counter(
        (r.env_name, r.draw_index, r.member)
        for run, steps in ((first, range(1, 4)), (second, range(1, 8)))
        for step in steps
        for r in run.monitors.rollouts.get(step, [])
    )
    assert set(decided.values()) == {1}
    for env_name in ("a", "b"):
        draws = sorted({draw for name, draw, _ in decided if name == env_name})
        assert draws == list(range(len(draws)))
    metrics = second.monitors.steps[-1][1]
    assert metrics["ledger/dispatched"] == len(decided)
    assert metrics["ledger/pending"] == 0


def _stateful() -> Stateful:
    pool = ScriptedPool()
    envs = [make_env(pool, ToyEnv("a")), make_env(pool, ToyEnv("b"), algorithm=Reinforce(ReinforceConfig(decay=0.9), pool))]
    return Stateful(DrawSource(envs, seed=0), envs, Ledger(["zero_advantage"]), Batcher(tokens=50, tokens_per_group=99))


def test_a_restored_state_captures_to_the_same_bytes():
    first = _stateful()
    draws = [first.source.draw() for _ in range(5)]
    group = make_group([1.0, 0.0])
    opened = [OpenGroup(n, draws[n], None, group, group.rollouts, opened_at_s=0.0) for n in (4, 2)]
    first.envs[0].tasks.update(draws[0].spec if draws[0].env_name == "a" else {"id": "a-0"}, [1.0, None], [3.0, 4.0])
    first.envs[1].algorithm.baseline = 0.1 + 0.2
    first.batcher.add(KeptGroup(opened[0], group.rollouts))
    first.ledger.dispatch(2)
    first.ledger.decide(group.rollouts[0], "filtered/zero_advantage")
    data = first.capture(7, opened[1:])
    assert decode_state(data).undecided == [draws[2], draws[4]._replace(is_counted=True)], "the queued one was learnt from"
    second = _stateful()
    assert second.restore(data) == 7
    assert second.source.to_redraw == decode_state(data).undecided
    assert second.capture(7, []) == data


def test_what_is_held_has_the_same_bytes_later_whatever_happened_meanwhile():
    stateful = _stateful()
    draws = [stateful.source.draw() for _ in range(5)]
    group = make_group([1.0, 0.0])
    opened = [OpenGroup(n, draws[n]._replace(spec=dict(draws[n].spec)), None, group, group.rollouts, opened_at_s=0.0) for n in (4, 2)]
    stateful.ledger.dispatch(2)
    held, data = stateful.hold(7, opened), stateful.capture(7, opened)
    stateful.envs[0].tasks.update({"id": "a-0"}, [1.0, None], [3.0, 4.0])
    stateful.envs[1].algorithm.baseline = 0.5
    stateful.ledger.decide(group.rollouts[0], "filtered/zero_advantage")
    stateful.batcher.add(KeptGroup(opened[0], group.rollouts))
    stateful.source.draw()
    opened[0].draw.spec["question"] = "another"
    assert encoded(held) == data != stateful.capture(7, opened)


async def test_undecided_draws_are_played_again_first_with_their_own_draw_index():
    run = play_part(1, max_steps=1, batch_size=16)
    state = decode_state(run.orchestrator.snapshot())
    again = [Draw("b", {"id": "b-2", "question": "q2"}, 7), Draw("a", {"id": "a-0", "question": "q0"}, 9)]
    data = encode_state(RunState(**{**_fields(state), "undecided": again}))
    resumed = play_part(2, data=data, max_steps=1, batch_size=16)
    await resumed.play()
    drawn = list(dict.fromkeys((r.env_name, r.draw_index, r.task.id) for r in resumed.monitors.rollouts[1]))
    assert drawn[:2] == [("b", 7, "b-2"), ("a", 9, "a-0")]


def _fields(state: RunState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in RunState.__dataclass_fields__}


def test_a_state_of_another_run_is_refused():
    data = make_run().orchestrator.snapshot()
    with pytest.raises(CheckpointError, match=r"of another run: the state is of the environments \['toy'\].*resume with"):
        play_part(1).orchestrator.restore(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"format": 1}',
        b'{"format": 1, "undecided": [[1]]}',
        b'{"format": 1, "undecided": [], "x": 1}',
    ],
)
def test_damaged_bytes_are_refused(data):
    with pytest.raises(CheckpointError, match="cannot be read"):
        decode_state(data)


def test_another_format_is_refused():
    values = json.loads(make_run().orchestrator.snapshot())
    with pytest.raises(CheckpointError, match="format 2, expected 1"):
        decode_state(json.dumps(values | {"format": 2}).encode())


def test_a_snapshot_of_a_step_that_was_never_shipped_is_refused():
    run = make_run()
    with pytest.raises(CheckpointError, match=r"no snapshot of step 5, only of \[0\]"):
        run.orchestrator.snapshot(5)
