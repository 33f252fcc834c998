"""One pass of a policy over an environment's tasks, with a row for every episode that was planned.

In: an environment, a policy, and what is to be played. Out: an `EvalResult`: rows in plan order and scores computed from them, and the
same in a folder where one is given. The policy is held still meanwhile, seeds come from a scope that no training environment can have,
and nothing of training (task order, sampling, random state) is touched. It trains nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.config.evals import EvalConfig
from jaxrl.config.turns import History
from jaxrl.envs.base import Environment
from jaxrl.envs.play import play_rollout
from jaxrl.errors import ConfigError, EndpointDownError, NoReplyError, PolicyFunctionError, RunFailedError
from jaxrl.evals.book import RESULT, EpisodeBook
from jaxrl.evals.demonstrations import DemonstrationScore, DemonstrationScorer
from jaxrl.evals.episodes import demonstration_columns, episode_row, is_policy_failure, timing_row
from jaxrl.evals.observation import VOLATILE_KEYS, FirstObservation, WatchedSession
from jaxrl.evals.plan import PlannedEpisode, plan_episodes, plan_record
from jaxrl.evals.policy import EvalPolicy
from jaxrl.evals.probes import PROBE_DEADLINE_S, Probe, probe_environment, probe_policy, probe_scores
from jaxrl.evals.result import EvalResult
from jaxrl.evals.scores import score_rows
from jaxrl.types import Rollout

MIN_FAILURES = 8
"""An evaluation of many episodes ends early only after at least so many in a row that the policy did not answer."""


class EnvEvalHarness:
    """Evaluates a policy on one environment.

    Args:
      env: the environment; its specs are never changed.
      policy: who is measured.
      output_dir: where `plan.json`, `episodes.jsonl`, `timings.jsonl` and `result.json` are written; None writes nothing.
      concurrency: episodes that are played at the same time; no row depends on it.
      rollout_deadline_s: deadline of one episode, in seconds.
      history: what a later turn makes of earlier ones.
      demonstrations: also scores the environment's own reference replies; None leaves them alone.
      should_probe: begin a few tasks twice, before the first evaluation, to find out whether they can be repeated.
      should_probe_policy: also play one task twice at temperature 0.
      volatile_keys: keys that do not count where what the policy is shown is JSON.
      on_progress: called with (episodes done, episodes planned) before the first episode and after each one.

    Raises:
      ConfigError: `policy` is none, such as a bare function, or `concurrency` is below 1.
    """

    def __init__(
        self,
        env: Environment,
        policy: EvalPolicy,
        *,
        output_dir: Path | None = None,
        concurrency: int = 64,
        rollout_deadline_s: float = 300.0,
        history: History = "template",
        demonstrations: DemonstrationScorer | None = None,
        should_probe: bool = True,
        should_probe_policy: bool = False,
        volatile_keys: Collection[str] = VOLATILE_KEYS,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if not callable(getattr(policy, "hold", None)) or not callable(getattr(policy, "open_session", None)):
            remedy = "a function is measured as `FunctionPolicy(function)`" if callable(policy) else "see `jaxrl.evals.EvalPolicy`"
            raise ConfigError(f"evaluation of {env.name!r}: expected a policy, got a {type(policy).__name__}; {remedy}")
        if concurrency < 1:
            raise ConfigError(f"`concurrency` must be at least 1, got {concurrency}")
        self._env = env
        self._policy = policy
        self._output_dir = output_dir
        self._concurrency = concurrency
        self._rollout_deadline_s = rollout_deadline_s
        self._history: History = history
        self._demonstrations = demonstrations
        self._should_probe = should_probe
        self._should_probe_policy = should_probe_policy
        self._volatile_keys = frozenset(volatile_keys)
        self._on_progress = on_progress
        self._probed: dict[str, list[Probe]] = {}

    @property
    def env_name(self) -> str:
        """Name of the environment."""
        return self._env.name

    async def run(self, config: EvalConfig, *, step: int = 0, resume: bool = True) -> EvalResult:
        """Play every planned episode once and score them. A failing episode is a row, not an exception.

        In a folder, episodes that are there already are not played again, but for those that failed for want of an answer of the policy,
        of time, or of the environment's server.

        Args:
          config: what is played, and how it is judged.
          step: the training step after which this is made, 0 for the base policy; a label, no part of any seed.
          resume: go on with what the folder holds; False keeps that under another name and begins anew.

        Raises:
          ConfigError: there is nothing to play, or the folder holds another evaluation, or a damaged one.
          EndpointDownError: no episode got an answer of the policy, or `max(8, concurrency)` in a row did not; rows are kept.
          PolicyFunctionError: the same, where the policy is a function.
          NoReplyError: that function returned something that is no reply.
          RunFailedError: the folder cannot be written any more; rows are kept.
        """
        plan = plan_episodes(self._env, config.eval_parameters)
        record = plan_record(config, plan, step=step, history=self._history, has_demonstrations=self._demonstrations is not None)
        book = EpisodeBook([episode.episode_id for episode in plan], self._output_dir)
        try:
            await asyncio.to_thread(book.open, record, resume=resume)
            async with self._policy.hold(f"evaluation of {self._env.name!r}") as version:
                _require_version(book, version)
                self._tell(len(book.rows()), len(plan))
                probes = await self._probe(config, plan, record["tasks_sha"])
                await self._play_missing(config, plan, book, step, version)
        finally:
            # On this thread, so that a cancellation cannot come in between: few rows are left to write, if any.
            book.close()
        rows = book.rows()
        scores = score_rows(rows, config.eval_parameters.success_threshold)
        if self._should_probe or self._should_probe_policy:
            scores |= probe_scores(probes)
        result = EvalResult(config, self._env.name, step, version, scores, rows)
        if self._output_dir is not None:
            await asyncio.to_thread(_write_result, result, self._output_dir / RESULT)
        return result

    def run_from_config(self, config: EvalConfig, *, step: int = 0, resume: bool = True) -> EvalResult:
        """Do what `run` does, in plain Python: for a loop of one's own, a notebook's cell aside.

        Raises:
          RuntimeError: an event loop is running in this thread.
          JaxrlError: whatever `run` raised.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.run(config, step=step, resume=resume))
        raise RuntimeError(
            f"evaluation of {self._env.name!r}: `run_from_config` was called where an event loop is running (a coroutine, or a notebook); "
            "use `await harness.run(config)` there"
        )

    async def _probe(self, config: EvalConfig, plan: Sequence[PlannedEpisode], tasks_sha: str) -> list[Probe]:
        """Find out whether the evaluation can be repeated; once for a list of tasks, because the answer is about the environment."""
        if tasks_sha not in self._probed:
            probes: list[Probe] = []
            if self._should_probe:
                deadline_s = min(self._rollout_deadline_s, PROBE_DEADLINE_S)
                probes += await probe_environment(self._env, plan, deadline_s=deadline_s, volatile_keys=self._volatile_keys)
            if self._should_probe_policy:
                greedy = config.eval_parameters.sampling.model_copy(update={"temperature": 0.0})

                async def play(rollout: Rollout) -> None:
                    session = self._policy.open_session(rollout, greedy, self._history)
                    await play_rollout(self._env, rollout, session, self._rollout_deadline_s)

                probes.append(await probe_policy(self._env.name, plan[0], play))
            self._probed[tasks_sha] = probes
        return self._probed[tasks_sha]

    async def _play_missing(
        self, config: EvalConfig, plan: Sequence[PlannedEpisode], book: EpisodeBook, step: int, version: int | None
    ) -> None:
        """Play the episodes that have no row, `concurrency` at a time, and write each row as soon as there is one."""
        missing = [plan[position] for position in book.missing()]
        num_done = len(plan) - len(missing)
        shown = await self._score_demonstrations(missing)
        # A plan of few episodes ends early only if there is nothing else in it.
        outage = _Outage(self._env.name, max(MIN_FAILURES, self._concurrency), None if num_done else len(plan))
        waiting = iter(missing)
        scope = f"eval/{self._env.name}/{step}/{version}"

        async def play_on() -> None:
            nonlocal num_done
            for episode in waiting:
                rollout, first = episode.rollout(scope), FirstObservation()
                session = self._policy.open_session(rollout, config.eval_parameters.sampling, self._history)
                await play_rollout(self._env, rollout, WatchedSession(session, first), self._rollout_deadline_s)
                row = episode_row(episode, rollout, first, version, volatile_keys=self._volatile_keys)
                if self._demonstrations is not None:
                    row |= demonstration_columns(shown.get(episode.question) if episode.sample == 0 else None)
                book.put(episode.position, row, timing_row(episode, rollout))
                if self._output_dir is not None:
                    await asyncio.to_thread(book.flush)
                num_done += 1
                self._tell(num_done, len(plan))
                outage.note(row)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._concurrency, len(missing))):
                    group.create_task(play_on())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _score_demonstrations(self, missing: Sequence[PlannedEpisode]) -> Mapping[str, DemonstrationScore | None]:
        """Return what the policy says of the tasks' demonstrations, by question; it stands in the row of the first sample."""
        if self._demonstrations is None:
            return {}
        tasks = {episode.question: episode.task for episode in missing if episode.sample == 0}
        return await self._demonstrations.score(tasks, asyncio.Semaphore(self._concurrency)) if tasks else {}

    def _tell(self, num_done: int, num_planned: int) -> None:
        if self._on_progress is not None:
            self._on_progress(num_done, num_planned)


