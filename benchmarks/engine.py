"""How fast the embedded engine generates, beside the machine's ceilings and beside `generate` of transformers.

The real `Engine` is ticked as the device thread ticks it, on randomly drawn weights: every slot gets a prompt of its own, all are
sampled at temperature 1, and each token comes with its logprob. The peer does the same work in its own way (sampled too, its logits
not returned). Ceilings are measured in the same run, interleaved: reading all weights once per step, and the model's own matrix
products at the shapes of a decode step.

    python benchmarks/engine.py --shape smollm2 --batches 1,8,32 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import PEER_PYTHON_VAR, Case, Peer, Report, interleave, peer_python

from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.engine import Engine
from jaxrl.engine.cache import cache_bytes
from jaxrl.inference.endpoint import GenerateRequest, TokenSampling
from jaxrl.models.decode import DecodeParams, to_decode_params
from jaxrl.models.spec import ModelSpec
from jaxrl.models.transformer import build_model

PEER_SCRIPT = Path(__file__).parent / "peers" / "transformers_generate.py"


@dataclass(frozen=True)
class Shape:
    """A model and the work that it is measured with."""

    hf_config: dict[str, Any]
    """Its config.json."""
    prompt_tokens: int
    new_tokens: int
    batches: tuple[int, ...]
    """Slots of each engine; all of them are busy."""
    prefill_rows: int
    min_prefill_bucket: int


SMOLLM2 = Shape(
    hf_config={
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
    },
    prompt_tokens=64,
    new_tokens=64,
    batches=(1, 8, 32),
    prefill_rows=8,
    min_prefill_bucket=16,
)
"""SmolLM2-135M."""
QUICKSTART = Shape(
    hf_config={
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
    },
    prompt_tokens=22,
    new_tokens=32,
    batches=(256,),
    prefill_rows=32,
    min_prefill_bucket=24,
)
"""The model and the engine of configs/quickstart.toml."""
SHAPES = {"smollm2": SMOLLM2, "quickstart": QUICKSTART}


class EngineRun:
    """One engine with a slot per prompt, and the timings of its latest generation."""

    def __init__(self, params: DecodeParams, spec: ModelSpec, shape: Shape, arguments: argparse.Namespace, batch: int) -> None:
        """Build and warm up."""
        self._shape, self._batch, self._spec = shape, batch, spec
        window = arguments.window or shape.prompt_tokens + shape.new_tokens
        config = EmbeddedInferenceConfig(
            num_slots=batch,
            max_model_len=window,
            prefill_rows=min(shape.prefill_rows, batch),
            min_prefill_bucket=shape.min_prefill_bucket,
            decode_steps_per_tick=arguments.steps_per_tick,
            dtype=arguments.dtype,
        )
        self.engine = Engine(spec, params, config, version=0)
        started = time.perf_counter()
        self.engine.warm_up(lambda name, done, total: print(f"  batch {batch}: compiled {done}/{total} ({name})", flush=True))
        self.warm_up_s = time.perf_counter() - started
        self.cache_bytes = cache_bytes(spec, batch, window, arguments.dtype)
        self.tick_s: list[float] = []
        """Seconds of each tick of the latest generation; the first one also prefills."""
        self._rng, self._calls = np.random.default_rng(0), 0

    def generate(self) -> None:
        """Answer one prompt per slot."""
        self._calls += 1
        self.tick_s = []
        prompts = self._rng.integers(0, self._spec.vocab_size, (self._batch, self._shape.prompt_tokens)).astype(np.int32)
        sampling = [TokenSampling(max_tokens=self._shape.new_tokens, seed=self._calls * 1000 + i) for i in range(self._batch)]
        futures = [self.engine.submit(GenerateRequest(f"{self._calls}/{i}", prompts[i], sampling[i])) for i in range(self._batch)]
        while self.engine.has_work():
            started = time.perf_counter()
            self.engine.tick()
            self.tick_s.append(time.perf_counter() - started)
        assert all(len(future.result(timeout=0).token_ids) == self._shape.new_tokens for future in futures)

    def cases(self, steps_per_tick: int) -> list[Case]:
        """Four figures of one generation: all of it, its decoding alone, its prefill alone, and its first tick."""
        batch, new_tokens = self._batch, self._shape.new_tokens

        def decode_s() -> float:
            return sum(self.tick_s[1:])

        def prefill_s() -> float:
            return self.tick_s[0] - statistics.median(self.tick_s[1:])

        return [
            Case(name("engine", batch), self.generate, batch * new_tokens, "tokens"),
            Case(name("engine, decode only", batch), decode_s, batch * (new_tokens - steps_per_tick), "tokens"),
            Case(name("engine, prefill only", batch), prefill_s, batch * (self._shape.prompt_tokens - 1), "tokens"),
            Case(name("engine, first tokens", batch), lambda: self.tick_s[0], batch, "tokens"),
        ]


def name(what: str, batch: int) -> str:
    """The name of a figure."""
    return f"{what}, batch {batch}"


def random_params(spec: ModelSpec, dtype: str) -> DecodeParams:
    """Draw weights of the scale of a fresh model, and lay them out for the engine."""
    rng = np.random.default_rng(0)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if path[-1].key == "scale":
            return jnp.ones(leaf.shape, jnp.float32)
        return jnp.asarray(0.02 * rng.standard_normal(leaf.shape, np.float32))

    params = jax.tree_util.tree_map_with_path(draw, build_model(spec).abstract_params(jnp.float32))
    return jax.jit(to_decode_params, static_argnums=(1, 2))(params, spec, dtype)


def ceiling_cases(params: DecodeParams, batches: tuple[int, ...]) -> list[Case]:
    """What no decode step can beat: reading every weight once, and the matrix products of one step alone."""
    kernels = [layer[key] for layer in params.layers for key in ("qkv", "o", "gate_up", "down")] + [params.output_VD]
    num_weights = sum(kernel.size for kernel in kernels)
    read = jax.jit(lambda weights: sum(jnp.sum(weight, dtype=jnp.float32) for weight in weights))

    def product_case(batch: int) -> Case:
        inputs = {size: jnp.ones((size, batch), kernels[0].dtype) for size in {kernel.shape[1] for kernel in kernels}}

        @jax.jit
        def products(weights: list[jax.Array], inputs: dict[int, jax.Array]) -> list[jax.Array]:
            # Each product whole, so that none can be left out; their outputs are small beside the weights.
            return [weight @ inputs[weight.shape[1]] for weight in weights]

        return Case(name("ceiling, matrix products", batch), lambda: jax.block_until_ready(products(kernels, inputs)), batch, "tokens")

    return [
        Case(
            "ceiling, reading the weights",
            lambda: jax.block_until_ready(read(kernels)),
            num_weights * kernels[0].dtype.itemsize / 1e9,
            "GB",
        ),
        *(product_case(batch) for batch in batches),
    ]


def peer_cases(peer: Peer, shape: Shape, batches: tuple[int, ...]) -> list[Case]:
    """The peer's generation at each batch."""

    def generate(batch: int) -> Callable[[], float]:
        return lambda: peer.call(batch=batch, prompt_tokens=shape.prompt_tokens, new_tokens=shape.new_tokens)["seconds"]

    return [Case(name("transformers generate", batch), generate(batch), batch * shape.new_tokens, "tokens") for batch in batches]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2")
    parser.add_argument("--batches", default="", help="comma-separated numbers of slots; the shape's own if left out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--window", type=int, default=0, help="cache columns of a slot; prompt plus completion if left out")
    parser.add_argument("--steps-per-tick", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None, help="JSON file (default: benchmarks/results/engine-SHAPE.json)")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    batches = tuple(int(batch) for batch in arguments.batches.split(",") if batch) or shape.batches
    spec = ModelSpec.from_hf(shape.hf_config)
    report = Report(f"engine-{arguments.shape}", settings={"shape": arguments.shape, "batches": batches, **_settings(arguments, shape)})
    print(f"drawing {spec.num_params / 1e6:.1f} M weights", flush=True)
    params = random_params(spec, arguments.dtype)
    runs = {batch: EngineRun(params, spec, shape, arguments, batch) for batch in batches}
    python = peer_python()
    peer = Peer(PEER_SCRIPT, "--config", json.dumps(shape.hf_config), "--dtype", arguments.dtype, python=python) if python else None
    cases = [case for run in runs.values() for case in run.cases(arguments.steps_per_tick)]
    cases += peer_cases(peer, shape, batches) if peer else []
    cases += ceiling_cases(params, batches)
    try:
        report.figures = interleave(cases, repeats=arguments.rounds, say=lambda text: print(f"  {text}", flush=True))
    finally:
        if peer is not None:
            peer.close()
    if peer is None:
        report.notes.append(f"no peer was run: {PEER_PYTHON_VAR} does not name a Python with torch and transformers")
    else:
        report.notes.append(f"peer: {json.dumps(peer.hello)}")
    _compare(report, runs, params, has_peer=peer is not None)
    report.publish(arguments.output)


