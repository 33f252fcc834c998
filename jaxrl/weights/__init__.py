"""How weights travel from the trainer to whoever serves them."""

from jaxrl.weights.memory import WeightStore

__all__ = ["WeightStore"]
