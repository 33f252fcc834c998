"""The root of a server's configuration: which model, how it generates, and how it is reached.

`config.load` reads it for `python -m jaxrl.serve`; the `[inference]` section is the one that a run has.
"""

from __future__ import annotations

import ipaddress
from pathlib import PurePath
from typing import Self

from pydantic import ConfigDict, Field, model_validator

from jaxrl.config.base import Section
from jaxrl.config.inference import EmbeddedInferenceConfig, InferenceConfig
from jaxrl.config.model import ToolFormat, VariableName
from jaxrl.config.turns import History


class ServedModelConfig(Section):
    """The model that is served."""

    name: str = Field(min_length=1)
    """A Hugging Face directory on this machine (config.json, safetensors, tokenizer files), or a name on the hub, `org/name` or
    `org/name@revision`, whose files are fetched first."""
    served_name: str | None = Field(default=None, min_length=1)
    """What requests call the model; null means the last part of `name`."""
    renderer: str = Field(default="auto", min_length=1)
    """What turns messages into tokens, as `model.renderer` of a run has it: `template`, a name of the `renderers` package, or `auto`."""
    tool_format: ToolFormat = "auto"
    """How calls of tools are read in its replies: `hermes`, `llama3`, `mistral` or `xml`; `auto` finds out from the chat template."""


class ServerConfig(Section):
    """Where the server listens, who may ask, and what it refuses."""

    # See `VariableName`.
    model_config = ConfigDict(hide_input_in_errors=True)

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to bind to; any that other machines can reach needs `api_key_var`."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to bind to; 0 takes a free one, which is printed."""
    api_key_var: VariableName | None = None
    """Name of the environment variable that holds the API key; with it, every route but /health wants `Authorization: Bearer KEY`."""
    max_queue: int = Field(default=256, ge=0)
    """Sequences that may wait for a slot; beyond it a request is refused with 429."""
    request_deadline_s: float | None = Field(default=None, gt=0)
    """A request that has not finished by then is cancelled and answered with 504; null means `inference.request_deadline_s`."""
    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)
    """Longest request body; a longer one is refused with 413."""
    max_logprobs: int = Field(default=5, ge=0, le=64)
    """Most alternatives per token that a request may ask for; 0 leaves them out of the compiled programs."""
    history: History = "template"
    """What a later turn of a chat makes of what was said before: `template` lets the chat template rewrite it (drop earlier thinking),
    `keep` always continues the very tokens that the model saw."""
    max_conversations: int = Field(default=1024, ge=0)
    """Replies of chats whose tokens are remembered, so that the conversation goes on from them; 0 encodes every history anew."""
    max_conversation_tokens: int = Field(default=4 * 2**20, ge=1)
    """Tokens of all remembered replies with their prompts together; the least recently used make room."""
    shutdown_deadline_s: float = Field(default=30.0, gt=0)
    """How long Ctrl-C lets running requests go on before they are cancelled."""
    compile_cache: bool = True
    """Keep compiled programs on disk and use those that are kept, as a run does."""
    compile_cache_dir: str | None = None
    """Where; null means the user's cache folder."""

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class ServeConfig(Section):
    """Everything that a server is."""

    model: ServedModelConfig
    """Which model."""
    inference: InferenceConfig = EmbeddedInferenceConfig()
    """How it generates: slots, window, precision."""
    server: ServerConfig = ServerConfig()
    """How it is reached."""

    @property
    def engine(self) -> EmbeddedInferenceConfig:
        """The embedded engine's settings; a validated server has no other engine."""
        assert isinstance(self.inference, EmbeddedInferenceConfig)
        return self.inference

    @property
    def served_name(self) -> str:
        """What requests call the model."""
        return self.model.served_name or PurePath(self.model.name).name or self.model.name

    @property
    def request_deadline_s(self) -> float:
        """How long a request may take, in seconds."""
        return self.server.request_deadline_s or self.engine.request_deadline_s

    @model_validator(mode="after")
    def _serves_its_own_engine(self) -> Self:
        if self.inference.type != "embedded":
            raise ValueError("`inference.type`='openai': a server generates with its own engine and is no proxy; use 'embedded'")
        return self

    @model_validator(mode="after")
    def _strangers_need_a_key(self) -> Self:
        if not self.server.is_local and self.server.api_key_var is None:
            raise ValueError(
                f"`server.host`={self.server.host!r} lets other machines in, and `server.api_key_var` is not set, so anyone could use "
                "the model: name an environment variable that holds a key (`--server.api_key_var JAXRL_API_KEY`), or bind to 127.0.0.1 "
                "and tunnel"
            )
        return self

    @model_validator(mode="after")
    def _deadlines_agree(self) -> Self:
        if self.request_deadline_s > self.engine.request_deadline_s:
            raise ValueError(
                f"`server.request_deadline_s`={self.request_deadline_s:g} would never be reached: the engine drops a request after "
                f"`inference.request_deadline_s`={self.engine.request_deadline_s:g} s; raise the second or lower the first"
            )
        return self
