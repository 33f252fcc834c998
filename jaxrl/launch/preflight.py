"""The look at the chat template that a run takes before there is a device, with what its own environments need of it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.config.run import RunConfig
from jaxrl.envs.base import Environment
from jaxrl.envs.single_turn import SingleTurnEnvironment
from jaxrl.errors import ConfigError
from jaxrl.inference.rendering import Renderer
from jaxrl.inference.rendering.preflight import Needs, Preflight, preflight


def template_needs(config: RunConfig, train: Sequence[Environment], heldout: Sequence[Environment]) -> Needs:
    """Return what the environments of a run, built in the order of its configuration, ask of the chat template."""
    settings = config.orchestrator
    configured = list(zip([*settings.train.env, *settings.eval.env], [*train, *heldout], strict=True))
    return Needs(
        turns=any(env_config.history == "template" and not isinstance(env, SingleTurnEnvironment) for env_config, env in configured),
        system=any(env_config.system_prompt is not None for env_config, _ in configured),
        tools=any(env_config.type == "tools" or len(getattr(env, "tools", ())) > 0 for env_config, env in configured),
    )


def check_template(config: RunConfig, renderer: Renderer, train: Sequence[Environment], heldout: Sequence[Environment]) -> Preflight:
    """Look the policy's chat template over; the remarks are for the log.

    Raises:
      ConfigError: it would spoil the run.
    """
    found = preflight(renderer, template_needs(config, train, heldout))
    if found.problems:
        raise ConfigError(
            f"the chat template of `orchestrator.model.name`={config.orchestrator.model.name!r} does not do for this run: "
            + "; ".join(found.problems)
        )
    return found
