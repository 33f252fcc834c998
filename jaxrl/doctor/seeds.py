"""The check of sampling seeds: no two turns share a stream, and a seed's tokens do not depend on what else is being decoded."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import numpy as np

from jaxrl.config.env import env_name
from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, bad, good, warning
from jaxrl.envs.session import eval_seed_scope
from jaxrl.inference.endpoint import Endpoint, GenerateRequest, Generation, TokenSampling, sampling_seed

NUM_DRAWS, NUM_TURNS = 64, 4
"""Draws and turns whose seeds are compared, for every environment and member."""
NUM_MEMBERS = 8
"""Members of the group that is played."""
MAX_TOKENS = 32
QUESTION = {"role": "user", "content": "Tell me a number."}


def check_seeds(exam: Examination) -> Finding:
    """Seeds differ, members of a group reply differently, and the same request gets the same reply in other company."""
    from jaxrl.engine.client import EmbeddedEndpoint

    config = exam.config
    scopes = [env_name(env) for env in config.orchestrator.train.env]
    scopes += [eval_seed_scope(env_name(env)) for env in config.orchestrator.eval.env]
    turns = list(itertools.product(scopes, range(NUM_DRAWS), range(config.orchestrator.group_size), range(NUM_TURNS)))
    num_seeds = len({sampling_seed(config.run.seed, *turn) for turn in turns})
    text = f"{num_seeds} different seeds for {len(turns)} turns"
    if num_seeds < len(turns):
        return bad(f"{text}: two turns share a stream of noise; rename one of the environments")
    prompt_ids = exam.renderer.open_turn(None, [QUESTION]).prompt_ids
    room = config.engine.max_model_len - len(prompt_ids)
    if room < 1:
        return warning(f"{text}; a prompt of {len(prompt_ids)} tokens does not fit the window, so none was played")
    arm = exam.arm
    endpoint = EmbeddedEndpoint(arm.engine, arm.device, arm.store)
    sampling = TokenSampling(max_tokens=min(MAX_TOKENS, room), stop_ids=exam.renderer.stop_ids)
    seeds = [sampling_seed(config.run.seed, "doctor:seeds", 0, member, 0) for member in range(NUM_MEMBERS)]
    requests = [
        GenerateRequest(f"seeds/{member}", prompt_ids, dataclasses.replace(sampling, seed=seed)) for member, seed in enumerate(seeds)
    ]
    num_ties = arm.engine.stats()["near_ties"]
    alone, together = asyncio.run(play_twice(endpoint, requests))
    finding = judge_seeds(alone, together, int(arm.engine.stats()["near_ties"] - num_ties))
    return dataclasses.replace(finding, text=f"{text}; {finding.text}")


async def play_twice(endpoint: Endpoint, requests: list[GenerateRequest]) -> tuple[Generation, list[Generation]]:
    """Send the first request alone and then all of them at once, the first one last.

    Returns:
      The reply that had the endpoint for itself, and those of all requests, in their order.
    """
    alone = await endpoint.generate(dataclasses.replace(requests[0], request_id="seeds/alone"))
    together = await asyncio.gather(*(endpoint.generate(request) for request in reversed(requests)))
    return alone, together[::-1]


def judge_seeds(alone: Generation, together: list[Generation], num_near_ties: int) -> Finding:
    """Say whether seeds do what they are for.

    Args:
      alone: the first request's reply when nothing else was decoded.
      together: the replies of all members at once, the first request's first.
      num_near_ties: sampled tokens for which a rounding could have decided otherwise.
    """
    replies = [tuple(generation.token_ids.tolist()) for generation in together]
    num_replies = len(set(replies))
    text = f"{num_replies} different replies of {len(replies)} members"
    if not np.array_equal(alone.token_ids, together[0].token_ids):
        pairs = zip(alone.token_ids, together[0].token_ids, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        changed = f"{text}; a reply changed from token {same} on when others were decoded beside it"
        if num_near_ties:
            return warning(f"{changed}: {num_near_ties} tokens were near ties, which a rounding decides")
        return bad(f"{changed}: the engine's numbers depend on its batch, so a run cannot be repeated")
    text += ", the same reply alone and among others"
    if num_replies == 1 and len(replies) > 1:
        return warning(f"{text}: either the policy is certain of it, or members share a stream; a group of equal replies teaches nothing")
    return good(text)
