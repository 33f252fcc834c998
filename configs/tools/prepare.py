"""Make the model that the configurations of this folder start from, into `models/tools/start/`: `python configs/tools/prepare.py`.

The quickstart's start model goes on with demonstrations of the tools environment: a call of the calculator, its answer, the policy's own. It sees
so few that it calls well about half of the time. What the policy says is under the loss, what the tool answers is not. No question of the
held-out split is among them. A model that is there already is left alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from jaxrl.config.env import ToolsEnvConfig
from jaxrl.envs.build import build_environment
from jaxrl.models import load_pretrained, save_pretrained

ROOT = Path(__file__).parents[2]
OUT = ROOT / "models" / "tools" / "start"
MAKER = ROOT / "configs" / "quickstart" / "make_start_model.py"
START_MODEL = ROOT / "configs" / "quickstart" / "start_model"

SUMS = {"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 2}
"""Parameters of `chain_sum` in every configuration of this folder."""
SYSTEM = "Tool: calc(expr)"
"""The system message in every configuration of this folder."""
STEPS, LR, SEED = 110, 1e-3, 0


def load_maker() -> Any:
    """Return the module that made the start model; its folder is no package."""
    spec = importlib.util.spec_from_file_location("make_start_model", MAKER)
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker


def conversations(maker: Any, rng: random.Random) -> Iterator[list[tuple[str, bool]]]:
    """Yield conversations for ever, as spans of text with whether the loss is taken there."""
    config = ToolsEnvConfig(
        dataset="chain_sum",
        parameters=SUMS,
        num_tasks=60_000,
        seed=1_000_000,
        split="train",
        calculator_name="calc",
        calculator_argument="expr",
    )
    env = build_environment(config)
    specs = list(env.tasks())
    while True:
        rng.shuffle(specs)
        for spec in specs:
            call, answer = env.demonstration(spec) or ()
            yield [
                *maker.turn("system", SYSTEM),
                *maker.turn("user", spec["question"]),
                *maker.turn("assistant", call, True),
                *maker.turn("user", f"<tool_response>{answer}</tool_response>"),
                *maker.turn("assistant", answer, True),
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
