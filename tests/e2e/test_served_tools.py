"""`jaxrl.serve` as an environment's other half: an agent that knows only OpenAI's API plays it, and the tokens are exact.

The model is real and tiny. It was not trained but written down: what it says next depends mostly on the last token, so that it calls a
tool, or answers, as its seed has it; a layer of noise makes every probability depend on all that stands before.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import openai
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer

from jaxrl.batching import rollout_to_samples
from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.config.serve import ServeConfig, ServedModelConfig, ServerConfig
from jaxrl.engine import Engine
from jaxrl.inference.endpoint import GenerateRequest, TokenSampling
from jaxrl.launch.serving import Running, serve
from jaxrl.losses import token_scores
from jaxrl.models import load_pretrained
from jaxrl.types import Node, Rollout, Task
from jaxrl.weights import WeightStore
from tests.e2e.runs import ROOT
from tests.engine.tiny import generate
from tests.golden.make_templates import DIRECTORY
from tests.inference.rendering.styles import ADD

WINDOW, WIDTH = 768, 64
ENGINE = EmbeddedInferenceConfig(num_slots=4, max_model_len=WINDOW, prefill_rows=1, min_prefill_bucket=WINDOW)
FIRST, LAST = '\n{"name": "add", "arguments"', ': {"a": 3, "b": 4}}\n'
SAID = "That makes 7."
SEEDS = (5, 0, 1, 2, 3)
FOLLOWS = [  # token, one that may follow it
    ("\n", "<tool_call>"), ("\n", SAID), ("<tool_call>", FIRST), (FIRST, LAST), (LAST, "</tool_call>"), ("</tool_call>", "<|im_end|>"),
    (SAID, "<|im_end|>"),
]  # fmt: skip


def write_model(directory: Path) -> None:
    """Write a Hugging Face directory: the tokenizer of a chat model with a few tokens more, and weights over them."""
    shutil.copytree(DIRECTORY / "chatml", directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    # The whole of a call is a token too, which is what the tokenizer makes of it and what the model never says.
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (FIRST, LAST, FIRST + LAST, SAID)])
    tokenizer.save(str(directory / "tokenizer.json"))
    vocab = tokenizer.get_vocab()
    size, rng = max(vocab.values()) + 1, np.random.default_rng(0)
    vocab["\n"] = tokenizer.encode("\n", add_special_tokens=False).ids[0]

    def noise(*shape: int) -> np.ndarray:
        return rng.normal(scale=0.1, size=shape).astype(np.float32)

    embed = rng.choice([-1.0, 1.0], (size, WIDTH)).astype(np.float32)
    head = np.zeros((size, WIDTH), np.float32)
    for token, following in FOLLOWS:
        head[vocab[following]] += 0.4 * embed[vocab[token]] + noise(WIDTH)
    layer = "model.layers.0."
    weights = {"model.embed_tokens.weight": embed, "lm_head.weight": head, "model.norm.weight": np.ones(WIDTH, np.float32)}
    weights |= {f"{layer}{name}.weight": np.ones(WIDTH, np.float32) for name in ("input_layernorm", "post_attention_layernorm")}
    weights |= {f"{layer}self_attn.{name}_proj.weight": noise(WIDTH, WIDTH) for name in "qkvo"}
    weights |= {f"{layer}mlp.{name}_proj.weight": noise(WIDTH, WIDTH) for name in ("gate", "up", "down")}
    save_file(weights, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": size, "hidden_size": WIDTH, "intermediate_size": WIDTH,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": WINDOW,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "dtype": "float32",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "caller"
    write_model(directory)
    return directory


@pytest.fixture(scope="module")
def server(model_directory: Path) -> Iterator[Running]:
    """Run `serve` in a thread, and stop it as Ctrl-C would."""
    settings = ServerConfig(port=0, max_logprobs=0)
    config = ServeConfig(model=ServedModelConfig(name=str(model_directory), served_name="caller"), inference=ENGINE, server=settings)
    ready: Future[Running] = Future()

    def run() -> None:
        try:
            serve(config, lambda line: None, ready.set_result)
        except BaseException as error:
            ready.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    running = ready.result(timeout=100)
    yield running
    running.request_stop()
    thread.join(timeout=20)
    assert not thread.is_alive()


class Recorder:
    """An agent over OpenAI's API, streams and all, that notes the tokens of each turn and nothing else of our making."""

    def __init__(self, client: openai.OpenAI) -> None:
        self.client = client
        self.messages: list[Any] = [{"role": "user", "content": "What is 3 + 4?"}]
        self.prompts: list[list[int]] = []
        self.replies: list[list[int]] = []
        self.logprobs: list[list[float]] = []
        self.ends: list[str] = []

    def turn(self, seed: int) -> None:
        """Let the model reply, and reply to it."""
        prompt, ids, logprobs = [], [], []
        with self.client.chat.completions.stream(
            model="caller", messages=self.messages, tools=[ADD], seed=seed, logprobs=True, extra_body={"return_token_ids": True}
        ) as stream:  # fmt: skip
            for event in stream:
                if event.type != "chunk":
                    continue
                chunk: Any = event.chunk
                prompt += getattr(chunk, "prompt_token_ids", None) or []
                for choice in chunk.choices:
                    ids += getattr(choice, "token_ids", None) or []
                    logprobs += [one.logprob for one in (choice.logprobs.content if choice.logprobs else None) or []]
            choice = stream.get_final_completion().choices[0]
        self.prompts.append(prompt)
        self.replies.append(ids)
        self.logprobs.append(logprobs)
        self.ends.append(choice.finish_reason)
        self.messages.append(choice.message.model_dump(exclude_none=True))
        if calls := choice.message.tool_calls:
            for call in calls:
                total = sum(json.loads(call.function.arguments).values())
                self.messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
        else:
            self.messages.append({"role": "user", "content": "And again?"})

    def rollout(self) -> Rollout:
        """Return what was played, as it would be trained on."""
        nodes: list[Node] = []
        seen = 0
        for prompt, ids, logprobs in zip(self.prompts, self.replies, self.logprobs, strict=True):
            parent = len(nodes) - 1 if nodes else None
            nodes.append(Node(parent, "user", "", np.asarray(prompt[seen:], np.int32)))
            nodes.append(
                Node(
                    len(nodes) - 1, "assistant", "", np.asarray(ids, np.int32), sampled=True, num_sampled=len(ids),
                    logprobs=np.asarray(logprobs, np.float32), versions=np.zeros(len(ids), np.int32),
                )
            )  # fmt: skip
            seen = len(prompt) + len(ids)
        return Rollout(Task("served", "t", {}), "served/0", member=0, draw_index=0, nodes=nodes)


