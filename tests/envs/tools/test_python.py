"""Tools that are Python functions: described by what they are, run in processes, and killed when they misbehave."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from jaxrl.config.env import PythonToolConfig
from jaxrl.envs.tools.python import python_tool
from jaxrl.envs.tools.tool import Tool, ToolError, ToolFailedError
from jaxrl.errors import ConfigError

FUNCTIONS = "tests.envs.tools.functions"


def section(function: str, **options) -> PythonToolConfig:  # type: ignore[no-untyped-def]
    return PythonToolConfig.model_validate({"name": function, "import_path": f"{FUNCTIONS}:{function}"} | options)


@contextlib.contextmanager
def opened(function: str, **options) -> Iterator[Tool]:  # type: ignore[no-untyped-def]
    tool = python_tool(section(function, **options), "env 'toy'")
    with contextlib.closing(tool):
        yield tool


async def test_a_text_comes_back_as_it_is_and_anything_else_as_json() -> None:
    with opened("weather") as weather, opened("as_json") as as_json, opened("later") as later:
        assert await weather.call({"city": "Ghent", "days": 2}) == "Ghent: 40 C"
        assert await as_json.call({"value": 1.5}) == '{"twice": 3.0}'
        assert await later.call({"text": "abc"}) == "cba"


async def test_settings_come_before_what_the_function_says() -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    with opened("weather", description="Weather.", parameters=parameters) as tool:
        assert tool.schema == {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": parameters}}


async def test_what_the_function_raises_is_told_in_few_words() -> None:
    with opened("act") as tool:
        with pytest.raises(ToolError) as error:
            await tool.call({"what": "raise"})
        assert str(error.value) == "ValueError: no such place"
        assert await tool.call({"what": "surrogate"}) == r"a\udc80b"


@pytest.mark.parametrize(
    ("what", "message", "told", "is_late"),
    [
        (
            "hang",
            r"env 'toy': tool 'act' \('tests.*:act'\) was not done after 1 s, and its worker process was killed",
            "not done after 1 s",
            True,
        ),
        ("die", "ended its worker process, with exit code 3", "the tool failed", False),
        ("much", "returned 10000000 characters; at most 262144 are read", "the tool failed", False),
        ("object", r"returned <object obj.* \(object\); expected a text, or a value that can be written as JSON", "the tool failed", False),
    ],
)
async def test_a_tool_that_misbehaves_has_failed_and_goes_on_answering_others(what: str, message: str, told: str, is_late: bool) -> None:
    with opened("act", deadline_s=1.0) as tool:
        lost, *fine = await asyncio.gather(*(tool.call({"what": text}) for text in (what, "a", "b", "c")), return_exceptions=True)
        assert fine == ["a", "b", "c"]
        assert isinstance(lost, ToolFailedError) and (lost.told, lost.is_late) == (told, is_late)
        with pytest.raises(ToolFailedError, match=message):
            raise lost


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"import_path": f"{FUNCTIONS}:nothing"},
            r"^env 'toy': tool 'act' \('.*:nothing'\): the function cannot be used: it raised AttributeError",
        ),
        ({"import_path": "no_such_module:act"}, "it raised ModuleNotFoundError: No module named 'no_such_module'"),
        ({"import_path": f"{FUNCTIONS}:by_position"}, "'text' can be given by position only"),
        ({"import_path": f"{FUNCTIONS}:os"}, "'os' is no function, it is a module"),
        ({"parameters": {"type": "string"}}, "`parameters` is no JSON schema of arguments: `type` must be 'object'"),
    ],
)
def test_a_function_that_cannot_be_used_is_found_at_once(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        python_tool(section("act", **options), "env 'toy'")
