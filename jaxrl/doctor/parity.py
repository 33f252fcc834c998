"""Checks of numbers: the engine's logprobs are the trainer's, at the run's temperature and at others.

Some tasks are played with the embedded engine, and the trainer scores the tokens that were sampled.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, bad, good, warning
from jaxrl.errors import EngineError
from jaxrl.types import Rollout, TrainingSample

if TYPE_CHECKING:
    from jaxrl.config.env import SamplingConfig

MAX_MISMATCH_KL = {"float32": 1e-6, "bfloat16": 1e-2}
"""Largest step-0 mismatch KL that is rounding and not a fault, by the coarser of the engine's and the trainer's precision."""
MAX_LOGPROB_ERROR = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean difference of logprobs that is rounding, likewise."""
PARITY_TASKS, LOGPROB_TASKS = 16, 4
"""Tasks of each environment that are played."""
LOGPROB_TEMPERATURES = (1.0, 0.5)


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """The same sampled tokens, judged three ways; each [N] float32."""

    engine: np.ndarray
    """What the engine reported."""
    trainer: np.ndarray
    """The trainer's, at the temperature of the sampling."""
    raw: np.ndarray
    """The trainer's, at temperature 1."""


def check_parity(exam: Examination) -> Finding:
    """The trainer gives the engine's tokens the engine's logprobs: the step-0 mismatch KL is rounding."""
    sampled = play_and_score(exam, num_tasks=PARITY_TASKS)
    differences = sampled.trainer - sampled.engine
    kl = float(np.mean(np.expm1(differences) - differences))
    limit = MAX_MISMATCH_KL[precision(exam)]
    largest = float(np.abs(differences).max())
    text = f"mismatch KL {kl:.1e} (limit {limit:.0e}), largest difference {largest:.1e} over {len(differences)} sampled tokens"
    if not kl <= limit:  # a NaN too
        return bad(f"{text}: engine and trainer disagree; compare `inference.dtype` with `trainer.compute_dtype`")
    return good(text)


def check_logprobs(exam: Examination) -> Finding:
    """The engine reports logprobs of the distribution that it sampled from, after the temperature, as the ratio needs them."""
    sampled = {t: play_and_score(exam, num_tasks=LOGPROB_TASKS, temperature=t) for t in LOGPROB_TEMPERATURES}
    return judge_logprobs(sampled, MAX_LOGPROB_ERROR[precision(exam)])


def judge_logprobs(sampled: dict[float, Sampled], limit: float) -> Finding:
    """Say which kind of logprob was reported.

    Args:
      sampled: tokens by the temperature at which they were sampled; one of them is not 1.
      limit: largest mean difference that is rounding.
    """
    texts: list[str] = []
    kinds: set[str] = set()
    is_told_apart = False
    for temperature, tokens in sampled.items():
        errors = {name: float(np.abs(tokens.engine - getattr(tokens, name)).mean()) for name in ("trainer", "raw")}
        texts.append(f"at temperature {temperature:g} {errors['trainer']:.0e} from the trainer's")
        if float(np.abs(tokens.trainer - tokens.raw).mean()) > 2 * limit:
            is_told_apart = True
            texts[-1] += f" ({errors['raw']:.0e} from those before temperature)"
        if not errors["trainer"] <= limit:
            kinds.add("raw" if errors["raw"] <= limit else "unknown")
    text = ", ".join(texts)
    if "unknown" in kinds:
        return bad(f"the engine's logprobs are the trainer's neither after nor before temperature: {text}; see the parity check")
    if "raw" in kinds:
        return bad(f"the engine reports logprobs before temperature, and the importance ratio needs those after it: {text}")
    if not is_told_apart:
        return warning(f"the policy is so sure that logprobs before and after temperature cannot be told apart: {text}")
    return good(f"after temperature, as sampled: {text}")


def precision(exam: Examination) -> str:
    """Return the coarser of the engine's and the trainer's precision."""
    return "bfloat16" if "bfloat16" in (exam.config.engine.dtype, exam.config.trainer.compute_dtype) else "float32"


