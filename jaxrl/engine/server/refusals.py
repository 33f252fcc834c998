"""Why a request gets no reply: one exception, in the shape and with the statuses of OpenAI's API.

In: a status and a sentence, or an exception of ours. Out: the JSON body. Every refusal of the server goes through here, so
that a client finds `error.message`, `error.type`, `error.param` and `error.code` in each.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from jaxrl.errors import DeadlineError, EngineError, EnvError, PromptTooLongError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        """Say why.

        Args:
          status: the HTTP status, 400 or above.
          message: what was expected, what came, what to do.
          param: the field of the body that is wrong.
          code: a stable word for programs.
          headers: further headers of the reply.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or HTTPStatus(status).name.lower()
        self.headers = headers or {}

    def body(self) -> bytes:
        """Return the JSON body."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return msgspec.json.encode({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})


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
