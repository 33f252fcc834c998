"""The format of a model's calls, found by reading back what its own chat template writes; and how the policy is told of tools."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from jinja2 import Environment
from tokenizers import Tokenizer

from jaxrl.inference.rendering import Renderer
from jaxrl.inference.rendering.tool_calls import FORMATS, CallParser, call_text, find_parser, tool_prompt

GOLDEN = Path(__file__).parents[2] / "golden"
TOKENIZER = Tokenizer.from_file(str(GOLDEN / "tokenizer" / "tokenizer.json"))
CHATML = (
    "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}"
    "<|im_end|>\n{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{opened}{{% endif %}}"
)
XML = (
    "<tool_call>\n<function={{ c.function.name }}>\n{% for key, value in c.function.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]


class Template:
    """A ChatML template whose calls are written in some way."""

    def __init__(self, call: str, opened: str = "") -> None:
        self._template = Environment().from_string(CHATML.format(call=call, opened=opened))

    def __call__(self, messages: Sequence, *, add_generation_prompt: bool) -> str:
        return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt)


def refusing(messages: Sequence, *, add_generation_prompt: bool) -> str:
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("style", "name"),
    [("chatml", "hermes"), ("qwen3", "hermes"), ("strips_thinking", "hermes"), ("llama3", "llama3"), ("mistral", "mistral")],
)
def test_the_format_is_the_one_that_reads_what_the_chat_template_writes(style: str, name: str) -> None:
    renderer = Renderer.from_pretrained(GOLDEN / "templates" / style)
    parser = find_parser(renderer.tokenizer.backend_tokenizer, renderer._template.render)
    assert (parser.format.name, parser.why) == (name, "it reads what the chat template writes")
    assert not parser.thinks_at_once


def test_a_template_with_elements_is_read_as_xml() -> None:
    assert find_parser(TOKENIZER, Template(XML)).format.name == "xml"


@pytest.mark.parametrize(
    ("render", "why"), [(Template(""), "cannot write calls"), (refusing, "cannot write calls"), (Template("{{ c }}"), "no known format")]
)
def test_a_template_that_shows_no_known_format_gets_hermes_and_says_why(render: Template, why: str) -> None:
    parser = find_parser(TOKENIZER, render)
    assert parser.format.name == "hermes"
    assert why in parser.why


def test_a_format_that_is_named_is_taken_whatever_the_template_writes() -> None:
    parser = find_parser(TOKENIZER, Template(XML), "mistral")
    assert (parser.format.name, parser.why) == ("mistral", "`model.tool_format` says so")


def test_a_generation_prompt_that_opens_thinking_is_noticed() -> None:
    renderer = Renderer.from_pretrained(GOLDEN / "templates" / "opens_thinking")
    assert find_parser(renderer.tokenizer.backend_tokenizer, renderer._template.render).thinks_at_once
    hermes = '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    for opened, thinks in (("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)):
        parser = find_parser(TOKENIZER, Template(hermes, opened))
        assert (parser.thinks_at_once, parser.why) == (thinks, "it reads what the chat template writes")


@pytest.mark.parametrize("name", FORMATS)
def test_the_prompt_names_every_tool_and_shows_a_call_that_the_parser_reads(name: str) -> None:
    prompt = tool_prompt(TOOLS, name)
    assert '"name": "add", "description": "Adds two numbers."' in prompt
    assert all(tag in prompt for tag in FORMATS[name].tags[:1]) or name == "llama3"
    shown = prompt[prompt.index({"llama3": '{"name": "the', "mistral": "[TOOL_CALLS]["}.get(name, "<tool_call>")) :]
    first = shown.split("\nTo call several")[0]
    (call,) = CallParser(TOKENIZER, FORMATS[name]).parse(TOKENIZER.encode(first, add_special_tokens=False).ids, turn=0).tool_calls
    assert (call.name, call.arguments) == ("the tool's name", {"argument": "value"})


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(ValueError, match="xml format has no way to write the name 'a>b'"):
        call_text("xml", "f", {"a>b": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        call_text("hermes", "f", {"a": float("nan")})
