"""Questions from any dataset of the `reasoning_gym` package, each asked once.

In: what makes the questions (`gym_questions`). Out: a single-turn environment.
"""

from __future__ import annotations

from jaxrl.config.env import ReasoningGymEnvConfig, env_name
from jaxrl.envs.gym_questions import gym_questions
from jaxrl.envs.single_turn import SingleTurnEnvironment


def reasoning_gym_environment(config: ReasoningGymEnvConfig) -> SingleTurnEnvironment:
    """Make the questions and build the environment.

    Raises:
      ConfigError: the questions cannot be made; see `gym_questions`.

    Example:
      >>> parameters = {"max_terms": 2, "max_digits": 1}
      >>> config = ReasoningGymEnvConfig(dataset="chain_sum", parameters=parameters, num_tasks=1, split="all")
      >>> env = reasoning_gym_environment(config)
      >>> env.tasks()[0]["question"]
      'State the final answer to the following arithmetic problem: 0 - 4 ='
    """
    questions = gym_questions(config)
    return SingleTurnEnvironment(
        env_name(config),
        questions.specs,
        prompt=lambda spec: spec["question"],
        score=questions.score,
        system_prompt=config.system_prompt,
        examples=config.examples,
        require_stop=questions.require_stop,
        demonstration=lambda spec: spec["answer"],
        close=questions.close,
    )
