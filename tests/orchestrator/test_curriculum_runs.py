"""Task samplers that learn, in whole runs: what they are told, what a restart makes of it, what a broken task costs."""

import asyncio
import json
import math
import random
from collections import Counter
from typing import Any

import pytest

from jaxrl.config.filters import MinRewardFilterConfig, ZeroAdvantageFilterConfig
from jaxrl.orchestrator.checkpoint import decode_state
from jaxrl.orchestrator.draws import Draw
from jaxrl.tasks import CurriculumSampler, Pool, PoolsSampler, TaskSampler, UniformSampler
from jaxrl.tasks.gates import AdvantageRangeGate
from jaxrl.transport.codec import encode
from tests.fakes import ScriptedPool, ToyEnv
from tests.orchestrator.wiring import Run, make_env, make_run

GROUP_SIZE = 4
POOLS = [Pool("hard", 0.2, 0.5), Pool("medium", 0.8, 1.0), Pool("easy", math.inf, 0.1)]


class Tiers(ToyEnv):
    """Tasks of three tiers: one that is always solved, one now and then, one whose every rollout fails."""

    def __init__(self, name: str = "toy", *, num_tasks: int = 9, broken: int | None = 2) -> None:
        super().__init__(name, num_tasks=num_tasks)
        self.broken = broken
        self._tasks = [{**spec, "difficulty": index % 3} for index, spec in enumerate(self._tasks)]

    async def play(self, spec, session):
        outcome = await super().play(spec, session)
        if spec["difficulty"] == self.broken:
            raise ValueError("this task cannot be played")
        return type(outcome)(reward=1.0 if spec["difficulty"] == 0 else float(outcome.reward > 0.5))


SAMPLERS = {
    "curriculum": lambda tasks: CurriculumSampler(tasks, GROUP_SIZE, rng_seed=3),
    "ids": lambda tasks: CurriculumSampler(tasks, GROUP_SIZE, key="id", rng_seed=3),
    "pools": lambda tasks: PoolsSampler(tasks, POOLS, rng_seed=3),
}


def part(
    kind: str, latency_seed: int, *, start: int = 0, data: bytes | None = None, broken: int | None = 2, gates=(), **settings: Any
) -> Run:
    """Return a run of an environment whose sampler learns beside one that is shuffled; requests take random times."""
    generator = random.Random(latency_seed)
    pool = ScriptedPool(version=start, latency=lambda request: generator.random() * 0.003)

    def envs(pool):
        tiers = Tiers("tiers", broken=broken)
        return [
            make_env(pool, tiers, tasks=SAMPLERS[kind](tiers.tasks()), ratio=2.0, gates=gates),
            make_env(pool, ToyEnv("plain", num_tasks=3)),
        ]

    run = make_run(pool=pool, envs=envs, start_version=start, **({"batch_size": 16, "max_consecutive_failures": 999} | settings))
    if data is not None:
        run.orchestrator.restore(data)
    return run


def played(run: Run, up_to: int = 99) -> list[tuple]:
    return [
        (step, r.group_id, r.member, r.task.id, r.completion_text, r.reward, str(r.bucket), r.mean_advantage())
        for step, rollouts in sorted(run.monitors.rollouts.items())
        for r in rollouts
        if step <= up_to
    ]


