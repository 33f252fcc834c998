"""Make the model that the configurations of this folder start from, into `models/tools/start/`: `python configs/tools/prepare.py`.

The quickstart's start model calls the tool `calc` for sums of three or four one-digit terms. Here it is shown some more such conversations,
of two to five terms of one or two digits, until it calls well about half of the time: what a reply says is under the loss, what the tool answers
is not. No question of the held-out split is among them. A model that is there already is left alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from jaxrl.config.env import ReasoningGymEnvConfig
from jaxrl.envs.build import build_environment
from jaxrl.models import load_pretrained, save_pretrained

ROOT = Path(__file__).parents[2]
OUT = ROOT / "models" / "tools" / "start"
MAKER = ROOT / "configs" / "quickstart" / "make_start_model.py"
START_MODEL = ROOT / "configs" / "quickstart" / "start_model"

SUMS = {"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 2}
"""Parameters of `chain_sum` in every configuration of this folder."""
SYSTEM = "Tool: calc(expr)"
"""How the start model was told of its tool."""
STEPS, LR, SEED = 90, 1e-3, 0


def load_maker() -> Any:
    """Return the module that made the start model; its folder is no package."""
    spec = importlib.util.spec_from_file_location("make_start_model", MAKER)
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker


def conversations(maker: Any, rng: random.Random) -> Iterator[list[tuple[str, bool]]]:
    """Yield conversations for ever, as spans of text with whether the loss is taken there."""
    config = ReasoningGymEnvConfig(dataset="chain_sum", parameters=SUMS, num_tasks=60_000, seed=1_000_000, split="train")
    specs = list(build_environment(config).tasks())
    while True:
        rng.shuffle(specs)
        for spec in specs:
            call = json.dumps({"name": "calc", "arguments": {"expr": maker.expression_of(spec["question"])}})
            yield [
                *maker.turn("system", SYSTEM),
                *maker.turn("user", spec["question"]),
                *maker.turn("assistant", f"<tool_call>{call}</tool_call>", True),
                *maker.turn("user", f"<tool_response>{spec['answer']}</tool_response>"),
                *maker.turn("assistant", spec["answer"], True),
            ]


def main(argv: Sequence[str] | None = None) -> int:
    """Make the model unless it is there."""
    parser = argparse.ArgumentParser(description="Make the start model of configs/tools.")
    parser.add_argument("--out", type=Path, default=OUT, help="Hugging Face directory to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    args = parser.parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    if (args.out / "config.json").is_file():
        console.print(f"{args.out} is there already")
        return 0
    maker = load_maker()
    model, params = load_pretrained(START_MODEL)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(START_MODEL)
    samples = (maker.to_sample(document, tokenizer) for document in conversations(maker, random.Random(SEED)))
    params = maker.fit(model, params, samples, args.steps, LR, console, rows=56)
    save_pretrained(model, params, args.out, tokenizer_dir=START_MODEL)
    console.print(f"saved {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
