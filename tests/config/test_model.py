"""How a server is named: addresses that can be used, and keys that never come near a file or a message. How a policy's words are read."""

from __future__ import annotations

from typing import get_args

import pytest
from pydantic import ValidationError

from jaxrl.config.model import ClientConfig, FrozenModelConfig, PolicyModelConfig, ToolFormat
from jaxrl.inference.rendering.tool_calls import FORMATS


def test_every_format_of_calls_can_be_named_and_no_other() -> None:
    assert set(get_args(ToolFormat)) == {"auto", *FORMATS}
    assert (PolicyModelConfig(name="m").tool_format, PolicyModelConfig(name="m").renderer) == ("auto", "auto")
    with pytest.raises(ValidationError, match="tool_format"):
        PolicyModelConfig.model_validate({"name": "m", "tool_format": "json"})
    with pytest.raises(ValidationError, match="renderer"):
        PolicyModelConfig(name="m", renderer="")


def test_a_slash_at_the_end_of_an_address_and_space_around_it_are_dropped() -> None:
    config = FrozenModelConfig(name="m", base_url=[" https://api.example.org/x/v1/ ", "http://127.0.0.1:8000/v1"])
    assert config.base_url == ["https://api.example.org/x/v1", "http://127.0.0.1:8000/v1"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("localhost:8000/v1", "expected an address such as http://127.0.0.1:8000/v1"),
        ("ftp://host/v1", "expected an address such as"),
        ("http:///v1", "expected an address such as"),
        ("http://host:0/v1", "expected an address such as"),
        ("http://host:99999/v1", "Port out of range"),
        ("http://\u200bhost/v1", r"made of printable ASCII; this one holds '\\u200b'"),
        ("http://my host/v1", "made of printable ASCII; this one holds ' '"),
        ("http://host:8000", "ends in /v1, got 'http://host:8000'; did you mean 'http://host:8000/v1'"),
        ("http://me:sesame@host/v1", "must not carry a user or password"),
        ("http://host/v1?key=sesame", "no query and no fragment"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_without_repeating_a_secret(url: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said) as caught:
        ClientConfig(base_url=[url])
    assert "sesame" not in str(caught.value)


def test_the_same_server_twice_is_a_mistake() -> None:
    with pytest.raises(ValidationError, match="stands there twice"):
        ClientConfig(base_url=["http://host/v1", "http://host/v1/"])


def test_a_key_in_place_of_its_variables_name_is_refused_without_showing_it() -> None:
    with pytest.raises(ValidationError, match="expected the name of an environment variable") as caught:
        ClientConfig(api_key_var="sesame-0123456789")
    assert "sesame" not in str(caught.value)


def test_a_frozen_model_needs_a_name_and_a_server() -> None:
    with pytest.raises(ValidationError, match="base_url"):
        FrozenModelConfig(name="m", base_url=[])
    with pytest.raises(ValidationError, match="name"):
        FrozenModelConfig(name="", base_url=["http://host/v1"])
