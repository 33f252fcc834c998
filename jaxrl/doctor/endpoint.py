"""The check of external servers: every one that the configuration names is there, well, and serves the model."""

from __future__ import annotations

import asyncio
import os

from jaxrl.config.model import ClientConfig
from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, bad, good
from jaxrl.inference.endpoint import EndpointHealth
from jaxrl.inference.frozen import api_key
from jaxrl.inference.http import HttpEndpoint


def check_endpoint(exam: Examination) -> Finding:
    """Every named server answers and lists the model; that is all that is asked of it."""
    named = {"orchestrator.model.client": (exam.model_name, exam.config.orchestrator.model.client)}
    asked = {key: (model, client) for key, (model, client) in named.items() if client.base_url}
    if not asked:
        return good("no external server is named")
    texts: list[str] = []
    problems: list[str] = []
    for key, (model, client) in asked.items():
        healths = asyncio.run(_healths(model, client))
        windows = [int(health.detail["window"]) for health in healths if "window" in health.detail]
        num_ready = sum(health.is_ready for health in healths)
        window = f", window {min(windows)}" if windows else ""
        texts.append(f"`{key}`: {num_ready} of {len(healths)} are well and serve {model!r}{window}")
        problems += [health.problem for health in healths if not health.is_ready]
    text = "; ".join([*texts, *problems])
    return bad(f"{text}; start the server, or correct `base_url`, the model's name or the key") if problems else good(text)


async def _healths(model: str, client: ClientConfig) -> list[EndpointHealth]:
    key = api_key(client.api_key_var, os.environ)
    endpoints = [HttpEndpoint(url, model, api_key=key, api_key_var=client.api_key_var) for url in client.base_url]
    try:
        return list(await asyncio.gather(*(endpoint.health() for endpoint in endpoints)))
    finally:
        for endpoint in endpoints:
            await endpoint.close()
