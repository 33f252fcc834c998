"""How train batches travel to the trainer and how its reports and versions come back."""

from jaxrl.transport.codec import decode, encode
from jaxrl.transport.memory import InProcessChannel

__all__ = ["InProcessChannel", "decode", "encode"]
