import asyncio

from jaxrl.monitors.ledger import Ledger
from jaxrl.orchestrator.algo import GRPO
from jaxrl.orchestrator.draws import Draw
from jaxrl.orchestrator.groups import OpenGroup
from jaxrl.orchestrator.metrics import StepTally
from jaxrl.orchestrator.sink import MAX_SCORING_HOOKS, Sink
from jaxrl.types import Boundary, Group
from tests.builders import make_group, make_rollout
from tests.fakes import ScriptedPool, ToyEnv
from tests.orchestrator.wiring import make_env


def _sink(**settings) -> Sink:
    defaults = {"is_ordered": False, "pre_batch_filters": [], "max_consecutive_failures": 9, "on_change": lambda: None}
    return Sink(Ledger(), StepTally(), **(defaults | settings))


def _opened(env, size: int, order: int = 0) -> OpenGroup:
    """Return a group of which nothing has arrived, with rollouts that were played."""
    played = make_group([float(member % 2) for member in range(size)], env_name=env.name, draw_index=order)
    waiting = Group(played.id, played.task, order, size=size, version=0)
    return OpenGroup(order, Draw(env.name, played.task.spec, order), env, waiting, played.rollouts, opened_at_s=0.0)


async def test_a_stuck_teacher_of_one_environment_holds_up_no_other():
    class Stuck(GRPO):
        async def score_rollout(self, rollout):
            await asyncio.sleep(60)

    pool, sink = ScriptedPool(), _sink()
    stuck = _opened(make_env(pool, ToyEnv("stuck"), algorithm=Stuck(None, pool)), MAX_SCORING_HOOKS + 5)
    free = _opened(make_env(pool, ToyEnv("free")), 2, order=1)
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(sink.add(stuck, rollout)) for rollout in stuck.members]
        await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            await asyncio.gather(*(sink.add(free, rollout) for rollout in free.members))
        for task in waiting:
            task.cancel()
    assert list(sink.finished) == [free]


async def test_waiting_for_a_place_among_the_hooks_is_not_charged_to_the_hook():
    class Slow(GRPO):
        async def score_rollout(self, rollout):
            await asyncio.sleep(0.3)

    pool, sink = ScriptedPool(), _sink()
    opened = _opened(make_env(pool, algorithm=Slow(None, pool), rollout_deadline_s=0.5), MAX_SCORING_HOOKS + 1)
    await asyncio.gather(*(sink.add(opened, rollout) for rollout in opened.members))
    assert [r.failure for r in opened.members] == [None] * (MAX_SCORING_HOOKS + 1)


async def test_members_arrive_in_any_order_and_stand_in_member_order_when_they_are_credited():
    pool, sink = ScriptedPool(), _sink()
    opened = _opened(make_env(pool), 4)
    for member in (2, 0, 3, 1):
        await sink.add(opened, opened.members[member])
    assert [r.member for r in opened.group] == [0, 1, 2, 3]
    assert [r.mean_advantage() for r in opened.group] == [-0.5, 0.5, -0.5, 0.5]
    assert list(sink.finished) == [opened]


async def test_in_draw_order_a_group_is_credited_after_the_one_before_it_or_when_that_is_dropped():
    pool, sink = ScriptedPool(), _sink(is_ordered=True)
    env = make_env(pool)
    first, second, third = (_opened(env, 2, order) for order in range(3))
    for opened in (first, second, third):
        sink.expect(opened)
    async with asyncio.TaskGroup() as tasks:
        for opened in (third, second):
            for rollout in opened.members:
                tasks.create_task(sink.add(opened, rollout))
        await asyncio.sleep(0.01)
        assert not sink.finished
        first.is_dropped = True
        first.finished.set()
    assert list(sink.finished) == [second, third]


async def test_a_missing_sampling_logprob_is_a_failure_of_the_policy():
    pool, sink = ScriptedPool(), _sink()
    opened = _opened(make_env(pool), 1)
    opened.members[0] = rollout = make_rollout(1.0, with_samples=False)
    rollout.nodes[-1].logprobs = None
    await sink.add(opened, rollout)
    assert (rollout.failure.boundary, rollout.failure.type, rollout.reward) == (Boundary.POLICY, "SampleError", None)


async def test_the_task_sampler_learns_rewards_and_costs_of_a_group_before_any_filter():
    seen = []
    pool, sink = ScriptedPool(), _sink()
    env = make_env(pool)
    env.tasks.update = lambda spec, rewards, costs: seen.append((spec, rewards, costs))
    opened = _opened(env, 3)
    opened.members[1].reward = None
    sink._ledger.dispatch(3)
    for rollout in opened.members:
        await sink.add(opened, rollout)
    kept = sink.commit(opened)
    assert seen == [({"id": "task-0"}, [0.0, None, 0.0], [3.0, 3.0, 3.0])]
    assert [r.member for r in kept.rollouts] == [0, 2]
    assert [r.bucket for r in opened.members] == ["pending", "unscored", "pending"]
