"""Make the start model of the curriculum's demonstration: `python configs/curriculum/prepare.py`, a few minutes on a CPU.

Out: `models/curriculum/start`, the quickstart's start model trained further so that it can work every sum out and does so the more rarely
the longer the sum is: from nearly always to nearly never. An answer at once is mostly wrong, so what it can do falls from tier to tier.
`measured.json` beside it tells how often each tier of the demonstration is solved. What is there with the same settings is left alone; no
question of the held-out split is in what it learns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from jaxrl.config.env import ReasoningGymEnvConfig
from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.config.load import load_config
from jaxrl.engine.engine import Engine
from jaxrl.envs.answers import exact_match
from jaxrl.envs.base import TaskSpec
from jaxrl.envs.build import build_environment
from jaxrl.inference.endpoint import GenerateRequest, TokenSampling, sampling_seed
from jaxrl.inference.rendering import Renderer
from jaxrl.models import load_pretrained, save_pretrained
from jaxrl.weights.memory import WeightStore

ROOT = Path(__file__).parents[2]
OUT = ROOT / "models" / "curriculum" / "start"
MAKER = ROOT / "configs" / "quickstart" / "make_start_model.py"
START_MODEL = ROOT / "configs" / "quickstart" / "start_model"
CONFIG = Path(__file__).with_name("uniform.toml")

SETTINGS = {
    "steps": 300,
    "lr": 1e-3,
    "seed": 0,
    "skill_share": 0.7,
    "worked_shares": {"3": 0.98, "4": 0.9, "5": 0.4, "6": 0.06, "7": 0.01, "8": 0.002},
}
"""`skill_share` of the documents teach how a sum is worked out, and not whether to; in the others, which teach that, `worked_shares` are
worked out, by the number of terms, and the rest are answered at once."""
QUESTIONS_PER_TIER = 12_000
THINK = "<think>"
SEED = 9_000_000
"""Of the questions learned from; which of them are held out is told from their text, as everywhere."""
NUM_MEASURED, GROUP_SIZE = 64, 8


def load_maker() -> Any:
    """Return the module that made the start model; its folder is no package."""
    spec = importlib.util.spec_from_file_location("make_start_model", MAKER)
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker


def documents(maker: Any, rng: random.Random, skill_share: float, worked_shares: dict[str, float]) -> Iterator[list[tuple[str, bool]]]:
    """Yield answered questions for ever, as spans of text with whether the loss is taken there."""
    questions = {terms: training_questions(int(terms)) for terms in worked_shares}
    while True:
        terms = rng.choice(list(worked_shares))
        question, answer = rng.choice(questions[terms])
        worked = maker.worked(maker.expression_of(question)).removeprefix(THINK)
        if rng.random() < skill_share:
            yield [*maker.turn("user", question), (f"<|im_start|>assistant\n{THINK}", False), (f"{worked}<|im_end|>", True), ("\n", False)]
        else:
            is_worked = rng.random() < worked_shares[terms]
            yield [*maker.turn("user", question), *maker.turn("assistant", THINK + worked if is_worked else answer, True)]


def training_questions(num_terms: int) -> list[tuple[str, str]]:
    """Return (question, answer) of one number of terms that are not held out."""
    parameters = {"min_terms": num_terms, "max_terms": num_terms, "min_digits": 1, "max_digits": 1}
    config = ReasoningGymEnvConfig(dataset="chain_sum", parameters=parameters, num_tasks=QUESTIONS_PER_TIER, seed=SEED, split="train")
    return [(spec["question"], spec["answer"]) for spec in build_environment(config).tasks()]


def make_start(out: Path, console: Console) -> None:
    """Train and measure the start model, unless one of these settings is there."""
    measured = out / "measured.json"
    if measured.is_file() and json.loads(measured.read_text(encoding="utf-8"))["settings"] == SETTINGS:
        console.print(f"{out} is there already")
        return
    maker = load_maker()
    model, params = load_pretrained(START_MODEL)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(START_MODEL)
    stream = documents(maker, random.Random(SETTINGS["seed"]), SETTINGS["skill_share"], SETTINGS["worked_shares"])
    samples = (maker.to_sample(document, tokenizer) for document in stream)
    params = maker.fit(model, params, samples, SETTINGS["steps"], SETTINGS["lr"], console, rows=maker.ROWS_WITH_HINTS)
    shutil.rmtree(out, ignore_errors=True)
    save_pretrained(model, params, out, tokenizer_dir=START_MODEL)
    tiers = measure(out)
    measured.write_text(json.dumps({"settings": SETTINGS, "tiers": tiers}, indent=1) + "\n", encoding="utf-8")
    console.print_json(data=tiers)
    console.print(f"saved {out}")


def measure(directory: Path) -> dict[str, dict[str, float]]:
    """Measure a saved model on the first held-out questions of each tier of the demonstration.

    Returns:
      By tier: `greedy` and `sampled` (temperature 1), the shares of right answers; `signal`, the share of groups of 8 samples that hold
      both right and wrong ones; `worked`, the share of samples that work it out, and `worked_right`, the share of right ones of those;
      `tokens` of a sampled reply.
    """
    config = load_config(CONFIG)
    env, sampling = config.orchestrator.eval.env[0], config.orchestrator.sampling
    specs = build_environment(env).tasks()
    model, params = load_pretrained(directory)
    renderer = Renderer.from_pretrained(directory)
    store = WeightStore(model.spec, "float32")
    store.publish(0, params)
    settings = EmbeddedInferenceConfig(num_slots=256, max_model_len=config.engine.max_model_len)
    engine = Engine(model.spec, store.get(0), settings, version=0, decode_text=renderer.decode)

    def play(spec: TaskSpec, temperature: float, num: int) -> list[Any]:
        prompt = renderer.open_turn(None, [{"role": "user", "content": spec["question"]}]).prompt_ids
        seeds = [sampling_seed(SETTINGS["seed"], spec["id"], temperature, member, 0) for member in range(num)]
        tokens = [
            TokenSampling(max_tokens=sampling.max_tokens, temperature=temperature, seed=seed, stop_ids=renderer.stop_ids) for seed in seeds
        ]
        name = f"{spec['id']}/{temperature}"
        return [engine.submit(GenerateRequest(f"{name}/{member}", prompt, token)) for member, token in enumerate(tokens)]

    def is_right(spec: TaskSpec, reply: Any) -> bool:
        return reply.finish_reason == "stop" and exact_match(spec, renderer.reply_text(reply.token_ids)) == 1.0

    found = {}
    for tier in (tier.name for tier in env.tiers):
        asked = [spec for spec in specs if spec["difficulty"] == tier][:NUM_MEASURED]
        futures = [(spec, play(spec, 0.0, 1), play(spec, 1.0, GROUP_SIZE)) for spec in asked]
        while engine.has_work():
            engine.tick()
        greedy = [is_right(spec, future.result(timeout=0)) for spec, (future,), _ in futures]
        sampled = np.array([[is_right(spec, future.result(timeout=0)) for future in group] for spec, _, group in futures])
        lengths = [len(future.result(timeout=0).token_ids) for _, _, group in futures for future in group]
        is_worked = np.array(
            [THINK in renderer.reply_text(future.result(timeout=0).token_ids) for _, _, group in futures for future in group]
        )
        found[tier] = {
            "greedy": round(float(np.mean(greedy)), 4),
            "sampled": round(float(sampled.mean()), 4),
            "signal": round(float(np.mean(sampled.any(axis=1) & ~sampled.all(axis=1))), 4),
            "worked": round(float(np.mean(is_worked)), 4),
            "worked_right": round(float(sampled.reshape(-1)[is_worked].mean()), 4) if is_worked.any() else 0.0,
            "tokens": round(float(np.mean(lengths)), 1),
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Make the start model."""
    argparse.ArgumentParser(description="Make the start model of the curriculum's demonstration.").parse_args(argv)
    make_start(OUT, Console(highlight=False, soft_wrap=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
