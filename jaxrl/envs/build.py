"""From an environment's config to the environment, and the check that evaluation questions are never trained on.

In: one `[[orchestrator.*.env]]` table. Out: an object with `tasks()` and `play()`. To add an environment, add its
config class to `jaxrl.config.env` and a case here; nothing else in the system knows the types. A `reward` takes the place
of any environment's own scorer here, so that no environment has to think of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from jaxrl.config.env import (
    AgentEnvConfig,
    EnvConfig,
    FeedbackEnvConfig,
    OpenEnvConfig,
    PythonEnvConfig,
    QuestionsEnvConfig,
    ReasoningGymEnvConfig,
    ReverseTextEnvConfig,
    ToolsEnvConfig,
    VerifiersEnvConfig,
)
from jaxrl.envs.agent import agent_environment
from jaxrl.envs.base import Environment
from jaxrl.envs.feedback import FeedbackEnvironment, feedback_environment
from jaxrl.envs.grading.scorer import reward_scorer
from jaxrl.envs.imported import python_environment
from jaxrl.envs.openenv.environment import openenv_environment
from jaxrl.envs.questions import questions_environment
from jaxrl.envs.reasoning_gym import reasoning_gym_environment
from jaxrl.envs.reverse_text import reverse_text
from jaxrl.envs.single_turn import SingleTurnEnvironment
from jaxrl.envs.tools.environment import ToolEnvironment, tool_environment
from jaxrl.envs.verifiers.environment import verifiers_environment
from jaxrl.errors import ConfigError

logger = logging.getLogger(__name__)


def build_environment(config: EnvConfig) -> Environment:
    """Build the environment that a config describes, with the reward that it asks for.

    Raises:
      ConfigError: a setting that only the environment itself can judge is wrong, a package that it needs is missing, or the
        reward function cannot be used.
    """
    environment = _build(config)
    if config.reward is None:
        return environment
    if not isinstance(environment, SingleTurnEnvironment | ToolEnvironment | FeedbackEnvironment):
        environment.close()
        raise ConfigError(
            f"env {environment.name!r}: `reward` scores an answer, and an environment of type {config.type!r} scores itself; leave it out"
        )
    scorer = reward_scorer(config, config.reward)
    return environment.scored_by(scorer.score, scorer.close)


def _build(config: EnvConfig) -> Environment:
    match config:
        case ReasoningGymEnvConfig():
            return reasoning_gym_environment(config)
        case QuestionsEnvConfig():
            return questions_environment(config)
        case ReverseTextEnvConfig():
            return reverse_text(config)
        case ToolsEnvConfig():
            return tool_environment(config)
        case FeedbackEnvConfig():
            return feedback_environment(config)
        case PythonEnvConfig():
            return python_environment(config)
        case AgentEnvConfig():
            return agent_environment(config)
        case VerifiersEnvConfig():
            return verifiers_environment(config)
        case OpenEnvConfig():
            return openenv_environment(config)
    raise ConfigError(f"no environment is built from {type(config).__name__}; add a case to `jaxrl.envs.build`")


def require_disjoint_questions(train: Sequence[Environment], heldout: Sequence[Environment]) -> None:
    """Assert that no question text of the held-out environments is a training question.

    Texts are compared, whatever names, seeds, tiers and splits they come from. Specs whose `question` is no text
    are compared by whole specs (but for `id`), and what they share is only warned about: a small world may
    have too few tasks to keep some apart.

    Raises:
      ConfigError: names the two environments, how many texts they share, and one of them.
    """
    for env in train:
        for other in heldout:
            if shared := _questions(env) & _questions(other):
                raise ConfigError(
                    f"{len(shared)} question(s) of evaluation env {other.name!r} are also trained on by env {env.name!r}, for example "
                    f"{min(shared)!r}; use `split`='train' and `split`='heldout' with the same `heldout_frac`"
                )
            if shared := _specs_without_question(env) & _specs_without_question(other):
                logger.warning(
                    "%d task(s) of evaluation env %r are also trained on by env %r; its scores are not of held-out tasks",
                    len(shared),
                    other.name,
                    env.name,
                )


def _questions(env: Environment) -> set[str]:
    return {spec["question"] for spec in env.tasks() if isinstance(spec.get("question"), str)}


def _specs_without_question(env: Environment) -> set[str]:
    specs = [spec for spec in env.tasks() if not isinstance(spec.get("question"), str)]
    return {json.dumps({key: value for key, value in spec.items() if key != "id"}, sort_keys=True) for spec in specs}
