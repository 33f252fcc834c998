"""The orchestrator's part of a checkpoint: what it holds, and its JSON bytes.

In and out: a `RunState`, everything that makes the next draws, tasks and credit what they would have been. Whoever
commits checkpoints stores the bytes with the other parts; nothing here touches a file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.errors import CheckpointError, RunFailedError
from jaxrl.monitors.ledger import Ledger
from jaxrl.orchestrator.batcher import Batcher
from jaxrl.orchestrator.draws import Draw, DrawSource
from jaxrl.orchestrator.groups import OpenGroup
from jaxrl.orchestrator.sampler import TrainEnv
from jaxrl.orchestrator.tasking import check_state_is_json

FORMAT = 1


@dataclass(frozen=True, slots=True)
class RunState:
    """The orchestrator as it was when the batch of `step` was shipped: batches up to `step` count as trained."""

    step: int
    source: dict[str, Any]
    """State of the draws and of every task sampler."""
    algorithms: dict[str, dict[str, Any]]
    """State of each environment's algorithm."""
    ledger: dict[str, Any]
    """Decided counts."""
    batcher: dict[str, Any]
    """What the batcher remembers between steps."""
    undecided: list[Draw]
    """Drawn and not trained: in flight, queued, or still to be drawn again; in draw order. Played anew after a
    restart; the task samplers, whose state has the queued ones in it, do not learn from those a second time."""


def encode_state(state: RunState) -> bytes:
    """Return the state as JSON bytes."""
    values = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    # A task may hold half a surrogate pair, which UTF-8 has no bytes for; `json.loads` takes these.
    return json.dumps({"format": FORMAT, **values}, ensure_ascii=False, allow_nan=False).encode(errors="surrogatepass")


def decode_state(data: bytes) -> RunState:
    """Return the state that `encode_state` wrote.

    Raises:
      CheckpointError: the bytes are not such a state, or of another format.
    """
    try:
        values = json.loads(data)
        found = values.pop("format")
        values["undecided"] = [Draw(*entry) for entry in values["undecided"]]
        state = RunState(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the orchestrator's part of the checkpoint cannot be read ({type(error).__name__}: {error}); resume from another one"
        ) from error
    if found != FORMAT:
        raise CheckpointError(f"the orchestrator's part of the checkpoint has format {found!r}, expected {FORMAT}")
    return state


def encoded(state: RunState) -> bytes:
    """Return the state as JSON bytes; reads nothing but the state, so any thread may ask.

    Raises:
      RunFailedError: something in it is no JSON value; says what.
    """
    try:
        return encode_state(state)
    except (TypeError, ValueError) as error:
        for env_name, of_env in state.source["envs"].items():
            check_state_is_json(env_name, of_env["tasks"])
        raise _no_json(state.step, error) from error


def _no_json(step: int, error: Exception) -> RunFailedError:
    return RunFailedError(
        f"step {step}: a checkpoint cannot hold the state of the run ({error}); tasks, and what an algorithm remembers, must be JSON values"
    )


@dataclass(frozen=True, slots=True)
class Stateful:
    """The parts of an orchestrator that a checkpoint speaks of."""

    source: DrawSource
    envs: Sequence[TrainEnv]
    ledger: Ledger
    batcher: Batcher

    def hold(self, step: int, in_flight: Iterable[OpenGroup]) -> RunState:
        """Return the present state as that of `step`; groups in flight and in the queue are to be played again.

        Nothing that happens later changes it, so its bytes, which may be many, can be made if and when they are needed: a sampler's state
        is a copy by its contract, all else is copied here.

        Raises:
          RunFailedError: a task sampler failed, or something other than a sampler's state is no JSON value.
        """
        held = [(opened.order, opened.draw) for opened in in_flight]
        held += [(kept.source.order, kept.source.draw._replace(is_counted=True)) for kept in self.batcher.waiting]
        small = {
            "algorithms": {env.name: env.algorithm.state_dict() for env in self.envs},
            "ledger": self.ledger.state_dict(),
            "batcher": self.batcher.state_dict(),
            "undecided": [draw for _, draw in sorted(held, key=lambda entry: entry[0])] + self.source.to_redraw,
        }
        try:
            copied = json.loads(json.dumps(small, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise _no_json(step, error) from error
        copied["undecided"] = [Draw(*entry) for entry in copied["undecided"]]
        return RunState(step=step, source=self.source.state_dict(), **copied)

    def capture(self, step: int, in_flight: Iterable[OpenGroup]) -> bytes:
        """Return the bytes of what `hold` returns.

        Raises:
          RunFailedError: a task sampler failed, or something that is to be kept is no JSON value.
        """
        return encoded(self.hold(step, in_flight))

    def restore(self, data: bytes) -> int:
        """Take on a captured state and return its step.

        Raises:
          CheckpointError: the bytes are no state, or one of another run.
        """
        state = decode_state(data)
        try:
            self.source.load_state_dict(state.source, state.undecided)
            for env in self.envs:
                env.algorithm.load_state_dict(state.algorithms[env.name])
            self.ledger.load_state_dict(state.ledger)
            self.batcher.load_state_dict(state.batcher)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint of step {state.step} is of another run: {error}; resume with the environments, tasks and seed that it was "
                "made with, or start a new run"
            ) from error
        return state.step