def test_five_turns_over_openais_api_are_one_exact_sample(server: Running, model_directory: Path) -> None:
    renderer = server.backend.renderer
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        agent = Recorder(client)
        for seed in SEEDS:
            agent.turn(seed)
    assert set(agent.ends) == {"tool_calls", "stop"}, "these seeds call tools and answer"

    for k in range(4):
        seen = agent.prompts[k] + agent.replies[k]
        suffix = agent.prompts[k + 1][len(seen) :]
        assert agent.prompts[k + 1][: len(seen)] == seen
        between = "tool\n7" if agent.ends[k] == "tool_calls" else "user\nAnd again?"
        assert renderer.decode(suffix) == f"\n<|im_start|>{between}<|im_end|>\n<|im_start|>assistant\n"
    called = agent.replies[agent.ends.index("tool_calls")]
    assert called != renderer.encode(renderer.decode(called)).tolist(), "encoding the words of a call would give other tokens"

    (sample,) = rollout_to_samples(agent.rollout())
    assert sample.token_ids.tolist() == agent.prompts[4] + agent.replies[4]
    assert sample.token_ids[sample.loss_mask].tolist() == [token_id for ids in agent.replies for token_id in ids]

    model, params = load_pretrained(model_directory)
    store = WeightStore(model.spec, "float32")
    store.publish(0, params)
    reference = Engine(model.spec, store.get(0), ENGINE, version=0, decode_text=renderer.decode)
    for seed, prompt, ids in zip(SEEDS, agent.prompts, agent.replies, strict=True):
        sampling = TokenSampling(max_tokens=WINDOW, seed=seed, stop_ids=renderer.stop_ids)
        (again,) = generate(reference, GenerateRequest("r", np.asarray(prompt, np.int32), sampling))
        assert again.token_ids.tolist() == ids, "what was told is what the engine samples"

    row = sample.token_ids[None]
    hidden = model.hidden(params, row, np.arange(row.shape[1], dtype=np.int32)[None], np.ones_like(row))
    scores = token_scores(hidden, model.head(params), row, np.ones_like(row), jnp.ones(row.shape), chunk_tokens=32)
    trained = np.asarray(scores.logprobs[0])[sample.loss_mask]
    np.testing.assert_allclose(sample.inference_logprobs[sample.loss_mask], trained, rtol=0, atol=1e-5)
    assert -4.0 < trained.min() < -0.1, "the choice between a call and an answer was one"
    assert len({round(float(turn[0]), 3) for turn in agent.logprobs}) > 2, "what stands before matters"


def test_the_example_of_the_document_calls_its_tool(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    code = next(block.split("```")[0] for block in text.split("```py\n")[1:] if "tools=" in block)
    exec(code.replace("http://127.0.0.1:8000/v1", server.url), {})
    said = capsys.readouterr().out.splitlines()
    assert "add {'a': 3, 'b': 4}" in said and said[-1] == "every prompt goes on from the tokens before it"
