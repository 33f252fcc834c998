"""Write the golden Qwen3 models: a tiny random checkpoint of each kind and the logits that transformers computes for it.

Run with a Python that has torch and transformers: `python tests/golden/models/make_qwen3_golden.py [OUTPUT_DIR]` (default: the folder of
this file). For each of "tied" and "untied" it writes a Hugging Face directory, saved by transformers itself, and logits.npz with token
ids and float32 logits. It does not import jaxrl: the numbers stand on their own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SHAPES = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
}


def write_golden(directory: Path, *, is_tied: bool, seed: int) -> None:
    """One checkpoint and its logits; the norm scales are drawn too, since ones would hide a scale applied in the wrong place."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPES, tie_word_embeddings=is_tied)).to(torch.float32).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    token_ids = torch.randint(0, SHAPES["vocab_size"], (3, 20))
    with torch.no_grad():
        logits = model(input_ids=token_ids).logits
    np.savez_compressed(directory / "logits.npz", token_ids=token_ids.numpy().astype(np.int32), logits=logits.numpy())


def main(output: Path) -> None:
    """Write both kinds under `output`."""
    for seed, is_tied in enumerate((True, False)):
        write_golden(output / ("qwen3_tied" if is_tied else "qwen3_untied"), is_tied=is_tied, seed=seed)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
