"""Messages to token ids and back: how a model reads a conversation, and what its replies say.

`renderer` is what everybody else uses; `turns` is what it gives. Behind it: `chat_template` writes text, `continuation` decides how a
conversation goes on from what the model saw, `attribution` which tokens are a message's own, `replies` and `tool_calls` take a reply apart,
`known_models` asks a package that knows the model. `preflight` judges a template before a run.
"""

from jaxrl.inference.rendering.renderer import Renderer
from jaxrl.inference.rendering.turns import RenderedTurn, RenderState

__all__ = ["RenderState", "RenderedTurn", "Renderer"]
