"""Checks of the model's files: every tensor loads, and the head is what config.json says it is."""

from __future__ import annotations

from pathlib import Path

from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, bad, good, warning

EMBED_PATH, HEAD_PATH = "embed/weight", "lm_head/weight"


def check_model(exam: Examination) -> Finding:
    """The model directory loads, every tensor of it, and the mesh and the window suit its sizes."""
    import jax

    from jaxrl.launch.arrays import check_sizes
    from jaxrl.models import load_pretrained

    check_sizes(exam.config)
    dtype = exam.config.trainer.param_dtype
    model, params = load_pretrained(exam.model_name, param_dtype=dtype)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    spec = model.spec
    leaves = jax.tree_util.tree_leaves_with_path(params)
    broken = [jax.tree_util.keystr(path, simple=True, separator="/") for path, leaf in leaves if not jax.numpy.isfinite(leaf).all()]
    if broken:
        return bad(f"not every number of {', '.join(broken)} is finite: the files are of a model that broke in training, or are damaged")
    return good(
        f"{spec.family}, {spec.num_params:,} parameters, {spec.num_layers} layers, vocabulary {spec.vocab_size}, "
        f"{num_bytes / 2**20:.1f} MiB in {dtype}"
    )


def check_head(exam: Examination) -> Finding:
    """A tied head is the embedding and nothing else; an untied one is in the files, with values of its own."""
    from jaxrl.inference.hub import resolve_model_directory
    from jaxrl.models import load_spec
    from jaxrl.models.spec import FAMILIES

    spec = load_spec(exam.model_name)
    names = {rule.path: rule.hf for rule in FAMILIES[spec.family].names}
    embedding, head = names[EMBED_PATH], names[HEAD_PATH]
    directory = resolve_model_directory(exam.model_name, "weights")
    files = _files_of(directory, {embedding, head})
    is_same = head in files and embedding in files and _are_equal(files, embedding, head)
    if spec.is_tied:
        if head not in files:
            return good(f"tied: `{embedding}` is the head, and the files hold no other")
        if is_same:
            return good(f"tied: the files also hold `{head}`, equal to `{embedding}`; it is not read")
        return bad(
            f"config.json says `tie_word_embeddings`=true, but the files hold a `{head}` with other values than `{embedding}`: set it to "
            "false if the model was trained with a head of its own, else remove the stale head"
        )
    if head not in files:
        return bad(f"config.json says `tie_word_embeddings`=false, but the files hold no `{head}`: get the files again, or set it to true")
    if is_same:
        return warning(
            f"untied, but `{head}` equals `{embedding}`: training moves them apart and needs memory for both; was "
            "`tie_word_embeddings`=true meant?"
        )
    return good(f"untied: `{head}` has values of its own")


def _files_of(directory: Path, names: set[str]) -> dict[str, Path]:
    """Return which safetensors file holds each of the tensors that are there. Damaged files are `check_model`'s matter."""
    from safetensors import SafetensorError, safe_open

    from jaxrl.models.hf import weight_files

    found: dict[str, Path] = {}
    for file in weight_files(directory):
        try:
            with safe_open(file, framework="np") as handle:
                found |= dict.fromkeys(names & set(handle.keys()), file)
        except (OSError, SafetensorError):
            continue
    return found


def _are_equal(files: dict[str, Path], ours: str, theirs: str) -> bool:
    """Compare two tensors byte for byte, some rows at a time."""
    from safetensors import safe_open

    with safe_open(files[ours], framework="np") as first, safe_open(files[theirs], framework="np") as second:
        a, b = first.get_slice(ours), second.get_slice(theirs)
        if a.get_shape() != b.get_shape() or a.get_dtype() != b.get_dtype():
            return False
        num_rows = a.get_shape()[0]
        spans = [slice(start, min(start + 4096, num_rows)) for start in range(0, num_rows, 4096)]
        return all(a[span].tobytes() == b[span].tobytes() for span in spans)
