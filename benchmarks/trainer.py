"""How fast the trainer's step is, beside XLA's own matrix products and beside a plain loop of torch.

The real `StepPrograms` make whole optimizer steps (zero the sums, gradient of one full micro-batch, clip, AdamW) on randomly
drawn weights. The bound is the time of the model's matrix products alone, forward and backward, each at the best of its
orientations in the same round: a step that did nothing else would run at it. The peer does the same step with transformers.

    python benchmarks/trainer.py --shape smollm2 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import PEER_PYTHON_VAR, Case, Peer, Report, interleave, peer_python

from jaxrl.config.trainer import MeshConfig, TrainerConfig
from jaxrl.models import build_mesh, build_model, init_params
from jaxrl.models.spec import ModelSpec
from jaxrl.trainer.step import ARRAY_DTYPES, build_programs

PEER_SCRIPT = Path(__file__).parent / "peers" / "torch_train.py"
OURS, BOUND, PEER = "jaxrl step", "matrix products alone", "torch loop"
MIN_TIMED_S = 0.01
"""A product is repeated until it takes at least this long."""

ORIENTATIONS: dict[str, tuple[tuple[str, str, Callable[[jax.Array, jax.Array], jax.Array]], ...]] = {
    "forward": (("x", "w", lambda x, w: x @ w), ("x", "w_t", lambda x, w: x @ w.T), ("x", "w_t", lambda x, w: (w @ x.T).T)),
    "d input": (("dy", "w", lambda y, w: y @ w.T), ("dy", "w", lambda y, w: (w @ y.T).T), ("dy", "w_t", lambda y, w: y @ w)),
    "d weight": (("x", "dy", lambda x, y: x.T @ y), ("x", "dy", lambda x, y: (y.T @ x).T), ("x", "dy", lambda x, y: y.T @ x)),
}
"""Ways to compute each product of a linear map: names of the operands, and the product as written."""


@dataclass(frozen=True)
class Shape:
    """A model and the micro-batch that it is measured with."""

    spec: ModelSpec
    rows: int
    row_length: int
    head_chunk_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of one step."""
        return self.rows * self.row_length


def _spec(family: str, vocab: int, hidden: int, feed_forward: int, layers: int, heads: tuple[int, int], head_dim: int) -> ModelSpec:
    config = {"model_type": family, "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": feed_forward}
    config |= {"num_hidden_layers": layers, "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": head_dim}
    return ModelSpec.from_hf({**config, "max_position_embeddings": 8192, "tie_word_embeddings": True})


SHAPES = {
    "smollm2": Shape(_spec("llama", 49152, 576, 1536, 30, (9, 3), 64), rows=8, row_length=128, head_chunk_tokens=1024),
    "quickstart": Shape(_spec("qwen3", 512, 128, 384, 3, (4, 2), 32), rows=32, row_length=96, head_chunk_tokens=3072),
}
"""SmolLM2-135M, and the model and micro-batch of configs/quickstart.toml."""


