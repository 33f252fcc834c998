"""Make the small model that the quickstart starts from: `make start-model`, or run this file.

It builds a tokenizer, writes supervised documents over reasoning_gym `chain_sum` questions of the training split, trains a
0.66 M parameter Qwen3 on them with the project's own trainer (cross-entropy is one of its three loss components), measures
the result, and saves a Hugging Face directory.

What is in the documents: single questions answered either bare (`18`) or worked out (`<think>8+3=11 ...</think>18`), a second
user turn after a wrong first answer, and a tool call with its result. Every token under the loss belongs to a correct
answer: the wrong first answers of the two-turn documents are context only. No question of the held-out split occurs.
Reinforcement learning is not done here.

Options make its relatives, which `configs/algorithms/prepare.py` needs: `--init` goes on from a saved model and keeps its
tokenizer; `--hinted-share` shows a worked answer in a system message first, worded as OPSD words it by default.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxrl.batching import pack
from jaxrl.config.algorithm import DEFAULT_HINT
from jaxrl.config.env import ReasoningGymEnvConfig
from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.config.trainer import CosineScheduleConfig, MeshConfig, OptimizerConfig, TrainerConfig
from jaxrl.engine.engine import Engine
from jaxrl.envs.answers import exact_match
from jaxrl.envs.base import TaskSpec
from jaxrl.envs.build import build_environment
from jaxrl.inference.endpoint import GenerateRequest, TokenSampling, sampling_seed
from jaxrl.inference.rendering import Renderer
from jaxrl.models import Model, ModelSpec, build_mesh, build_model, init_params, load_pretrained, save_pretrained
from jaxrl.trainer.step import build_programs, densify
from jaxrl.types import TrainingSample
from jaxrl.weights.memory import WeightStore

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}"
    r"{{- '<|im_start|>user\n<tool_response>' + message.content + '</tool_response><|im_end|>\n' -}}"
    "{%- else -%}"
    r"{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    r"{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
"""ChatML. Newlines stand inside expressions, where block tags cannot trim them."""
NUM_MERGED_TOKENS = 385
NUM_TOKENS = 512
"""Rows of the embedding; with hinted documents the tokenizer fills them, so that a hint costs few tokens."""
ROWS, ROW_LENGTH, DOCS_PER_STEP = 20, 96, 54
ROWS_WITH_HINTS = 32

Document = list[tuple[str, bool]]
"""Spans of text in order; True where the loss is taken."""


def worked(expression: str) -> str:
    r"""Return the answer to a chain of sums and differences, worked out one operation per line.

    Example:
      >>> worked("8 + 3 - 1")
      '<think>8+3=11\n11-1=10</think>10'
    """
    terms = expression.split()
    total, lines = int(terms[0]), []
    for sign, term in zip(terms[1::2], terms[2::2], strict=True):
        result = total + int(term) if sign == "+" else total - int(term)
        lines.append(f"{total}{sign}{term}={result}")
        total = result
    return "<think>" + "\n".join(lines) + f"</think>{total}"


def turn(role: str, content: str, is_trained: bool = False) -> Document:
    """Return one ChatML turn; the content and its end are trained, the header and the newline never are."""
    return [(f"<|im_start|>{role}\n", False), (f"{content}<|im_end|>", is_trained), ("\n", False)]


def expression_of(question: str) -> str:
    """Return the sum that a `chain_sum` question asks for, such as `8 + 3 - 1`."""
    match = re.search(r": (.*) =$", question)
    if match is None:
        raise ValueError(f"expected a chain_sum question that ends in ': a + b =', got {question!r}")
    return match.group(1)


def hint(expression: str) -> str:
    """Return the system message that shows the worked answer."""
    return DEFAULT_HINT.format(demonstration=worked(expression))


def document(question: str, answer: str, rng: random.Random, worked_share: float, hinted_share: float = 0.0) -> Document:
    """Return one supervised document about a question: 10% a retry, 10% a tool call, else a single turn.

    A share `hinted_share` of the single turns has the worked answer in a system message before the question.
    """
    expression = expression_of(question)
    kind = rng.random()
    if kind < 0.1:
        wrong = str(int(answer) + rng.choice([-1, 1]) * rng.randint(1, 20))
        return [
            *turn("user", question),
            *turn("assistant", wrong),
            *turn("user", "Wrong, try again."),
            *turn("assistant", worked(expression), True),
        ]
    if kind < 0.2:
        call = json.dumps({"name": "calc", "arguments": {"expr": expression}})
        return [
            *turn("system", "Tool: calc(expr)"),
            *turn("user", question),
            *turn("assistant", f"<tool_call>{call}</tool_call>", True),
            *turn("user", f"<tool_response>{answer}</tool_response>"),
            *turn("assistant", answer, True),
        ]
    if hinted_share and rng.random() < hinted_share:
        return [*turn("system", hint(expression)), *turn("user", question), *turn("assistant", worked(expression), True)]
    is_worked = rng.random() < worked_share
    return [*turn("user", question), *turn("assistant", worked(expression) if is_worked else answer, True)]


def train_tokenizer(documents: list[Document], num_tokens: int = NUM_MERGED_TOKENS) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE in which digits and newlines stand alone, so that arithmetic is seen digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    is_special = re.compile("|".join(map(re.escape, SPECIALS)))
    # Merges must not run across special tokens, so the texts are cut there before training.
    texts = [piece for doc in documents for piece in is_special.split("".join(text for text, _ in doc)) if piece]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def to_sample(doc: Document, tokenizer: PreTrainedTokenizerFast) -> TrainingSample:
    """Return a document as a sample whose trained tokens are cross-entropy members."""
    spans = [tokenizer.encode(text, add_special_tokens=False) for text, _ in doc]
    ids = np.concatenate([np.asarray(s, np.int32) for s in spans])
    weights = np.concatenate([np.full(len(s), float(t), np.float32) for s, (_, t) in zip(spans, doc, strict=True)])
    return TrainingSample(
        token_ids=ids,
        loss_mask=np.zeros(len(ids), bool),
        inference_logprobs=np.zeros(len(ids), np.float32),
        temperatures=np.ones(len(ids), np.float32),
        env_name="documents",
        ce_weights=weights,
    )


def documents_forever(
    questions: list[tuple[str, str]], rng: random.Random, worked_share: float, hinted_share: float = 0.0
) -> Iterator[Document]:
    """Yield documents over all questions, epoch after epoch, in a new order each time."""
    while True:
        rng.shuffle(questions)
        for question, answer in questions:
            yield document(question, answer, rng, worked_share, hinted_share)


def fit(model: Model, params: dict, samples: Iterator[TrainingSample], steps: int, lr: float, console: Console, rows: int = ROWS) -> dict:
    """Train the parameters on the samples by cross-entropy and return them."""
    config = TrainerConfig(
        row_length=ROW_LENGTH,
        rows=rows,
        max_segments=8,
        head_chunk_tokens=rows * ROW_LENGTH,
        optimizer=OptimizerConfig(lr=lr, beta2=0.98, schedule=CosineScheduleConfig(warmup_steps=min(100, steps // 4), min_lr=lr / 10)),
    )
    programs = build_programs(model, config, build_mesh(MeshConfig(), jax.devices()[:1]), steps)
    state = programs.init_state(params)
    began_s = time.monotonic()
    for step in range(1, steps + 1):
        batch = pack(
            [next(samples) for _ in range(DOCS_PER_STEP)],
            step=step,
            row_length=ROW_LENGTH,
            rows=rows,
            shards=1,
            max_segments=config.max_segments,
        )
        denominators = programs.psum_denominators(batch.member_counts)
        accumulator = programs.zero_accumulator()
        for micro_batch in batch.micro_batches:
            accumulator, _ = programs.grad_step(state, accumulator, densify(micro_batch), denominators)
        state, metrics = programs.apply(state, accumulator)
        if step % 50 == 0 or step == steps:
            loss = float(metrics["loss/ce"])
            console.print(f"step {step}/{steps}  cross-entropy {loss:.3f}  {time.monotonic() - began_s:.0f} s")
    return state.params


def measure(directory: Path, specs: list[TaskSpec], seed: int, has_hints: bool = False) -> dict[str, float]:
    """Measure the saved model on held-out questions with the project's own engine, greedily and at temperature 1."""
    model, params = load_pretrained(directory)
    renderer = Renderer.from_pretrained(directory)
    store = WeightStore(model.spec, "float32")
    store.publish(0, params)
    window = 128 if has_hints else 64
    engine = Engine(
        model.spec, store.get(0), EmbeddedInferenceConfig(num_slots=256, max_model_len=window), version=0, decode_text=renderer.decode
    )

    def play(temperature: float, is_hinted: bool = False) -> tuple[np.ndarray, np.ndarray]:
        futures = []
        for index, spec in enumerate(specs):
            hints = [{"role": "system", "content": hint(expression_of(spec["question"]))}] if is_hinted else []
            prompt = renderer.open_turn(None, [*hints, {"role": "user", "content": spec["question"]}]).prompt_ids
            token_seed = sampling_seed(seed, "measure", index, 0, 0)
            sampling = TokenSampling(max_tokens=32, temperature=temperature, seed=token_seed, stop_ids=renderer.stop_ids)
            futures.append(engine.submit(GenerateRequest(f"{temperature}/{is_hinted}/{index}", prompt, sampling)))
        while engine.has_work():
            engine.tick()
        replies = [future.result(timeout=0) for future in futures]
        texts = [renderer.reply_text(reply.token_ids) if reply.finish_reason == "stop" else "" for reply in replies]
        is_right = np.array([exact_match(spec, text) == 1.0 for spec, text in zip(specs, texts, strict=True)])
        return is_right, np.array(["</think>" in text for text in texts])

    greedy, _ = play(0.0)
    sampled, is_worked = play(1.0)
    hinted = {"hinted_greedy_accuracy": float(play(0.0, is_hinted=True)[0].mean())} if has_hints else {}
    return hinted | {
        "num_questions": len(specs),
        "greedy_accuracy": float(greedy.mean()),
        "sampled_accuracy": float(sampled.mean()),
        "worked_share": float(is_worked.mean()),
        "worked_accuracy": float(sampled[is_worked].mean()) if is_worked.any() else 0.0,
        "bare_accuracy": float(sampled[~is_worked].mean()) if not is_worked.all() else 0.0,
    }


