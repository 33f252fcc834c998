"""Write the golden models: tiny random checkpoints of every family, and what transformers computes for them.

Run with a Python that has torch and transformers:

    python tests/golden/models/make_golden.py [OUTPUT_DIR]           the tiny models (default: the folder of this file)
    python tests/golden/models/make_golden.py --smollm2 MODEL_DIR    smollm2.npz, of a model that is too large to keep here

For each tiny model it writes a Hugging Face directory, saved by transformers itself, with golden.npz inside; for SmolLM2 only smollm2.npz.
Both hold token ids, their logprobs, and greedy continuations with the gap between the two likeliest tokens at each place: a
continuation can only be expected to be the same up to the first gap that rounding may close. float32 throughout, but for SmolLM2's
exact_logprobs, which are computed in float64. It does not import jaxrl: the numbers stand on their own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

SHAPES = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""With heads of 8 the four wavelengths are 6.3, 29.7, 140 and 664 positions: below 32 / 4, so kept; between 8 and 32, so blended; and two
above 32, so stretched. The sequences are longer than 32."""
KINDS: dict[str, PretrainedConfig] = {
    "qwen3_tied": Qwen3Config(**SHAPES, head_dim=8, rope_theta=500.0, tie_word_embeddings=True),
    "qwen3_untied": Qwen3Config(**SHAPES, head_dim=8, rope_theta=500.0, tie_word_embeddings=False),
    "llama": LlamaConfig(**SHAPES, head_dim=8, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**{**SHAPES, "hidden_size": 32}, rope_theta=500.0, tie_word_embeddings=False),
}
TINY_LENGTH, TINY_PROMPT, TINY_NEW = 48, 5, 24

TEXTS = (
    "The old lighthouse keeper counted the ships each evening: three barges, one ferry, and sometimes nothing but fog. In his notebook he "
    "wrote the hour, the wind and the colour of the water, and he never once left a page empty.",
    "def moving_average(values, width):\n    total = sum(values[:width])\n    yield total / width\n    for left, right in zip(values, "
    "values[width:]):\n        total += right - left\n        yield total / width\n",
    "Q: A train leaves at 14:05 and arrives at 16:50. How long is the journey?\nA: 2 hours and 45 minutes, which is 165 minutes.\n"
    "Größe, naïve, 東京, 12,345.67 — and an emoji: 🙂.",
)
PROMPTS = (
    "What is the capital of France?",
    "State the final answer to the following arithmetic problem: 4 + 7 - 2 =",
    "Write one sentence about the sea.",
)
SMOLLM2_NEW = 48


@torch.no_grad()
def token_logprobs(model: torch.nn.Module, token_ids: list[int]) -> np.ndarray:
    """[T] float32, the logprob of each token given those before it, in the model's precision; index 0 is 0."""
    ids = torch.tensor([token_ids])
    logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1)
    chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], chosen.double().numpy()]).astype(np.float32)


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt_ids: list[int], num_new: int) -> tuple[list[int], list[float]]:
    """The likeliest continuation, through any end of sequence, and how far ahead of the second each token was, in logits."""
    fed, cache, token_ids, gaps = torch.tensor([prompt_ids]), None, [], []
    for _ in range(num_new):
        out = model(input_ids=fed, past_key_values=cache, use_cache=True)
        top = out.logits[0, -1].topk(2)
        token_ids.append(int(top.indices[0]))
        gaps.append(float(top.values[0] - top.values[1]))
        fed, cache = torch.tensor([[token_ids[-1]]]), out.past_key_values
    return token_ids, gaps


def write_tiny(directory: Path, config: PretrainedConfig, seed: int) -> None:
    """One checkpoint and its numbers; norm scales and biases are drawn too, since ones and zeros would hide a wrong place."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    token_ids = torch.randint(0, config.vocab_size, (3, TINY_LENGTH))
    with torch.no_grad():
        logits = model(input_ids=token_ids).logits.numpy()
    prompt_ids = token_ids[0, :TINY_PROMPT].tolist()
    greedy_ids, gaps = greedy(model, prompt_ids, TINY_NEW)
    np.savez_compressed(
        directory / "golden.npz",
        token_ids=token_ids.numpy().astype(np.int32),
        logits=logits,
        logprobs=np.stack([token_logprobs(model, row) for row in token_ids.tolist()]),
        prompt_ids=np.array(prompt_ids, np.int32),
        greedy_ids=np.array(greedy_ids, np.int32),
        gaps=np.array(gaps, np.float32),
    )


def write_smollm2(model_directory: Path, file: Path) -> None:
    """The numbers of SmolLM2 on a few texts and on prompts through its chat template."""
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()
    arrays = {}
    for i, text in enumerate(TEXTS):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        arrays[f"text_ids_{i}"] = np.array(token_ids, np.int32)
        arrays[f"logprobs_{i}"] = token_logprobs(model, token_ids)
    for i, prompt in enumerate(PROMPTS):
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer.encode(text, add_special_tokens=False)
        greedy_ids, gaps = greedy(model, prompt_ids, SMOLLM2_NEW)
        print(repr(prompt), "->", repr(tokenizer.decode(greedy_ids)), f"least gap {min(gaps):.2e}")
        arrays[f"prompt_ids_{i}"] = np.array(prompt_ids, np.int32)
        arrays[f"greedy_ids_{i}"] = np.array(greedy_ids, np.int32)
        arrays[f"gaps_{i}"] = np.array(gaps, np.float32)
    # Without the rounding of float32 on their side: what both sides are near to.
    model = model.to(torch.float64)
    for i in range(len(TEXTS)):
        arrays[f"exact_logprobs_{i}"] = token_logprobs(model, arrays[f"text_ids_{i}"].tolist())
    np.savez_compressed(file, **arrays)


def main() -> None:
    """Write the tiny models, or SmolLM2's numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, nargs="?", default=Path(__file__).parent)
    parser.add_argument("--smollm2", type=Path, metavar="MODEL_DIR", help="write smollm2.npz from this model instead of the tiny models")
    arguments = parser.parse_args()
    if arguments.smollm2 is not None:
        write_smollm2(arguments.smollm2, arguments.output / "smollm2.npz")
        return
    for seed, (kind, config) in enumerate(KINDS.items()):
        write_tiny(arguments.output / kind, config, seed)


if __name__ == "__main__":
    main()
