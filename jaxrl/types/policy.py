"""Policy versions and how far behind the trainer a token may be.

`v_k` is the weights after `k` optimizer steps; step `k` (1-based) turns `v_{k-1}` into `v_k`. Everything that speaks of
staleness uses the one function here. Weights themselves never pass through this module.
"""


def staleness_steps(step: int, oldest_version: int) -> int:
    """Return how many versions behind a sample is when step `step` trains on it.

    Step `k` trains `v_{k-1}`, so a token sampled from `v_{k-1}` has staleness 0.

    Args:
      step: the 1-based optimizer step that consumes the sample.
      oldest_version: the oldest policy version among the sample's sampled tokens.

    Returns:
      Staleness in steps, `>= 0` for any sample that existed when the step began.

    Example:
      >>> staleness_steps(step=10, oldest_version=9)
      0
      >>> staleness_steps(step=10, oldest_version=5)
      4
    """
    return (step - 1) - oldest_version
