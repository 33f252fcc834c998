"""Which policy is trained, and how an external server that serves a model is reached.

What is reserved for later is parsed here, so that `config.run` can say why it is refused or not used.
"""

from pydantic import Field

from jaxrl.config.base import Section


class ClientConfig(Section):
    """How an OpenAI-compatible server is reached."""

    base_url: list[str] = []
    """Base URLs ending in `/v1`; requests are spread over them."""
    api_key_var: str | None = None
    """Name of the environment variable that holds the API key; the key itself is never written into a config."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one request, in seconds."""


class PolicyModelConfig(Section):
    """The policy that is trained."""

    name: str
    """A Hugging Face directory on this machine (config.json, model.safetensors, tokenizer files)."""
    trust_remote_code: bool = False
    """Tokenizers that ship code are not run; true is refused."""
    lora: None = None
    """Low-rank adapters are not built; any value but null is refused."""
    client: ClientConfig = ClientConfig()
    """How an external policy server is reached; the embedded engine has none, and setting it then is a warning."""
