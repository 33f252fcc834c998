"""The check of the chat template, on one that is well and on ones that are not."""

from __future__ import annotations

from jaxrl.doctor.finding import Level
from jaxrl.doctor.template import check_template
from tests.doctor.patients import ModelDir, examine

SEVERAL_TURNS = "--orchestrator.train.env=[{type='feedback', dataset='chain_sum', num_tasks=40}]"
SYSTEM_PROMPT = "--orchestrator.train.env.0.system_prompt=Add."
TOOLS = "--orchestrator.train.env=[{type='tools', dataset='chain_sum', num_tasks=40}]"
UNMEASURED = "--orchestrator.eval.env=[]"
NO_SYSTEM = "{%- if messages[0].role == 'system' -%}{{ raise_exception('no system') }}{%- endif -%}"


def test_the_shipped_template_continues_conversations_of_every_kind() -> None:
    finding = examine(check_template, UNMEASURED, SEVERAL_TURNS)
    assert finding.level is Level.GOOD
    kinds = "user, system, thinking, list content, assistant last, tool, parallel tools, tool and question, tool with thinking"
    assert finding.text.endswith(f"replies begin after '<|im_start|>assistant\\n', each turn continues the one before ({kinds})")


def test_a_template_that_rewrites_earlier_turns_is_told_with_the_place_where_there_are_several_turns(model_dir: ModelDir) -> None:
    content = "message.content"
    short = "(message.content if loop.last or message.role != 'assistant' else message.content.upper())"
    model_dir.edit_template((f"message.role + '\\n' + {content}", f"message.role + '\\n' + {short}"))
    rewritten = "'t is five.' became 'T IS FIVE.<|im_end|>'"
    single = examine(check_template, model_dir.override)
    assert single.level is Level.GOOD and f"starts a new branch (user: {rewritten}" in single.text
    several = examine(check_template, model_dir.override, SEVERAL_TURNS, UNMEASURED)
    assert several.level is Level.WARNING and f"what was said before is rewritten by a later turn ({rewritten})" in several.text
    keeping = SEVERAL_TURNS.replace("num_tasks", "history='keep', num_tasks")
    assert examine(check_template, model_dir.override, keeping, UNMEASURED).level is Level.GOOD, "then nothing is rewritten"


def test_a_template_that_drops_earlier_thinking_is_good_for_one_turn_and_says_so(model_dir: ModelDir) -> None:
    spoken = "(message.content if loop.last else message.content.split('</think>')[-1].lstrip('\\n'))"
    model_dir.edit_template(("message.role + '\\n' + message.content", f"message.role + '\\n' + {spoken}"))
    finding = examine(check_template, model_dir.override)
    assert finding.level is Level.GOOD, finding.text
    assert "starts a new branch (thinking: '<think>\\nTwo and thre' became 'It is five.<|im_end|'" in finding.text
    assert "continues the one before (user, system, list content, assistant last" in finding.text
    several = examine(check_template, model_dir.override, SEVERAL_TURNS, UNMEASURED)
    assert several.level is Level.WARNING and "earlier thinking is dropped by a later turn" in several.text


def test_a_generation_prompt_that_is_written_twice_is_bad(model_dir: ModelDir) -> None:
    asks = "{{- '<|im_start|>assistant\\n' -}}"
    always = f"{{%- if messages[-1].role == 'user' -%}}{asks}{{%- endif -%}}"
    model_dir.edit_template(("{%- if add_generation_prompt -%}", always + "{%- if add_generation_prompt -%}"))
    finding = examine(check_template, model_dir.override)
    assert finding.level is Level.BAD and "a prompt asks for a reply twice ('<|im_start|>assistant\\n<|im_start|>" in finding.text


def test_a_template_with_todays_date_is_warned_about_with_its_hash(model_dir: ModelDir) -> None:
    model_dir.edit_template(before="{{- strftime_now('%d %b %Y') -}}")
    finding = examine(check_template, model_dir.override)
    assert finding.level is Level.WARNING
    assert "writes today's date" in finding.text and finding.text.startswith("sha256 ")


def test_a_template_without_a_system_role_is_bad_only_for_an_environment_that_sends_one(model_dir: ModelDir) -> None:
    model_dir.edit_template(before=NO_SYSTEM)
    unused = examine(check_template, model_dir.override)
    assert unused.level is Level.GOOD and "refuses some conversations (system)" in unused.text
    needed = examine(check_template, model_dir.override, SYSTEM_PROMPT)
    assert needed.level is Level.BAD and "an environment sends a system message, and" in needed.text


def test_a_template_without_a_tool_role_is_bad_only_for_an_environment_with_tools(model_dir: ModelDir) -> None:
    model_dir.edit_template(before="{%- if 'tool' in messages|map(attribute='role') -%}{{ raise_exception('no tools') }}{%- endif -%}")
    assert examine(check_template, model_dir.override).level is Level.GOOD
    needed = examine(check_template, model_dir.override, TOOLS, UNMEASURED)
    assert needed.level is Level.BAD and "an environment offers tools, and" in needed.text and "no tools" in needed.text


def test_a_template_that_fails_on_a_long_conversation_is_bad_only_where_there_are_several_turns(model_dir: ModelDir) -> None:
    model_dir.edit_template(before="{%- if messages|length > 4 -%}{{ 1/0 }}{%- endif -%}")
    single = examine(check_template, model_dir.override)
    assert single.level is Level.GOOD and "refuses some conversations (user, system" in single.text
    several = examine(check_template, model_dir.override, SEVERAL_TURNS, UNMEASURED)
    assert several.level is Level.BAD and "an environment plays several turns, and" in several.text and "division by zero" in several.text