SETTINGS = {
    "all at once": {},
    "few in flight, gated and filtered": {
        "max_inflight_groups": 2,
        "gates": [AdvantageRangeGate()],
        "pre_batch_filters": [MinRewardFilterConfig(threshold=0.1)],
    },
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", SAMPLERS)
async def test_n_plus_n_synchronous_steps_draw_what_two_n_draw(kind, name):
    settings = {"max_steps": 6, **SETTINGS[name]}
    whole = part(kind, 1, **settings)
    await whole.play()
    taken: dict[int, bytes] = {}
    first = part(kind, 2, on_applied=lambda step: taken.update({step: first.orchestrator.snapshot(step)}), failure_at=4, **settings)
    with pytest.raises(RuntimeError, match="broke at step 4"):
        await first.play()
    second = part(kind, 3, start=3, data=taken[3], **settings)
    await second.play()

    assert [encode(b) for b in first.batches + second.batches] == [encode(b) for b in whole.batches]
    assert played(first, 3) + played(second) == played(whole)
    rows = [{k: v for k, v in run.monitors.steps[-1][1].items() if k.startswith(("ledger/", "tasks/"))} for run in (second, whole)]
    assert rows[0] == rows[1]
    assert [env.tasks.state_dict() for env in second.envs] == [env.tasks.state_dict() for env in whole.envs]
    buckets = Counter(row[6] for row in played(whole))
    assert buckets["errored"] and (name == "all at once" or buckets["gated"])


class Diary:
    """A `TaskSampler` with a new task for each draw, that remembers what it was told."""

    def __init__(self) -> None:
        self.num_draws = 0
        self.told: list[str] = []

    def sample(self, n: int) -> list[dict[str, str]]:
        self.num_draws += n
        return [{"id": f"t{index}", "question": f"q{index}"} for index in range(self.num_draws - n, self.num_draws)]

    def __iter__(self):
        return self

    def __next__(self):
        return self.sample(1)[0]

    def update(self, task, rewards, costs=None) -> None:
        self.told.append(task["id"])

    def state_dict(self) -> dict[str, Any]:
        return {"num_draws": self.num_draws, "told": list(self.told)}

    def load_state_dict(self, state) -> None:
        self.num_draws, self.told = state["num_draws"], list(state["told"])

    def metrics(self) -> dict[str, float]:
        return {"groups": float(len(self.told))}


async def test_in_an_asynchronous_run_a_task_is_learnt_from_once_although_it_is_played_again_after_a_restart():
    assert isinstance(Diary(), TaskSampler)
    taken: dict[int, bytes] = {}

    def one(seed: int, start: int = 0, **settings) -> Run:
        generator = random.Random(seed)
        pool = ScriptedPool(version=start, latency=lambda request: generator.random() * 0.003)
        return make_run(
            pool=pool,
            envs=lambda pool: [make_env(pool, ToyEnv(), tasks=Diary())],
            **{"start_version": start, "async_level": 1, "max_steps": 8, "max_inflight_groups": 6, "step_s": 0.02} | settings,
        )

    first = one(1, on_applied=lambda step: taken.update({step: first.orchestrator.snapshot(step)}), failure_at=5)
    with pytest.raises(RuntimeError, match="broke at step 5"):
        await first.play()
    again = decode_state(taken[4]).undecided
    queued = [draw.spec["id"] for draw in again if draw.is_counted]
    told = json.loads(taken[4])["source"]["envs"]["toy"]["tasks"]["told"]
    assert queued and set(queued) <= set(told), "nothing was queued: the test proves nothing"
    assert {draw.spec["id"] for draw in again if not draw.is_counted}.isdisjoint(told)

    second = one(2, start=4)
    second.orchestrator.restore(taken[4])
    await second.play()
    written = [r for run, steps in ((first, range(1, 5)), (second, range(1, 10))) for s in steps for r in run.monitors.rollouts.get(s, [])]
    ends = Counter((r.task.id, r.member) for r in written)
    assert set(ends.values()) == {1}, "each drawn task is trained once or has one line in the ledger"
    counts = Counter(second.envs[0].tasks.told)
    trained = {r.task.id for r in written if r.bucket == "trained"}
    assert set(counts.values()) == {1} and trained <= set(counts) and set(queued) <= trained
    dropped = {r.task.id for r in written if r.bucket in ("stale", "cancelled")}
    assert set(counts) - trained <= dropped


@pytest.mark.parametrize("kind", SAMPLERS)
async def test_in_an_asynchronous_run_every_draw_of_a_sampler_that_learns_is_trained_once_or_has_a_ledger_line(kind):
    taken: dict[int, bytes] = {}
    settings = {"async_level": 1, "max_steps": 6, "step_s": 0.01, "max_inflight_groups": 6, "gates": [AdvantageRangeGate()]}
    first = part(kind, 1, on_applied=lambda step: taken.update({step: first.orchestrator.snapshot(step)}), failure_at=4, **settings)
    with pytest.raises(RuntimeError, match="broke at step 4"):
        await first.play()
    state = decode_state(taken[3])
    assert state.undecided, "nothing was in flight: the test proves nothing"
    second = part(kind, 2, start=3, data=taken[3], **settings)
    assert [env.tasks.state_dict() for env in second.envs] == [state.source["envs"][env.name]["tasks"] for env in second.envs]
    await second.play()
    ends = Counter(
        (r.env_name, r.draw_index, r.member)
        for run, steps in ((first, range(1, 4)), (second, range(1, 8)))
        for step in steps
        for r in run.monitors.rollouts.get(step, [])
    )
    assert set(ends.values()) == {1}
    for env_name in ("tiers", "plain"):
        draws = sorted({draw for name, draw, _ in ends if name == env_name})
        assert draws == list(range(len(draws)))
    row = second.monitors.steps[-1][1]
    assert row["ledger/dispatched"] == len(ends) and row["ledger/pending"] == 0 and row["ledger/gated"] > 0


async def test_a_draw_that_was_learnt_from_stays_so_over_two_restarts():
    run = make_run(envs=lambda pool: [make_env(pool, ToyEnv(), tasks=Diary())], max_steps=1)
    values = json.loads(run.orchestrator.snapshot())
    values["undecided"] = [["toy", {"id": "t9", "question": "q"}, 9, True], ["toy", {"id": "t8", "question": "q"}, 8]]
    values["source"]["envs"]["toy"]["tasks"] = {"num_draws": 10, "told": ["t9"]}
    data = json.dumps(values).encode()
    run.orchestrator.restore(data)
    assert [draw.is_counted for draw in decode_state(run.orchestrator.snapshot()).undecided] == [True, False]
    await run.play()
    assert run.envs[0].tasks.told == ["t9", "t8"]
    assert {r.task.id for r in run.monitors.rollouts[1] if r.bucket == "trained"} == {"t8", "t9"}


@pytest.mark.parametrize("slot", ["pre_batch_filters", "post_batch_filters"])
async def test_filters_downstream_change_nothing_that_a_sampler_knows(slot):
    """The same groups: where filters before the batch have groups replaced, further groups come after them."""

    async def state_after(filters):
        environment = Tiers(broken=None)
        told = []
        sampler = UniformSampler(environment.tasks(), rng_seed=1)
        run = make_run(envs=lambda pool: [make_env(pool, environment, tasks=sampler)], max_steps=3, **{slot: filters})
        update = sampler.update
        sampler.update = lambda *group: (told.append(group), update(*group))
        await run.play()
        return told, sampler.state_dict()

    plain, state = await state_after([])
    filtered, other = await state_after([ZeroAdvantageFilterConfig(), MinRewardFilterConfig(threshold=0.1)])
    assert len(plain) == 6
    if slot == "post_batch_filters":
        assert filtered == plain and other == state
    else:
        assert len(filtered) > 6 and filtered[:2] == plain[:2]


async def test_a_group_that_failed_whole_is_counted_and_moves_no_estimate():
    environment = Tiers()
    sampler = CurriculumSampler(environment.tasks(), GROUP_SIZE)
    run = make_run(envs=lambda pool: [make_env(pool, environment, tasks=sampler)], max_steps=4, max_consecutive_failures=999)
    await run.play()
    row = run.monitors.steps[-1][1]
    failed = {r.group_id for rollouts in run.monitors.rollouts.values() for r in rollouts if r.bucket == "errored"}
    assert row["tasks/toy/unscored_groups"] == len(failed) > 0
    assert row["tasks/toy/missing_rewards"] == 4 * len(failed) == row["tasks/toy/key/2/episodes"]
    assert (row["tasks/toy/key/2/p_hat"], row["tasks/toy/key/2/signal"]) == (0.5, 0.875), "as if it had never been played"
    assert row["tasks/toy/key/0/p_hat"] > 0.8


@pytest.mark.parametrize("kind", ["ids", "pools"])
async def test_one_broken_task_of_five_does_not_take_over_the_draws(kind):
    """As in prime-rl#3261: what never gets a score must not stay unseen, and so attractive, for ever."""

    class OneBroken(ToyEnv):
        async def play(self, spec, session):
            if spec["id"] == "toy-2":
                raise ValueError("this task cannot be played")
            return await super().play(spec, session)

    environment = OneBroken(num_tasks=5)
    sampler = SAMPLERS[kind](environment.tasks())
    run = make_run(
        envs=lambda pool: [make_env(pool, environment, tasks=sampler)], max_steps=40, max_consecutive_failures=999, max_empty_batches=999
    )
    await run.play()
    drawn = Counter(r.task.id for rollouts in run.monitors.rollouts.values() for r in rollouts if r.member == 0)
    late = Counter(r.task.id for step in range(31, 41) for r in run.monitors.rollouts[step] if r.member == 0)
    assert len(drawn) == 5 and drawn["toy-2"] > 0
    assert late["toy-2"] < sum(late.values()) / 5, (late, "in the end it is drawn less than any other")
    assert run.monitors.steps[-1][1]["tasks/toy/unscored_groups"] == drawn["toy-2"]


async def test_a_group_that_is_stale_before_it_is_committed_is_no_result_of_its_task():
    diary = Diary()

    class Slow(ToyEnv):
        async def play(self, spec, session):
            outcome = await super().play(spec, session)
            if spec["id"] == "t0":
                while run.pool.version < 3:
                    await asyncio.sleep(0.001)
            return outcome

    run = make_run(envs=lambda pool: [make_env(pool, Slow(), tasks=diary)], max_steps=5, async_level=1, max_staleness_steps=1, step_s=0.005)
    await run.play()
    ends = {r.task.id: str(r.bucket) for rollouts in run.monitors.rollouts.values() for r in rollouts}
    assert ends["t0"] == "stale" and "t0" not in diary.told
    assert {task for task, end in ends.items() if end == "trained"} <= set(diary.told)


async def test_a_group_that_finished_in_time_and_is_committed_too_late_is_no_result_of_its_task_either():
    diary = Diary()
    run = make_run(envs=lambda pool: [make_env(pool, ToyEnv(), tasks=diary)], max_steps=9, async_level=1, max_staleness_steps=1)
    orchestrator = run.orchestrator
    async with asyncio.TaskGroup() as tasks:
        opened = orchestrator._dispatcher.open(0, tasks)
    assert orchestrator._sink.finished.popleft() is opened and opened.oldest_version == 0
    orchestrator._step = 3  # the main loop was held up meanwhile, as by a batch that is shipped
    orchestrator._commit(opened)
    assert {str(r.bucket) for r in opened.members} == {"stale"} and not diary.told and not orchestrator._dispatcher.in_flight


async def test_tasks_that_an_environment_empties_as_it_plays_are_learnt_from_and_saved_as_they_were_drawn():
    class Careless(ToyEnv):
        async def play(self, spec, session):
            outcome = await super().play(spec, session)
            spec.clear()
            return outcome

    world = Careless()
    # Without an `id`, a task is known by its content; one of them holds what UTF-8 has no bytes for.
    world._tasks = [{"question": f"q{i}", "halves": "\ud83d"} for i in range(3)]
    tasks = CurriculumSampler(world.tasks(), GROUP_SIZE, key="id")
    run = make_run(envs=lambda pool: [make_env(pool, world, tasks=tasks)], async_level=1)
    await run.play()
    assert tasks.metrics()["groups"] >= 6 and world.tasks()[0] == {"question": "q0", "halves": "\ud83d"}
    state = decode_state(run.orchestrator.snapshot())
    assert all(draw.spec in world.tasks() for draw in state.undecided)
    again = make_run(envs=lambda pool: [make_env(pool, world)], start_version=3)
    source = again.orchestrator._stateful.source
    source._again.append(Draw("toy", world.tasks()[0], 0))
    assert decode_state(again.orchestrator._stateful.capture(3, [])).undecided[0].spec == world.tasks()[0]
