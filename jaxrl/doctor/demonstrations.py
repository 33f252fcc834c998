"""The check of demonstrations: tasks that are learned from them have one each, and it fits with what stands around it."""

from __future__ import annotations

import asyncio

import numpy as np

from jaxrl.config.algorithm import DEMONSTRATIONS
from jaxrl.config.env import EnvBase
from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, good, joined, verdict, warning
from jaxrl.doctor.probes import PLAY_DEADLINE_S, algorithm_of, play_empty, rollout_of, spread
from jaxrl.envs.base import Environment
from jaxrl.envs.play import play_rollout
from jaxrl.envs.tools.environment import UNPARSED
from jaxrl.envs.tools.toolbox import MALFORMED
from jaxrl.errors import SampleError
from jaxrl.orchestrator.algo import OPSD
from jaxrl.orchestrator.sources import DemonstrationSource
from jaxrl.types import Boundary, Rollout

PROBED_DEMONSTRATIONS = 64
"""Demonstrations of each environment that are rendered."""
NO_WINDOW = 1 << 30
"""Long enough for any demonstration: how long they are is what is looked for."""


def check_demonstrations(exam: Examination) -> Finding:
    """Where demonstrations are replies, they fit window and row; where they are hints, they leave room for prompt and reply."""
    settings = exam.config.orchestrator
    train, heldout = exam.worlds
    findings: list[Finding] = []
    for env_config, env in zip(settings.train.env, train, strict=True):
        algorithm = algorithm_of(exam, env_config, env.demonstration)
        if algorithm.config.sampling.source == DEMONSTRATIONS:
            findings.append(_look_at_replies(exam, env_config, env))
        elif isinstance(algorithm, OPSD):
            findings.append(_look_at_hints(exam, env_config, env, algorithm))
    if settings.eval.demonstration_nll:
        without = [env.name for env in heldout if all(env.demonstration(spec) is None for spec in env.tasks())]
        findings += [
            warning(f"evaluation env {name!r} has no demonstration, so `orchestrator.eval.demonstration_nll` measures nothing on it")
            for name in without
        ]
    return joined(findings) if findings else good("no environment learns from demonstrations")


def _look_at_replies(exam: Examination, env_config: EnvBase, env: Environment) -> Finding:
    """Render demonstrations as a run does, and have them scored."""
    tasks = env.tasks()
    missing = [spec for spec in tasks if env.demonstration(spec) is None]
    text = f"env {env.name!r}: {len(tasks) - len(missing)} of {len(tasks)} tasks have a demonstration"
    if missing:
        asked = f" ({missing[0]['question'][:60]!r})" if "question" in missing[0] else ""
        return verdict(text, [f"{missing[0]['id']!r}{asked} has none: rollouts of such tasks fail; leave them out"], [])
    rollouts = asyncio.run(_play_demonstrations(exam, env_config, env))
    # A scorer that is slow or fails is looked at by another check; the tokens are there all the same.
    failures = [rollout.failure for rollout in rollouts if rollout.failure is not None]
    broken = next((failure for failure in failures if failure.boundary in (Boundary.ENV, Boundary.POLICY)), None)
    if broken is not None:
        return verdict(text, [f"one cannot be played: {broken.message}"], [])
    lengths, replies = np.array([_num_tokens(rollout) for rollout in rollouts]).T
    needed, window, row = int(lengths.max()), exam.config.engine.max_model_len, exam.config.trainer.row_length
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    worth = f", worth {np.mean(rewards):.3g} on average" if rewards else ", not scored"
    text += (
        f"{worth}; of {len(rollouts)} probed, the longest has {replies.max()} tokens, and {needed} with its prompt; "
        f"window {window}, row {row}"
    )
    problems, remarks = [], []
    if needed > exam.config.trainable_window:
        num_long = int((lengths > exam.config.trainable_window).sum())
        problems.append(f"{num_long} are too long; raise `inference.max_model_len` and `trainer.row_length` to {needed}, or leave them out")
    if rewards and max(rewards) <= 0:
        remarks.append("the environment's own scorer gives none of them more than 0; see what form of reply it expects")
    if any(rollout.metrics.get(MALFORMED) or rollout.metrics.get(UNPARSED) for rollout in rollouts):
        remarks.append("calls of tools in them are not read as such; `demonstration_format` is not the policy's, see `model.tool_format`")
    return verdict(text, problems, remarks)


async def _play_demonstrations(exam: Examination, env_config: EnvBase, env: Environment) -> list[Rollout]:
    source = DemonstrationSource(exam.renderer, env.demonstration, NO_WINDOW, history=env_config.history)
    rollouts = [rollout_of(env, spec) for spec in spread(env.tasks(), PROBED_DEMONSTRATIONS)]
    await asyncio.gather(*(play_rollout(env, rollout, source.open_session(rollout), PLAY_DEADLINE_S) for rollout in rollouts))
    return rollouts


def _num_tokens(rollout: Rollout) -> tuple[int, int]:
    """Return the tokens of the longest branch, and those of all replies."""
    branches = ([rollout.nodes[index] for index in rollout.path_to(leaf)] for leaf in rollout.leaves)
    longest = max((sum(len(node.token_ids) for node in branch) for branch in branches), default=0)
    return longest, sum(node.num_sampled for node in rollout.nodes)


def _look_at_hints(exam: Examination, env_config: EnvBase, env: Environment, algorithm: OPSD) -> Finding:
    """Have the hints of some tasks made, and count what is scored with each: hint, prompt and reply."""
    asyncio.run(algorithm.setup())
    played = asyncio.run(play_empty(exam, env))
    max_tokens, window = exam.config.orchestrator.sampling_of(env_config).max_tokens, exam.config.engine.max_model_len
    # A conversation begins with its first token once, also where a hint stands before it.
    num_shared = int(exam.renderer.bos_id is not None)
    missing: list[str] = []
    needs: list[tuple[int, int]] = []
    for rollout, prompts in played:
        try:
            hint = len(algorithm.hint_ids(algorithm.demonstration_of(rollout))) - num_shared
        except SampleError as error:
            missing.append(str(error))
            continue
        needs.append((hint, max(prompts, default=0)))
    text = f"env {env.name!r}: {len(needs)} of {len(played)} probed tasks have a demonstration"
    if not needs:
        return verdict(text, missing[:1], [])
    hint, prompt = max(needs, key=sum)
    needed = hint + prompt + max_tokens
    text += f"; longest hint {hint} + prompt {prompt} + reply {max_tokens} = {needed} tokens; window {window}"
    problems = missing[:1]
    if needed > window:
        what = "no rollout" if hint + prompt >= window else f"no reply longer than {window - hint - prompt} tokens"
        problems.append(
            f"after such a hint {what} can be scored; raise `inference.max_model_len` to {needed}, or shorten the demonstrations"
        )
    return verdict(text, problems, [])
