"""The peer of `benchmarks/engine.py`: `generate` of transformers on a randomly drawn Llama-shaped model of the same size.

Runs under the Python named by `PEER_PYTHON` (torch, transformers) and is driven by `measure.Peer`: it prints one JSON object when the
model is built, then one for each JSON line it reads, `{"batch": B, "prompt_tokens": P, "new_tokens": N}`, with the seconds of one call.
It imports nothing of jaxrl. Sampled at temperature 1 from the whole vocabulary, logits not returned, no stop token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
import transformers


def main() -> None:
    """Build the model, say hello, answer until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="JSON object: the model's config.json")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**json.loads(arguments.config))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, arguments.dtype)).eval()
    # Note: an explicit pad id, and no stop id at all, so that every call does the same work and nothing is warned about.
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    model.generation_config.pad_token_id = 0

    def say(**answer: object) -> None:
        print(json.dumps(answer), flush=True)

    say(
        python=sys.version.split()[0],
        torch=torch.__version__,
        transformers=transformers.__version__,
        threads=torch.get_num_threads(),
        num_parameters=model.num_parameters(),
    )
    for line in sys.stdin:
        request = json.loads(line)
        prompts = torch.randint(1, config.vocab_size, (request["batch"], request["prompt_tokens"]))
        num_new = request["new_tokens"]
        started = time.perf_counter()
        with torch.no_grad():
            tokens = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=num_new,
            )
        seconds = time.perf_counter() - started
        assert tokens.shape == (request["batch"], request["prompt_tokens"] + num_new), tokens.shape
        say(seconds=seconds)


if __name__ == "__main__":
    main()
