"""Arguments against schemas: what does not fit is said in words that the policy can use."""

import pytest

from jaxrl.envs.tools.arguments import misfit, schema_error

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": ["array", "null"], "items": {"type": "string"}},
        "place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "exact": {"type": "boolean"},
        "any": {},
    },
    "required": ["city"],
}


@pytest.mark.parametrize(
    "more",
    [{}, {"days": 2}, {"share": 2}, {"share": 0.5}, {"unit": "F"}, {"tags": None}, {"tags": ["a"]}, {"place": {"x": 1}}, {"any": [None]}],
)
def test_what_fits_is_not_remarked_on(more: dict) -> None:
    assert misfit({"city": "Ghent", **more}, SCHEMA) == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "`city` is missing"),
        ({"city": 3}, "`city` must be of type string, got 3"),
        ({"city": None}, "`city` must be of type string, got None"),
        ({"city": "a", "days": True}, "`days` must be of type integer, got True"),
        ({"city": "a", "days": 2.5}, "`days` must be of type integer, got 2.5"),
        ({"city": "a", "share": False}, "`share` must be of type number, got False"),
        ({"city": "a", "exact": 1}, "`exact` must be of type boolean, got 1"),
        ({"city": "a", "unit": "K"}, "`unit` must be one of ['C', 'F'], got 'K'"),
        ({"city": "a", "tags": "b"}, "`tags` must be of type array or null, got 'b'"),
        ({"city": "a", "tags": ["b", 4]}, "item 1 of `tags` must be of type string, got 4"),
        ({"city": "a", "place": {}}, "`x` is missing"),
        ({"city": "a", "place": {"x": 1, "y": 2}}, "there is no `y`; there are `x`"),
        (
            {"city": "a", "town": "b"},
            "there is no `town`; there are `city`, `days`, `share`, `unit`, `tags`, `place`, `exact`, `any`",
        ),
    ],
)
def test_what_does_not_fit_is_named(arguments: dict, words: str) -> None:
    assert misfit(arguments, SCHEMA) == words


def test_a_long_value_is_shown_in_few_characters() -> None:
    assert len(misfit({"city": ["x" * 9999]}, SCHEMA)) < 100


def test_further_names_are_allowed_only_where_the_schema_says_so() -> None:
    assert misfit({"a": 1}, {"type": "object", "properties": {}}) == "there is no `a`; there are none"
    assert misfit({"a": 1}, {"type": "object", "properties": {}, "additionalProperties": True}) == ""
    assert misfit({"a": 1}, {"type": "object"}) == ""


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {}}, "`type` must be 'object', got None"),
        ({"type": "object", "properties": {"a": "string"}}, "`properties` must map names to schemas, got {'a': 'string'}"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "`required` must list names of `properties`, got ['a']"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "there is no JSON type 'text'; there are ['array', 'boolean'"),
        ({"type": "object", "properties": {"a": {"items": {"type": "text"}}}}, "there is no JSON type 'text'"),
        ({"type": "object", "properties": {"a": {"type": None}}}, "`type` of `a` must be the name of a JSON type, or a list of them, got"),
        ({"type": "object", "properties": {"a": {"type": [["text"]]}}}, "`type` of `a` must be the name of a JSON type"),
        ({"type": "object", "properties": {"a": {"enum": "CF"}}}, "`enum` of `a` must be a list, got 'CF'"),
        ({"type": "object", "properties": {"a": {"properties": ["x"]}}}, "`properties` of `a` must map names to schemas, got ['x']"),
        ({"type": "object", "properties": {"a": {"required": "x"}}}, "`required` of `a` must list names of `properties`, got 'x'"),
        ({"type": "object", "properties": {}, "required": [["a"]]}, "`required` must list names of `properties`, got [['a']]"),
    ],
)
def test_a_schema_that_is_none_is_refused(schema: dict, words: str) -> None:
    assert schema_error(schema).startswith(words)
    assert schema_error(SCHEMA) == ""