class OurStep:
    """Compiled programs, a state, and one micro-batch without padding."""

    def __init__(self, shape: Shape, dtype: str, remat: str) -> None:
        size = (shape.rows, shape.row_length)
        sizes = {"rows": shape.rows, "row_length": shape.row_length, "head_chunk_tokens": shape.head_chunk_tokens}
        config = TrainerConfig(**sizes, compute_dtype=dtype, remat=remat)  # pyright: ignore[reportArgumentType]
        mesh = build_mesh(MeshConfig(), jax.devices()[:1])
        model = build_model(shape.spec, mesh)
        self._programs = build_programs(model, config, mesh, max_steps=1000)
        started = time.perf_counter()
        self._programs.compile()
        self.compile_s = time.perf_counter() - started
        self.temp_bytes = {name: _temp_bytes(self._programs.program(name)) for name in ("grad_step", "apply")}
        self._state = self._programs.init_state(init_params(model, jax.random.key(0)))
        rng = np.random.default_rng(0)
        arrays = {name: np.zeros(size, array_dtype) for name, array_dtype in ARRAY_DTYPES.items()}
        arrays["token_ids"] = rng.integers(0, shape.spec.vocab_size, size, np.int32)
        arrays["segment_ids"] += 1
        arrays["position_ids"] += np.arange(shape.row_length, dtype=np.int32)
        arrays["loss_mask"][:] = True
        arrays["inference_logprobs"] -= np.float32(np.log(shape.spec.vocab_size))
        arrays["temperatures"] += 1
        arrays["rl_weights"] += 1
        arrays["advantages"] = rng.normal(size=size).astype(np.float32)
        self._arrays = jax.device_put(arrays)
        self._denominators = self._programs.psum_denominators(np.array([[shape.rows * (shape.row_length - 1), 0, 0]], np.int32))
        self.seconds: dict[str, list[float]] = defaultdict(list)
        """Of each part, every repetition; warm-ups included."""

    def __call__(self) -> None:
        """One optimizer step."""
        accumulator = self._timed("zero", self._programs.zero_accumulator)
        inputs = (self._state, accumulator, self._arrays, self._denominators)
        accumulator, _ = self._timed("gradient", lambda: self._programs.grad_step(*inputs))
        self._state, _ = self._timed("update", lambda: self._programs.apply(self._state, accumulator))

    def _timed(self, name: str, run: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = jax.block_until_ready(run())
        self.seconds[name].append(time.perf_counter() - started)
        return result


def _temp_bytes(program: jax.stages.Compiled) -> int:
    analysis = program.memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes


@dataclass(frozen=True)
class Product:
    """A matrix product of the step, compiled in each of its orientations."""

    name: str
    count: int
    """How often a step computes it."""
    flops: int
    forms: tuple[Callable[[], jax.Array], ...]


def build_products(shape: Shape, dtype: str) -> list[Product]:
    """Every distinct product of the forward and backward pass; attention's own are left out, which makes the bound higher."""
    spec, n = shape.spec, shape.num_tokens
    counts: dict[tuple[int, int], int] = defaultdict(int)
    layers = spec.num_layers
    for num_in, num_out, count in (
        (spec.hidden_size, spec.query_size, layers),
        (spec.hidden_size, spec.kv_size, 2 * layers),
        (spec.query_size, spec.hidden_size, layers),
        (spec.hidden_size, spec.intermediate_size, 2 * layers),
        (spec.intermediate_size, spec.hidden_size, layers),
        (spec.hidden_size, spec.vocab_size, 1),
    ):
        counts[num_in, num_out] += count

    def ones(*size: int) -> jax.Array:
        return jnp.ones(size, dtype)

    def compiled(form: Callable[[jax.Array, jax.Array], jax.Array], a: jax.Array, b: jax.Array) -> Callable[[], jax.Array]:
        program = jax.jit(form).lower(a, b).compile()
        return lambda: program(a, b)

    products = []
    for (k, m), count in counts.items():
        x, dy, w, w_t = ones(n, k), ones(n, m), ones(k, m), ones(m, k)
        operands = {"x": x, "dy": dy, "w": w, "w_t": w_t}
        for kind, forms in ORIENTATIONS.items():
            programs = tuple(compiled(form, operands[a], operands[b]) for a, b, form in forms)
            products.append(Product(f"{n} x {k} x {m} {kind}", count, 2 * n * k * m, programs))
    return products


class Bound:
    """Times every product and adds up what a step of nothing else would take."""

    def __init__(self, products: list[Product]) -> None:
        self._products = products
        self.gflops: dict[str, list[float]] = defaultdict(list)
        """Rate of each product at its best orientation, every repetition."""

    def __call__(self) -> float:
        """Seconds of one step's products."""
        total = 0.0
        for product in self._products:
            seconds = min(map(_seconds_per_call, product.forms))
            self.gflops[product.name].append(product.flops / seconds / 1e9)
            total += product.count * seconds
        return total


def _seconds_per_call(run: Callable[[], jax.Array]) -> float:
    num_calls, started = 0, time.perf_counter()
    while True:
        run().block_until_ready()
        num_calls += 1
        taken = time.perf_counter() - started
        if taken >= MIN_TIMED_S:
            return taken / num_calls


def start_peer(shape: Shape, arguments: argparse.Namespace, python: str) -> Peer:
    """The torch loop at the same shapes."""
    spec = shape.spec
    sizes = {name: getattr(spec, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")}
    sizes |= {"num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "rows": shape.rows, "row_length": shape.row_length}
    options = {"family": spec.family, "attention": arguments.peer_attention, "dtype": arguments.dtype}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**sizes, **options}.items()]
    return Peer(PEER_SCRIPT, *flags, python=python)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2", help="the model and its micro-batch")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="precision of activations and products")
    parser.add_argument("--remat", choices=("none", "layer"), default="none", help="`trainer.remat`")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of everything, interleaved")
    parser.add_argument("--peer-attention", choices=("best", "sdpa", "eager"), default="best", help="best tries both first")
    parser.add_argument("--output", type=Path, default=None, help="JSON file (default: benchmarks/results/trainer-SHAPE.json)")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]

    def say(line: str) -> None:
        print(f"[trainer] {line}", flush=True)

    report = Report(f"trainer-{arguments.shape}", settings={**vars(arguments), "output": None, "tokens_per_step": shape.num_tokens})
    say(f"compiling the step of a model of {shape.spec.num_params / 1e6:.1f} M parameters")
    step = OurStep(shape, arguments.dtype, arguments.remat)
    say(f"compiled in {step.compile_s:.1f} s; compiling the products")
    bound = Bound(build_products(shape, arguments.dtype))
    cases = [Case(OURS, step, shape.num_tokens, "token"), Case(BOUND, bound, shape.num_tokens, "token")]
    peer = None
    if python := peer_python():
        say("starting the torch peer")
        peer = start_peer(shape, arguments, python)
        cases.append(Case(PEER, lambda: peer.call()["seconds"], shape.num_tokens, "token"))
    else:
        report.notes.append(f"no torch peer: {PEER_PYTHON_VAR} is not set (the Python of an environment with torch and transformers)")
    report.figures |= interleave(cases, repeats=arguments.rounds, say=say)
    report.ratio("step / matrix products alone", OURS, BOUND)
    if peer is not None:
        report.ratio("step / torch loop", OURS, PEER)
        report.notes.append(f"peer: {json.dumps(peer.hello)}")
        peer.close()
    describe(report, shape, step, bound, arguments.rounds)
    report.publish(arguments.output)


def describe(report: Report, shape: Shape, step: OurStep, bound: Bound, rounds: int) -> None:
    """Add what is not a rate."""
    tokens_per_s = report.figures[OURS].median
    flops = shape.spec.flops_per_token(shape.row_length) * tokens_per_s
    parts = {name: statistics.median(seconds[-rounds:]) for name, seconds in step.seconds.items()}
    rates = {name: round(statistics.median(values[-rounds:])) for name, values in bound.gflops.items()}
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    report.settings |= {"compile_s": step.compile_s, "temp_bytes": step.temp_bytes, "peak_rss_mib": peak_mib}
    report.settings |= {"model_flops_per_s": flops, "part_s": parts, "product_gflops": rates}
    report.notes += [
        f"model FLOP/s: {flops / 1e9:.1f} G (6 per matmul parameter and token, and attention)",
        "seconds of a step: " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items()),
        f"compile {step.compile_s:.1f} s; temporary memory "
        + ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in step.temp_bytes.items())
        + f"; peak RSS of this process {peak_mib:,.0f} MiB, operands of the products included",
        *(f"GFLOP/s of {name}: {rate}" for name, rate in rates.items()),
    ]


if __name__ == "__main__":
    main()
