"""The answer in a reply, and the scorer that compares it with the right one, character by character."""

from __future__ import annotations

from jaxrl.envs.base import TaskSpec


def extract_answer(text: str) -> str:
    """Return what follows the last `</think>`, or the whole text if there is none, without surrounding space.

    Example:
      >>> extract_answer("<think>8+3=11</think> 11")
      '11'
    """
    return text.rpartition("</think>")[2].strip()


def exact_match(spec: TaskSpec, text: str) -> float:
    """Return 1 if the extracted answer is exactly the spec's `answer`, but for surrounding space, else 0."""
    return float(extract_answer(text) == spec["answer"].strip())
