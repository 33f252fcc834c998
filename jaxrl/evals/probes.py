"""Whether an evaluation can be repeated: found out by playing the beginning of a few tasks twice, not assumed.

In: an environment, the plan, and the policy where it is to be probed too. Out: one JSON object per probe, with true, false, or null where
it could not be told, and a warning for what is false. Episodes end here at the first question; nothing of them is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxrl.envs.base import Environment, Message, Reply, ToolSchema
from jaxrl.envs.play import play_rollout
from jaxrl.evals.episodes import without_addresses
from jaxrl.evals.observation import FirstObservation, observation_text
from jaxrl.evals.plan import PlannedEpisode
from jaxrl.types import Rollout

logger = logging.getLogger(__name__)

MAX_TASKS = 3
PROBE_DEADLINE_S = 120.0
"""How long an environment may take to its first question; six of them are waited for, one after the other."""
CLEAN_UP_DEADLINE_S = 30.0
"""How long an environment may take to end an episode that was cancelled at its first question."""
_AROUND, _SHOWN = 24, 72

ProbeKind = Literal["same_task", "different_tasks", "policy"]


@dataclass(frozen=True, slots=True)
class Probe:
    """One question about repeatability, with its answer."""

    kind: ProbeKind
    """`same_task`: two plays of one task with one seed begin alike; `different_tasks`: plays of different tasks do not all begin alike;
    `policy`: the policy says the same twice at temperature 0."""
    questions: tuple[str, ...]
    """The tasks, with their seeds."""
    is_passed: bool | None
    """None if it could not be told."""
    detail: str
    """What differed, or why it could not be told; empty where it passed."""

    def record(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {"kind": self.kind, "tasks": list(self.questions), "passed": self.is_passed, "detail": self.detail}


class FirstQuestionSession:
    """A session that keeps the first question and never answers: whoever waits for `asked` then cancels the episode."""

    def __init__(self) -> None:
        self.first = FirstObservation()
        self.asked = asyncio.Event()

    async def ask(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> Reply:
        """Keep the question, and wait to be cancelled."""
        self.first.note(messages, tools)
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    def fork(self) -> FirstQuestionSession:
        """Return this session: it ends at its first question, in whichever conversation."""
        return self

    def restart(self) -> FirstQuestionSession:
        """Return this session, as `fork` does."""
        return self


async def probe_environment(
    env: Environment, plan: Sequence[PlannedEpisode], *, deadline_s: float, volatile_keys: frozenset[str]
) -> list[Probe]:
    """Begin a few tasks, spread over the plan, twice each.

    Args:
      env: the environment; at most one episode of it runs at a time.
      plan: the episodes of the evaluation; each task is probed with the first of its seeds.
      deadline_s: how long an episode may take to its first question, in seconds.
      volatile_keys: keys that may differ where a message is JSON.
    """
    probes: list[Probe] = []
    begun: dict[str, str] = {}
    for episode in spread_tasks(plan):
        texts: list[str] = []
        problem = ""
        for attempt in range(2):
            shown = await _first_question(env, episode.rollout(f"probe/{env.name}/{attempt}"), deadline_s)
            if isinstance(shown, str):
                problem = shown
                break
            texts.append(observation_text(shown, volatile_keys))
        if texts:
            begun[episode.question] = texts[0]
        is_same = None if problem else texts[0] == texts[1]
        detail = problem or ("" if is_same else difference(texts[0], texts[1]))
        probes.append(Probe("same_task", (episode.question,), is_same, detail))
    if len(probes) > 1:
        probes.append(_probe_of_different_tasks(begun))
    for probe in probes:
        _warn(env.name, probe)
    return probes


async def probe_policy(env_name: str, episode: PlannedEpisode, play: Callable[[Rollout], Awaitable[None]]) -> Probe:
    """Play one task twice at temperature 0, and compare what the policy said.

    Args:
      env_name: the environment.
      episode: which task.
      play: plays a rollout to its end at temperature 0.
    """
    rollouts = [episode.rollout(f"probe/{env_name}/policy/{attempt}") for attempt in range(2)]
    for rollout in rollouts:
        await play(rollout)
    failure = next((rollout.failure for rollout in rollouts if rollout.failure is not None), None)
    said = [[(node.content, node.token_ids.tolist()) for node in rollout.nodes if node.sampled] for rollout in rollouts]
    if failure is not None or not said[0]:
        why = without_addresses(failure.message) if failure is not None else "the policy was asked nothing"
        probe = Probe("policy", (episode.question,), None, why)
    elif said[0] == said[1]:
        probe = Probe("policy", (episode.question,), True, "")
    else:
        texts = ["\n".join(text for text, _ in replies) for replies in said]
        probe = Probe("policy", (episode.question,), False, difference(*texts))
    _warn(env_name, probe)
    return probe


def is_reproducible(probes: Sequence[Probe]) -> bool | None:
    """Say whether an evaluation can be repeated: false if a repeat differed, None if any could not be told, or none was made.

    That different tasks begin differently is a question of its own (`different_tasks`) and no part of this.
    """
    answers = [probe.is_passed for probe in probes if probe.kind != "different_tasks"]
    if False in answers:
        return False
    return None if None in answers or not answers else True


def probe_scores(probes: Sequence[Probe]) -> dict[str, Any]:
    """Return what joins the scores of an evaluation: `reproducible` and, where it was asked, `different_tasks`, with the `probes`.

    Either is None if it could not be told.
    """
    told: dict[str, Any] = {"reproducible": is_reproducible(probes)}
    told |= {probe.kind: probe.is_passed for probe in probes if probe.kind == "different_tasks"}
    return told | {"probes": [probe.record() for probe in probes]}


def spread_tasks(plan: Sequence[PlannedEpisode]) -> list[PlannedEpisode]:
    """Return the first episode of a few tasks, the first and the last task among them."""
    firsts = list({episode.task.id: episode for episode in reversed(plan)}.values())[::-1]
    num = min(MAX_TASKS, len(firsts))
    return [firsts[round(place * (len(firsts) - 1) / max(num - 1, 1))] for place in range(num)]


def difference(before: str, after: str) -> str:
    """Say in words where two texts differ first.

    Example:
      >>> difference("Guess the word: apple", "Guess the word: grape")
      "'Guess the word: apple' and then 'Guess the word: grape'"
    """
    place = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    start = max(place - _AROUND, 0)
    shown = [("..." if start else "") + text[start : start + _SHOWN] for text in (before, after)]
    return f"{shown[0]!r} and then {shown[1]!r}"


def _probe_of_different_tasks(begun: dict[str, str]) -> Probe:
    if len(begun) < 2:
        return Probe("different_tasks", tuple(begun), None, "fewer than two tasks came to a first question")
    if len(set(begun.values())) > 1:
        return Probe("different_tasks", tuple(begun), True, "")
    return Probe("different_tasks", tuple(begun), False, f"all begin with {next(iter(begun.values()))[:_SHOWN]!r}")


async def _first_question(env: Environment, rollout: Rollout, deadline_s: float) -> dict[str, Any] | str:
    """Return what a play of a task asks first, or why it asks nothing; the environment has cleaned up when this returns."""
    session = FirstQuestionSession()
    playing = asyncio.create_task(play_rollout(env, rollout, session, deadline_s), name=f"probe of {rollout.task.id}")
    asked = asyncio.create_task(session.asked.wait(), name="first question of a probe")
    try:
        # The play ends at its deadline by itself, unless the environment does not let it.
        await asyncio.wait({playing, asked}, timeout=deadline_s + CLEAN_UP_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (asked, playing):
            task.cancel()
        _, late = await asyncio.wait({playing, asked}, timeout=CLEAN_UP_DEADLINE_S)
    if playing in late:
        logger.warning("env %r: task %r goes on %g s after it was cancelled", env.name, rollout.task.id, CLEAN_UP_DEADLINE_S)
    if session.first.shown is not None:
        return session.first.shown
    if rollout.failure is not None:
        return without_addresses(f"{rollout.failure.type}: {rollout.failure.message}")
    return "the environment asked the policy nothing"


_WORDS = {
    "same_task": "the same task began differently when it was played again, so scores need not repeat (does it use its seed?)",
    "different_tasks": "different tasks begin alike (does it use the index, or the task, that it is given?)",
    "policy": "the policy answered the same task differently at temperature 0, so scores need not repeat",
}


def _warn(env_name: str, probe: Probe) -> None:
    if probe.is_passed is False:
        logger.warning("env %r: %s: %s: %s", env_name, _WORDS[probe.kind], ", ".join(map(repr, probe.questions)), probe.detail)
