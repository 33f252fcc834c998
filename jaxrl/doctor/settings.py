"""Checks of the settings alone: what the run is, and whether prompts, replies and rows fit one another."""

from __future__ import annotations

import asyncio
from typing import Literal, NamedTuple

from jaxrl.config.env import EnvBase
from jaxrl.config.schema import values_named
from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, Level, bad, good, joined, warning
from jaxrl.doctor.probes import play_empty
from jaxrl.envs.base import Environment
from jaxrl.envs.hooks import imported
from jaxrl.errors import ConfigError


def check_config(exam: Examination) -> Finding:
    """The configuration loaded, and what it names by import path is there; say what the run is."""
    for key, path in values_named("import_path", exam.config):
        try:
            imported(path, f"`{key}`={path!r}")
        except ConfigError as error:
            return bad(str(error))
    config, settings = exam.config, exam.config.orchestrator
    size = f"{settings.rollouts_per_step} rollouts" if settings.rollouts_per_step else f"{settings.token_batch_size} tokens"
    return good(
        f"{config.run.max_steps} steps of {size} in groups of {settings.group_size}, {len(settings.train.env)} environment(s), "
        f"async level {config.async_level}"
    )


def check_budgets(exam: Examination) -> Finding:
    """Prompts leave room for replies in the window, and whole rollouts fit a row."""
    settings = exam.config.orchestrator
    train, heldout = exam.worlds
    needs = [
        _need_of(exam, env, settings.sampling_of(env_config).max_tokens, _source_of(exam, env_config))
        for env_config, env in zip(settings.train.env, train, strict=True)
    ]
    for env_config, env in zip(settings.eval.env, heldout, strict=True):
        needs.append(_need_of(exam, env, (env_config.sampling or settings.eval.sampling).max_tokens, "evaluation"))
    finding = joined([_judge(exam, need) for need in needs])
    return _judge(exam, max(needs, key=lambda need: need.num_tokens)) if finding.level is Level.GOOD else finding


class _Need(NamedTuple):
    """What the rollouts of one environment take."""

    env_name: str
    source: Literal["policy", "evaluation", "frozen", "demonstrations"]
    """Who writes its replies; in an evaluation nothing is trained on."""
    longest: int
    """Tokens of its longest prompt, of those that were probed."""
    max_tokens: int
    """Tokens of a reply; 0 for demonstrations, which have a check of their own."""
    failure: str
    """What went wrong in the first rollout that failed; empty if none did."""

    @property
    def num_tokens(self) -> int:
        return self.longest + self.max_tokens


def _source_of(exam: Examination, env_config: EnvBase) -> Literal["policy", "frozen", "demonstrations"]:
    algo = exam.config.orchestrator.algo_of(env_config)
    return "policy" if algo.samples_from_live_policy else "frozen" if algo.samples_from_model else "demonstrations"


def _need_of(
    exam: Examination, env: Environment, max_tokens: int, source: Literal["policy", "evaluation", "frozen", "demonstrations"]
) -> _Need:
    played = asyncio.run(play_empty(exam, env))
    longest = max((length for _, prompts in played for length in prompts), default=0)
    failure = next((rollout.failure.message for rollout, _ in played if rollout.failure is not None), "")
    return _Need(env.name, source, longest, 0 if source == "demonstrations" else max_tokens, failure)


def _judge(exam: Examination, need: _Need) -> Finding:
    """Say whether what one environment needs is there."""
    window, row = exam.config.engine.max_model_len, exam.config.trainer.row_length
    longest, needed = need.longest, need.num_tokens
    figures = f"{longest}" if need.source == "demonstrations" else f"{longest} + reply {need.max_tokens} = {needed}"
    where = "evaluation env" if need.source == "evaluation" else "env"
    text = f"{where} {need.env_name!r}: longest of the probed prompts {figures} tokens; window {window}, row {row}"
    if not longest:
        return bad(f"{where} {need.env_name!r} asked nothing in any of the probed tasks: {need.failure or 'it does not call `ask`'}")
    if longest >= window:
        return bad(f"{text}: prompts do not fit; raise `inference.max_model_len` above {longest}")
    if need.source in ("frozen", "demonstrations"):
        # What is longer than one of the two cannot be trained on, and is not written.
        if longest >= row:
            return bad(f"{text}: prompts leave no room for a reply in a row; raise `trainer.row_length` above {longest}")
        if needed > min(window, row):
            return warning(
                f"{text}: a long reply of the frozen model will be cut where it could not be trained on; raise `inference.max_model_len` "
                f"and `trainer.row_length` to {needed}, or lower `max_tokens`"
            )
        return good(text)
    if needed > window:
        what = "replies will be cut at the window; raise `inference.max_model_len` to"
        return warning(f"{text}: {what} {needed}") if need.source == "evaluation" else bad(f"{text}: {what} {needed}")
    if needed > row and exam.config.trainer.overlong == "drop" and need.source == "policy":
        return bad(f"{text}: long rollouts will be dropped; raise `trainer.row_length` to {needed}")
    return good(text)
