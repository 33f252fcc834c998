"""Who generates text: the engine in this process, or an OpenAI-compatible server.

One class per kind, told apart by `type`. How tokens are sampled belongs to the environments (`config.env`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxrl.config.base import Section
from jaxrl.config.trainer import Dtype


class EmbeddedInferenceConfig(Section):
    """The engine inside the training process, on the trainer's devices."""

    type: Literal["embedded"] = "embedded"
    """Which engine: `embedded`; `openai` is refused with the reason."""
    num_slots: int = Field(default=64, ge=1)
    """Sequences that decode at the same time."""
    max_model_len: int = Field(default=512, ge=2)
    """Prompt plus completion tokens of one sequence; the length of a slot's key-value cache."""
    prefill_rows: int = Field(default=8, ge=1)
    """Prompts that are prefilled by one call."""
    min_prefill_bucket: int = Field(default=16, ge=1)
    """Shortest prompt bucket; the others follow in steps of two significant bits up to `max_model_len`."""
    decode_steps_per_tick: int = Field(default=1, ge=1)
    """Decode steps per call of the device; 1 suits a CPU, 8 to 16 an accelerator."""
    dtype: Dtype = "float32"
    """Precision of the engine's copy of the weights and of its key-value cache."""
    request_deadline_s: float = Field(default=600.0, gt=0)
    """A request that has not finished by then fails with the engine's state in the message."""


class OpenAIInferenceConfig(Section):
    """An external OpenAI-compatible server as the policy; parsed so that the refusal can say why."""

    type: Literal["openai"] = "openai"
    """Which engine: `embedded`; `openai` is refused with the reason."""


InferenceConfig = Annotated[EmbeddedInferenceConfig | OpenAIInferenceConfig, Field(discriminator="type")]
