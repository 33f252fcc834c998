"""What we see of a run: metrics, rollouts, evaluations, the terminal and the reward curve.

`MonitorSet` is all of it behind one object; `metrics` has the name and the meaning of every number.
"""

from jaxrl.monitors.monitor_set import MonitorSet

__all__ = ["MonitorSet"]
