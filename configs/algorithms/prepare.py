"""Make what the configurations of this folder need, into `models/algorithms/`: worked answers, a teacher, two start models.

Each is made once: what is there with the same settings is left alone. `python configs/algorithms/prepare.py [sums | teacher |
hinted_start | tools_start ...]`; without a name, all four. The models are relatives of the quickstart's start model (see
`configs/quickstart/make_start_model.py`) and have its size; no question of the held-out split is in what they learn.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from jaxrl.config.env import ReasoningGymEnvConfig, ToolsEnvConfig
from jaxrl.envs.build import build_environment
from jaxrl.models import load_pretrained, save_pretrained

ROOT = Path(__file__).parents[2]
OUT = ROOT / "models" / "algorithms"
MAKER = ROOT / "configs" / "quickstart" / "make_start_model.py"
START_MODEL = ROOT / "configs" / "quickstart" / "start_model"

SPLITS: tuple[tuple[Literal["heldout", "train"], int, int], ...] = (("heldout", 5_000_000, 8_000), ("train", 7_000_000, 20_000))
"""Split, seed and number of the sums: the quickstart's, so that the held-out questions are the same ones, in the same order."""
TEACHER = {"steps": 200, "lr": 2e-3, "worked_share": 1.0}
"""The start model, trained further on answers that are all worked out."""
HINTED_START = {"steps": 700, "hinted_share": 0.4}
"""As the start model, but in 40% of the single turns it was shown the worked answer first."""
TOOLS_START = {"steps": 280, "lr": 1e-3, "seed": 0, "called_share": 0.5}
"""The start model after demonstrations of the tools environment, of which half answer at once: it knows how to call, not that it should."""
TOOL_SYSTEM = "Tool: calc(expr)"
"""How the start model was told of its tool, in a system message; its template tells of any tools like that."""
TOOLS_TEMPLATE = r"""
{%- if tools -%}
  {{- '<|im_start|>system\n' -}}
  {%- for tool in tools -%}
    {{- 'Tool: ' + tool.function.name + '(' + (tool.function.parameters.properties | list | join(', ')) + ')' -}}
    {%- if not loop.last -%}{{- '\n' -}}{%- endif -%}
  {%- endfor -%}
  {%- if messages[0].role == 'system' -%}{{- '\n' + messages[0].content -}}{%- endif -%}
  {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|im_start|>user\n<tool_response>' + message.content + '</tool_response><|im_end|>\n' -}}
  {%- elif not (tools and loop.first and message.role == 'system') -%}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '<tool_call>\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
"""The start model's chat template, and what it lacks: tools, and calls of them."""


def load_maker() -> Any:
    """Return the module that made the start model; its folder is no package."""
    spec = importlib.util.spec_from_file_location("make_start_model", MAKER)
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker


def make_sums(out: Path, console: Console) -> None:
    """Write the questions of the quickstart with their answers and worked answers, held-out ones first."""
    if out.is_file():
        console.print(f"{out} is there already")
        return
    maker = load_maker()
    parameters = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}
    lines = []
    for split, seed, num_tasks in SPLITS:
        config = ReasoningGymEnvConfig(dataset="chain_sum", parameters=parameters, num_tasks=num_tasks, seed=seed, split=split)
        for task in build_environment(config).tasks():
            demonstration = maker.worked(maker.expression_of(task["question"]))
            lines.append(json.dumps({"question": task["question"], "answer": task["answer"], "demonstration": demonstration}))
    part = out.with_suffix(".part")
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    part.replace(out)
    console.print(f"{out}: {len(lines)} questions")


def make_model(settings: dict[str, float], init: Path | None, out: Path, console: Console) -> None:
    """Train a relative of the start model, unless one of these settings is there; one of other settings is replaced."""
    measured = out / "measured.json"
    if measured.is_file():
        there = json.loads(measured.read_text(encoding="utf-8"))["settings"]
        if settings.items() <= there.items():
            console.print(f"{out} is there already")
            return
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    options += [f"--init={init}"] if init else []
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    subprocess.run([sys.executable, str(MAKER), *options, f"--out={part}"], check=True)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)


def make_tools_start(out: Path, console: Console) -> None:
    """Show the start model some conversations with a calculator, unless that was done with these settings.

    What the policy says is under the loss, what the tool answers is not.
    """
    made = out / "made.json"
    if made.is_file() and json.loads(made.read_text(encoding="utf-8")) == TOOLS_START:
        console.print(f"{out} is there already")
        return
    maker = load_maker()
    model, params = load_pretrained(START_MODEL)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(START_MODEL)
    rng = random.Random(TOOLS_START["seed"])
    samples = (maker.to_sample(document, tokenizer) for document in tool_conversations(maker, rng, TOOLS_START["called_share"]))
    params = maker.fit(model, params, samples, TOOLS_START["steps"], TOOLS_START["lr"], console, rows=maker.ROWS_WITH_HINTS)
    shutil.rmtree(out, ignore_errors=True)
    save_pretrained(model, params, out, tokenizer_dir=START_MODEL)
    (out / "chat_template.jinja").write_text(TOOLS_TEMPLATE.strip(), encoding="utf-8")
    made.write_text(json.dumps(TOOLS_START) + "\n", encoding="utf-8")
    console.print(f"saved {out}")


def tool_conversations(maker: Any, rng: random.Random, called_share: float) -> Iterator[list[tuple[str, bool]]]:
    """Yield demonstrations of the tools environment for ever, as spans of text with whether the loss is taken there.

    In a share of them the tool is called; in the others the answer follows at once.
    """
    config = ToolsEnvConfig(
        dataset="chain_sum",
        parameters={"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 2},
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
            demonstration = env.demonstration(spec)
            assert demonstration is not None and not isinstance(demonstration, str), "the calculator works every sum out"
            call, answer = demonstration
            told = [*maker.turn("assistant", call, True), *maker.turn("user", f"<tool_response>{answer}</tool_response>")]
            yield [
                *maker.turn("system", TOOL_SYSTEM),
                *maker.turn("user", spec["question"]),
                *(told if rng.random() < called_share else []),
                *maker.turn("assistant", answer, True),
            ]


THINGS: dict[str, Callable[[Console], None]] = {
    "sums": lambda console: make_sums(OUT / "sums.jsonl", console),
    "teacher": lambda console: make_model(TEACHER, START_MODEL, OUT / "teacher", console),
    "hinted_start": lambda console: make_model(HINTED_START, None, OUT / "hinted_start", console),
    "tools_start": lambda console: make_tools_start(OUT / "tools_start", console),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Make what is asked for."""
    parser = argparse.ArgumentParser(description="Make what the algorithm configurations need.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to make, all by default: {', '.join(THINGS)}")
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in THINGS]
    if unknown:
        parser.error(f"unknown: {unknown[0]!r}; known: {', '.join(THINGS)}")
    OUT.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)
    names = args.names or list(THINGS)
    for number, name in enumerate(names, start=1):
        console.print(f"{number}/{len(names)} {name}")
        THINGS[name](console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