def _compare(report: Report, runs: dict[int, EngineRun], params: DecodeParams, *, has_peer: bool) -> None:
    """Add the ratios, and what is no rate."""
    for batch, run in runs.items():
        if has_peer:
            report.ratio(f"engine / transformers generate, batch {batch}", name("engine", batch), name("transformers generate", batch))
        decode = name("engine, decode only", batch)
        report.ratio(f"decode only / matrix products, batch {batch}", decode, name("ceiling, matrix products", batch))
        first_s = statistics.median(report.figures[name("engine, first tokens", batch)].seconds)
        report.notes.append(
            f"batch {batch}: time to first token {first_s:.3f} s, warm-up {run.warm_up_s:.1f} s, cache {run.cache_bytes / 2**20:.1f} MiB"
        )
    reading = report.figures["ceiling, reading the weights"]
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    for batch in runs:
        steps = [rate / batch for rate in report.figures[name("engine, decode only", batch)].rates]
        shares = [step * num_bytes / 1e9 / rate for step, rate in zip(steps, reading.rates, strict=True)]
        report.ratios[f"decode only / reading the weights once a step, batch {batch}"] = statistics.median(shares)


def _settings(arguments: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    kept = {key: getattr(arguments, key) for key in ("rounds", "dtype", "window", "steps_per_tick")}
    return {**kept, "prompt_tokens": shape.prompt_tokens, "new_tokens": shape.new_tokens}


if __name__ == "__main__":
    main()
