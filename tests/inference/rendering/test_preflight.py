"""What is told of a chat template before a run, over the committed styles and over templates with something wrong in them."""

import hashlib

import pytest

from jaxrl.inference.rendering import Renderer
from jaxrl.inference.rendering.preflight import Needs, preflight
from tests.inference.rendering.styles import STYLES, renderer_of, tokenizer_of

ALL = Needs(turns=True, system=True, tools=True)
TOOL_KINDS = ("tool", "parallel tools", "tool and question", "tool with thinking")
KINDS = ("user", "system", "thinking", "list content", "assistant last", *TOOL_KINDS)
NOT_CONTINUED = {
    "chatml": {},
    "llama3": {},
    "no_turn_end": {},
    "dated": {},
    "qwen3": {"rewritten": {"thinking", "assistant last", "tool and question"}},
    "strips_thinking": {"rewritten": {"thinking", "tool with thinking"}},
    "mistral": {"rewritten": {"system", "tool and question"}, "refused": {"assistant last"}},
    "channels": {"rewritten": {"assistant last"}},
    "gemma": {"refused": {"system", "assistant last", *TOOL_KINDS}},
    "opens_thinking": {"rewritten": set(KINDS)},
}
BRANCHES = (
    'turns are trained as branches, each with its own copy of the prompt, unless the environment has `history = "keep"`, which goes '
    "on from what the model saw: "
)
REMARKS = {
    "qwen3": [BRANCHES + "earlier thinking is dropped by a later turn ('<think>\\nTwo and thre' became 'It is five.<|im_end|')"],
    "strips_thinking": [BRANCHES + "earlier thinking is dropped by a later turn ('<think>\\nTwo and thre' became 'It is five.<|im_end|')"],
    "mistral": [BRANCHES + "what was said before is rewritten by a later turn ('Be brief.\\n\\nWhat is 2' became 'What is 2 + 3?[/INST')"],
    "opens_thinking": [
        BRANCHES + "what was said before is rewritten by a later turn ('<think>\\nIt is five.' became 'It is five.<|end|><|')"
    ],
    "channels": ["the last reply of a conversation ends with '<|return|>' and an earlier one with '<|end|>'"],
    "dated": ["the chat template writes today's date, which jaxrl holds at 01 Jan 2025"],
}


def chatml_with(*replaced: tuple[str, str], before: str = "") -> Renderer:
    """Return the renderer of `chatml` with parts of its template replaced."""
    renderer = renderer_of("chatml")
    template = renderer.chat_template
    for old, new in replaced:
        assert old in template, old
        template = template.replace(old, new)
    return Renderer(tokenizer_of("chatml"), before + template, renderer.stop_ids)


@pytest.mark.parametrize("style", STYLES)
def test_each_style_continues_rewrites_and_refuses_what_its_template_says(style: str) -> None:
    found = preflight(renderer_of(style), ALL)
    expected = NOT_CONTINUED[style]
    assert set(found.rewritten) == expected.get("rewritten", set())
    assert set(found.refused) == expected.get("refused", set())
    assert found.continued == tuple(kind for kind in KINDS if kind not in found.rewritten | found.refused)


@pytest.mark.parametrize("style", STYLES)
def test_only_what_the_run_needs_is_a_problem_and_only_what_it_meets_is_a_remark(style: str) -> None:
    assert preflight(renderer_of(style)).problems == ()
    assert len(preflight(renderer_of(style)).remarks) == (style == "dated")
    found = preflight(renderer_of(style), ALL)
    assert len(found.problems) == (2 if style == "gemma" else 0)
    for remark, beginning in zip(found.remarks, REMARKS.get(style, []), strict=True):
        assert remark.startswith(beginning)


def test_a_template_that_rewrites_history_is_told_with_one_example_and_the_number_of_the_others() -> None:
    endings = {"strips_thinking": "and so in 1 other kind of conversation", "opens_thinking": "and so in 8 other kinds of conversation"}
    for style, ending in endings.items():
        (remark,) = preflight(renderer_of(style), ALL).remarks
        assert remark.endswith(f"), {ending}") and remark.count("became") == 1 and len(remark) < 400


