"""What the algorithm configurations need is made once, is right, and asks the quickstart's held-out questions."""

import importlib.util
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxrl.config.env import QuestionsEnvConfig, ToolsEnvConfig
from jaxrl.config.load import load_config
from jaxrl.envs.build import build_environment
from jaxrl.inference.rendering import Renderer
from jaxrl.types import TrainingSample

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("prepare_algorithms", ROOT / "configs" / "algorithms" / "prepare.py")
assert _spec is not None and _spec.loader is not None
prepare = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(prepare)

QUIET = Console(quiet=True)


def test_every_worked_answer_is_right_and_the_held_out_questions_are_the_quickstarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quickstart = load_config(ROOT / "configs" / "quickstart.toml").orchestrator
    expected: dict[str, list[str]] = {}
    for config in (*quickstart.eval.env, *quickstart.train.env):
        assert (config.split, config.seed, config.num_tasks) in prepare.SPLITS
        fewer = build_environment(config.model_copy(update={"num_tasks": 800}))
        expected[config.split] = [spec["question"] for spec in fewer.tasks()]
    monkeypatch.setattr(prepare, "SPLITS", [(split, seed, 800) for split, seed, _ in prepare.SPLITS])
    path = tmp_path / "sums.jsonl"
    prepare.make_sums(path, QUIET)
    written = path.stat().st_mtime_ns
    prepare.make_sums(path, QUIET)
    assert path.stat().st_mtime_ns == written
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        lines, said = row["demonstration"].removeprefix("<think>").split("</think>")
        assert said == row["answer"]
        assert all(eval(left) == int(right) for left, right in (line.split("=") for line in lines.split("\n")))
    for split, questions in expected.items():
        env = build_environment(QuestionsEnvConfig(path=str(path), split=split))
        assert [spec["question"] for spec in env.tasks()] == questions


def test_a_model_is_made_again_only_with_other_settings_and_then_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []

    def make(command: list[str], *, check: bool) -> None:
        made.append(command)
        folder = Path(command[-1].removeprefix("--out="))
        folder.mkdir()
        steps = next(option for option in command if option.startswith("--steps=")).removeprefix("--steps=")
        (folder / "measured.json").write_text(json.dumps({"settings": {**prepare.TEACHER, "steps": int(steps), "seed": 0}}))

    monkeypatch.setattr(prepare.subprocess, "run", make)
    out = tmp_path / "teacher"
    for _ in range(2):
        prepare.make_model(prepare.TEACHER, prepare.START_MODEL, out, QUIET)
    assert len(made) == 1 and f"--init={prepare.START_MODEL}" in made[0] and "--worked-share=1.0" in made[0]
    prepare.make_model({**prepare.TEACHER, "steps": 1}, prepare.START_MODEL, out, QUIET)
    assert len(made) == 2 and [path.name for path in tmp_path.iterdir()] == ["teacher"]
    assert json.loads((out / "measured.json").read_text())["settings"]["steps"] == 1


def test_tool_conversations_are_those_of_the_tool_configurations_and_train_only_what_the_policy_says() -> None:
    maker, start = prepare.load_maker(), Renderer.from_pretrained(prepare.START_MODEL)
    renderer = Renderer(start.tokenizer, prepare.TOOLS_TEMPLATE.strip(), start.stop_ids)
    grpo, echo = (load_config(ROOT / "configs" / "algorithms" / f"{name}.toml").orchestrator for name in ("tools_grpo", "echo"))
    env = grpo.train.env[0]
    assert isinstance(env, ToolsEnvConfig) and echo.train == grpo.train and echo.eval == grpo.eval
    tools = build_environment(env.model_copy(update={"num_tasks": 10, "split": "all"})).tools
    for share in (0.0, 1.0):
        for document in itertools.islice(prepare.tool_conversations(maker, random.Random(1), share), 20):
            text, trained = "".join(span for span, _ in document), [span for span, is_trained in document if is_trained]
            question = text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
            told = [{"role": "user", "content": question}]
            answer = trained[-1].removesuffix("<|im_end|>")
            assert eval(maker.expression_of(question)) == int(answer) and len(trained) == 1 + (share == 1)
            if share:
                told += [{"role": "assistant", "content": trained[0].removesuffix("<|im_end|>")}, {"role": "tool", "content": answer}]
            prompt = renderer.open_turn(None, told, tools=tools).text
            assert prompt + f"{answer}<|im_end|>\n" == text


def test_the_tools_start_model_is_made_once_with_the_same_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker, fits = prepare.load_maker(), []

    def fit(model: Any, params: dict, samples: Iterator[TrainingSample], *settings: Any, rows: int) -> dict:
        fits.append((next(samples), settings[:2], rows))
        return params

    maker.fit = fit
    monkeypatch.setattr(prepare, "load_maker", lambda: maker)
    out = tmp_path / "tools_start"
    for _ in range(2):
        prepare.make_tools_start(out, QUIET)
    (sample, settings, _), *more = fits
    assert not more and settings == (prepare.TOOLS_START["steps"], prepare.TOOLS_START["lr"]) and sample.ce_weights.any()
    assert Renderer.from_pretrained(out).stop_ids == Renderer.from_pretrained(prepare.START_MODEL).stop_ids
    monkeypatch.setattr(prepare, "TOOLS_START", {**prepare.TOOLS_START, "called_share": 0.25})
    prepare.make_tools_start(out, QUIET)
    assert len(fits) == 2 and json.loads((out / "made.json").read_text())["called_share"] == 0.25


def test_the_template_of_the_tools_start_model_writes_tools_and_calls_and_is_the_start_models_without_them() -> None:
    start = Renderer.from_pretrained(prepare.START_MODEL)
    renderer = Renderer(start.tokenizer, prepare.TOOLS_TEMPLATE.strip(), start.stop_ids)
    call = {"id": "1", "type": "function", "function": {"name": "calc", "arguments": {"expr": "1 + 1"}}}
    told = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1 ="},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    parameters = {"type": "object", "properties": {"expr": {"type": "string"}}}
    schema = {"type": "function", "function": {"name": "calc", "parameters": parameters}}
    assert renderer.writes_tools and renderer.prompt_text(told, tools=[schema]) == (
        "<|im_start|>system\nTool: calc(expr)\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1 =<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "calc", "arguments": {"expr": "1 + 1"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>2</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert renderer.prompt_text(told[:2]) == start.prompt_text(told[:2])
