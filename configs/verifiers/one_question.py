"""A harness of the `verifiers` package that runs in its process: it asks a task's prompt once.

verifiers' own harnesses start a program for each rollout; this one starts none, so a tiny model is not waited for. Its folder must be
importable, as that of `chain_sums`.
"""

from __future__ import annotations

from typing import Any

import httpx
import verifiers.v1 as vf

__all__ = ["OneQuestion"]

DEADLINE_S = 300.0


class OneQuestionConfig(vf.HarnessConfig):
    """It has no settings of its own."""


class OneQuestion(vf.Harness[OneQuestionConfig]):
    """Ask once, and be done."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Send the prompt to the policy; verifiers records the reply."""
        system, prompt = self.resolve_text_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        # The endpoint is on this machine: no certificates are loaded.
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=DEADLINE_S) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        return vf.ProgramResult(0, "", "") if answer.is_success else vf.ProgramResult(1, "", answer.text)
