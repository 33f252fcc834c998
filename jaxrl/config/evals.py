"""When the policy is measured during training, and on what.

That held-out questions are not trained on can be told only from the questions: `envs.build.require_disjoint_questions`.
"""

from __future__ import annotations

from pydantic import Field

from jaxrl.config.base import Section
from jaxrl.config.env import EnvConfig, SamplingConfig


class EvalSectionConfig(Section):
    """Evaluation in training. The base and the final policy are always evaluated when an environment is listed."""

    env: list[EnvConfig] = []
    """Held-out environments; their `algo`, `coefficients`, `ratio` and `tasks` are not used, and setting one is a warning."""
    every_n_steps: int | None = Field(default=None, ge=1)
    """Also evaluate after every n-th step; null evaluates the base and the final policy only."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Tasks of each environment, the first ones in its order; null plays all of them."""
    success_threshold: float = 1.0
    """A rollout whose reward reaches this counts as a success."""
    demonstration_nll: bool = False
    """Also score the environments' own reference replies: their mean negative logprob per token under the policy."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    """Token sampling of evaluation; never touches training's."""
