"""The shape of a model, read from a Hugging Face config.json and written back to one.

In goes a parsed config.json, out comes a frozen `ModelSpec` that every other module of the package reads instead of the
file. Also counts parameters and floating-point operations. Reads no file and imports no JAX: sizes can be reasoned
about without a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from jaxrl.errors import ModelLoadError
from jaxrl.models.family import Family
from jaxrl.models.llama import LLAMA
from jaxrl.models.qwen2 import QWEN2
from jaxrl.models.qwen3 import QWEN3

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, QWEN2, QWEN3)}
"""Every family that can be built, by the `model_type` of its config.json."""

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
}
_ROPE_KEYS = ("rope_scaling", "rope_parameters")
"""Where transformers 4 and 5 describe what is done to the rotary embedding."""


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3 stretches the rotary wavelengths of a model beyond the lengths that it was first trained on."""

    factor: float
    """Long wavelengths are multiplied by this; >= 1."""
    low_freq_factor: float
    """Wavelengths above `original_max_position_embeddings / low_freq_factor` are long."""
    high_freq_factor: float
    """Wavelengths below `original_max_position_embeddings / high_freq_factor` are left alone; > `low_freq_factor`."""
    original_max_position_embeddings: int
    """Longest sequence before the stretching, in tokens."""


@dataclass(frozen=True)
class ModelSpec:
    """Everything that fixes the shapes and the arithmetic of a decoder; hashable, so it may be a static argument."""

    family: str
    """Key of `FAMILIES`."""
    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the feed-forward."""
    num_layers: int
    """Decoder layers."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; each serves `num_heads / num_kv_heads` query heads."""
    head_dim: int
    """Width of one head; even."""
    rope_theta: float
    """Base of the rotary embedding's wavelengths."""
    rms_norm_eps: float
    """Added to the mean square inside every norm."""
    is_tied: bool
    """The head is the embedding itself: one array."""
    has_qk_norm: bool
    """Queries and keys are normalised per head before the rotary embedding."""
    has_attention_bias: bool
    """The query, key and value projections add a bias."""
    max_position_embeddings: int
    """Longest sequence that the model was made for, in tokens."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary wavelengths; None leaves them as `rope_theta` gives them."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read the shape of a model from a parsed config.json.

        Args:
          config: the JSON object, as written by transformers 4 (`rope_theta` and `rope_scaling`) or 5 (`rope_parameters`).

        Returns:
          The spec; keys absent from `config` take the family's defaults.

        Raises:
          ModelLoadError: the family is not one of `FAMILIES`, a size is missing or impossible, or a key asks for a part
            that is not built.

        Example:
          >>> spec = ModelSpec.from_hf({"model_type": "qwen3", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384,
          ...     "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
          ...     "tie_word_embeddings": True})
          >>> spec.num_params
          656448
        """
        if "vision_config" in config:
            raise ModelLoadError(
                f"`model_type` {config.get('model_type')!r} is a vision-language model (config.json has `vision_config`), and only text is "
                f"trained here; choose a text model of the families {', '.join(map(repr, FAMILIES))}."
            )
        family = FAMILIES.get(str(config.get("model_type")))
        if family is None:
            raise ModelLoadError(
                f"`model_type` of config.json is {config.get('model_type')!r}; the families that can be loaded are "
                f"{', '.join(map(repr, FAMILIES))}. Choose a model of one of them."
            )
        _check_fixed(config, family)
        values = {**family.config_defaults, **{key: value for key, value in config.items() if value is not None}}
        values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
        if "head_dim" not in values and _size(values, "hidden_size") % _size(values, "num_attention_heads") == 0:
            values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
        spec = cls(
            family=family.name,
            **{field: _size(values, key) for field, key in _SIZES.items()},
            rope_theta=_positive({**values, **(config.get("rope_parameters") or {})}, "rope_theta"),
            rope_scaling=_rope_scaling(config),
            rms_norm_eps=_positive(values, "rms_norm_eps"),
            is_tied=_flag(values, "tie_word_embeddings"),
            has_qk_norm=family.has_qk_norm,
            has_attention_bias=family.has_attention_bias,
        )
        if spec.num_heads % spec.num_kv_heads or spec.head_dim % 2:
            raise ModelLoadError(
                f"config.json has `num_attention_heads`={spec.num_heads}, `num_key_value_heads`={spec.num_kv_heads} and "
                f"`head_dim`={spec.head_dim}; the first must be a multiple of the second and the third must be even. The file "
                "does not describe a model that exists; get it again from where the weights came from."
            )
        return spec

    def to_hf(self, dtype: str) -> dict[str, Any]:
        """Write the config.json that `from_hf` reads, in the spelling of both transformers 4 and 5.

        Args:
          dtype: precision of the weights beside it, such as `"float32"`.
        """
        family = FAMILIES[self.family]
        scaling = {} if self.rope_scaling is None else {"rope_type": "llama3", **asdict(self.rope_scaling)}
        return {
            "architectures": [family.architecture],
            "model_type": family.name,
            "dtype": dtype,
            **{key: getattr(self, field) for field, key in _SIZES.items()},
            "rope_theta": self.rope_theta,
            **({"rope_scaling": scaling} if scaling else {}),
            "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": self.rope_theta},
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.is_tied,
            **family.fixed_config,
        }

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_params(self) -> int:
        """Parameters, each counted once (a tied head is the embedding)."""
        attention = 2 * self.hidden_size * (self.query_size + self.kv_size)
        if self.has_attention_bias:
            attention += self.query_size + 2 * self.kv_size
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.has_qk_norm else 0)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + norms
        embeddings = self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    @property
    def num_active_matmul_params(self) -> int:
        """Parameters that one token is multiplied with: projections, feed-forward, head; no norm, no embedding."""
        attention = 2 * self.hidden_size * (self.query_size + self.kv_size)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of one token's forward and backward pass.

        6 * active matmul parameters + 12 * layers * hidden * seq_len. Causal sparsity and recomputation are ignored,
        and the attention term takes heads * head_dim to be the hidden size, so that figures compare with those
        published by this formula.

        Args:
          seq_len: positions that one token attends over.

        Returns:
          Operations per token, dimensionless.

        Example:
          >>> qwen3_0_6b = ModelSpec.from_hf({"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
          ...     "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
          ...     "head_dim": 128, "tie_word_embeddings": True})
          >>> qwen3_0_6b.flops_per_token(1024)
          3928227840

        Reference: Chowdhery et al. 2022, PaLM, https://arxiv.org/abs/2204.02311, appendix B.
        """
        attention = 12 * self.num_layers * self.num_heads * (self.hidden_size // self.num_heads) * seq_len
        return 6 * self.num_active_matmul_params + attention


def _size(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        came = "is absent" if value is None else f"is {value!r}"
        raise ModelLoadError(
            f"`{key}` {came} in config.json; a positive integer was expected. Get the file again from where the weights came from."
        )
    return value


def _positive(values: Mapping[str, Any], key: str) -> float:
    value = values[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelLoadError(
            f"`{key}` is {value!r} in config.json; a positive number was expected. Get the file again from where the weights came from."
        )
    return float(value)


def _flag(values: Mapping[str, Any], key: str) -> bool:
    value = values[key]
    if not isinstance(value, bool):
        raise ModelLoadError(
            f"`{key}` is {value!r} in config.json; true or false was expected. Get the file again from where the weights came from."
        )
    return value


def _check_fixed(config: Mapping[str, Any], family: Family) -> None:
    """Refuse keys that ask for another network than the one that is built."""
    unsupported = [
        f"`{key}`={config[key]!r} (only {value!r} is built)"
        for key, value in family.fixed_config.items()
        if config.get(key) is not None and config[key] != value
    ]
    for key in _ROPE_KEYS:
        rope = config.get(key) or {}
        if not isinstance(rope, Mapping):
            raise ModelLoadError(
                f"`{key}` is {rope!r} in config.json; an object was expected. Get the file again from where the weights came from."
            )
        if _rope_type(rope) not in ("default", "llama3"):
            unsupported.append(f"rotary embedding of type {_rope_type(rope)!r} in `{key}` (only 'default' and 'llama3' are built)")
        if any(isinstance(value, Mapping) for value in rope.values()):
            unsupported.append(f"`{key}` with settings of their own for {', '.join(map(repr, rope))} (one for all layers is built)")
        if (rotated := rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))) not in (None, 1):
            unsupported.append(f"`partial_rotary_factor`={rotated!r} (only whole heads are rotated)")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        unsupported.append(f"`layer_types`={kinds!r} (only 'full_attention' is built)")
    if config.get("quantization_config"):
        unsupported.append("`quantization_config` (only unquantised weights are read)")
    if unsupported:
        raise ModelLoadError(
            f"config.json of this {family.name!r} model asks for {'; '.join(unsupported)}. Choose a checkpoint without it."
        )


def _rope_type(rope: Mapping[str, Any]) -> Any:
    """The type that one of `_ROPE_KEYS` names, in the spelling of today or the older one."""
    return rope.get("rope_type", rope.get("type", "default"))


def _rope_scaling(config: Mapping[str, Any]) -> RopeScaling | None:
    """Read Llama 3's scaling from whichever of `_ROPE_KEYS` is there; two that disagree are refused."""
    found = {key: _read_scaling(config[key], config, key) for key in _ROPE_KEYS if config.get(key)}
    if len(set(found.values())) > 1:
        raise ModelLoadError(
            f"`rope_scaling` and `rope_parameters` of config.json disagree: {found['rope_scaling']} and {found['rope_parameters']}. Remove "
            "the one that does not belong to the weights."
        )
    return next(iter(found.values()), None)


def _read_scaling(rope: Mapping[str, Any], config: Mapping[str, Any], key: str) -> RopeScaling | None:
    if _rope_type(rope) != "llama3":
        return None
    values = {name: rope.get(name, config.get(name)) for name in (field.name for field in fields(RopeScaling))}
    if not all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values.values()):
        raise ModelLoadError(
            f"`{key}` of type 'llama3' in config.json needs the positive numbers {', '.join(f'`{name}`' for name in values)}; it holds "
            f"{dict(rope)!r}. Get the file again from where the weights came from."
        )
    scaling = RopeScaling(
        factor=float(values["factor"]),
        low_freq_factor=float(values["low_freq_factor"]),
        high_freq_factor=float(values["high_freq_factor"]),
        original_max_position_embeddings=int(values["original_max_position_embeddings"]),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor or scaling.factor < 1:
        raise ModelLoadError(
            f"`{key}` of config.json has `low_freq_factor`={scaling.low_freq_factor}, `high_freq_factor`={scaling.high_freq_factor} and "
            f"`factor`={scaling.factor}; the second must be above the first and the third at least 1. Get the file again from where the "
            "weights came from."
        )
    return scaling
