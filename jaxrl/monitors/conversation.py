"""A rollout as a conversation that a person can read: its turns, its calls of tools, its token counts, and where branches fork.

In: one record of the rollout log, as it stands in the file. Out: lines with styles, for a terminal or, without the styles, for
a pipe. What a model or a tool wrote may be hostile: nothing of it reaches a terminal as a control character, and nothing is
read as markup. It reads no files and prints nothing.
"""

from __future__ import annotations

import json
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

MAX_CHARS = 1000
"""A longer text is cut in the middle."""
MAX_LINES = 40
"""A text of more lines is cut likewise."""

_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_MAX_NAMED = 4
"""More branches than these are counted and not named."""
_MUCH_SCAFFOLD = 16
"""Of a message with more tokens of the chat template than these it is said: a description of tools, a system message of its own."""
_LEAST_WIDTH = 20
"""Text is never wrapped to less than this, however deep branches lie."""
_UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of what a terminal obeys, hides, reorders or cannot be sent: control, format and surrogate characters, line ends."""
_SAFE = "\n\t\u200c\u200d"
"""Of those, what is harmless: a newline, a tab, and the joiners that emoji and some scripts are spelled with."""

Node = Mapping[str, Any]


def conversation(record: Mapping[str, Any], *, is_full: bool = False, width: int | None = None) -> list[Text]:
    """Return a rollout as lines: what it is, how it ended, then its turns.

    Where branches fork, what they share stands above and once. Every branch but the last is drawn behind a line on its left; the last
    goes on where the shared part stood.

    Args:
      record: one object of a rollout log, or of a file of an evaluation; messages without a graph are one branch without token counts.
      is_full: cut no text.
      width: places of a line, to which texts are wrapped; None wraps nothing.
    """
    nodes = record.get("nodes") or _chain(record.get("messages") or [])
    lines = _header(record, nodes)
    numbers = {index: number for number, index in enumerate((i for i, node in enumerate(nodes) if node.get("sampled")), start=1)}
    rewards = record.get("turn_rewards") or []
    for prefix, drawn in _drawn(nodes):
        if isinstance(drawn, str):
            lines.append(Text.assemble((prefix, "dim"), (drawn, "bold")))
            continue
        node, number = nodes[drawn], numbers.get(drawn)
        reward = rewards[number - 1] if number is not None and number <= len(rewards) else None
        lines.append(Text.assemble((prefix, "dim"), _node_header(node, number, reward)))
        room = None if width is None else max(width - len(prefix) - 2, _LEAST_WIDTH)
        lines += [Text.assemble((f"{prefix}  ", "dim"), line) for line in _body(node, is_full, room)]
    return lines


def harmless(text: str) -> str:
    r"""Return a text with every character that a terminal would obey, or that hides or reorders others, spelled out.

    Example:
      >>> print(harmless("\x1b[31mred\x07 ok"))
      \x1b[31mred\x07 ok
    """
    if text.isprintable():
        return text
    return "".join(char if char in _SAFE or unicodedata.category(char) not in _UNSAFE else _spelled(char) for char in text)


def _spelled(char: str) -> str:
    return char.encode("unicode_escape").decode()


def _chain(messages: Sequence[Mapping[str, Any]]) -> list[Node]:
    """Return the messages of one branch as nodes."""
    return [{**message, "parent": index - 1 if index else None} for index, message in enumerate(messages)]


def _header(record: Mapping[str, Any], nodes: Sequence[Node]) -> list[Text]:
    task = record.get("task") or {}
    names = [
        *([f"step {record['step']}"] if "step" in record else []),
        str(record.get("env", "")),
        f"task {task.get('id', record.get('task_id', '?'))}",
        *([f"{record['group_id']}, member {record.get('member')}"] if "group_id" in record else []),
    ]
    reward = record.get("reward")
    num_turns = record.get("num_turns", record.get("turns", 0))
    num_written = record.get("num_completion_tokens", record.get("completion_tokens")) or 0
    num_tokens = sum(node.get("num_tokens", 0) for node in nodes)
    num_branches = len(_leaves(nodes))
    facts = [
        "no reward" if reward is None else f"reward {reward:g}",
        str(record.get("bucket", "")),
        str(record.get("stop_reason") or ""),
        "cut by a limit" if record.get("is_truncated") else "",
        _counted(num_turns, "turn"),
        f"{_counted(num_written, 'token')} written" + (f", {num_tokens:,} in all" if num_tokens else ""),
        _counted(num_branches, "branch", "branches") if num_branches > 1 else "",
        f"{record['duration_s']:g} s" if record.get("duration_s") else "",
    ]
    lines = [Text(_joined(names), "bold"), Text(_joined(facts), "dim")]
    if error := record.get("error"):
        words = f"failed at {error.get('boundary') or error.get('stage')}: {error.get('type')}: {error.get('message')}"
        lines += [Text(line, "red") for line in harmless(words).split("\n")]
    return lines


def _node_header(node: Node, number: int | None, reward: float | None) -> Text:
    role = str(node.get("role", "?"))
    facts = [
        f"turn {number:,}" if number is not None else "told again" if node.get("retold") else "given" if role == "assistant" else "",
        _size(node),
        "" if reward is None else f"reward {reward:g}",
        f"written by {node['source']}" if node.get("source", "policy") != "policy" else "",
        {"length": "cut by the token limit", "cancelled": "cancelled"}.get(str(node.get("finish_reason")), ""),
    ]
    name = f" {node['name']}" if node.get("name") else ""
    spelled = harmless(role + name).replace("\n", "\\n")
    return Text.assemble((spelled, f"bold {_STYLES.get(role, 'white')}"), ("".join(f" · {fact}" for fact in facts if fact), "dim"))


def _size(node: Node) -> str:
    """Return how many tokens a node has and, where that is many, how many of them the chat template wrote."""
    if "num_tokens" not in node:
        return _counted(node["num_sampled"], "token") if node.get("num_sampled") else ""
    num_scaffold = node["num_tokens"] - node.get("num_content_tokens", node["num_tokens"])
    told = f", {num_scaffold:,} of the template" if num_scaffold > _MUCH_SCAFFOLD else ""
    return _counted(node.get("num_sampled", node["num_tokens"]), "token") + told


def _body(node: Node, is_full: bool, room: int | None) -> Iterator[Text]:
    """Yield the lines of a node's text and of its calls."""
    content, calls = node.get("content"), node.get("tool_calls") or []
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    for line, style in _cut(harmless(text), is_full):
        wrapped = [line] if room is None or len(line) <= room else textwrap.wrap(line, room, replace_whitespace=False, expand_tabs=False)
        yield from (Text(part, style) for part in wrapped)
    if not text and not calls:
        yield Text("(empty)", "dim")
    for call in calls:
        yield from _call(call, is_full)


def _call(call: Mapping[str, Any], is_full: bool) -> Iterator[Text]:
    arguments = call.get("arguments")
    if isinstance(arguments, Mapping):
        shown = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
        yield Text(f"→ {_one_line(str(call.get('name')), is_full)}({_one_line(shown, is_full)})", "blue")
    else:
        yield Text(f"→ {_one_line(str(call.get('name') or '?'), is_full)}: {_one_line(str(call.get('raw')), is_full)}", "red")
        yield Text(f"  malformed: {_one_line(str(call.get('error')), is_full)}", "red")


def _one_line(text: str, is_full: bool) -> str:
    shown = harmless(text).replace("\n", "\\n")
    missing = len(shown) - MAX_CHARS
    return shown if is_full or missing <= 0 else f"{shown[:MAX_CHARS]} [{_counted(missing, 'character')} left out]"


def _cut(text: str, is_full: bool) -> list[tuple[str, str]]:
    """Return the lines of a text, each with its style; of a long one the first two thirds and the last of what may be shown."""
    missing = "" if is_full else _missing(len(text), MAX_CHARS, "character")
    head, tail = (text[: MAX_CHARS * 2 // 3], text[-MAX_CHARS // 3 :]) if missing else (text, "")
    lines = [(line, "") for line in head.split("\n")] if text else []
    if missing:
        lines += [(missing, "dim"), *((line, "") for line in tail.split("\n"))]
    if is_full or len(lines) <= MAX_LINES:
        return lines
    num_head = MAX_LINES * 2 // 3
    return [*lines[:num_head], (_missing(len(lines), MAX_LINES, "line"), "dim"), *lines[num_head - MAX_LINES :]]


def _missing(num: int, shown: int, noun: str) -> str:
    return f"[{_counted(num - shown, noun)} left out]" if num > shown else ""


def _drawn(nodes: Sequence[Node]) -> Iterator[tuple[str, int | str]]:
    """Yield the tree line by line: what stands on the left, and a node's index or the words at a fork."""
    children: dict[int | None, list[int]] = {}
    for index, node in enumerate(nodes):
        children.setdefault(_parent(node, index), []).append(index)
    below = _branches_below(nodes)
    # No recursion: a conversation may fork at every turn.
    pending: list[tuple[str, str, list[int]]] = [("", "", children.get(None, []))]
    while pending:
        words, prefix, siblings = pending.pop()
        if words:
            yield prefix, words
        if words.startswith("├"):
            prefix += "│  "
        while len(siblings) == 1:
            yield prefix, siblings[0]
            siblings = children.get(siblings[0], [])
        forks = [(f"{'├' if child != siblings[-1] else '└'}─ {_named(below[child])}", prefix, [child]) for child in siblings]
        pending += reversed(forks)


def _parent(node: Node, index: int) -> int | None:
    """Return a node's parent; None for a root, and where a file holds what cannot be one."""
    parent = node.get("parent")
    return parent if isinstance(parent, int) and 0 <= parent < index else None


def _leaves(nodes: Sequence[Node]) -> list[int]:
    parents = {_parent(node, index) for index, node in enumerate(nodes)}
    return [index for index in range(len(nodes)) if index not in parents]


def _branches_below(nodes: Sequence[Node]) -> list[list[int]]:
    """Return for each node the 1-based numbers of the branches that it is part of."""
    below: list[list[int]] = [[] for _ in nodes]
    for number, leaf in enumerate(_leaves(nodes), start=1):
        below[leaf] = [number]
    for index in range(len(nodes) - 1, -1, -1):
        if (parent := _parent(nodes[index], index)) is not None:
            below[parent] = below[index] + below[parent] if below[parent] else below[index]
    return below


def _named(numbers: Sequence[int]) -> str:
    if len(numbers) > _MAX_NAMED:
        return f"{len(numbers):,} branches"
    return ("branch " if len(numbers) == 1 else "branches ") + ", ".join(map(str, sorted(numbers)))


def _counted(num: int, noun: str, plural: str = "") -> str:
    return f"{num:,} {noun if num == 1 else plural or noun + 's'}"


def _joined(parts: Sequence[str]) -> str:
    return harmless(" · ".join(part for part in parts if part)).replace("\n", "\\n")
