"""Why a request to the server gets no reply: which refusal an exception of ours is for a client."""

from __future__ import annotations

from jaxrl.errors import DeadlineError, EngineError, EnvError, PromptTooLongError
from jaxrl.inference.chat.refusals import Refusal


def refusal_of(error: Exception) -> Refusal:
    """Return the refusal that an exception of the engine or the renderer is for the client; our own faults are a 500."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, PromptTooLongError):
        return Refusal(400, str(error), code="context_length_exceeded")
    if isinstance(error, EnvError):
        return Refusal(400, str(error), param="messages")
    if isinstance(error, RecursionError):
        return Refusal(400, "the body is nested too deeply", code="invalid_json")
    if isinstance(error, DeadlineError):
        return Refusal(504, str(error), code="deadline_exceeded")
    if isinstance(error, EngineError):
        return Refusal(500, str(error), code="engine_error")
    return Refusal(500, f"the server failed on this request: {type(error).__name__}; its log says more")


def stopped() -> Refusal:
    """Return the refusal of a request that the server no longer waits for."""
    return Refusal(503, "the server stopped before the reply was finished (`server.shutdown_deadline_s`)", code="stopped")
