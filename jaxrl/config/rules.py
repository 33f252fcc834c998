"""What one environment's algorithm, token sampling and coefficients must be to each other, and what evaluation ignores.

In: an environment and what it ends up with, its own settings or the inherited ones. Out: nothing, a warning, or a
`ValueError`; each names the key to change, which is that of the section that the setting came from.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence

from jaxrl.config.algorithm import AlgorithmBase, EchoConfig
from jaxrl.config.env import EnvBase, SamplingConfig, env_name
from jaxrl.config.evals import UNUSED_IN_EVALUATION


def key_of(index: int, env: EnvBase, section: str) -> str:
    """Return where a training environment's section stands: `algo` and `sampling` may be its own or inherited.

    Args:
      index: the environment's place in the list.
      env: the environment.
      section: name of the field.
    """
    return f"orchestrator.{section}" if getattr(env, section) is None else f"orchestrator.train.env.{index}.{section}"


def check_training_env(index: int, env: EnvBase, algo: AlgorithmBase, sampling: SamplingConfig) -> None:
    """Check one training environment against what it is trained by.

    Args:
      index: its place in `orchestrator.train.env`.
      env: its own settings.
      algo: the algorithm that it ends up with.
      sampling: the token sampling that it ends up with.

    Raises:
      ValueError: its tokens could not be trained on, or none of them would be.
    """
    if algo.samples_from_live_policy:
        _check_policy_sampling(index, env, sampling)
    _check_coefficients(index, env, algo)
    if algo.needs_turn_rewards and _has_one_turn(env):
        raise ValueError(
            f"`{key_of(index, env, 'algo')}.credit`='turn': env {env_name(env)!r} ends with the first reply, and gives one reward for the "
            "whole rollout; use 'rollout'"
        )
    if algo.needs_turn_rewards and not env.gives_turn_rewards:
        remedy = "set its `turn_rewards`=true, or use 'rollout'" if hasattr(env, "turn_rewards") else "use 'rollout'"
        raise ValueError(
            f"`{key_of(index, env, 'algo')}.credit`='turn': env {env_name(env)!r} gives no reward for each turn, so every rollout would "
            f"fail; {remedy}"
        )
    if not algo.samples_from_model and env.sampling is not None:
        warnings.warn(
            f"`{key_of(index, env, 'sampling')}` is not used: env {env_name(env)!r} takes its rollouts from demonstrations "
            f"(`{key_of(index, env, 'algo')}.sampling.source`), so no token is sampled; leave it out",
            stacklevel=2,
        )


def warn_of_training(envs: Sequence[tuple[EnvBase, AlgorithmBase, SamplingConfig]], group_size: int) -> None:
    """Warn of settings with which training is not what it seems, once for each, however many environments inherit it.

    Args:
      envs: the training environments, each with the algorithm and the token sampling that it ends up with.
      group_size: rollouts of one task.
    """
    tempered, alone = (defaultdict[str, list[str]](list) for _ in range(2))
    mute = defaultdict[tuple[str, str, str], list[str]](list)
    for index, (env, algo, sampling) in enumerate(envs):
        if "ref_kl" in algo.loss_types and sampling.temperature != 1:
            setting = f"`{key_of(index, env, 'sampling')}.temperature`={sampling.temperature:g}: `{algo.type}`"
            tempered[setting].append(env_name(env))
        if group_size == 1 and algo.is_group_relative:
            alone[f"`{algo.type}` (`{key_of(index, env, 'algo')}.type`)"].append(env_name(env))
        if isinstance(algo, EchoConfig) and (reason := _why_unheard(env, algo)):
            mute[f"`{key_of(index, env, 'algo')}.type`={algo.type!r}", *reason].append(env_name(env))
    for setting, names in tempered.items():
        warnings.warn(
            f"{setting} compares logprobs of the teacher and the policy at temperature 1, but env {_listed(names)} samples at another one, "
            "so the policy that plays is not quite the one that comes closer to the teacher; use 1",
            stacklevel=2,
        )
    for algorithm, names in alone.items():
        warnings.warn(
            f"`orchestrator.group_size`=1: {algorithm} compares the rollouts of a group, so every advantage of env {_listed(names)} will "
            "be 0 and nothing will be learned from it; use at least 2, or 'reinforce'",
            stacklevel=2,
        )
    for (setting, why, remedy), names in mute.items():
        warnings.warn(
            f"{setting} learns from what an environment says after the policy's first reply, and env {_listed(names)} {why}, so it learns "
            f"there as 'grpo' does; {remedy}",
            stacklevel=2,
        )


def _why_unheard(env: EnvBase, algo: EchoConfig) -> tuple[str, str] | None:
    """Return why nothing that an environment says is learned from, and what to do about it; None if something is, or may be."""
    if _has_one_turn(env):
        return "ends with that reply", "use that, or an environment of several turns"
    if env.speaks_as is not None and env.speaks_as not in algo.table:
        return f"says it in the role {env.speaks_as!r}, which `roles` does not have", f"set `roles.{env.speaks_as}.alpha`"
    chosen = getattr(algo.table.get(env.speaks_as or ""), "tool_names", None)
    if chosen is not None and not set(chosen) & set(env.tool_names):
        return f"has no tool of `roles.tool.tool_names`={chosen}", f"it has {env.tool_names}"
    return None


def _has_one_turn(env: EnvBase) -> bool:
    """Say whether every rollout of an environment ends with the first reply."""
    budget = getattr(env, "budget", None)
    return env.has_one_turn or (budget is not None and budget.max_turns == 1)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def warn_of_unused(index: int, env: EnvBase) -> None:
    """Warn of what an evaluation environment sets in vain: nothing is trained on it, and its tasks come in their order."""
    for name in UNUSED_IN_EVALUATION:
        if getattr(env, name) != type(env).model_fields[name].get_default():
            warnings.warn(
                f"`orchestrator.eval.env.{index}.{name}` is not used: it means something in training only, and env {env_name(env)!r} is "
                "only measured; leave it out",
                stacklevel=2,
            )


def warn_of_default_split(index: int, env: EnvBase) -> None:
    """Warn of an evaluation environment that measures the part for training because nobody chose another one."""
    if "split" in env.model_fields_set or getattr(env, "heldout_frac", 0) == 0 or getattr(env, "split", None) != "train":
        return
    other = "'all' for a file that is already split" if hasattr(env, "path") else "'train' if that is meant"
    warnings.warn(
        f"`orchestrator.eval.env.{index}.split` is not set, so env {env_name(env)!r} measures 'train', the part of its questions that is "
        f"for training; set it to 'heldout', or to {other}",
        stacklevel=2,
    )


def _check_policy_sampling(index: int, env: EnvBase, sampling: SamplingConfig) -> None:
    """Refuse token sampling whose logprobs the trainer cannot compute."""
    key = key_of(index, env, "sampling")
    cuts = [name for name in ("top_p", "top_k", "min_p") if getattr(sampling, name) != SamplingConfig.model_fields[name].default]
    if cuts:
        settings = ", ".join(f"`{key}.{name}`={getattr(sampling, name):g}" for name in cuts)
        raise ValueError(
            f"{settings}: env {env_name(env)!r} samples from the policy, and the engine's logprobs would be of a cut distribution that "
            "the trainer does not compute; use top_p=1, top_k=0, min_p=0"
        )
    if sampling.temperature == 0:
        raise ValueError(
            f"`{key}.temperature`=0: env {env_name(env)!r} samples from the policy, and a greedy one has no logprob to learn from; use a "
            "positive temperature"
        )


def _check_coefficients(index: int, env: EnvBase, algo: AlgorithmBase) -> None:
    """Refuse coefficients that leave nothing to train on, and warn of those of components that the algorithm never feeds."""
    key, fed = f"orchestrator.train.env.{index}.coefficients", algo.loss_types
    if all(getattr(env.coefficients, name) == 0 for name in fed):
        settings = ", ".join(f"`{key}.{name}`=0" for name in fed)
        raise ValueError(
            f"{settings}: `{algo.type}` feeds no other loss component, so nothing of env {env_name(env)!r} would be trained on; use a "
            "positive coefficient, or measure it in `orchestrator.eval.env`"
        )
    for name, coefficient in env.coefficients:
        if name not in fed and coefficient != 1:
            warnings.warn(
                f"`{key}.{name}`={coefficient:g} is not used: `{algo.type}`, the algorithm of env {env_name(env)!r}, feeds only "
                f"{' and '.join(fed)}; leave it out",
                stacklevel=2,
            )
