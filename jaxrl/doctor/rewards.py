"""The check of rewards: what scores a reply is called, where a run calls it, and gives a number or None in time."""

from __future__ import annotations

import asyncio

from jaxrl.config.env import EnvBase
from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, bad, good, joined, warning
from jaxrl.doctor.probes import OneReply, rollout_of
from jaxrl.envs.base import Environment
from jaxrl.envs.play import play_rollout
from jaxrl.types import Boundary, Rollout

NONSENSE = "I would rather talk about the weather."


def check_rewards(exam: Examination) -> Finding:
    """Each environment scores its own reference reply, if it has one, and one that answers nothing."""
    settings = exam.config.orchestrator
    train, heldout = exam.worlds
    envs = [(env_config, env, "env") for env_config, env in zip(settings.train.env, train, strict=True)]
    envs += [(env_config, env, "evaluation env") for env_config, env in zip(settings.eval.env, heldout, strict=True)]

    async def look() -> list[Finding]:
        return list(await asyncio.gather(*(_look(exam, *env) for env in envs)))

    return joined(asyncio.run(look()))


async def _look(exam: Examination, env_config: EnvBase, env: Environment, kind: str) -> Finding:
    scorer = "its own scorer" if env_config.reward is None else f"`reward.type`={env_config.reward.type!r}"
    where = f"{kind} {env.name!r} ({scorer})"
    spec = next((spec for spec in env.tasks() if env.demonstration(spec) is not None), env.tasks()[0])
    replies = {"its demonstration": env.demonstration(spec), "nonsense": NONSENSE}
    scored: dict[str, Rollout] = {}
    for what, reply in replies.items():
        if reply is not None:
            scored[what] = rollout = rollout_of(env, spec)
            await play_rollout(env, rollout, OneReply(exam.renderer, rollout, reply), env_config.rollout_deadline_s)
    for what, rollout in scored.items():
        if rollout.failure is not None:
            hint = "such replies have no reward, and are left out of their groups" if rollout.failure.boundary is Boundary.GRADER else ""
            return bad(f"{where}, task {rollout.task.id!r}: {what} got no reward: {rollout.failure.message}" + (hint and f"; {hint}"))
    slowest = max(rollout.duration_s for rollout in scored.values())
    rewards = {what: rollout.reward for what, rollout in scored.items()}
    given = ", ".join(f"{what} {'is not scored' if reward is None else f'is worth {reward:g}'}" for what, reward in rewards.items())
    text = f"{where}: {given}, after {slowest:.2g} s at most of {env_config.reward_deadline_s:g} s"
    shown, nonsense = rewards.get("its demonstration"), rewards["nonsense"]
    if all(reward is None for reward in rewards.values()):
        return warning(f"{text}; a rollout without a reward trains nothing")
    if shown is not None and nonsense is not None and shown <= nonsense:
        return warning(f"{text}: the reference reply is worth no more than nonsense; see what form of reply the scorer expects")
    return good(text)
