"""What a chat template does with tools, arguments and dates, found by asking it."""

import pytest

from jaxrl.errors import EnvError
from jaxrl.inference.rendering.chat_template import ChatTemplate
from tests.inference.rendering.handmade import ADD, CALLS, CHATML, TAKES_TURNS, WRITES_TOOLS, assistant, golden, result, user

SYSTEM = {"role": "system", "content": "Be short."}
ODD = {"is_exact": True, "unit": None, "name": "é"}
NO_SYSTEM = "{% for m in messages if m.role == 'system' %}{{ raise_exception('no system role') }}{% endfor %}" + CHATML


def template(source: str) -> ChatTemplate:
    return ChatTemplate(golden().tokenizer, source, lambda tools: f"TOOLS: {tools[0]['function']['name']}")


def rendered(source: str, *messages: dict, tools: tuple = ()) -> str:
    return template(source).render(messages, tools, add_generation_prompt=False)


def test_a_template_that_shows_tools_is_given_them_and_one_that_does_not_has_them_told_in_the_system_message() -> None:
    assert template(WRITES_TOOLS).writes_tools and not template(CHATML).writes_tools
    assert rendered(WRITES_TOOLS, user("hi"), tools=(ADD,)).startswith('<|im_start|>system\n[{"type": "function"')
    told = "<|im_start|>system\nTOOLS: add<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert rendered(CHATML, user("hi"), tools=(ADD,)) == told
    assert rendered(CHATML, SYSTEM, user("hi"), tools=(ADD,)) == told.replace("TOOLS", "Be short.\n\nTOOLS")
    assert rendered(CHATML, user("hi"), SYSTEM, tools=(ADD,)).startswith(told), "a system message within is another one"
    assert rendered(CHATML, {**SYSTEM, "content": ""}, user("hi"), tools=(ADD,)) == told
    assert "TOOLS" not in rendered(CHATML, user("hi"))


def test_tools_are_told_in_the_first_question_where_there_is_no_system_message() -> None:
    told = "<|im_start|>user\nTOOLS: add\n\nhi<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nok<|im_end|>\n"
    assert rendered(NO_SYSTEM, user("hi"), assistant("4"), user("ok"), tools=(ADD,)) == told
    drops = CHATML.replace("for message in messages", "for message in messages if message['role'] != 'system'")
    assert rendered(drops, user("hi"), assistant("4"), user("ok"), tools=(ADD,)) == told


def test_a_template_that_fails_over_tools_does_not_write_them() -> None:
    assert not template("{{ tools[0].name.first if tools else '' }}" + CHATML).writes_tools


def test_arguments_read_as_json_whether_a_template_converts_them_or_not() -> None:
    as_json = '{"is_exact": true, "unit": null, "name": "é"}'
    assert f'"arguments": {as_json}' in rendered(CALLS, user("hi"), assistant("", ODD))
    assert f'"arguments": {as_json}' in rendered(TAKES_TURNS, user("hi"), assistant("", ODD), result("3"))
    as_is = CALLS.replace('{"name": c.function.name, "arguments": c.function.arguments} | tojson', "c.function.arguments")
    assert f"<tool_call>{as_json}</tool_call>" in rendered(
        as_is.replace("c.function.arguments +", "c.function.arguments ~"), user("hi"), assistant("", ODD)
    )
    assert f"<tool_call>{as_json}</tool_call>" in rendered(as_is, user("hi"), assistant("", ODD)), "one that wants a text"
    assert "<tool_call>{oops</tool_call>" in rendered(as_is, user("hi"), assistant("", "{oops"))


def test_todays_date_never_enters_a_prompt() -> None:
    assert rendered("{{ strftime_now('%Y-%m-%d') }}" + CHATML, user("hi")) == "01 Jan 2025<|im_start|>user\nhi<|im_end|>\n"


def test_what_ends_a_reply_is_what_stands_behind_the_last_one() -> None:
    assert template(CHATML).reply_end == "<|im_end|>\n"
    assert (
        template(CHATML.replace("+ '<|im_end|>", "+ (' <|endoftext|>' if loop.last else '<|im_end|>') + '")).reply_end == " <|endoftext|>\n"
    )
    with pytest.raises(EnvError, match=r"refused messages with the roles \['user', 'assistant'\]: no"):
        template("{{ raise_exception('no') }}").reply_end  # noqa: B018


def test_whatever_a_template_raises_is_the_environments_error() -> None:
    with pytest.raises(EnvError, match=r"roles \['system', 'user'\]: no system role"):
        rendered(NO_SYSTEM, SYSTEM, user("hi"))
    with pytest.raises(EnvError, match="refused messages"):
        rendered("{{ messages[0].content + 4 }}", user("hi"))
