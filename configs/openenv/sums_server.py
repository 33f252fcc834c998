"""An OpenEnv server of sums in tiers of difficulty, made of `reasoning_gym`'s `chain_sum`: something to train and to be measured on.

It needs the package `openenv`, which belongs into an environment of its own, apart from jaxrl's:

    python3 -m venv .venv-openenv && .venv-openenv/bin/pip install openenv==0.10.0 reasoning-gym==0.1.25
    .venv-openenv/bin/python -m uvicorn sums_server:app --app-dir configs/openenv --port 8765 --log-level warning

A task is a split and an index, and a seed makes other sums of the same tier; train and test never share a seed of the dataset. The reward
is 1 for exactly the answer and else 0: the dataset's own scorer gives part of it to wrong numbers that hold the digits of the right one.
`SUMS_SESSIONS` says how many sessions there may be at the same time.
"""

import os
from typing import Any
from uuid import uuid4

import reasoning_gym
from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

TIERS = [(3, 1), (4, 1)]
"""Terms of a sum, and digits of a term: the quickstart's start model solves some of each. An index counts the tiers first."""
PER_TIER = {"train": 4_000, "test": 100}
FIRST_SEED = {"train": 0, "test": 500_000_000}
SEEDS_APART = 100_000
"""More than a split has tasks: what different `seed`s make differs."""
SPEND = 0.001
"""What an episode costs, in money that nobody pays."""


class SumAction(Action):
    """An answer."""

    answer: str = Field(max_length=10_000)


class SumObservation(Observation):
    """A question, and nothing after the answer."""

    question: str | None = None


class Sums(Environment):
    """One sum, one answer."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id=str(uuid4()), step_count=0)
        self._answer: str | None = None

    def list_splits(self) -> list[str]:
        """Return the splits."""
        return list(PER_TIER)

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has."""
        return len(TIERS) * PER_TIER[split]

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return one task."""
        if not 0 <= index < self.num_tasks(split):
            raise IndexError(index)
        tier = index % len(TIERS)
        return {"id": f"{split}-{index}", "split": split, "index": index, "group": "chain_sum", "difficulty": tier}

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """Return some tasks, as a slice would."""
        return [self.get_task(split, index) for index in range(*slice(start, stop).indices(self.num_tasks(split)))]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the first few tasks: a preview."""
        return self.get_task_range(split, 0, 10)

    def reset(
        self, split: str = "train", index: int = 0, seed: int | None = None, episode_id: str | None = None, **more: Any
    ) -> SumObservation:
        """Ask the sum of a task."""
        del more
        num_terms, num_digits = TIERS[self.get_task(split, index)["difficulty"]]
        sums = reasoning_gym.create_dataset(
            "chain_sum",
            size=1,
            seed=FIRST_SEED[split] + index + SEEDS_APART * (seed or 0),
            min_terms=num_terms,
            max_terms=num_terms,
            min_digits=num_digits,
            max_digits=num_digits,
        )
        self._answer = sums[0]["answer"]
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return SumObservation(question=sums[0]["question"], done=False, reward=None)

    def step(self, action: SumAction, timeout_s: float | None = None, **more: Any) -> SumObservation:
        """Score an answer."""
        del timeout_s, more
        if self._answer is None:
            raise RuntimeError("step before reset")
        self._state.step_count += 1
        reward = float(action.answer.strip() == self._answer)
        return SumObservation(reward=reward, done=True, metadata={"service_spend": SPEND})

    @property
    def state(self) -> State:
        """Where the episode is."""
        return self._state


app = create_app(Sums, SumAction, SumObservation, env_name="sums", max_concurrent_envs=int(os.environ.get("SUMS_SESSIONS", "128")))