class _Outage:
    """Ends an evaluation whose policy has gone: thousands of rows without an answer would measure nothing."""

    def __init__(self, env_name: str, limit: int, num_all: int | None) -> None:
        self._env_name = env_name
        self._limit = limit if num_all is None else min(limit, num_all)
        self._num_in_a_row = 0
        self._first = ""

    def note(self, row: Mapping[str, Any]) -> None:
        """Count an episode that is over.

        Raises:
          EndpointDownError: it was one too many without an answer.
          PolicyFunctionError: so it was, and the policy is a function.
          NoReplyError: the function returned something that is no reply, as it would again.
        """
        failure = (row.get("error") or {}).get("type")
        if failure == NoReplyError.__name__:
            raise NoReplyError(f"evaluation of {self._env_name!r}: {row['error']['message']}")
        if not is_policy_failure(row):
            self._num_in_a_row, self._first = 0, ""
            return
        self._num_in_a_row += 1
        self._first = self._first or f"{row['error']['type']}: {row['error']['message']}"
        if self._num_in_a_row < self._limit:
            return
        kept = "Rows so far are kept where a folder was given"
        if failure == PolicyFunctionError.__name__:
            raise PolicyFunctionError(
                f"evaluation of {self._env_name!r}: the policy is a function, and gave no reply in {self._num_in_a_row} episodes in a row, "
                f"so the evaluation ends here; the first one: {self._first}. {kept}: correct the function, and start the same evaluation "
                "again"
            )
        raise EndpointDownError(
            f"evaluation of {self._env_name!r}: the policy did not answer {self._num_in_a_row} episodes in a row, so the evaluation "
            f"ends here; the first one: {self._first}. {kept}: start the same evaluation again once the policy answers"
        )


def _write_result(result: EvalResult, path: Path) -> None:
    try:
        result.to_json(path)
    except OSError as error:
        raise RunFailedError(
            f"`{path}` cannot be written ({error}); all episodes are kept: make room, and start the same evaluation again"
        ) from error


def _require_version(book: EpisodeBook, version: int | None) -> None:
    """Refuse to go on with rows of another policy version than the one that is held."""
    before = {row["version"] for row in book.rows()} - {version}
    if before:
        raise ConfigError(
            f"the folder has episodes of policy version {sorted(map(str, before))[0]}, and version {version} is served now; measure that "
            "in another folder, or begin anew with `resume=False` (`--no-resume`)"
        )
