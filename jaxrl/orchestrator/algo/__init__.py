"""Credit: one module per algorithm, by the `type` of its config. A new one is a module, a config and a line here."""

from __future__ import annotations

from jaxrl.config.algorithm import AlgorithmConfig
from jaxrl.errors import ConfigError
from jaxrl.orchestrator.algo.base import Algorithm, AlgorithmContext
from jaxrl.orchestrator.algo.echo import Echo
from jaxrl.orchestrator.algo.grpo import GRPO
from jaxrl.orchestrator.algo.max_rl import MaxRL
from jaxrl.orchestrator.algo.opd import OPD
from jaxrl.orchestrator.algo.opsd import OPSD
from jaxrl.orchestrator.algo.rae import RAE
from jaxrl.orchestrator.algo.reinforce import Reinforce
from jaxrl.orchestrator.algo.rloo import RLOO
from jaxrl.orchestrator.algo.sft import SFT
from jaxrl.orchestrator.ports import ScoringPolicy

ALGORITHM_CLASSES: dict[str, type[Algorithm]] = {
    "echo": Echo,
    "grpo": GRPO,
    "max_rl": MaxRL,
    "opd": OPD,
    "opsd": OPSD,
    "rae": RAE,
    "reinforce": Reinforce,
    "rloo": RLOO,
    "sft": SFT,
}
"""Algorithm by the `type` of its config."""


def build_algorithm(config: AlgorithmConfig, policy_pool: ScoringPolicy, context: AlgorithmContext | None = None) -> Algorithm:
    """Return the algorithm that `config` describes.

    Args:
      config: one environment's algorithm.
      policy_pool: the live policy; the algorithm may ask it for logprobs and never closes it.
      context: the environment and the run around it.

    Returns:
      A fresh instance: environments never share one.

    Raises:
      ConfigError: nobody said which class credits by this config.
    """
    algorithm_class = ALGORITHM_CLASSES.get(config.type)
    if algorithm_class is None:
        raise ConfigError(
            f"`algo.type`={config.type!r} has a config class ({type(config).__name__}), but no line in `ALGORITHM_CLASSES`; add one with "
            "the algorithm's class to jaxrl/orchestrator/algo/__init__.py"
        )
    assert algorithm_class.action_loss_type == config.action_loss_type, (
        f"{config.type}: config and class name different losses"
    )
    return algorithm_class(config, policy_pool, context)


__all__ = [
    "ALGORITHM_CLASSES",
    "GRPO",
    "OPD",
    "OPSD",
    "RAE",
    "RLOO",
    "SFT",
    "Algorithm",
    "AlgorithmContext",
    "Echo",
    "MaxRL",
    "Reinforce",
    "build_algorithm",
]
