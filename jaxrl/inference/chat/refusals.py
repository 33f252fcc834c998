"""Why a request gets no reply: one exception, in the shape and with the statuses of OpenAI's API.

In: a status and a sentence. Out: the JSON body, in which a client finds `error.message`, `error.type`, `error.param` and `error.code`.
Every server of jaxrl refuses with it; it knows no HTTP library.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec

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
