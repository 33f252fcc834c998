"""The check of external servers: every one that the configuration names is there, and can do what a run will ask of it.

A frozen model is connected as a run connects it, by the algorithm that asks it or by the source that plays with it, so
that what would end a run's start is found here; teachers are also asked to score one sequence several times.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrl.config.env import EnvBase
from jaxrl.config.model import ClientConfig, FrozenModelConfig
from jaxrl.config.rules import key_of
from jaxrl.config.run import RunConfig
from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, good, verdict
from jaxrl.doctor.probes import algorithm_of
from jaxrl.errors import JaxrlError
from jaxrl.inference.endpoint import EndpointHealth
from jaxrl.inference.frozen import FrozenPool, api_key
from jaxrl.inference.http import HttpEndpoint
from jaxrl.orchestrator.ports import ConnectedPool, ScoringPool
from jaxrl.orchestrator.sources import FrozenSource

POLICY_CLIENT, SOURCE = "orchestrator.model.client", "sampling.source"
QUESTION, REPLY = {"role": "user", "content": "What is 2 + 3?"}, "It is five."
MAX_SCORE_DIFFERENCE = 0.05
"""In nats: a score may change by so much with what else a server computes beside it, in bfloat16."""


@dataclass
class _Notes:
    """What was found so far."""

    texts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def check_endpoint(exam: Examination) -> Finding:
    """Every named server answers and lists its model; teachers score the policy's ids, sources of rollouts have room for them."""
    named = named_models(exam.config)
    if not named:
        return good("no external server is named")
    notes = _Notes()
    asyncio.run(_look(exam, named, notes))
    return verdict("; ".join(notes.texts), notes.problems, notes.remarks)


def named_models(config: RunConfig) -> dict[str, tuple[str, ClientConfig]]:
    """Return the model and the servers under each key of the configuration that names any and is used by a run."""
    policy = config.orchestrator.model
    found: dict[str, tuple[str, ClientConfig]] = {POLICY_CLIENT: (policy.name, policy.client)} if policy.client.base_url else {}
    for index, env_config in enumerate(config.orchestrator.train.env):
        found |= {key: (model.name, model) for key, model in _frozen_models(config, index, env_config).items()}
    return found


def _frozen_models(config: RunConfig, index: int, env_config: EnvBase) -> dict[str, FrozenModelConfig]:
    """Return the frozen models of the algorithm that an environment ends up with, by key."""
    table = key_of(index, env_config, "algo")
    return {f"{table}.{key}": model for key, model in config.orchestrator.algo_of(env_config).frozen_models.items()}


async def _look(exam: Examination, named: dict[str, tuple[str, ClientConfig]], notes: _Notes) -> None:
    """Ask all servers how they are, and then those that are well for what a run will ask."""
    all_healths = await asyncio.gather(*(_healths(key, model, client) for key, (model, client) in named.items()))
    well: set[str] = set()
    for (key, (model, _)), healths in zip(named.items(), all_healths, strict=True):
        windows = [int(health.detail["window"]) for health in healths if "window" in health.detail]
        num_ready = sum(health.is_ready for health in healths)
        window = f", window {min(windows)}" if windows else ""
        notes.texts.append(f"`{key}`: {num_ready} of {len(healths)} are well and serve {model!r}{window}")
        problems = [health.problem for health in healths if not health.is_ready]
        if problems:
            problems[-1] += "; start the server, or correct `base_url`, the model's name or the key"
        else:
            well.add(key)
        notes.problems += problems
    done: set[tuple[str, str]] = set()
    for index, env_config in enumerate(exam.config.orchestrator.train.env):
        models = _frozen_models(exam.config, index, env_config)
        # An inherited algorithm is asked about once for each token sampling that goes with it.
        keys = key_of(index, env_config, "algo"), key_of(index, env_config, "sampling")
        if not models or keys in done or not well.issuperset(models):
            continue
        done.add(keys)
        source_key = f"{keys[0]}.{SOURCE}"
        with _warnings_kept(notes.remarks):
            if source_key in models:
                await _connect_source(exam, env_config, source_key, models[source_key], notes)
            if teachers := [key for key in models if key != source_key]:
                await _connect_teachers(exam, env_config, teachers, notes)


