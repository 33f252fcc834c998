"""The event loop only waits and decides: rendering, tokenising, packing and writing are done by worker threads."""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from jaxrl.inference.rendering import Renderer
from tests.orchestrator.wiring import TOKENIZER, make_env, make_run

SEEN: defaultdict[str, set[threading.Thread]] = defaultdict(set)
"""By kind of work, the threads that did it."""


def watched(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that notes its thread."""

    def watching(*args: Any, **kwargs: Any) -> Any:
        SEEN[kind].add(threading.current_thread())
        return call(*args, **kwargs)

    return watching


class WatchedRenderer(Renderer):
    """Notes the thread of every call that renders, encodes or decodes."""

    open_turn = watched("render and encode", Renderer.open_turn)
    decode = watched("decode", Renderer.decode)


async def test_no_heavy_work_runs_on_the_event_loops_thread() -> None:
    renderer = WatchedRenderer.from_pretrained(TOKENIZER)
    SEEN.clear()

    def envs(pool):
        env = make_env(pool)
        source = dataclasses.replace(env.sampler.source, renderer=renderer)
        return [dataclasses.replace(env, sampler=dataclasses.replace(env.sampler, source=source))]

    run = make_run(max_steps=2, envs=envs)
    run.monitors.log_step = watched("write metrics", run.monitors.log_step)
    run.monitors.log_rollouts = watched("write rollouts", run.monitors.log_rollouts)
    run.orchestrator._maker._pack = watched("pack", run.orchestrator._maker._pack)
    await run.play()
    assert set(SEEN) == {"render and encode", "decode", "pack", "write metrics", "write rollouts"}
    assert [kind for kind, threads in SEEN.items() if threading.current_thread() in threads] == []
