"""What is said that training had taken by a version: as much as when its step was shipped, however far generation is ahead since."""

from __future__ import annotations

from typing import Any

import pytest

from jaxrl.orchestrator.spending import Spending
from jaxrl.tasks import SequentialSampler
from tests.fakes import ScriptedPool, ToyEnv
from tests.orchestrator.wiring import make_env, make_run


class Silent(SequentialSampler):
    """A sampler that reports nothing of what it is told."""

    def metrics(self) -> dict[str, float]:
        return {}


def env(name: str, sampler: type[SequentialSampler] = SequentialSampler, **settings: Any) -> Any:
    world = ToyEnv(name)
    return make_env(ScriptedPool(), world, tasks=sampler(world.tasks()), **settings)


def tell(env: Any, costs: list[float]) -> None:
    env.tasks.update(env.tasks.sample(1)[0], [0.0] * len(costs), costs)


def test_totals_are_over_all_environments_and_those_of_a_step_stay() -> None:
    first, second = env("a"), env("b")
    spending = Spending([first, second])
    assert spending.at(0) == {"training_episodes": 0, "training_cost": 0}
    tell(first, [1.0, 2.0])
    tell(second, [4.0])
    spending.note(1)
    tell(first, [8.0])
    spending.note(2)
    tell(first, [16.0])
    assert spending.at(1) == {"training_episodes": 3, "training_cost": 7}
    assert spending.at(2) == {"training_episodes": 4, "training_cost": 15}


@pytest.mark.parametrize("second", [env("b", cost="service_spend"), env("b", Silent)], ids=["another unit", "a silent sampler"])
def test_costs_that_cannot_be_added_up_are_left_out(second: Any) -> None:
    first = env("a")
    spending = Spending([first, second])
    tell(first, [1.0])
    assert spending.at(0) == {"training_episodes": 1}


async def test_a_version_that_is_measured_late_is_told_what_its_own_step_had_taken() -> None:
    told: dict[int, dict[str, float]] = {}

    async def evaluate(step: int, version: int) -> None:
        told[version] = run.orchestrator.spent_by(version)

    run = make_run(max_steps=4, async_level=1, evaluate=evaluate, eval={"every_n_steps": 1}, step_s=0.05)
    await run.play()
    rows = {step: (row["tasks/toy/episodes"], row["tasks/toy/cost"]) for step, row in run.monitors.steps}
    assert told.pop(0) == {"training_episodes": 0, "training_cost": 0}
    assert 4 in told and all((spent["training_episodes"], spent["training_cost"]) == rows[version] for version, spent in told.items())
