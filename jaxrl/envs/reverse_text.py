"""Write a short text backwards: the smallest complete environment. Copy this file to make your own.

An environment is a list of task specs (JSON dicts with an `id` of their own) and a way to play one of them. Where one
question gets one reply, two functions are all it takes: `prompt(spec)` says what to ask, `score(spec, text)` what the
reply is worth; `demonstration(spec)`, the right reply, is for algorithms that learn from one. Then add a config class to
`jaxrl.config.env` and a line to `jaxrl.envs.build`. Longer conversations implement `Environment.play` themselves.
"""

import random

from jaxrl.config.env import ReverseTextEnvConfig, env_name
from jaxrl.envs.base import TaskSpec
from jaxrl.envs.single_turn import SingleTurnEnvironment


def reverse_text(config: ReverseTextEnvConfig) -> SingleTurnEnvironment:
    """Build the environment.

    Example:
      >>> env = reverse_text(ReverseTextEnvConfig(num_tasks=2, seed=7))
      >>> env.tasks()
      [{'id': '0', 'text': 'jdai', 'difficulty': 4}, {'id': '1', 'text': 'da', 'difficulty': 2}]
    """
    return SingleTurnEnvironment(
        env_name(config),
        _specs(config),
        prompt,
        score,
        system_prompt=config.system_prompt,
        examples=config.examples,
        demonstration=demonstration,
    )


def prompt(spec: TaskSpec) -> str:
    """Return what the policy is asked."""
    return f"Write this text backwards: {spec['text']}"


def score(spec: TaskSpec, text: str) -> float:
    """Return 1 for the reversed text and 0 for anything else; surrounding space is forgiven."""
    return float(text.strip() == demonstration(spec))


def demonstration(spec: TaskSpec) -> str:
    """Return the reply that is worth 1."""
    return spec["text"][::-1]


def _specs(config: ReverseTextEnvConfig) -> list[TaskSpec]:
    rng = random.Random(config.seed)
    texts = ["".join(rng.choices(config.alphabet, k=rng.randint(config.min_chars, config.max_chars))) for _ in range(config.num_tasks)]
    return [{"id": str(index), "text": text, "difficulty": len(text)} for index, text in enumerate(texts)]
