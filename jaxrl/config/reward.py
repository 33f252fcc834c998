"""What scores a reply in place of an environment's own scorer: one class per kind, told apart by `type`.

Whatever it is runs in a worker process that can be killed; an error or a passed deadline is a missing reward, never 0.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxrl.config.base import IMPORT_PATH, Section


class MathVerifyRewardConfig(Section):
    """1 if the reply's final answer equals the task's `answer` mathematically, by the `math-verify` package, else 0.

    An answer that is not worked out equals it too: to "1 + 1 =", `1+1` is right. Where the question itself is such an
    expression, a policy learns to repeat it; compare character by character there, as the environments do by default.
    """

    type: Literal["math_verify"] = "math_verify"
    """Which reward: `math_verify` or `python`."""


class PythonRewardConfig(Section):
    """Any Python function `score(spec, text, **kwargs)` that returns a number, or None for a reply that it cannot score.

    It may be a coroutine function.
    """

    type: Literal["python"] = "python"
    """Which reward: `math_verify` or `python`."""
    import_path: str = Field(pattern=IMPORT_PATH)
    """`package.module:function`, importable from where the run is started; refused if `run.allow_import_paths` is false."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of every call."""
    env_vars: list[str] = []
    """Environment variables that the function may see though they look like secrets, such as a judge's API key; its
    process gets no others that do."""


RewardConfig = Annotated[MathVerifyRewardConfig | PythonRewardConfig, Field(discriminator="type")]
