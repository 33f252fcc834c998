"""Hugging Face model directories, both ways: config.json and safetensors to a model and its parameters, and back.

One name table per family (`Family.names`) serves loading and saving. Loading reads each device's slice of each tensor
straight from the memory-mapped files, so host memory never holds more than one leaf's shard. Anything that does not
match is an error that names it. Nothing is downloaded, and tokenizers are only copied, never read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl.errors import ModelLoadError
from jaxrl.models.family import LAYER, NameRule
from jaxrl.models.spec import FAMILIES, ModelSpec
from jaxrl.models.transformer import Model, Params, build_model

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that travel with the weights when a model is saved; generation_config.json holds the stop ids that servers
read."""
_TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_HEAD_PATH, _EMBED_PATH = "lm_head/weight", "embed/weight"


def load_spec(path: str | os.PathLike[str]) -> ModelSpec:
    """Read the shape of the model in a Hugging Face directory, without its weights.

    Raises:
      ModelLoadError: `path` is no such directory, or the family is not built.
    """
    return ModelSpec.from_hf(_read_json(_model_directory(path) / CONFIG_FILE))


def load_pretrained(
    path: str | os.PathLike[str], *, param_dtype: jax.typing.DTypeLike = "float32", mesh: Mesh | None = None
) -> tuple[Model, Params]:
    """Load a Hugging Face directory.

    Args:
      path: directory with config.json and either model.safetensors or shards with model.safetensors.index.json.
      param_dtype: dtype of every parameter; the files may hold float16, bfloat16, float32 or float64.
      mesh: from `build_mesh`; each device reads only its own slices. None loads onto the default device.

    Returns:
      (model, params); `params` is drawn in `Model`.

    Raises:
      ModelLoadError: `path` is not such a directory, the family is not built, a file is missing or damaged, or the
        tensors are not exactly those of the model by name, shape or kind of dtype.
      ConfigError: the mesh does not divide the model.

    Example:
      >>> model, params = load_pretrained("Qwen/Qwen3-0.6B")  # doctest: +IGNORE_EXCEPTION_DETAIL
      Traceback (most recent call last):
      jaxrl.errors.ModelLoadError: `Qwen/Qwen3-0.6B` is not a directory ...
    """
    directory = _model_directory(path)
    spec = ModelSpec.from_hf(_read_json(directory / CONFIG_FILE))
    model = build_model(spec, mesh)
    abstract = model.abstract_params(param_dtype)
    with _open_weights(directory) as weights:
        leaves = {leaf_path: _Leaf(_rule(spec, leaf_path), struct) for leaf_path, struct in _flatten(abstract).items()}
        _check_tensors(spec, leaves, weights, directory)
        flat = {leaf_path: leaf.load(weights) for leaf_path, leaf in leaves.items()}
    return model, _unflatten(flat)


