"""Checks of the settings alone: what the run is, and whether prompts, replies and rows fit one another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, bad, good
from jaxrl.envs.base import Message, Reply
from jaxrl.inference.rendering import Renderer

PROBED_TASKS = 16
"""Tasks of each environment whose prompts are rendered."""


def check_config(exam: Examination) -> Finding:
    """The configuration loaded; say what the run is."""
    config, settings = exam.config, exam.config.orchestrator
    size = f"{settings.rollouts_per_step} rollouts" if settings.rollouts_per_step else f"{settings.token_batch_size} tokens"
    return good(
        f"{config.run.max_steps} steps of {size} in groups of {settings.group_size}, {len(settings.train.env)} environment(s), "
        f"async level {config.async_level}"
    )


def check_budgets(exam: Examination) -> Finding:
    """Prompts leave room for replies in the window, and whole rollouts fit a row."""
    config = exam.config
    longest = max(_prompt_lengths(exam))
    max_tokens = max(config.orchestrator.sampling_of(env).max_tokens for env in config.orchestrator.train.env)
    window, row = config.engine.max_model_len, config.trainer.row_length
    needed = longest + max_tokens
    text = f"longest of the probed prompts {longest} + reply {max_tokens} = {needed} tokens; window {window}, row {row}"
    if longest >= window:
        return bad(f"{text}: prompts do not fit; raise `inference.max_model_len` above {longest}")
    if needed > window:
        return bad(f"{text}: replies will be cut at the window; raise `inference.max_model_len` to {needed}")
    if needed > row and config.trainer.overlong == "drop":
        return bad(f"{text}: long rollouts will be dropped; raise `trainer.row_length` to {needed}")
    return good(text)


class _PromptProbe:
    """A session without a policy: measures prompts and answers nothing."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.lengths: list[int] = []

    async def ask(self, messages: Sequence[Message]) -> Reply:
        """Note the prompt's length and reply with the empty string."""
        self.lengths.append(len(self.renderer.open_turn(None, messages).prompt_ids))
        return Reply(text="", is_stopped=True, num_tokens=0)


def _prompt_lengths(exam: Examination) -> list[int]:
    """Return the prompt lengths of some tasks of every environment, in tokens."""
    train, heldout = exam.worlds
    probe = _PromptProbe(exam.renderer)

    async def play() -> None:
        for env in (*train, *heldout):
            for spec in env.tasks()[:PROBED_TASKS]:
                await env.play(spec, probe)

    asyncio.run(play())
    return probe.lengths
