"""`jaxrl.inference.chat.refusals`: what a client is told that gets no reply."""

import json

import pytest

from jaxrl.inference.chat.refusals import Refusal


@pytest.mark.parametrize(("status", "kind", "code"), [
    (400, "invalid_request_error", "bad_request"),
    (401, "authentication_error", "unauthorized"),
    (404, "not_found_error", "not_found"),
    (409, "invalid_request_error", "conflict"),
    (429, "rate_limit_error", "too_many_requests"),
    (503, "server_error", "service_unavailable"),
])  # fmt: skip
def test_a_refusal_has_the_shape_of_openai_and_the_code_of_its_status(status: int, kind: str, code: str) -> None:
    error = json.loads(Refusal(status, "no", param="messages").body())["error"]
    assert error == {"message": "no", "type": kind, "param": "messages", "code": code}


def test_a_code_of_its_own_takes_the_place_of_the_statuss() -> None:
    assert json.loads(Refusal(400, "too long", code="context_length_exceeded").body())["error"]["code"] == "context_length_exceeded"