def play_and_score(exam: Examination, *, num_tasks: int, temperature: float | None = None) -> Sampled:
    """Play some tasks of every training environment with the engine, and score the sampled tokens with the trainer.

    Args:
      exam: the run.
      num_tasks: of each environment.
      temperature: in place of each environment's own.
    """
    from jaxrl.batching import rollout_to_samples

    rollouts = asyncio.run(_play(exam, num_tasks, temperature))
    failures = [rollout.failure for rollout in rollouts if rollout.failure is not None]
    if len(failures) == len(rollouts):
        raise EngineError(f"every probed rollout failed, the last one with {failures[-1].type}: {failures[-1].message}")
    samples: list[TrainingSample] = []
    for rollout in rollouts:
        rollout.samples = rollout_to_samples(rollout)
        rollout.assign_advantages(0.0)
        samples += [sample for sample in rollout.samples if len(sample) <= exam.config.trainer.row_length]
    if not samples:
        raise EngineError("no probed rollout fits a row; see the budgets check")
    scored = _trainer_logprobs(exam, samples)
    for sample in samples:
        sample.temperatures = np.ones_like(sample.temperatures)
    raw = _trainer_logprobs(exam, samples)
    masks = [sample.loss_mask for sample in samples]
    engine = [sample.inference_logprobs for sample in samples]
    parts = ([values[mask] for values, mask in zip(stream, masks, strict=True)] for stream in (engine, scored, raw))
    return Sampled(*(np.concatenate(part) for part in parts))


def _trainer_logprobs(exam: Examination, samples: list[TrainingSample]) -> list[np.ndarray]:
    """Return the trainer's logprobs of every token of each sample, at the sample's own temperatures."""
    from jaxrl.batching import pack
    from jaxrl.trainer.loop import split_by_sample
    from jaxrl.trainer.step import densify

    trainer, arm = exam.config.trainer, exam.arm
    shards, max_segments = trainer.mesh.row_shards, trainer.max_segments
    batch = pack(samples, row_length=trainer.row_length, rows=trainer.rows, shards=shards, max_segments=max_segments)

    def score() -> list[np.ndarray]:
        denominators = arm.programs.psum_denominators(batch.member_counts)
        logprobs = []
        for micro_batch in batch.micro_batches:
            accumulator = arm.programs.zero_accumulator()
            _, logprobs_BT = arm.programs.grad_step(arm.state, accumulator, densify(micro_batch), denominators)
            logprobs.append(np.asarray(logprobs_BT))
        return split_by_sample(batch, logprobs)

    return arm.device.run(score, kind="trainer")


async def _play(exam: Examination, num_tasks: int, temperature: float | None) -> list[Rollout]:
    from jaxrl.engine.client import EmbeddedEndpoint
    from jaxrl.envs.play import play_rollout
    from jaxrl.envs.session import PolicySession
    from jaxrl.inference.pool import PolicyPool
    from jaxrl.tasks import task_of

    config, arm = exam.config, exam.arm
    pool = PolicyPool([EmbeddedEndpoint(arm.engine, arm.device, arm.store)], arm.start_step)
    rollouts = []
    async with asyncio.TaskGroup() as tasks:
        for env_config, env in zip(config.orchestrator.train.env, exam.worlds[0], strict=True):
            sampling: SamplingConfig = config.orchestrator.sampling_of(env_config)
            if temperature is not None:
                sampling = sampling.model_copy(update={"temperature": temperature})
            for index, spec in enumerate(env.tasks()[:num_tasks]):
                rollout = Rollout(task_of(env.name, spec), f"doctor/{env.name}/{index}", member=0, draw_index=index)
                session = PolicySession(
                    pool,
                    exam.renderer,
                    rollout,
                    sampling,
                    run_seed=config.run.seed,
                    seed_scope=f"doctor:{env.name}",
                    window=config.engine.max_model_len,
                    history=env_config.history,
                )
                tasks.create_task(play_rollout(env, rollout, session, env_config.rollout_deadline_s))
                rollouts.append(rollout)
    await pool.close()
    return rollouts
