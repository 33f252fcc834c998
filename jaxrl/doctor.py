"""`python -m jaxrl.doctor --config FILE.toml [--check NAME ...]`: look a run over before it costs anything.

Runs the checks in order, from those that need no device to those that play and train a little, and prints a line for each:
what was found, and what to do if it is not good. It writes no run folder: `--check resume`, which trains a few steps, works
in a temporary one.
Exit code: 0 all good, 1 a check failed, 2 the configuration cannot be loaded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jaxrl.config.evals import EvalSectionConfig
from jaxrl.config.load import build_parser, load_config_aloud, parse_cli
from jaxrl.config.monitors import MonitorsConfig
from jaxrl.config.run import RunConfig
from jaxrl.envs.base import Environment, Message, Reply
from jaxrl.errors import ConfigError, EngineError, JaxrlError
from jaxrl.types import Rollout, Task

if TYPE_CHECKING:
    import numpy as np

    from jaxrl.inference.rendering import Renderer
    from jaxrl.launch import ArrayArm

MAX_MISMATCH_KL = {"float32": 1e-6, "bfloat16": 1e-2}
"""Largest step-0 mismatch KL that is rounding and not a fault, by the coarser of the engine's and the trainer's precision."""
PROBED_TASKS = 16
"""Tasks of each environment whose prompts are rendered, and that are played for parity."""
RESUME_STEPS = 2
"""`--check resume` compares this many steps twice with twice as many at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    is_good: bool
    text: str
    """One line: figures, and what to do if it is not good."""


def check_config(config: RunConfig) -> Finding:
    """The configuration loaded; say what the run is."""
    settings = config.orchestrator
    size = f"{settings.rollouts_per_step} rollouts" if settings.rollouts_per_step else f"{settings.token_batch_size} tokens"
    return Finding(
        True,
        f"{config.run.max_steps} steps of {size} in groups of {settings.group_size}, {len(settings.train.env)} environment(s), "
        f"async level {config.async_level}",
    )


def check_model(config: RunConfig) -> Finding:
    """The model directory loads, every tensor of it."""
    import jax

    from jaxrl.models import load_pretrained

    model, params = load_pretrained(config.orchestrator.model.name, param_dtype=config.trainer.param_dtype)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    spec = model.spec
    return Finding(
        True,
        f"{spec.family}, {spec.num_params:,} parameters, {spec.num_layers} layers, vocabulary {spec.vocab_size}, "
        f"{num_bytes / 2**20:.1f} MiB in {config.trainer.param_dtype}",
    )


def check_tokenizer(config: RunConfig) -> Finding:
    """The tokenizer renders a conversation and knows how a reply ends."""
    from jaxrl.inference.rendering import Renderer

    renderer = Renderer.from_pretrained(config.orchestrator.model.name)
    turn = renderer.open_turn(None, [{"role": "user", "content": "What is 2 + 3?"}])
    stops = ", ".join(f"{renderer.decode([i])!r} ({i})" for i in renderer.stop_ids)
    return Finding(True, f"{renderer.vocab_size} ids, a short question is {len(turn.prompt_ids)} tokens, replies end at {stops}")


def check_budgets(config: RunConfig) -> Finding:
    """Prompts leave room for replies in the window, and whole rollouts fit a row."""
    longest = max(_prompt_lengths(config))
    max_tokens = max(config.orchestrator.sampling_of(env).max_tokens for env in config.orchestrator.train.env)
    window, row = config.engine.max_model_len, config.trainer.row_length
    needed = longest + max_tokens
    text = f"longest of the probed prompts {longest} + reply {max_tokens} = {needed} tokens; window {window}, row {row}"
    if longest >= window:
        return Finding(False, f"{text}: prompts do not fit; raise `inference.max_model_len` above {longest}")
    if needed > window:
        return Finding(False, f"{text}: replies will be cut at the window; raise `inference.max_model_len` to {needed}")
    if needed > row and config.trainer.overlong == "drop":
        return Finding(False, f"{text}: long rollouts will be dropped; raise `trainer.row_length` to {needed}")
    return Finding(True, text)


