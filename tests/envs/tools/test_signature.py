"""What a function says of itself becomes the schema of a tool."""

import pytest

from jaxrl.envs.tools.signature import described

FUNCTIONS = "tests.envs.tools.functions"


def test_a_docstring_and_a_signature_make_the_schema() -> None:
    assert described(f"{FUNCTIONS}:weather") == {
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["C", "F"]},
                "tags": {"type": ["array", "null"]},
            },
            "required": ["city"],
        },
    }


def test_what_json_cannot_say_fits_any_value_and_named_extras_are_allowed() -> None:
    assert described(f"{FUNCTIONS}:loose") == {
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {
                "when": {},
                "numbers": {"type": "array", "items": {"type": "number"}},
                "either": {"type": ["integer", "string"]},
            },
            "required": ["when"],
            "additionalProperties": True,
        },
    }


@pytest.mark.parametrize(("name", "message"), [("by_position", "'text' can be given by position only"), ("os", "'os' is no function")])
def test_what_cannot_be_called_with_names_is_refused(name: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        described(f"{FUNCTIONS}:{name}")
