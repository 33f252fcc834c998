"""Hugging Face model directories, both ways: config.json and safetensors to a model and its parameters, and back.

One name table per family (`Family.names`) serves loading and saving. Loading reads each device's slice of each tensor
straight from the memory-mapped files, so host memory never holds more than one leaf's shard. Anything that does not
match is an error that names it. Files of the hub come through `inference.hub`; tokenizers are only copied, never read.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from jaxrl.errors import ModelLoadError
from jaxrl.inference.hub import CONFIG_FILE, TOKENIZER_FILES, resolve_model_directory
from jaxrl.models.family import LAYER, NameRule
from jaxrl.models.spec import FAMILIES, ModelSpec
from jaxrl.models.transformer import Model, Params, build_model

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DTYPE_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Floating-point dtypes under the names that safetensors files give them."""
_HEAD_PATH, _EMBED_PATH = "lm_head/weight", "embed/weight"
_DERIVED = ".rotary_emb.inv_freq"
"""End of the names under which older checkpoints hold what follows from `rope_theta`; it is computed, not read."""
_MAX_LISTED = 8
"""Tensors that an error names; a config.json of another model makes all of them wrong."""


def load_spec(path: str | os.PathLike[str]) -> ModelSpec:
    """Read the shape of a Hugging Face model, without its weights.

    Args:
      path: a directory, or a name on the hub (`org/name`, `org/name@revision`), from which only config.json is fetched.

    Raises:
      ModelLoadError: `path` is neither, or the family is not built.
    """
    return ModelSpec.from_hf(_read_json(_model_directory(path, "config") / CONFIG_FILE))


def load_pretrained(
    path: str | os.PathLike[str],
    *,
    param_dtype: jax.typing.DTypeLike = "float32",
    mesh: Mesh | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Model, Params]:
    """Load a Hugging Face model.

    Args:
      path: directory with config.json and either model.safetensors or shards with model.safetensors.index.json; or a name
        on the hub (`org/name`, `org/name@revision`), whose weights are fetched into the hub client's cache first.
      param_dtype: dtype of every parameter; the files may hold float16, bfloat16, float32 or float64.
      mesh: from `build_mesh`; each device reads only its own slices. None loads onto the default device.
      on_progress: called with the bytes of the parameters loaded so far and of all of them, after each parameter.

    Returns:
      (model, params); `params` is drawn in `Model`.

    Raises:
      ModelLoadError: `path` is neither, the family is not built, a file is missing or damaged, or the tensors are not
        exactly those of the model by name, shape or kind of dtype.
      ConfigError: the mesh does not divide the model.

    Example:
      >>> model, params = load_pretrained("configs/quickstart/start_model")
      >>> model.spec.num_params
      656448
    """
    directory = _model_directory(path, "weights")
    spec = ModelSpec.from_hf(_read_json(directory / CONFIG_FILE))
    model = build_model(spec, mesh)
    abstract = model.abstract_params(param_dtype)
    with _open_weights(directory) as weights:
        leaves = {leaf_path: _Leaf(_rule(spec, leaf_path), struct) for leaf_path, struct in _flatten(abstract).items()}
        _check_tensors(spec, leaves, weights, directory)
        total, done = sum(leaf.num_bytes for leaf in leaves.values()), 0
        flat: dict[str, jax.Array] = {}
        for leaf_path, leaf in leaves.items():
            flat[leaf_path] = leaf.load(weights)
            done += leaf.num_bytes
            if on_progress is not None:
                on_progress(done, total)
    return model, _unflatten(flat)


