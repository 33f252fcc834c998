"""Reinforcement-learning post-training of language models in JAX.

The package has two arms and one hinge: an asyncio arm decides what to play and what to learn from, an array arm
computes how likely, how wrong and how to step, and they meet at `jaxrl.types` (`TrainBatch` one way, `StepReport`
back). Nothing is imported here, so `import jaxrl` touches no device and no optional dependency.
"""

__version__ = "0.1.0"
