"""What a run shows and writes besides its checkpoints.

`metrics.jsonl`, `environment.json` and the logs have no switch: a run without its record would be worth nothing. A tracker is on when
its section is there, and then its package must be installed.
"""

from importlib import metadata
from typing import Literal, Self

from pydantic import Field, model_validator

from jaxrl.config.base import Section


class TensorBoardConfig(Section):
    """Metrics as TensorBoard event files; needs the extra `tensorboard`."""

    log_dir: str | None = None
    """Folder of the event files; null means `tensorboard` in the run folder."""


class WandbConfig(Section):
    """Metrics as a run of Weights & Biases; needs the extra `wandb`. The key is never in the configuration: wandb reads WANDB_API_KEY."""

    project: str = "jaxrl"
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team that owns the project; null means the default of the account."""
    group: str | None = None
    """Group of runs that this one is shown with."""
    tags: list[str] = []
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """`offline` needs no network and writes files that `wandb sync` uploads later."""


class MonitorsConfig(Section):
    """Terminal view, rollout log, reward curve and trackers."""

    terminal: bool = True
    """Show a live view when standard output is a terminal, and one line per step otherwise."""
    rollouts: bool = True
    """Write every rollout of every step to `rollouts/step_NNNNNN.jsonl`."""
    token_export: bool = True
    """In that file, give each token its text, its origin, the trainer's logprob, its weights and why it was not trained. False writes
    ids, mask, versions and streams only, in about half the space, and the trainer reports no logprobs."""
    show_rollout_every_n_steps: int = Field(default=0, ge=0)
    """Print one rollout of every so many steps as a conversation; 0 prints none. `python -m jaxrl.rollouts RUN_DIR` shows any of them."""
    plot: bool = True
    """Draw `reward_curve.png` at the end of the run."""
    tensorboard: TensorBoardConfig | None = None
    """TensorBoard event files; null writes none."""
    wandb: WandbConfig | None = None
    """A run of Weights & Biases; null makes none."""

    @model_validator(mode="after")
    def _trackers_are_installed(self) -> Self:
        for field, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
            if getattr(self, field) is not None and not is_installed(package):
                raise ValueError(
                    f"`monitors.{field}` needs the package {package}, which is not installed; install the extra `{field}` "
                    f"(pip install 'jaxrl[{field}]'), or leave the section out"
                )
        return self


def is_installed(package: str) -> bool:
    """Say whether a distribution is installed, without importing it."""
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True
