"""The smallest environment of the user's own: a list of questions and a function that says what a reply is worth.

In: tasks, and `score(spec, reply)`. Out: what `type = "python"` calls to get an environment. Several turns are `envs.chat`'s.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jaxrl.config.env import ExampleConfig
from jaxrl.envs.base import Score, TaskSpec
from jaxrl.envs.single_turn import SingleTurnEnvironment
from jaxrl.envs.splits import question_id, split_in_words, split_of
from jaxrl.errors import ConfigError

logger = logging.getLogger(__name__)

Factory = Callable[..., SingleTurnEnvironment]
"""What makes the environment: called with `name` and, if they are set, `system_prompt`, `examples` and the table's `kwargs`."""


def single_turn(tasks: Sequence[TaskSpec] | Callable[..., Sequence[TaskSpec]], *, require_stop: bool = False) -> Callable[[Score], Factory]:
    """Make an environment of one question and one reply out of a function that scores the reply.

    The decorated function is what `import_path` names. The environment's `kwargs` go to `tasks`, but for two that are heeded here:
    `split` (`train`, `heldout` or `all`, which is the default) keeps a part of the questions, by a hash of their text, and `heldout_frac`
    (0.1) says how large the held-out part is.

    Args:
      tasks: JSON objects with a `question`, which is the user's message, and whatever the function needs; or a function that returns them,
        if they are read or generated. A task without an `id` is named by a hash of what it holds. `demonstration` may hold a reply to
        learn from; `difficulty` and `group` are for curricula and evaluation.
      require_stop: a reply that the token limit cut is worth 0.0 without asking the function.

    Returns:
      A decorator for `score(spec, reply)`, which takes the task and the text of the reply, and returns a finite number, or None if it
      cannot be scored. It may be a coroutine function; a plain one runs in a thread of its own, beside others.

    Example:
      >>> @single_turn([{"question": "Name a word with two vowels.", "vowels": 2}])
      ... def vowels(spec, reply):
      ...     return float(sum(letter in "aeiou" for letter in reply) == spec["vowels"])
      >>> vowels(name="vowels").tasks()[0]["question"]
      'Name a word with two vowels.'
    """

    def decorate(score: Score) -> Factory:
        def make(
            name: str,
            *,
            system_prompt: str | None = None,
            examples: Sequence[ExampleConfig] = (),
            split: Literal["train", "heldout", "all"] = "all",
            heldout_frac: float = 0.1,
            **kwargs: Any,
        ) -> SingleTurnEnvironment:
            if kwargs and not callable(tasks):
                raise ConfigError(
                    f"env {name!r}: its tasks are a list, so `kwargs` has no place for {sorted(kwargs)}; make them a function"
                )
            if split not in ("train", "heldout", "all") or not 0 <= heldout_frac < 1:
                raise ConfigError(
                    f"env {name!r}: expected `split` 'train', 'heldout' or 'all' and `heldout_frac` from 0 up to 1, got {split!r} "
                    f"and {heldout_frac!r}"
                )
            specs = [_named(name, spec) for spec in (tasks(**kwargs) if callable(tasks) else tasks)]
            kept = [spec for spec in specs if split in ("all", split_of(spec["question"], heldout_frac))]
            if specs and not kept:
                raise ConfigError(
                    f"env {name!r}: none of its {len(specs)} questions is in split {split!r} with `heldout_frac`={heldout_frac}"
                )
            if len(kept) < len(specs):
                logger.info("env %r: %s", name, split_in_words(len(kept), len(specs), split, heldout_frac))
            return SingleTurnEnvironment(
                name,
                kept,
                prompt=lambda spec: spec["question"],
                score=score,
                system_prompt=system_prompt,
                examples=examples,
                require_stop=require_stop,
                demonstration=lambda spec: spec.get("demonstration"),
            )

        make.__name__, make.__doc__ = getattr(score, "__name__", "score"), score.__doc__
        return make

    return decorate


def _named(name: str, spec: TaskSpec) -> TaskSpec:
    """Return a task with an `id`; raises ConfigError if it asks nothing."""
    if not isinstance(spec, dict) or not isinstance(spec.get("question"), str) or not spec["question"].strip():
        raise ConfigError(f"env {name!r}: each task is a dict with a `question`, a text that is not empty; got {spec!r:.100}")
    return spec if "id" in spec else {"id": question_id(json.dumps(spec, sort_keys=True)), **spec}
