"""How likely a group is to carry a signal: the maths of the curriculum, as pure functions of numbers.

In: decayed counts of successes and failures, or of groups whose rewards differed. Out: a rate, a probability. No cost goes in.

The form is that of RFC 013 of OpenEnv (task sampling and in-training evaluation): the probability that a group of `group_size` independent
attempts, each a success with probability p, has both successes and failures, with p estimated under a Beta(1, 1) prior that never fades.
"""

from __future__ import annotations

import math


def success_rate(successes: float, failures: float) -> float:
    """Return the mean of the Beta(1 + successes, 1 + failures) posterior, in (0, 1).

    Args:
      successes: decayed number of successes, >= 0.
      failures: decayed number of failures, >= 0.

    Example:
      >>> success_rate(0, 0), success_rate(8, 0), success_rate(0, 8)
      (0.5, 0.9, 0.1)
    """
    return (successes + 1) / (successes + failures + 2)


def signal_of(p_hat: float, group_size: int) -> float:
    """Return 1 - p^G - (1 - p)^G, the probability that `group_size` attempts are neither all successes nor all failures.

    Symmetric in p and 1 - p, largest at 1/2. Accurate for rates near 0 and 1 too, where the formula as it stands would cancel.

    Args:
      p_hat: success rate of one attempt, in [0, 1].
      group_size: rollouts of one task, at least 1; a group of one never carries a signal.

    Example:
      >>> signal_of(0.5, 8), round(signal_of(0.9, 8), 6), signal_of(0.3, 1)
      (0.9921875, 0.569533, 0.0)
      >>> signal_of(1e-20, 8)
      8e-20
    """
    if not 0 <= p_hat <= 1 or group_size < 1:
        raise ValueError(f"expected a rate from 0 to 1 and a group of at least 1, got {p_hat!r} and {group_size!r}")
    if group_size == 1:
        return 0.0
    rarer = min(p_hat, 1 - p_hat)
    return -math.expm1(group_size * math.log1p(-rarer)) - rarer**group_size


def varied_share(varied: float, groups: float) -> float:
    """Return the mean of the Beta(1 + varied, 1 + groups - varied) posterior: the share of groups whose rewards differ, in (0, 1).

    Args:
      varied: decayed number of groups whose rewards differed, >= 0.
      groups: decayed number of groups, >= `varied`.

    Example:
      >>> varied_share(0, 0), varied_share(3, 4)
      (0.5, 0.6666666666666666)
    """
    return (varied + 1) / (groups + 2)
