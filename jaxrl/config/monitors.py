"""What a run shows and writes besides its checkpoints.

`metrics.jsonl` and `environment.json` have no switch: a run without its record would be worth nothing.
"""

from jaxrl.config.base import Section


class MonitorsConfig(Section):
    """Terminal view, rollout log and reward curve."""

    terminal: bool = True
    """Show a live view when standard output is a terminal, and one line per step otherwise."""
    rollouts: bool = True
    """Write every rollout of every step to `rollouts/step_NNNNNN.jsonl`."""
    plot: bool = True
    """Draw `reward_curve.png` at the end of the run."""
