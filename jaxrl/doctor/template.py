"""The check of the chat template: each turn begins with what the model saw in the one before, so a rollout stays one branch."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, verdict
from jaxrl.errors import EnvError

REPLY, THOUGHT = "It is five.", "<think>\nTwo and three.\n</think>\n\nIt is five."
QUESTIONS = ("What is 2 + 3?", "And one more?", "Thank you.")
SYSTEM = {"role": "system", "content": "Be brief."}


def check_template(exam: Examination) -> Finding:
    """Conversations of three turns keep the prefix property, and a prompt asks for a reply once."""
    source = exam.tokenizer.get_chat_template()
    problems: list[str] = []
    remarks: list[str] = []
    kinds: list[str] = []
    for kind, opening in (("user", []), ("system and user", [SYSTEM])):
        try:
            difference = _first_difference(exam, opening, REPLY)
        except EnvError as error:
            remarks.append(f"it refuses conversations of {kind} and assistant: {error}")
            continue
        if difference:
            remarks.append(
                f"a conversation of {kind} and assistant is rewritten by a later turn ({difference}): each of its turns will be trained "
                "as a branch of its own, with its own copy of the prompt"
            )
        else:
            kinds.append(kind)

    question = exam.renderer.open_turn(None, [_user(QUESTIONS[0])])
    asks = exam.renderer.decode(question.generation_prompt)
    if asks and question.text.endswith(asks + asks):
        problems.append(f"a prompt asks for a reply twice ({asks!r}): the template writes it also when `add_generation_prompt` is false")
    if "strftime_now" in source:
        remarks.append(
            "it writes today's date, which jaxrl holds at 01 Jan 2025 so that a run can be repeated; servers that render chats write the "
            "real one"
        )
    try:
        thinks = _first_difference(exam, [], THOUGHT) if kinds else ""
    except EnvError as error:
        thinks = ""
        remarks.append(f"it refuses replies that hold a <think> block: {error}")
    text = f"sha256 {hashlib.sha256(source.encode()).hexdigest()[:12]}, replies begin after {asks!r}"
    if kinds:
        text += f", each turn continues the one before ({', '.join(kinds)})"
    if thinks:
        text += ", but earlier thinking is dropped, which starts a new branch"
    return verdict(text, problems, remarks)


def _first_difference(exam: Examination, opening: list[dict[str, Any]], reply: str) -> str:
    """Play three turns; return where the template first rewrote what the model saw, empty if it never did."""
    renderer = exam.renderer
    reply_ids = np.asarray(exam.tokenizer(reply, add_special_tokens=False)["input_ids"], np.int32)
    turn = renderer.open_turn(None, [*opening, _user(QUESTIONS[0])])
    for question in QUESTIONS[1:]:
        # The id that the template itself ends the reply with, where it is known: the reply stopped there.
        after = _text_after(exam, turn.messages, reply)
        stops = [stop for stop in renderer.stop_ids if after.startswith(renderer.decode([stop]))]
        state = renderer.close_turn(turn, np.concatenate([reply_ids, np.asarray(stops[:1], np.int32)]))
        turn = renderer.open_turn(state, [_user(question)])
        if turn.is_fork:
            same = next((i for i, (a, b) in enumerate(zip(state.text, turn.text, strict=False)) if a != b), len(turn.text))
            return f"{state.text[same : same + 20]!r} became {turn.text[same : same + 20]!r}"
    return ""


def _text_after(exam: Examination, messages: tuple[dict[str, Any], ...], reply: str) -> str:
    """Return what the template writes after an assistant's reply that is followed by another question."""
    whole = exam.renderer.open_turn(None, [*messages, {"role": "assistant", "content": reply}, _user(QUESTIONS[-1])]).text
    return whole.rpartition(reply)[2]


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}