def check_memory(config: RunConfig) -> Finding:
    """What the first device holds all the time fits into it; the engine and its weights live there."""
    import jax

    from jaxrl.engine.cache import cache_bytes
    from jaxrl.models import load_spec

    spec, engine, trainer = load_spec(config.orchestrator.model.name), config.engine, config.trainer
    # Master parameters in their dtype, two moments and the sum of gradients in float32, split over fsdp x tensor.
    training = spec.num_params * (jax.numpy.dtype(trainer.param_dtype).itemsize + 12) // (trainer.mesh.fsdp * trainer.mesh.tensor)
    version = spec.num_params * jax.numpy.dtype(engine.dtype).itemsize
    cache = cache_bytes(spec, engine.num_slots, engine.max_model_len, engine.dtype)
    # The one being served, and one for each step that the trainer may finish before the next is loaded.
    num_versions = 2 + config.async_level
    needed = training + num_versions * version + cache
    text = (
        f"training {_mib(training)} + {num_versions} policy versions of {_mib(version)} + key-value cache {_mib(cache)} = {_mib(needed)} "
        "on the first device, activations and logits not counted"
    )
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > limit:
        return Finding(False, f"{text}; it has {_mib(limit)}: lower `inference.num_slots`, use bfloat16, or raise `trainer.mesh.fsdp`")
    return Finding(True, f"{text}, of {_mib(limit)}")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def check_parity(config: RunConfig) -> Finding:
    """The trainer gives the engine's tokens the engine's logprobs: the step-0 mismatch KL is rounding."""
    import numpy as np

    differences = _parity_differences(config)
    kl = float(np.mean(np.expm1(differences) - differences))
    dtypes = (config.engine.dtype, config.trainer.compute_dtype)
    limit = MAX_MISMATCH_KL["bfloat16" if "bfloat16" in dtypes else "float32"]
    largest = float(np.abs(differences).max())
    text = f"mismatch KL {kl:.1e} (limit {limit:.0e}), largest difference {largest:.1e} over {len(differences)} sampled tokens"
    if kl > limit:
        return Finding(False, f"{text}: engine and trainer disagree; compare `inference.dtype` with `trainer.compute_dtype`")
    return Finding(True, text)


def check_resume(config: RunConfig) -> Finding:
    """N steps, a resume and N steps equal 2N steps bit for bit: weights, task order, text and rewards."""
    from jaxrl.launch import launch

    if config.async_level > 0:
        return Finding(False, f"resume is exact in synchronous runs only; set `orchestrator.max_async_level`=0, got {config.async_level}")
    steps = 2 * RESUME_STEPS
    if config.run.max_steps < steps:
        return Finding(False, f"needs at least {steps} steps; set `run.max_steps`, got {config.run.max_steps}")
    with tempfile.TemporaryDirectory(prefix="jaxrl-resume-") as folder:
        whole, parts = (_quiet(config, Path(folder) / name) for name in ("whole", "parts"))
        launch(whole, stop_after=steps)
        launch(parts, stop_after=RESUME_STEPS)
        launch(parts, resume=True, stop_after=steps)
        differing = _differences(whole, parts, steps)
    if differing:
        return Finding(False, f"{steps} steps differ from {RESUME_STEPS} + resume + {RESUME_STEPS} in {', '.join(differing)}")
    return Finding(True, f"{RESUME_STEPS} + resume + {RESUME_STEPS} steps equal {steps}, bit for bit")


CHECKS: dict[str, Callable[[RunConfig], Finding]] = {
    "config": check_config,
    "model": check_model,
    "tokenizer": check_tokenizer,
    "budgets": check_budgets,
    "memory": check_memory,
    "parity": check_parity,
    "resume": check_resume,
}
"""Every check by name, in the order in which they run."""

