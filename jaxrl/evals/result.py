"""What one evaluation found, and its file.

In: the scores of a set of rows, with what was asked. Out: a value that other parts read, and JSON with the field names of OpenEnv's
results. The rows have a file of their own (`evals.book`). Nothing is computed here, and nothing that a clock said is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl.config.evals import EvalConfig
from jaxrl.errors import ConfigError
from jaxrl.evals.scores import flat_scores
from jaxrl.monitors.jsonl import to_json

_ENV = "env"
"""Where a file has the environment's settings, among `eval_parameters`."""
_STANDING = ("env_name", "step", "version")
"""What a file has among the scores besides them."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What one evaluation of one environment found."""

    config: EvalConfig
    """What was asked."""
    env_name: str
    """The environment's name."""
    step: int
    """The training step after which it was made; 0 is the base policy."""
    version: int | None
    """The policy version that was held; None where nobody counts versions."""
    scores: dict[str, Any]
    """See `score_rows`; with what the probes found, under `reproducible`, `different_tasks` and `probes`."""
    rows: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """One JSON object per planned episode, in plan order; empty in a result that was read from its file."""

    def flat_scores(self) -> dict[str, float]:
        """Return the scores that are numbers, by path; see `scores.flat_scores`."""
        return flat_scores(self.scores)

    def to_json(self, path: Path) -> None:
        """Write everything but the rows; equal results give equal bytes.

        OpenEnv's own `EvalResult` reads the file: it has no other fields than that one's, so what we know besides stands in those that
        may hold anything, the environment's settings under `eval_parameters` and where the policy stood under `scores`.
        """
        config = self.config.model_dump(mode="json")
        config["eval_parameters"][_ENV] = config.pop("env_parameters")
        value = {"config": config, "scores": {**{name: getattr(self, name) for name in _STANDING}, **self.scores}}
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        text = json.dumps(json.loads(to_json(value)), indent=1, ensure_ascii=True) + "\n"
        new.write_text(text, encoding="utf-8", newline="\n")
        new.replace(path)

    @classmethod
    def from_json(cls, path: Path) -> EvalResult:
        """Read what `to_json` wrote; its rows are not read.

        Raises:
          ConfigError: there is no such file, or it is no result of an evaluation.
        """
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(value, Mapping) or not isinstance(value.get("scores"), dict):
                raise ValueError("it has no `scores`")
            asked, scores = dict(value["config"]), dict(value["scores"])
            asked["eval_parameters"] = dict(asked["eval_parameters"])
            asked["env_parameters"] = asked["eval_parameters"].pop(_ENV, {})
            env_name, step, version = (scores.pop(name) for name in _STANDING)
            return cls(
                config=EvalConfig.model_validate(asked),
                env_name=str(env_name),
                step=int(step),
                version=None if version is None else int(version),
                scores=scores,
            )
        except OSError as error:
            raise ConfigError(f"`{path}` cannot be read ({error}); give the `result.json` of an evaluation") from None
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"`{path}` is no result of an evaluation: {error}; give the `result.json` of one") from None