def save_pretrained(
    model: Model,
    params: Params,
    directory: str | os.PathLike[str],
    *,
    tokenizer_dir: str | os.PathLike[str] | None = None,
    dtype: str = "float32",
) -> None:
    """Write config.json, model.safetensors and tokenizer files, as transformers, vLLM and `load_pretrained` read them.

    The directory appears whole or not at all: it is written under another name beside its place, then renamed.

    Args:
      model: describes `params`.
      params: the dict drawn in `Model`; every shard must be addressable from this process.
      directory: must not exist, or be empty.
      tokenizer_dir: where `TOKENIZER_FILES` are copied from, and the token ids of its config.json; None copies nothing.
      dtype: precision of the written weights, `"float32"`, `"bfloat16"` or `"float16"`.

    Raises:
      ModelLoadError: `directory` is in use, or `tokenizer_dir` holds no tokenizer.
    """
    target = Path(directory).absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ModelLoadError(
            f"`{target}` exists and is not an empty directory, so no model was written there. Choose a new name or remove it first."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        config = model.spec.to_hf(dtype)
        if tokenizer_dir is not None:
            config |= _copy_tokenizer(Path(tokenizer_dir), partial)
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        save_file(_hf_tensors(model.spec, params, dtype), partial / WEIGHTS_FILE, metadata={"format": "pt"})
        for file in (partial / CONFIG_FILE, partial / WEIGHTS_FILE):
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        partial.replace(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@dataclass(frozen=True)
class _Weights:
    """The open safetensors files of a checkpoint, as one mapping from tensor name to lazy slice."""

    slices: dict[str, Any]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.slices[name].get_shape())

    def dtype(self, name: str) -> str:
        return self.slices[name].get_dtype()

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self.slices[name][index]


@dataclass(frozen=True)
class _Leaf:
    """One of our parameters and the checkpoint tensors that it is made of."""

    rule: NameRule
    struct: jax.ShapeDtypeStruct

    @property
    def is_stacked(self) -> bool:
        return LAYER in self.rule.hf

    @property
    def hf_names(self) -> list[str]:
        if not self.is_stacked:
            return [self.rule.hf]
        return [self.rule.hf.replace(LAYER, str(layer)) for layer in range(self.struct.shape[0])]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        shape = self.struct.shape[1:] if self.is_stacked else self.struct.shape
        return shape[::-1] if self.rule.transform == "transpose" else shape

    def read(self, weights: _Weights, index: tuple[slice, ...]) -> np.ndarray:
        """The part of the leaf at `index`, reading no other part of the files."""
        index = tuple(slice(*part.indices(size)) for part, size in zip(index, self.struct.shape, strict=True))
        out = np.empty([part.stop - part.start for part in index], self.struct.dtype)
        if not self.is_stacked:
            out[...] = self._read_tensor(weights, self.rule.hf, index)
        else:
            for row, name in enumerate(self.hf_names[index[0]]):
                out[row] = self._read_tensor(weights, name, index[1:])
        return out

    def load(self, weights: _Weights) -> jax.Array:
        """The leaf on its devices."""
        if self.struct.sharding is None:
            return jnp.asarray(self.read(weights, (slice(None),) * len(self.struct.shape)))

        def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "every shard of an array has an index"
            return self.read(weights, index)

        return jax.make_array_from_callback(self.struct.shape, self.struct.sharding, read_shard)

    def _read_tensor(self, weights: _Weights, name: str, index: tuple[slice, ...]) -> np.ndarray:
        is_transposed = self.rule.transform == "transpose"
        tensor = weights.read(name, index[::-1] if is_transposed else index)
        return tensor.T if is_transposed else tensor


def _model_directory(path: str | os.PathLike[str]) -> Path:
    directory = Path(path).expanduser()
    if not directory.is_dir():
        came = "is a file, not a directory" if directory.exists() else "is not a directory on this machine"
        raise ModelLoadError(
            f"`{path}` {came}. Downloading from the Hugging Face hub is not available yet: fetch the model with another tool and "
            f"pass the directory that holds its {CONFIG_FILE}, safetensors and tokenizer files."
        )
    if not (directory / CONFIG_FILE).is_file():
        raise ModelLoadError(
            f"`{directory}` has no {CONFIG_FILE}, so it is not a Hugging Face model directory. Pass the directory that holds it"
            " (a checkpoint of a run is exported with save_pretrained first)."
        )
    return directory


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"`{file}` cannot be read as JSON: {error}. Get the file again from where it came.") from error
    if not isinstance(content, dict):
        raise ModelLoadError(
            f"`{file}` holds a JSON {type(content).__name__} where an object was expected. Get the file again from where it came."
        )
    return content


@contextmanager
def _open_weights(directory: Path) -> Iterator[_Weights]:
    with ExitStack() as stack:
        slices: dict[str, Any] = {}
        for file in _weight_files(directory):
            try:
                handle = stack.enter_context(safe_open(file, framework="np"))
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(
                    f"`{file}` is not a whole safetensors file ({file.stat().st_size} bytes): {error}. It was probably cut short "
                    "while downloading or copying; get the file again."
                ) from error
            for name in handle.keys():  # noqa: SIM118 - the handle is not a mapping
                if name in slices:
                    raise ModelLoadError(
                        f"tensor `{name}` is in `{file}` and in another shard as well. Remove the shards that do not belong to "
                        f"{INDEX_FILE}, or get the directory again."
                    )
                slices[name] = handle.get_slice(name)
        yield _Weights(slices)