def test_a_template_without_system_role_or_tools_is_a_problem_of_an_environment_that_has_them() -> None:
    system, tools = preflight(renderer_of("gemma"), ALL).problems
    assert "an environment sends a system message, and the chat template refused" in system and "there is no system role" in system
    assert "an environment offers tools, and the chat template refused" in tools and "there is no role tool" in tools
    deaf = chatml_with(("{%- for message in messages %}", "{%- for message in messages if message.role not in ('system', 'tool') %}"))
    system, tools = preflight(deaf, ALL).problems
    assert "sends a system message, and the chat template leaves it out" in system
    assert "offers tools, and the chat template leaves out what they answer" in tools
    assert preflight(deaf).problems == ()


def test_the_hash_is_that_of_the_template_as_it_was_given() -> None:
    renderer = renderer_of("dated")
    assert preflight(renderer).template_sha256 == hashlib.sha256(renderer.chat_template.encode()).hexdigest()
    assert preflight(renderer_of("chatml")).template_sha256 != preflight(renderer_of("qwen3")).template_sha256


def test_a_bos_that_is_written_twice_is_a_problem_and_one_that_only_bare_text_gets_is_a_remark() -> None:
    renderer = renderer_of("llama3")
    twice = Renderer(renderer.tokenizer, "{{- bos_token }}" + renderer.chat_template, renderer.stop_ids)
    (problem,) = preflight(twice).problems
    assert problem.startswith("a prompt begins with BOS twice, which the model has never seen")
    never = Renderer(renderer.tokenizer, renderer.chat_template.replace("{{- bos_token }}", ""), renderer.stop_ids)
    (remark,) = preflight(never).remarks
    assert remark.startswith("the tokenizer puts BOS before bare text and the chat template does not")


def test_a_generation_prompt_that_is_written_twice_is_a_problem() -> None:
    asks = "{{- '<|im_start|>assistant\\n' }}"
    begins = "{%- if add_generation_prompt %}"
    for twice in ("{%- if messages[-1].role != 'assistant' %}" + asks + "{%- endif %}\n" + begins, begins + "\n    " + asks):
        (problem,) = preflight(chatml_with((begins, twice))).problems
        assert problem.startswith("a prompt asks for a reply twice (") and "assistant\\n<|im_start|>assistant\\n'" in problem


def test_an_end_of_turn_at_which_no_reply_stops_is_a_problem() -> None:
    renderer = renderer_of("chatml")
    (problem,) = preflight(Renderer(renderer.tokenizer, renderer.chat_template, [0])).problems
    assert problem == "the chat template ends a reply with '<|im_end|>', at which no reply would stop"


def test_arguments_that_are_written_as_python_writes_them_are_a_remark_where_there_are_tools() -> None:
    python = chatml_with(("called.arguments | tojson", "called.arguments.items() | list | string"))
    (remark,) = preflight(python, Needs(tools=True)).remarks
    assert remark.startswith("the chat template writes the arguments of calls as Python does, which is no JSON")
    assert preflight(python).remarks == ()


def test_a_template_that_refuses_a_second_question_is_a_problem_of_several_turns() -> None:
    short = chatml_with(before="{%- if messages | length > 2 %}{{ raise_exception('one question only') }}{%- endif %}")
    assert preflight(short).problems == ()
    (problem,) = preflight(short, Needs(turns=True)).problems
    assert problem.startswith("an environment plays several turns, and") and "one question only" in problem


def test_a_template_that_refuses_questions_is_a_problem() -> None:
    deaf = chatml_with(before="{%- if add_generation_prompt %}{{ raise_exception('ask nothing') }}{%- endif %}")
    (problem,) = preflight(deaf).problems
    assert problem.startswith("not even a question can be asked: ") and "ask nothing" in problem