def main(argv: list[str] | None = None) -> int:
    """Make the start model, or one of its relatives, and save it."""
    parser = argparse.ArgumentParser(description="Train the quickstart's start model, or a relative of it.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "start_model", help="Hugging Face directory to write")
    parser.add_argument("--steps", type=int, default=620, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--worked-share", type=float, default=0.35, help="share of single-turn answers that are worked out")
    parser.add_argument("--seed", type=int, default=0, help="seed of documents and initial weights")
    parser.add_argument("--init", type=Path, help="go on from this Hugging Face directory, with its tokenizer")
    parser.add_argument("--hinted-share", type=float, default=0.0, help="share of single turns that are shown the worked answer first")
    args = parser.parse_args(argv)
    if args.out.is_dir() and any(args.out.iterdir()):
        parser.error(f"{args.out} holds files already; remove it first, or name another folder with --out")
    console = Console()

    config = ReasoningGymEnvConfig(
        dataset="chain_sum",
        parameters={"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1},
        num_tasks=60_000,
        seed=1_000_000,
        split="train",
    )
    questions = [(spec["question"], spec["answer"]) for spec in build_environment(config).tasks()]
    console.print(f"{len(questions)} distinct training questions")
    stream = documents_forever(questions, random.Random(args.seed), args.worked_share, args.hinted_share)
    if args.init:
        model, params = load_pretrained(args.init)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.init)
    else:
        num_tokens = NUM_TOKENS if args.hinted_share else NUM_MERGED_TOKENS
        tokenizer = train_tokenizer([next(stream) for _ in range(4000)] * 10, num_tokens)
        model, params = initial_model(args.seed)
    rows = ROWS_WITH_HINTS if args.hinted_share else ROWS
    params = fit(model, params, (to_sample(doc, tokenizer) for doc in stream), args.steps, args.lr, console, rows)
    probe = document(*questions[0], random.Random(args.seed), 1.0, args.hinted_share)
    if to_sample(probe, tokenizer).token_ids.tolist() != tokenizer.encode("".join(text for text, _ in probe)):
        raise RuntimeError("a document encoded span by span differs from the same document encoded whole: a merge crosses a span")
    tokenizer_dir = args.out.with_name(args.out.name + ".tokenizer")
    tokenizer.save_pretrained(tokenizer_dir)
    save_pretrained(model, params, args.out, tokenizer_dir=tokenizer_dir)
    shutil.rmtree(tokenizer_dir)
    heldout = build_environment(config.model_copy(update={"split": "heldout", "seed": 5_000_000, "num_tasks": 8000}))
    scores = measure(args.out, list(heldout.tasks())[:512], args.seed, has_hints=args.hinted_share > 0)
    names = ("steps", "lr", "worked_share", "seed", *(["hinted_share"] if args.hinted_share else []))
    settings = {name: getattr(args, name) for name in names}
    (args.out / "measured.json").write_text(json.dumps({"settings": settings, "heldout": scores}, indent=2) + "\n")
    console.print_json(data=scores)
    console.print(f"saved {args.out}")
    return 0


def initial_model(seed: int) -> tuple[Model, dict]:
    """Return the quickstart's network with random weights."""
    spec = ModelSpec(
        family="qwen3",
        vocab_size=NUM_TOKENS,
        hidden_size=128,
        intermediate_size=384,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        is_tied=True,
        has_qk_norm=True,
        has_attention_bias=False,
        max_position_embeddings=512,
    )
    model = build_model(spec)
    return model, init_params(model, jax.random.key(seed), param_dtype="float32")


if __name__ == "__main__":
    sys.exit(main())
