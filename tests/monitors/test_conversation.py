"""`jaxrl.monitors.conversation`: a record of the rollout log as lines that a person can read."""

import io
import json
import re
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from jaxrl.monitors.conversation import MAX_CHARS, MAX_LINES, conversation, harmless
from jaxrl.monitors.rollouts import rollout_record
from jaxrl.types import Boundary, Failure, Node, Rollout, Task, ToolCall


def said(parent: int | None, role: str, content: str, num_tokens: int = 2, **more) -> Node:
    return Node(parent, role, content, np.arange(num_tokens, dtype=np.int32), **more)


def replied(parent: int, content: str, num_sampled: int = 2, **more) -> Node:
    more = {"finish_reason": "stop", **more}
    return Node(parent, "assistant", content, np.arange(num_sampled + 1, dtype=np.int32), sampled=True, num_sampled=num_sampled, **more)


def shown(rollout: Rollout, **options) -> list[str]:
    """Return the lines of a rollout below the two of its header, as they are after the way through the file."""
    record = json.loads(json.dumps(rollout_record(3, rollout, token_export=False)))
    return [line.plain for line in conversation(record, **options)][2:]


def played(*nodes: Node, **more) -> Rollout:
    return Rollout(Task("sums", "t1", {}), "sums/7", 2, 7, nodes=list(nodes), **more)


def test_a_conversation_has_its_turns_its_calls_and_the_tokens_of_each_message() -> None:
    call = ToolCall("c1", "calculator", {"expression": "3 + 4", "exact": True}, "")
    rollout = played(
        said(None, "system", "Use tools.", 5),
        said(0, "user", "3+4?\nQuick.", 4),
        replied(1, "<call>", 6, tool_calls=(call,)),
        said(2, "tool", "7", 3, name="calculator"),
        replied(3, "It is 7.", 3, finish_reason="length"),
        reward=1.0, turn_rewards=[0.25, 0.75], bucket="trained", stop_reason="done", is_truncated=True, duration_s=1.5,
    )  # fmt: skip
    record = rollout_record(3, rollout, token_export=False)
    assert [line.plain for line in conversation(record)] == [
        "step 3 · sums · task t1 · sums/7, member 2",
        "reward 1 · trained · done · cut by a limit · 2 turns · 9 tokens written, 23 in all · 1.5 s",
        "system · 5 tokens",
        "  Use tools.",
        "user · 4 tokens",
        "  3+4?",
        "  Quick.",
        "assistant · turn 1 · 6 tokens · reward 0.25",
        "  <call>",
        '  → calculator(expression="3 + 4", exact=true)',
        "tool calculator · 3 tokens",
        "  7",
        "assistant · turn 2 · 3 tokens · reward 0.75 · cut by the token limit",
        "  It is 7.",
    ]


def test_the_conversation_that_the_document_shows_is_what_is_drawn() -> None:
    document = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text(encoding="utf-8")
    (drawing,) = re.findall(r"```text\n(.*?)```", document, re.DOTALL)
    raw = '{"name": "calculator", "arguments": {"expression": "3 + 4"}}'
    call = ToolCall("c1", "calculator", {"expression": "3 + 4"}, raw)
    rollout = played(
        said(None, "user", "What is 3 + 4?", 336, is_content=np.arange(336) >= 312),
        replied(0, f"<tool_call>{raw}</tool_call>", 29, tool_calls=(call,)),
        said(1, "tool", "7", 12, name="calculator"),
        replied(2, "It is 7.", 7),
        replied(2, "7", 5),
        reward=1.0, bucket="trained", stop_reason="done", duration_s=1.5204,
    )  # fmt: skip
    rollout.task, rollout.group_id = Task("tools", "5f0c", {}), "tools/7"
    assert [line.plain for line in conversation(rollout_record(3, rollout))] == drawing.splitlines()


