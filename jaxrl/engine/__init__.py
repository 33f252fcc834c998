"""Our inference: a fixed set of slots that decode together, filled and emptied between steps.

`Engine` is the whole of it, in process; `EmbeddedEndpoint` is its face for the asyncio arm.
"""

from jaxrl.engine.client import EmbeddedEndpoint
from jaxrl.engine.engine import Engine

__all__ = ["EmbeddedEndpoint", "Engine"]