def _weight_files(directory: Path) -> list[Path]:
    if (directory / WEIGHTS_FILE).is_file():
        return [directory / WEIGHTS_FILE]
    if not (directory / INDEX_FILE).is_file():
        raise ModelLoadError(
            f"`{directory}` has neither {WEIGHTS_FILE} nor {INDEX_FILE}; it holds "
            f"{', '.join(sorted(file.name for file in directory.iterdir()))}. Only safetensors are read: save other formats "
            "as safetensors first (transformers' `save_pretrained` does)."
        )
    weight_map = _read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelLoadError(
            f"`{directory / INDEX_FILE}` has no `weight_map` from tensor names to file names. Get the file again from where it came."
        )
    files = [directory / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelLoadError(
            f"`{directory / INDEX_FILE}` names {len(missing)} of {len(files)} shards that are not there: {', '.join(missing)}. "
            "Get the missing files."
        )
    return files


def _check_tensors(spec: ModelSpec, leaves: dict[str, _Leaf], weights: _Weights, directory: Path) -> None:
    """Refuse a checkpoint whose tensors are not exactly those of the model."""
    head = _rule(spec, _HEAD_PATH).hf
    owners = {name: leaf for leaf in leaves.values() for name in leaf.hf_names}
    missing = sorted(owners.keys() - weights.slices.keys())
    unknown = sorted(weights.slices.keys() - owners.keys() - ({head} if spec.is_tied else set()))
    if missing or unknown:
        problems = []
        if missing:
            problems.append(f"missing from the files: {', '.join(missing)}")
        if unknown:
            problems.append(f"in the files but not part of the model: {', '.join(unknown)}")
        raise ModelLoadError(
            f"The tensors in `{directory}` are not those of the {spec.family!r} model with {spec.num_layers} layers that its "
            f"{CONFIG_FILE} describes (`tie_word_embeddings`={spec.is_tied}); {'; '.join(problems)}. Get a {CONFIG_FILE} and "
            "weights that belong together."
        )
    wrong_shapes = [
        f"{name} is {list(weights.shape(name))}, expected {list(leaf.hf_shape)}"
        for name, leaf in owners.items()
        if weights.shape(name) != leaf.hf_shape
    ]
    if wrong_shapes:
        raise ModelLoadError(
            f"Tensors in `{directory}` do not have the shapes that its {CONFIG_FILE} describes: {'; '.join(wrong_shapes)}. Get a "
            f"{CONFIG_FILE} and weights that belong together."
        )
    wrong_dtypes = [f"{name} is {weights.dtype(name)}" for name in owners if weights.dtype(name) not in _FLOAT_DTYPES]
    if wrong_dtypes:
        raise ModelLoadError(
            f"Tensors in `{directory}` are not floating point of 16 bits or more: {', '.join(wrong_dtypes)}. Quantised weights are "
            "not read; choose an unquantised checkpoint."
        )
    if spec.is_tied and head in weights.slices:
        _check_tied_head(_rule(spec, _EMBED_PATH).hf, head, weights, directory)


def _check_tied_head(embedding: str, head: str, weights: _Weights, directory: Path) -> None:
    whole = (slice(None), slice(None))
    is_alike = weights.shape(head) == weights.shape(embedding) and weights.dtype(head) == weights.dtype(embedding)
    if not is_alike or weights.read(head, whole).tobytes() != weights.read(embedding, whole).tobytes():
        raise ModelLoadError(
            f"{CONFIG_FILE} in `{directory}` says `tie_word_embeddings`=true, but `{head}` is not equal to `{embedding}`. If the "
            "model was trained with a head of its own, set `tie_word_embeddings` to false; otherwise remove the stale head."
        )


def _hf_tensors(spec: ModelSpec, params: Params, dtype: str) -> dict[str, np.ndarray]:
    tensors = {}
    for leaf_path, array in _flatten(params).items():
        leaf = _Leaf(_rule(spec, leaf_path), jax.ShapeDtypeStruct(array.shape, array.dtype))
        host = np.asarray(array).astype(jnp.dtype(dtype), copy=False)
        for name, tensor in zip(leaf.hf_names, host if leaf.is_stacked else [host], strict=True):
            tensors[name] = np.ascontiguousarray(tensor.T if leaf.rule.transform == "transpose" else tensor)
    return tensors


def _copy_tokenizer(source: Path, target: Path) -> dict[str, Any]:
    """Copy the tokenizer's files; give back the token ids that its config.json declares."""
    found = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise ModelLoadError(
            f"`{source}` holds none of the tokenizer files {', '.join(TOKENIZER_FILES)}. Pass the directory that the policy's "
            "tokenizer came from, or no `tokenizer_dir`."
        )
    for file in found:
        shutil.copyfile(file, target / file.name)
    config = _read_json(source / CONFIG_FILE) if (source / CONFIG_FILE).is_file() else {}
    return {key: config[key] for key in _TOKEN_ID_KEYS if config.get(key) is not None}


def _rule(spec: ModelSpec, leaf_path: str) -> NameRule:
    return next(rule for rule in FAMILIES[spec.family].names if rule.path == leaf_path)


def _flatten(params: Params) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


def _unflatten(flat: dict[str, Any]) -> Params:
    params: Params = {}
    for leaf_path, leaf in flat.items():
        *parents, name = leaf_path.split("/")
        branch = params
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[name] = leaf
    return params