DEFAULT_CHECKS = ("config", "model", "tokenizer", "budgets", "memory", "parity")
"""What runs without `--check`: everything but `resume`, which trains."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks, print what they found, and return the process's exit code."""
    parser = build_parser("python -m jaxrl.doctor", "Look a run over before it costs anything.")
    parser.add_argument(
        "--check", action="append", choices=list(CHECKS), help="run this check only; may be given several times (default: all but `resume`)"
    )
    out, errors = Console(highlight=False), Console(stderr=True, highlight=False)

    def warn(text: str) -> None:
        errors.print(f"Warning: {text}", style="yellow", markup=False, soft_wrap=True)

    command = parse_cli(sys.argv[1:] if argv is None else argv, parser)
    try:
        config = load_config_aloud(command.path, command.overrides, warn)
    except ConfigError as error:
        errors.print(f"Configuration error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    is_good = True
    for name in command.flags.check or DEFAULT_CHECKS:
        try:
            finding = CHECKS[name](config)
        except JaxrlError as error:
            finding = Finding(False, str(error))
        is_good &= finding.is_good
        mark, style = ("ok  ", "green") if finding.is_good else ("FAIL", "red")
        out.print(f"{mark} {name:10}", style=style, end="")
        out.print(finding.text, markup=False, soft_wrap=True)
    return 0 if is_good else 1


class _PromptProbe:
    """A session without a policy: measures prompts and answers nothing."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.lengths: list[int] = []

    async def ask(self, messages: Sequence[Message]) -> Reply:
        """Note the prompt's length and reply with the empty string."""
        self.lengths.append(len(self.renderer.open_turn(None, messages).prompt_ids))
        return Reply(text="", is_stopped=True, num_tokens=0)


def _prompt_lengths(config: RunConfig) -> list[int]:
    """Return the prompt lengths of some tasks of every environment, in tokens."""
    from jaxrl.launch import build_worlds

    renderer, train, heldout = build_worlds(config)
    probe = _PromptProbe(renderer)

    async def play() -> None:
        for env in (*train, *heldout):
            for spec in env.tasks()[:PROBED_TASKS]:
                await env.play(spec, probe)

    asyncio.run(play())
    return probe.lengths


def _parity_differences(config: RunConfig) -> np.ndarray:
    """Play some tasks with the engine, score the tokens with the trainer; return trainer minus engine logprob per sampled token."""
    import numpy as np

    from jaxrl.batching import pack, rollout_to_samples
    from jaxrl.launch import array_arm, build_worlds
    from jaxrl.models import build_mesh
    from jaxrl.trainer.loop import split_by_sample
    from jaxrl.trainer.step import densify

    renderer, train, _ = build_worlds(config)
    trainer = config.trainer
    with array_arm(config, renderer, build_mesh(trainer.mesh), lambda *_: None) as arm:
        rollouts = asyncio.run(_play_some(config, arm, renderer, train))
        failures = [rollout.failure for rollout in rollouts if rollout.failure is not None]
        if len(failures) == len(rollouts):
            raise EngineError(f"every probed rollout failed, the last one with {failures[-1].type}: {failures[-1].message}")
        samples = []
        for rollout in rollouts:
            rollout.samples = rollout_to_samples(rollout)
            rollout.assign_advantages(0.0)
            samples += [sample for sample in rollout.samples if len(sample) <= trainer.row_length]
        batch = pack(
            samples, row_length=trainer.row_length, rows=trainer.rows, shards=trainer.mesh.row_shards, max_segments=trainer.max_segments
        )

        def score() -> list[np.ndarray]:
            denominators = arm.programs.psum_denominators(batch.member_counts)
            logprobs = []
            for micro_batch in batch.micro_batches:
                accumulator = arm.programs.zero_accumulator()
                _, logprobs_BT = arm.programs.grad_step(arm.state, accumulator, densify(micro_batch), denominators)
                logprobs.append(np.asarray(logprobs_BT))
            return split_by_sample(batch, logprobs)

        scored = arm.device.run(score, kind="trainer")
    return np.concatenate([(ours - s.inference_logprobs)[s.loss_mask] for ours, s in zip(scored, samples, strict=True)])


async def _play_some(config: RunConfig, arm: ArrayArm, renderer: Renderer, envs: Sequence[Environment]) -> list[Rollout]:
    """Play some tasks of every training environment with the embedded engine."""
    from jaxrl.engine.client import EmbeddedEndpoint
    from jaxrl.envs.play import play_rollout
    from jaxrl.envs.session import PolicySession
    from jaxrl.inference.pool import PolicyPool
    from jaxrl.tasks import task_id

    pool = PolicyPool([EmbeddedEndpoint(arm.engine, arm.device, arm.store)], arm.start_step)
    rollouts = []
    async with asyncio.TaskGroup() as tasks:
        for env_config, env in zip(config.orchestrator.train.env, envs, strict=True):
            for index, spec in enumerate(env.tasks()[:PROBED_TASKS]):
                rollout = Rollout(Task(env.name, task_id(spec), spec), f"doctor/{env.name}/{index}", member=0, draw_index=index)
                session = PolicySession(
                    pool,
                    renderer,
                    rollout,
                    config.orchestrator.sampling_of(env_config),
                    run_seed=config.run.seed,
                    seed_scope=f"doctor:{env.name}",
                    window=config.engine.max_model_len,
                )
                tasks.create_task(play_rollout(env, rollout, session, env_config.rollout_deadline_s))
                rollouts.append(rollout)
    await pool.close()
    return rollouts


def _quiet(config: RunConfig, run_dir: Path) -> RunConfig:
    """Return the same training in another folder, without evaluation, terminal and picture."""
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"output_dir": str(run_dir)}),
            "orchestrator": config.orchestrator.model_copy(update={"eval": EvalSectionConfig()}),
            "monitors": MonitorsConfig(terminal=False, plot=False),
        }
    )


def _differences(whole: RunConfig, parts: RunConfig, steps: int) -> list[str]:
    """Name what differs between two runs of `steps` steps: rollouts of a step, or arrays of the trainer's state."""
    import jax
    import numpy as np

    from jaxrl.models import build_mesh, load_pretrained
    from jaxrl.trainer.checkpoint import Checkpointer
    from jaxrl.trainer.step import build_programs

    def rollouts(config: RunConfig, step: int) -> list[dict[str, Any]]:
        lines = (config.run_dir / "rollouts" / f"step_{step:06d}.jsonl").read_text(encoding="utf-8").splitlines()
        return [{key: value for key, value in json.loads(line).items() if key != "duration_s"} for line in lines]

    names = [f"the rollouts of step {step}" for step in range(1, steps + 1) if rollouts(whole, step) != rollouts(parts, step)]
    mesh = build_mesh(whole.trainer.mesh)
    model, _ = load_pretrained(whole.orchestrator.model.name, param_dtype=whole.trainer.param_dtype, mesh=mesh)
    abstract = build_programs(model, whole.trainer, mesh, whole.run.max_steps).abstract_state
    states = [Checkpointer(config.run_dir / "checkpoints", 1, mesh).restore(steps, abstract)[0] for config in (whole, parts)]
    leaves = [jax.tree_util.tree_leaves_with_path(state) for state in states]
    for (path, ours), (_, theirs) in zip(*leaves, strict=True):
        if not np.array_equal(np.asarray(ours), np.asarray(theirs), equal_nan=True):
            names.append(jax.tree_util.keystr(path, simple=True, separator="."))
    return names


if __name__ == "__main__":
    sys.exit(main())
