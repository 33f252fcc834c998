"""Which policy is trained, and how an external server that serves a model is reached.

What is reserved for later is parsed here, so that `config.run` can say why it is refused or not used.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field, field_validator

from jaxrl.config.base import Section

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _is_a_variable(name: str) -> str:
    if not _VARIABLE_NAME.fullmatch(name):
        raise ValueError(
            "expected the name of an environment variable, got something that cannot be one; if it is the key itself, put it into a "
            "variable and give that one's name"
        )
    return name


VariableName = Annotated[str, AfterValidator(_is_a_variable)]
"""The name of an environment variable. What is given in its place may be the key itself, so no error repeats it."""


ToolFormat = Literal["auto", "hermes", "llama3", "mistral", "xml"]
"""How a model writes calls of tools: `hermes` is JSON between `<tool_call>` tags (Qwen too), `llama3` a JSON object that is the whole
reply, `mistral` a JSON list after `[TOOL_CALLS]`, `xml` `<function=...>` with parameters (Qwen3-Coder); `auto` takes the one that reads
back what the model's chat template writes."""


class ClientConfig(Section):
    """How an OpenAI-compatible server is reached."""

    # See `VariableName`.
    model_config = ConfigDict(hide_input_in_errors=True)

    base_url: list[str] = []
    """Base URLs ending in `/v1`, of servers that serve the same model; requests are spread over them."""
    api_key_var: VariableName | None = None
    """Name of the environment variable that holds the API key; the key itself is never written into a config."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one request, its retries included, in seconds."""
    max_concurrency: int = Field(default=64, ge=1)
    """Requests in flight at the same time, over all base URLs; further ones wait here."""
    max_attempts: int = Field(default=5, ge=1)
    """Times that a request is sent to one server while that cannot be reached or says that it is busy."""

    @field_validator("base_url")
    @classmethod
    def _are_base_urls(cls, urls: list[str]) -> list[str]:
        cleaned = [_base_url(url) for url in urls]
        twice = sorted({url for url in cleaned if cleaned.count(url) > 1})
        if twice:
            raise ValueError(f"{twice[0]} stands there twice; name each server once")
        return cleaned


class FrozenModelConfig(ClientConfig):
    """A model behind servers of its own that is never trained: a teacher, or a source of rollouts."""

    name: str = Field(min_length=1)
    """The model's name as the servers list it under `/v1/models`."""
    base_url: list[str] = Field(min_length=1)
    """Base URLs ending in `/v1`, of servers that serve the same model; requests are spread over them."""
    ready_deadline_s: float = Field(default=60.0, gt=0)
    """How long the run waits, before its first rollout, for these servers to be ready, in seconds."""


class PolicyModelConfig(Section):
    """The policy that is trained."""

    name: str
    """A Hugging Face directory on this machine (config.json, safetensors, tokenizer files), or a name on the hub, `org/name` or
    `org/name@revision`, whose files are fetched first."""
    trust_remote_code: bool = False
    """Tokenizers that ship code are not run; true is refused."""
    renderer: str = Field(default="auto", min_length=1)
    """What turns messages into tokens: `template` is the tokenizer's own chat template; a name of the `renderers` package, such as `qwen3`,
    is what that package knows of a model; `auto` takes the package if it is installed and knows the very `name`, else the template."""
    tool_format: ToolFormat = "auto"
    """How calls of tools are read in its replies: `hermes`, `llama3`, `mistral` or `xml`; `auto` finds out from the chat template."""
    lora: None = None
    """Low-rank adapters are not built; any value but null is refused."""
    client: ClientConfig = ClientConfig()
    """How an external policy server is reached; the embedded engine has none, and setting it then is a warning."""


def _base_url(url: str) -> str:
    """Return a base URL without a slash at its end.

    Raises:
      ValueError: it is no http(s) URL, holds a character that none can, carries a password, a query or a fragment, or does not end in
        `/v1`.
    """
    url = url.strip()
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ValueError("a base URL must not carry a user or password; put the key into a variable and name it in `api_key_var`")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:  # above 65535, `port` itself raises
        raise ValueError(f"expected an address such as http://127.0.0.1:8000/v1, got {url!r}")
    if odd := sorted({character for character in url if not "!" <= character <= "~"}):
        raise ValueError(f"a base URL is made of printable ASCII; this one holds {odd[0]!a}, which may have been copied along")
    if parts.query or parts.fragment:
        raise ValueError("a base URL has no query and no fragment; a key belongs into a variable that `api_key_var` names")
    cleaned = url.rstrip("/")
    if not cleaned.endswith("/v1"):
        raise ValueError(f"a base URL ends in /v1, got {url!r}; did you mean {cleaned + '/v1'!r}?")
    return cleaned
