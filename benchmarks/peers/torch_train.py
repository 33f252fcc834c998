"""A plain training loop of torch and transformers, as a peer of benchmarks/trainer.py: no framework around it.

One optimizer step: forward, logprobs of the next tokens, a policy-gradient loss over all of them, backward, clipping,
AdamW. Random weights in float32 from a configuration; no gradient checkpointing; bfloat16 means autocast. Imports
nothing of jaxrl. Run by benchmarks/trainer.py, which asks for a step by a line `{}` and reads its seconds from a line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
import transformers


def build_model(arguments: argparse.Namespace) -> transformers.PreTrainedModel:
    """The same shapes."""
    shared = {
        "vocab_size": arguments.vocab_size,
        "hidden_size": arguments.hidden_size,
        "intermediate_size": arguments.intermediate_size,
        "num_hidden_layers": arguments.num_layers,
        "num_attention_heads": arguments.num_heads,
        "num_key_value_heads": arguments.num_kv_heads,
        "head_dim": arguments.head_dim,
        "tie_word_embeddings": True,
        "use_cache": False,
    }
    if arguments.family == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shared))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shared))


def main() -> None:
    """Answer requests until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    widths = ("vocab_size", "hidden_size", "intermediate_size", "head_dim")
    for name in (*widths, "num_layers", "num_heads", "num_kv_heads", "rows", "row_length"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, required=True)
    parser.add_argument("--family", choices=("llama", "qwen3"), required=True)
    parser.add_argument("--attention", choices=("best", "sdpa", "eager"), default="best")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = build_model(arguments).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)
    tokens = torch.randint(arguments.vocab_size, (arguments.rows, arguments.row_length))
    advantages = torch.randn(arguments.rows, arguments.row_length - 1)

    def step() -> float:
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.dtype == "bfloat16"):
            logits = model(tokens).logits[:, :-1].float()
        chosen = torch.gather(logits, 2, tokens[:, 1:, None])[:, :, 0] - torch.logsumexp(logits, dim=2)
        loss = -(torch.exp(chosen - chosen.detach()) * advantages).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started

    def seconds_with(attention: str) -> float:
        model.set_attn_implementation(attention)
        step()
        return step()

    attention = min(("sdpa", "eager"), key=seconds_with) if arguments.attention == "best" else arguments.attention
    model.set_attn_implementation(attention)

    def say(**answer: Any) -> None:
        print(json.dumps(answer), flush=True)

    say(torch=torch.__version__, transformers=transformers.__version__, threads=torch.get_num_threads(), attention=attention)
    for _ in sys.stdin:
        say(seconds=step())


if __name__ == "__main__":
    main()