def test_what_the_template_adds_to_a_message_is_said_where_it_is_more_than_its_usual_few_tokens() -> None:
    def header(num_template: int, **more) -> str:
        return shown(played(said(None, "user", "3+4?", 20 + num_template, is_content=np.arange(20 + num_template) < 20, **more)))[0]

    assert header(16) == "user · 36 tokens"
    assert header(17) == "user · 37 tokens, 17 of the template"
    assert shown(played(said(None, "user", "3+4?", 90)))[0] == "user · 90 tokens", "nobody knows whose they are"
    assert shown(played(said(None, "user", "3+4?"), replied(0, "7", 30)))[2] == "assistant · turn 1 · 30 tokens"


def test_a_malformed_call_is_shown_as_it_was_written_with_why_and_a_failure_stands_at_the_top() -> None:
    calls = (ToolCall("c1", "calculator", None, '{"expression": ', "the JSON ends too early"), ToolCall("c2", "", None, "{\n", "no name"))
    rollout = played(said(None, "user", "3+4?"), replied(0, "", tool_calls=calls), failure=Failure(Boundary.ENV, "KeyError", "'x'\nthere"))
    assert shown(rollout) == [
        "failed at env: KeyError: 'x'",
        "there",
        "user · 2 tokens",
        "  3+4?",
        "assistant · turn 1 · 2 tokens",
        '  → calculator: {"expression": ',
        "    malformed: the JSON ends too early",
        "  → ?: {\\n",
        "    malformed: no name",
    ]


def test_where_branches_fork_the_shared_part_stands_once_and_the_last_branch_goes_on_below_it() -> None:
    rollout = played(
        said(None, "user", "q"),
        replied(0, "first"),
        said(0, "assistant", "rewritten", is_retold=True),
        said(2, "user", "go on"),
        replied(3, "second"),
        replied(3, "third", source="frozen"),
        said(None, "system", "sub-agent"),
        replied(6, ""),
    )
    assert shown(rollout) == [
        "├─ branches 1, 2, 3",
        "│  user · 2 tokens",
        "│    q",
        "│  ├─ branch 1",
        "│  │  assistant · turn 1 · 2 tokens",
        "│  │    first",
        "│  └─ branches 2, 3",
        "│  assistant · told again · 2 tokens",
        "│    rewritten",
        "│  user · 2 tokens",
        "│    go on",
        "│  ├─ branch 2",
        "│  │  assistant · turn 2 · 2 tokens",
        "│  │    second",
        "│  └─ branch 3",
        "│  assistant · turn 3 · 2 tokens · written by frozen",
        "│    third",
        "└─ branch 4",
        "system · 2 tokens",
        "  sub-agent",
        "assistant · turn 4 · 2 tokens",
        "  (empty)",
    ]


def test_a_conversation_that_forks_at_each_of_its_thousands_of_turns_is_drawn_without_growing_sideways() -> None:
    nodes = [said(None, "user", "q")]
    for _ in range(2000):
        nodes += [replied(len(nodes) - 1, "thought"), said(len(nodes) - 1, "assistant", "kept")]
    lines = shown(played(*nodes))
    assert lines[2:6] == ["├─ branch 1", "│  assistant · turn 1 · 2 tokens", "│    thought", "└─ 2,000 branches"]
    assert lines[-6:-2] == ["├─ branch 2000", "│  assistant · turn 2,000 · 2 tokens", "│    thought", "└─ branch 2001"]
    assert max(map(len, lines)) < 60


def test_long_texts_are_cut_in_the_middle_with_how_much_is_missing_unless_all_is_asked_for() -> None:
    text = "a" * MAX_CHARS + "b" * 234
    rollout = played(said(None, "user", text), said(0, "tool", "\n".join(map(str, range(MAX_LINES + 5)))))
    lines = shown(rollout)
    assert lines[2] == "  [234 characters left out]"
    assert lines[1] == "  " + "a" * 666 and lines[3] == "  " + "a" * 100 + "b" * 234, "of 1000 characters, 666 and the last 334"
    assert lines[5:6] + lines[30:33] + lines[-1:] == ["  0", "  25", "  [5 lines left out]", "  31", "  44"]
    assert len(lines) == 5 + MAX_LINES + 1
    full = shown(rollout, is_full=True)
    assert full[1] == "  " + text and len(full) == 3 + MAX_LINES + 5
    call = ToolCall("c", "f", {"x": "y" * 2000}, "")
    assert shown(played(said(None, "assistant", "", tool_calls=(call,))))[-1].endswith("y [1,004 characters left out])")