async def _healths(key: str, model: str, client: ClientConfig) -> list[EndpointHealth]:
    secret = api_key(client.api_key_var, os.environ, f"{key}.api_key_var")
    endpoints = [HttpEndpoint(url, model, api_key=secret, api_key_var=client.api_key_var) for url in client.base_url]
    try:
        return list(await asyncio.gather(*(endpoint.health() for endpoint in endpoints)))
    finally:
        for endpoint in endpoints:
            await endpoint.close()


async def _connect_source(exam: Examination, env_config: EnvBase, key: str, model: FrozenModelConfig, notes: _Notes) -> None:
    """Connect a source of rollouts; say whether its tokens are the policy's, and whether it is served with room for them."""
    config = exam.config
    longest = config.trainable_window
    sampling = config.orchestrator.sampling_of(env_config)
    source = FrozenSource(model, exam.renderer, sampling, run_seed=config.run.seed, window=longest)
    async with _closing(source.connected_pools):
        try:
            await source.setup()
        except JaxrlError as error:
            notes.problems.append(f"`{key}`: {error}")
            return
        if source.why_in_words is not None:
            notes.remarks.append(
                f"`{key}` is asked in words, and its replies will be encoded with the policy's tokenizer: {source.why_in_words}"
            )
            return
        notes.texts.append(f"`{key}` has the policy's vocabulary")
        windows = [pool.window for pool in source.connected_pools if isinstance(pool, FrozenPool) and pool.window is not None]
        if windows and min(windows) < longest:
            notes.remarks.append(
                f"`{key}` is served with a window of {min(windows)}, and rollouts of {longest} tokens could be trained on: what is longer "
                "is cut; serve it with a longer one, or lower `inference.max_model_len`"
            )


async def _connect_teachers(exam: Examination, env_config: EnvBase, keys: list[str], notes: _Notes) -> None:
    """Connect what an algorithm asks for scores, which compares vocabularies and windows; then have each score one sequence."""
    shown = ", ".join(f"`{key}`" for key in keys)
    algorithm = algorithm_of(exam, env_config)
    pools = algorithm.connected_pools
    async with _closing(pools):
        try:
            await algorithm.setup()
            for pool in pools:
                await _score(pool, exam, shown, notes)
        except JaxrlError as error:
            notes.problems.append(f"{shown}: {error}")


async def _score(pool: ScoringPool, exam: Examination, shown: str, notes: _Notes) -> None:
    """Have a prompt and a reply scored, its first half alone, and all of it again: every number must stay."""
    renderer = exam.renderer
    prompt_ids = renderer.open_turn(None, [QUESTION]).prompt_ids
    token_ids = np.append(np.concatenate([prompt_ids, renderer.encode(REPLY, add_special_tokens=False)]), renderer.turn_end_id)
    token_ids = token_ids[: exam.config.engine.max_model_len].astype(np.int32)
    half = (len(token_ids) + 1) // 2
    first = await pool.score(token_ids)
    short, again = await pool.score(token_ids[:half]), await pool.score(token_ids)
    apart = max(np.abs(first[:half] - short).max(), np.abs(first - again).max())
    notes.texts.append(f"{shown} scores {len(token_ids)} given ids, alike to {apart:.2g} when asked again")
    if apart > MAX_SCORE_DIFFERENCE:
        notes.remarks.append(
            f"{shown}: the logprob of a token changed by {apart:.3g} between three requests that show the same tokens before it; look at "
            "the server's precision and its prefix cache"
        )


@contextlib.asynccontextmanager
async def _closing(pools: Sequence[ConnectedPool]) -> AsyncIterator[None]:
    """Close in the end every pool that the list holds by then."""
    try:
        yield
    finally:
        for pool in pools:
            await pool.close()


class _Keeper(logging.Handler):
    """Appends messages to a list."""

    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self._kept.append(record.getMessage())


@contextlib.contextmanager
def _warnings_kept(kept: list[str]) -> Iterator[None]:
    """Append what is logged as a warning meanwhile to a list: what a run would warn of belongs to the finding."""
    keeper, logger = _Keeper(kept), logging.getLogger("jaxrl")
    logger.addHandler(keeper)
    try:
        yield
    finally:
        logger.removeHandler(keeper)
