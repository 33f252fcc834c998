"""When to measure, in a training loop of anybody's: every so many steps, and the policy that comes out in the end.

In: a harness, what to play, and the number of each step that was done. Out: results, handed to a function of the caller's with the
number of the step and what training had cost until then. It needs no trainer, no configuration file and no event loop; within a
run of ours the orchestrator's watcher says when (`orchestrator.rules.is_eval_due`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import operator
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol, TypeVar

from jaxrl.config.evals import EvalConfig
from jaxrl.evals.result import EvalResult

logger = logging.getLogger(__name__)

T = TypeVar("T")

OnResult = Callable[..., Any]
"""(step, result) or (step, result, counters), a plain function or a coroutine function; what it returns is not used."""
Counters = Callable[[], Mapping[str, float]]
"""What training has taken so far, such as a task sampler's `metrics`, which has `episodes` and `cost`."""


class Harness(Protocol):
    """Whoever measures; `EnvEvalHarness` does."""

    async def run(self, config: EvalConfig, *, step: int = 0, resume: bool = True) -> EvalResult:
        """Play the evaluation and score it."""
        ...


class EvalSchedule:
    """Measures a policy while it is trained.

    Args:
      harness: who measures. One with an `output_dir` keeps there the files of the newest evaluation, and earlier ones as `.bak1` and so on.
      config: what is played, the same each time, so that any two results can be compared.
      every_n_steps: measure after each n-th step, at least 1.
      on_result: told of each result: `(step, result)` or, if it needs a third argument, `(step, result, counters)`.
      run_at_start: also measure the policy before the first step, at step 0.
      on_error: `raise` lets what the harness raises end the loop; `log` logs it and goes on, and the step counts as not measured. What
        `on_result` raises always goes to the caller.
      counters: read just before each measurement and given to `on_result`, so that curves can be drawn per episode and per cost.

    Raises:
      ValueError: `every_n_steps` is less than 1, or `on_error` is another word.

    Example:
      >>> class Always:
      ...     async def run(self, config, *, step=0, resume=True):
      ...         return f"measured at {step}"
      >>> seen = []
      >>> schedule = EvalSchedule(
      ...     Always(), EvalConfig(dataset="sums"), every_n_steps=2, on_result=lambda step, result, counters: seen.append((step, counters)),
      ...     counters=lambda: {"episodes": 8.0})
      >>> [schedule.maybe_run(step) for step in range(4)], schedule.final(3), schedule.final(3)
      (['measured at 0', None, 'measured at 2', None], 'measured at 3', None)
      >>> seen[0]
      (0, {'episodes': 8.0})
    """

    def __init__(
        self,
        harness: Harness,
        config: EvalConfig,
        *,
        every_n_steps: int,
        on_result: OnResult | None = None,
        run_at_start: bool = True,
        on_error: Literal["raise", "log"] = "raise",
        counters: Counters | None = None,
    ) -> None:
        self._every_n_steps = operator.index(every_n_steps)
        if self._every_n_steps < 1:
            raise ValueError(f"`every_n_steps` must be at least 1, got {every_n_steps}")
        if on_error not in ("raise", "log"):
            raise ValueError(f"`on_error` must be 'raise' or 'log', got {on_error!r}")
        self._harness = harness
        self._config = config
        self._on_result = on_result
        self._needs_counters = on_result is not None and _needs_counters(on_result)
        self._run_at_start = run_at_start
        self._on_error = on_error
        self._counters = counters
        self._measured: set[int] = set()
        self._measuring: set[int] = set()
        """Steps that are being measured: whoever asks again meanwhile measures nothing."""

    @property
    def measured_steps(self) -> list[int]:
        """The steps that were measured, in ascending order."""
        return sorted(self._measured)

    def is_due(self, step: int) -> bool:
        """Say whether `maybe_run(step)` would measure."""
        step = _checked(step)
        is_nth = step % self._every_n_steps == 0
        return is_nth and self._is_open(step) and (step > 0 or self._run_at_start)

    def maybe_run(self, step: int) -> EvalResult | None:
        """Measure if it is due: at step 0 and at each n-th step, each of them once.

        It returns when all is measured, and may be called in a notebook; a coroutine, which this would hold up together with every other
        one, awaits `maybe_run_async`.

        Args:
          step: steps that are done; 0 before the first one.

        Returns:
          The result; None if nothing was due, or an error was logged.

        Raises:
          Exception: whatever the harness raised, unless `on_error` is `log`, and whatever `on_result` raised.
        """
        return self._now(step) if self.is_due(step) else None

    async def maybe_run_async(self, step: int) -> EvalResult | None:
        """Measure if it is due, as `maybe_run` does, within a coroutine."""
        return await self._measure(step) if self.is_due(step) else None

    def final(self, step: int) -> EvalResult | None:
        """Measure the policy that training ends with, unless it just was; call it after the last step.

        Args:
          step: steps that are done.
        """
        return self._now(step) if self._is_open(_checked(step)) else None

    async def final_async(self, step: int) -> EvalResult | None:
        """Measure the policy that training ends with, as `final` does, within a coroutine."""
        return await self._measure(step) if self._is_open(_checked(step)) else None

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON value from which `load_state_dict` restores which steps were measured."""
        return {"measured_steps": self.measured_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; `every_n_steps` may have changed since.

        Raises:
          ValueError: the state is not one of a schedule; nothing is changed.
        """
        steps = state.get("measured_steps") if isinstance(state, Mapping) else None
        if not isinstance(steps, list) or not all(type(step) is int and step >= 0 for step in steps):
            raise ValueError(f"the state of an EvalSchedule is a dict whose `measured_steps` is a list of integers >= 0, got {state!r}")
        self._measured = set(steps)

    def _is_open(self, step: int) -> bool:
        return step not in self._measured and step not in self._measuring

    def _now(self, step: int) -> EvalResult | None:
        counters = self._read_counters()
        result = _wait_for(self._play(_checked(step)))
        if result is not None:
            told = self._tell(step, result, counters)
            if inspect.isawaitable(told):
                _wait_for(_awaiting(told))
        return result

    async def _measure(self, step: int) -> EvalResult | None:
        counters = self._read_counters()
        result = await self._play(_checked(step))
        if result is not None:
            told = self._tell(step, result, counters)
            if inspect.isawaitable(told):
                await told
        return result

    def _read_counters(self) -> dict[str, float]:
        return {} if self._counters is None else dict(self._counters())

    async def _play(self, step: int) -> EvalResult | None:
        self._measuring.add(step)
        try:
            # Not resumed: the rows that are there may be of another policy that was at this step.
            result = await self._harness.run(self._config, step=step, resume=False)
        except Exception:
            if self._on_error == "raise":
                raise
            logger.exception("the evaluation of %r after step %d failed, training goes on", self._config.dataset, step)
            return None
        finally:
            self._measuring.discard(step)
        self._measured.add(step)
        return result

    def _tell(self, step: int, result: EvalResult, counters: Mapping[str, float]) -> Any:
        if self._on_result is None:
            return None
        arguments: tuple[Any, ...] = (step, result, counters) if self._needs_counters else (step, result)
        return self._on_result(*arguments)


def _wait_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end: in this thread or, where an event loop is running in it, as in a notebook, in one of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, thread_name_prefix="evaluation") as thread:
        return thread.submit(asyncio.run, coroutine).result()


async def _awaiting(told: Awaitable[Any]) -> None:
    await told


def _checked(step: int) -> int:
    """Return a step as an int, whatever integer type a trainer counts with."""
    number = operator.index(step)
    if number < 0:
        raise ValueError(f"`step` counts the steps that are done and cannot be negative, got {step}")
    return number


def _needs_counters(function: Callable[..., Any]) -> bool:
    """Say whether two arguments are too few for a function; one whose parameters nobody knows is called with two."""
    try:
        inspect.signature(function).bind(0, None)
    except TypeError:
        return True
    except ValueError:
        pass
    return False