def test_text_is_wrapped_behind_the_lines_of_its_branch() -> None:
    rollout = played(said(None, "user", "q"), replied(0, "one two three four five six seven"), replied(0, "  indented " + "x" * 30))
    assert shown(rollout, width=29)[4:6] == ["│    one two three four five", "│    six seven"]
    assert shown(rollout, width=29)[8:] == ["    indented " + "x" * 16, "  " + "x" * 14]


def test_what_a_terminal_would_obey_or_what_hides_text_is_spelled_out_wherever_it_stands() -> None:
    hostile = "\x1b]0;pwned\x07\x1b[2J\r\x9b31m\u202eevil\ud800\x00\u2028"
    call = ToolCall("c", f"n{hostile}", {"k" + hostile: hostile}, "")
    bad = ToolCall("c", hostile, None, hostile, hostile)
    rollout = played(
        said(None, hostile, hostile, name=hostile), replied(0, hostile, tool_calls=(call, bad)),
        stop_reason=hostile, failure=Failure(Boundary.ENV, hostile, hostile),
    )  # fmt: skip
    lines = [line.plain for line in conversation(rollout_record(1, rollout))]
    assert re.search(r"[\x00-\x1f\x7f-\x9f\u202e\ud800\u2028]", "".join(lines)) is None
    assert "  \\x1b]0;pwned\\x07\\x1b[2J\\r\\x9b31m\\u202eevil\\ud800\\x00\\u2028" in lines
    assert harmless("tab\tline\n👩\u200d🚀 é 日本") == "tab\tline\n👩\u200d🚀 é 日本"


def test_on_a_terminal_the_roles_have_colours_and_the_texts_their_own() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200, color_system="standard", _environ={})
    rollout = played(said(None, "user", "q"), replied(0, "a"), replied(0, "b"))
    for line in conversation(rollout_record(1, rollout))[2:]:
        console.print(line, soft_wrap=True)
    assert out.getvalue().splitlines()[:5] == [
        "\x1b[1;36muser\x1b[0m\x1b[2m · 2 tokens\x1b[0m",
        "\x1b[2m  \x1b[0mq",
        "\x1b[1m├─ branch 1\x1b[0m",
        "\x1b[2m│  \x1b[0m\x1b[1;32massistant\x1b[0m\x1b[2m · turn 1 · 2 tokens\x1b[0m",
        "\x1b[2m│    \x1b[0ma",
    ]


def test_markup_and_names_of_emoji_in_a_text_stay_as_they_are() -> None:
    text = "[bold red]no[/bold red] :smile: [link=http://x]y[/link] [/nothing]"
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200, color_system=None)
    for line in conversation(rollout_record(1, played(said(None, "user", text)))):
        console.print(line, soft_wrap=True)
    assert f"  {text}" in out.getvalue().splitlines()


def test_messages_alone_are_one_branch_without_token_counts() -> None:
    row = {"task_id": "t9", "reward": None, "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
           "turns": 1, "completion_tokens": 3, "stop_reason": "done", "error": None}  # fmt: skip
    assert [line.plain for line in conversation(row)] == [
        "task t9",
        "no reward · done · 1 turn · 3 tokens written",
        "user",
        "  q",
        "assistant · given",
        "  a",
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-2, 12), st.text(max_size=20)), max_size=12), st.integers(1, 40))
def test_every_node_of_any_graph_is_drawn_once(links: list[tuple[int, str]], width: int) -> None:
    nodes = [{"parent": parent, "role": f"r{index}", "content": text, "num_tokens": 1} for index, (parent, text) in enumerate(links)]
    lines = [line.plain for line in conversation({"nodes": nodes}, width=width)]
    headers = [match[1] for line in lines if (match := re.fullmatch(r"[│ ]*(r\d+) · 1 token", line))]
    assert sorted(headers) == sorted(node["role"] for node in nodes)