def save_pretrained(
    model: Model,
    params: Params,
    directory: str | os.PathLike[str],
    *,
    tokenizer_dir: str | os.PathLike[str] | None = None,
    dtype: str = "float32",
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write config.json, weights and tokenizer files, as transformers, vLLM and `load_pretrained` read them.

    The directory appears whole or not at all: it is written under another name beside its place, then renamed. Tensors
    are written one after another, so the host holds one at a time: a layer's kernel or the embedding.

    Args:
      model: describes `params`.
      params: the dict drawn in `Model`; every shard must be addressable from this process.
      directory: must not exist, or be empty.
      tokenizer_dir: directory or hub name that the tokenizer's files are copied from, and the token ids of its
        config.json; None copies nothing.
      dtype: precision of the written weights, `"float32"`, `"bfloat16"` or `"float16"`; rounded to nearest, ties to even.
      max_shard_bytes: weights above this are split over several files with an index; a tensor is never split. > 0.

    Raises:
      ModelLoadError: `directory` is in use, or `tokenizer_dir` holds no tokenizer.
    """
    target = Path(directory).resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ModelLoadError(
            f"`{target}` exists and is not an empty directory, so no model was written there. Choose a new name or remove it first."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed and had this number
    partial.mkdir()
    try:
        config = model.spec.to_hf(dtype)
        if tokenizer_dir is not None:
            config |= _copy_tokenizer(resolve_model_directory(tokenizer_dir, "tokenizer"), partial)
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        _write_weights(partial, _hf_tensors(model.spec, params, np.dtype(dtype)), max_shard_bytes)
        for file in partial.iterdir():
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
    def num_bytes(self) -> int:
        return math.prod(self.struct.shape) * self.struct.dtype.itemsize

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


def _model_directory(path: str | os.PathLike[str], files: Literal["config", "weights"]) -> Path:
    directory = resolve_model_directory(path, files)
    if not directory.is_dir():
        raise ModelLoadError(f"`{path}` is a file, not a directory. Pass the directory that holds its {CONFIG_FILE}.")
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
        for file in weight_files(directory):
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


def weight_files(directory: Path) -> list[Path]:
    """Return the files that hold a checkpoint's tensors: the single one, or those that the index names.

    Raises:
      ModelLoadError: neither is there, the index is damaged, or it names a file that is missing.
    """
    if (directory / WEIGHTS_FILE).is_file():
        return [directory / WEIGHTS_FILE]
    if not (directory / INDEX_FILE).is_file():
        raise ModelLoadError(
            f"`{directory}` has neither {WEIGHTS_FILE} nor {INDEX_FILE}; it holds "
            f"{', '.join(sorted(_described(file) for file in directory.iterdir()))}. Only safetensors are read: save other formats "
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


def _described(file: Path) -> str:
    return file.name if file.exists() else f"{file.name} (a link to nothing)"


def _listed(items: Sequence[str], separator: str = ", ") -> str:
    """Join the first few, and say how many more there are."""
    rest = f"{separator}and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return separator.join(items[:_MAX_LISTED]) + rest


def _check_tensors(spec: ModelSpec, leaves: dict[str, _Leaf], weights: _Weights, directory: Path) -> None:
    """Refuse a checkpoint whose tensors are not exactly those of the model."""
    head = _rule(spec, _HEAD_PATH).hf
    owners = {name: leaf for leaf in leaves.values() for name in leaf.hf_names}
    missing = sorted(owners.keys() - weights.slices.keys())
    unread = {head} if spec.is_tied else set()
    unknown = sorted(name for name in weights.slices.keys() - owners.keys() - unread if not name.endswith(_DERIVED))
    if missing or unknown:
        problems = []
        if missing:
            problems.append(f"missing from the files: {_listed(missing)}")
        if unknown:
            problems.append(f"in the files but not part of the model: {_listed(unknown)}")
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
            f"Tensors in `{directory}` do not have the shapes that its {CONFIG_FILE} describes: {_listed(wrong_shapes, '; ')}. Get a "
            f"{CONFIG_FILE} and weights that belong together."
        )
    wrong_dtypes = [f"{name} is {weights.dtype(name)}" for name in owners if weights.dtype(name) not in _DTYPE_NAMES.values()]
    if wrong_dtypes:
        raise ModelLoadError(
            f"Tensors in `{directory}` are not floating point of 16 bits or more: {_listed(wrong_dtypes)}. Quantised weights are "
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


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a checkpoint that is written; its numbers are fetched when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    fetch: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _hf_tensors(spec: ModelSpec, params: Params, dtype: np.dtype) -> list[_Tensor]:
    """The tensors of a checkpoint in the order of their names, so that the tensors of a layer stand together."""
    tensors = []
    for leaf_path, array in _flatten(params).items():
        leaf = _Leaf(_rule(spec, leaf_path), jax.ShapeDtypeStruct(array.shape, array.dtype))
        for layer, name in enumerate(leaf.hf_names):
            index = layer if leaf.is_stacked else ...
            tensors.append(_Tensor(name, leaf.hf_shape, dtype, functools.partial(_to_host, array, index, leaf.rule.transform, dtype)))
    return sorted(tensors, key=lambda tensor: tensor.name)


def _to_host(array: jax.Array, index: Any, transform: str, dtype: np.dtype) -> np.ndarray:
    # Indexed on the device: only this layer crosses to the host.
    tensor = np.asarray(array[index]).astype(dtype, copy=False)
    return np.ascontiguousarray(tensor.T if transform == "transpose" else tensor)


def _write_weights(directory: Path, tensors: list[_Tensor], max_shard_bytes: int) -> None:
    assert max_shard_bytes > 0, f"`max_shard_bytes` must be positive, not {max_shard_bytes}"
    shards: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(other.num_bytes for other in shards[-1]) + tensor.num_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        _write_safetensors(directory / WEIGHTS_FILE, tensors)
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_safetensors(directory / name, shard)
        weight_map |= dict.fromkeys((tensor.name for tensor in shard), name)
    index = {"metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _write_safetensors(file: Path, tensors: list[_Tensor]) -> None:
    """Write one safetensors file without holding it: the package's own writer takes all its tensors at once.

    Reference: https://github.com/huggingface/safetensors, "Format": the header's length as 8 little-endian bytes, the
      header as JSON padded with spaces, the tensors' bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": _DTYPE_NAMES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            handle.write(tensor.fetch().view(np.uint8).data)


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
