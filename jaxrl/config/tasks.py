"""How an environment's next task is picked, what a rollout costs, and which groups are let into a batch.

One class per task sampler, told apart by `type`. What a sampler needs of the tasks themselves (that they have a difficulty,
say) is checked where it is built (`tasks.build`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from jaxrl.config.base import IMPORT_PATH, Section


class AdvantageRangeGateConfig(Section):
    """Turns a group away if all that it would be trained for are advantages within a range; 0 to 0 is a group without a signal."""

    type: Literal["advantage_range"] = "advantage_range"
    """Which gate: `advantage_range`, `reward_range` or `python`."""
    low: float = 0.0
    """Lower end of the range, which belongs to it."""
    high: float = 0.0
    """Upper end of the range, which belongs to it."""

    @model_validator(mode="after")
    def _is_a_range(self) -> AdvantageRangeGateConfig:
        if self.low > self.high:
            raise ValueError(f"`low`={self.low:g} exceeds `high`={self.high:g}")
        return self


class RewardRangeGateConfig(Section):
    """Lets in a group whose mean reward is within a range."""

    type: Literal["reward_range"] = "reward_range"
    """Which gate: `advantage_range`, `reward_range` or `python`."""
    low: float
    """Least mean reward."""
    high: float
    """Largest mean reward."""

    @model_validator(mode="after")
    def _is_a_range(self) -> RewardRangeGateConfig:
        if self.low > self.high:
            raise ValueError(f"`low`={self.low:g} exceeds `high`={self.high:g}")
        return self


class PythonGateConfig(Section):
    """A function of yours, `gate(rollouts, **kwargs) -> bool`, which sees the scored rollouts of a group."""

    type: Literal["python"] = "python"
    """Which gate: `advantage_range`, `reward_range` or `python`."""
    name: str = Field(pattern=r"^[A-Za-z0-9_\-]+$")
    """Its name in metrics."""
    import_path: str = Field(pattern=IMPORT_PATH)
    """`package.module:function`; refused if `run.allow_import_paths` is false."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments of each call."""


GateConfig = Annotated[AdvantageRangeGateConfig | RewardRangeGateConfig | PythonGateConfig, Field(discriminator="type")]


def gate_name(config: AdvantageRangeGateConfig | RewardRangeGateConfig | PythonGateConfig) -> str:
    """Return what a gate is called in metrics: the name of a function of yours, else its type."""
    return config.name if isinstance(config, PythonGateConfig) else config.type


class TasksBase(Section):
    """What every task sampler has."""

    cost: str = Field(default="completion_tokens", min_length=1)
    """What a rollout costs in `tasks/<env>/cost`: `completion_tokens` counts sampled tokens, any other word is a number that the
    environment reports with each rollout, such as `service_spend`. Costs are counted and never weigh a task."""
    gates: list[GateConfig] = []
    """What a group must pass to get into a batch; all of them are asked, and one that is turned away is replaced."""

    @model_validator(mode="after")
    def _gates_have_names_of_their_own(self) -> Self:
        names = [gate_name(gate) for gate in self.gates]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two of `gates` are called {twice[0]!r}; keep one of them, or give a function of yours another `name`")
        return self


class SequentialTasksConfig(TasksBase):
    """Tasks in the order that the environment lists them, from the start again when they are used up."""

    type: Literal["sequential"] = "sequential"
    """Which task sampler: `uniform`, `sequential`, `curriculum`, `pools` or `python`."""


class UniformTasksConfig(TasksBase):
    """Every task once per epoch, each epoch in an order of its own."""

    type: Literal["uniform"] = "uniform"
    """Which task sampler: `uniform`, `sequential`, `curriculum`, `pools` or `python`."""


