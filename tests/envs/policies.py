"""A policy that says given texts, for tests of environments: a real pool over a scripted endpoint."""

from pathlib import Path

import numpy as np

from jaxrl.config.env import SamplingConfig
from jaxrl.envs.session import PolicySession
from jaxrl.inference.endpoint import GenerateRequest
from jaxrl.inference.pool import PolicyPool
from jaxrl.inference.rendering import Renderer
from jaxrl.types import Rollout, Task
from tests.fakes import ScriptedEndpoint

RENDERER = Renderer.from_pretrained(Path(__file__).parents[1] / "golden" / "tokenizer")
IM_END = 2


def ids_of(text: str) -> list[int]:
    """Return the ids of a text."""
    return RENDERER._backend.encode(text, add_special_tokens=False).ids


def saying(*texts: str) -> ScriptedEndpoint:
    """Return an endpoint that answers turn `t` of every rollout with `texts[t]` and the end of the turn."""

    def reply(request: GenerateRequest, version: int) -> list[int]:
        return [*ids_of(texts[int(request.request_id.rpartition("/")[2])]), IM_END]

    return ScriptedEndpoint(reply)


def make_rollout(spec: dict | None = None, *, member: int = 0, draw_index: int = 0) -> Rollout:
    """Return a rollout of one task of environment `toy` that has not begun."""
    return Rollout(task=Task("toy", "t", spec or {"id": "t"}), group_id=f"g{draw_index}", member=member, draw_index=draw_index)


def open_session(
    endpoint: ScriptedEndpoint,
    rollout: Rollout | None = None,
    *,
    sampling: SamplingConfig | None = None,
    window: int = 512,
    renderer: Renderer = RENDERER,
    seed_scope: str = "toy",
) -> PolicySession:
    """Return a session of `rollout` with the policy behind `endpoint`."""
    return PolicySession(
        PolicyPool([endpoint], endpoint.version),
        renderer,
        rollout or make_rollout(),
        sampling or SamplingConfig(),
        run_seed=0,
        seed_scope=seed_scope,
        window=window,
    )


def path_ids(rollout: Rollout, leaf: int) -> np.ndarray:
    """Return the ids along the path from the root to node `leaf`."""
    parts = []
    index: int | None = leaf
    while index is not None:
        parts.append(rollout.nodes[index].token_ids)
        index = rollout.nodes[index].parent
    return np.concatenate(parts[::-1])