class CurriculumTasksConfig(TasksBase):
    """More of the tasks whose groups are likely to carry a signal, told from how often their kind was solved lately."""

    type: Literal["curriculum"] = "curriculum"
    """Which task sampler: `uniform`, `sequential`, `curriculum`, `pools` or `python`."""
    key: Literal["difficulty", "group", "id"] = "difficulty"
    """Which tasks are of one kind: those that share this key. A list without it falls back to `group`, then to `id`."""
    gamma: float = Field(default=0.9, gt=0, le=1)
    """What an earlier group still counts after each later one of its kind."""
    eps: float = Field(default=0.05, ge=0)
    """Added to every kind's weight, so that none is given up."""
    signal: Literal["beta", "variance"] = "beta"
    """What a kind's weight is made of: `beta` is the probability that a group has both successes and failures, by the rate of success;
    `variance` is the share of its groups whose rewards differed, for graded rewards."""
    signal_tolerance: float = Field(default=0.0, ge=0)
    """Rewards of a group that differ by no more than this are equal, for `signal`='variance'."""

    @model_validator(mode="after")
    def _tolerance_has_a_use(self) -> CurriculumTasksConfig:
        if self.signal_tolerance and self.signal != "variance":
            raise ValueError("`signal_tolerance` is for `signal`='variance'; leave it out")
        return self


class PoolConfig(Section):
    """One pool of tasks, by what their last group was worth."""

    name: str = Field(pattern=r"^[A-Za-z0-9_\-]+$")
    """Its name in metrics."""
    max_score: float | None = None
    """Tasks whose last group had a mean reward of at most this, and that no earlier pool takes; null takes all that are left."""
    weight: float = Field(ge=0)
    """Share of the draws, relative to the other pools that have tasks."""


class PoolsTasksConfig(TasksBase):
    """Tasks sorted into pools by the mean reward of their last group, each pool with a share of the draws."""

    type: Literal["pools"] = "pools"
    """Which task sampler: `uniform`, `sequential`, `curriculum`, `pools` or `python`."""
    pools: list[PoolConfig] = [
        PoolConfig(name="hard", max_score=0.2, weight=0.5),
        PoolConfig(name="medium", max_score=0.8, weight=1.0),
        PoolConfig(name="easy", weight=0.1),
    ]
    """In ascending order of `max_score`; the last one takes all that are left."""
    unseen_weight: float = Field(default=1.0, gt=0)
    """Share of the draws for tasks that have no score yet."""
    failing_weight: float = Field(default=0.05, ge=0)
    """Share of the draws for tasks whose last three groups or more had no reward at all; 0 gives them up."""

    @model_validator(mode="after")
    def _pools_are_ordered(self) -> PoolsTasksConfig:
        names = [pool.name for pool in self.pools]
        if not names or len(set(names)) < len(names) or {"unseen", "failing"} & set(names):
            raise ValueError(f"`pools` needs at least one pool, each with a name of its own, none 'unseen' or 'failing'; got {names}")
        scores = [pool.max_score for pool in self.pools[:-1]]
        if self.pools[-1].max_score is not None or None in scores:
            raise ValueError("the last of `pools`, and no other, takes all that are left: give it no `max_score`")
        known = [score for score in scores if score is not None]
        if any(low >= high for low, high in pairwise(known)):
            raise ValueError(f"the `max_score` of `pools` must ascend, got {known}")
        if not any(pool.weight for pool in self.pools):
            raise ValueError(
                "every one of `pools` has `weight`=0, so that nothing would be drawn once each task was played; give one a share"
            )
        return self


class PythonTasksConfig(TasksBase):
    """A sampler of your own: a class or function that is called with the tasks and returns a `jaxrl.tasks.TaskSampler`."""

    type: Literal["python"] = "python"
    """Which task sampler: `uniform`, `sequential`, `curriculum`, `pools` or `python`."""
    import_path: str = Field(pattern=IMPORT_PATH)
    """`package.module:name`; refused if `run.allow_import_paths` is false. Called as `name(tasks, rng_seed=..., **kwargs)`, and with
    `group_size` and `success_threshold` if it takes them."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments of the call."""


TasksConfig = Annotated[
    SequentialTasksConfig | UniformTasksConfig | CurriculumTasksConfig | PoolsTasksConfig | PythonTasksConfig,
    Field(discriminator="type"),
]
