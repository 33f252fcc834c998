"""The check of demonstrations, as replies to learn from and as hints of a self-teacher; and what they mean for the budgets."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from jaxrl.doctor.demonstrations import _num_tokens, check_demonstrations
from jaxrl.doctor.finding import Finding, Level
from jaxrl.doctor.settings import check_budgets
from jaxrl.errors import ConfigError
from jaxrl.types import Node, Rollout, Task
from tests.doctor.patients import examine_run, questions_config, tools_config

ROWS = [{"id": f"sum-{n}", "question": f"{n}+1=?", "answer": str(n + 1), "demonstration": str(n + 1)} for n in range(8)]
GRPO, OPSD = "{type = 'grpo'}", "{type = 'opsd', template = 'So: {demonstration}'}"


def without(*missing: int) -> list[dict]:
    """Return the rows, some of them without their demonstration."""
    return [{key: value for key, value in row.items() if n not in missing or key != "demonstration"} for n, row in enumerate(ROWS)]


def longer(num_chars: int) -> list[dict]:
    """Return the rows, the last one with a long demonstration of one-digit tokens."""
    return [*ROWS[:-1], ROWS[-1] | {"demonstration": "7" * num_chars}]


def test_demonstrations_that_are_there_and_fit_are_good_with_their_worth_and_length(tmp_path: Path) -> None:
    finding = examine_run(check_demonstrations, questions_config(tmp_path, ROWS))
    assert finding.level is Level.GOOD, finding.text
    # A digit and the id that ends a turn.
    assert "env 'questions': 8 of 8 tasks have a demonstration, worth 1 on average; of 8 probed, the longest has 2 tokens" in finding.text


def test_tasks_without_a_demonstration_are_counted_and_one_is_named(tmp_path: Path) -> None:
    finding = examine_run(check_demonstrations, questions_config(tmp_path, without(2, 5)))
    assert finding.level is Level.BAD
    assert "6 of 8 tasks have a demonstration; 'sum-2' ('2+1=?') has none" in finding.text
    columns = "`orchestrator.train.env.0.demonstration_key`='demonstration' the column that holds it: there are 'id', 'question', 'answer'$"
    with pytest.raises(ConfigError, match=f"none of the 8 tasks of env 'questions' has a demonstration; .*{columns}"):
        examine_run(check_demonstrations, questions_config(tmp_path, without(*range(8))))


def test_demonstrations_that_do_not_fit_window_and_row_are_found_with_the_number_to_set(tmp_path: Path) -> None:
    run = questions_config(tmp_path, longer(70))
    finding = examine_run(check_demonstrations, run)
    assert finding.level is Level.BAD
    needed = 71 + 13
    assert f"the longest has 71 tokens, and {needed} with its prompt; window 64, row 96" in finding.text
    assert f"1 are too long; raise `inference.max_model_len` and `trainer.row_length` to {needed}" in finding.text
    assert examine_run(check_demonstrations, questions_config(tmp_path, longer(70), f"--inference.max_model_len={needed}")).is_good


def test_of_a_demonstration_whose_history_is_written_anew_the_longest_branch_must_fit_and_not_both_together() -> None:
    def node(parent: int | None, num_tokens: int, num_sampled: int = 0) -> Node:
        return Node(parent, "user", "", np.zeros(num_tokens, np.int32), sampled=num_sampled > 0, num_sampled=num_sampled)

    nodes = [node(None, 5), node(0, 4, 3), node(0, 6), node(2, 3, 2)]
    assert _num_tokens(Rollout(Task("sums", "0", {}), "sums/0", 0, 0, nodes)) == (5 + 6 + 3, 3 + 2)


def test_demonstrations_that_their_own_scorer_finds_worthless_or_that_cannot_be_played_are_told(tmp_path: Path) -> None:
    odd = [row | {"demonstration": f"it is {row['answer']}?"} for row in ROWS]
    finding = examine_run(check_demonstrations, questions_config(tmp_path, odd))
    assert finding.level is Level.WARNING and "gives none of them more than 0" in finding.text
    early = [row | {"demonstration": f"{row['answer']}<|im_end|>"} for row in ROWS]
    finding = examine_run(check_demonstrations, questions_config(tmp_path, early))
    assert finding.level is Level.BAD and "the reply holds '<|im_end|>'" in finding.text


def test_a_hint_must_leave_room_for_prompt_and_reply(tmp_path: Path) -> None:
    def look(window: int, rows: list[dict] = ROWS) -> Finding:
        return examine_run(check_demonstrations, questions_config(tmp_path, rows, f"--inference.max_model_len={window}", algo=OPSD))

    roomy = look(96)
    assert roomy.level is Level.GOOD and "8 of 8 probed tasks have a demonstration" in roomy.text
    # What the template puts around a hint is its own affair; the number that is told must be the one that is enough.
    needed = int(roomy.text.partition(" tokens; window")[0].rpartition("= ")[2])
    assert look(needed).is_good
    narrow = look(needed - 1)
    assert narrow.level is Level.BAD
    assert f"no reply longer than 31 tokens can be scored; raise `inference.max_model_len` to {needed}" in narrow.text
    assert "after such a hint no rollout can be scored" in look(96, longer(90)).text
    missing = look(96, without(0))
    assert missing.level is Level.BAD
    assert "7 of 8 probed tasks" in missing.text and "task 'sum-0': there is no demonstration" in missing.text
    assert look(96, without(*range(8))).text.startswith("env 'questions': 0 of 8 probed tasks")


def test_the_limit_of_replies_does_not_count_where_demonstrations_are_the_replies(tmp_path: Path) -> None:
    long = "--orchestrator.sampling.max_tokens=60"
    played = examine_run(check_budgets, questions_config(tmp_path, ROWS, long, algo=GRPO))
    assert played.level is Level.BAD and "replies will be cut at the window" in played.text
    shown = examine_run(check_budgets, questions_config(tmp_path, ROWS, long))
    assert shown.level is Level.GOOD and "longest of the probed prompts 13 tokens; window 64, row 96" in shown.text
    frozen = "{type = 'sft', sampling = {source = {name = 'm', base_url = ['http://127.0.0.1:9/v1']}}}"
    cut = examine_run(check_budgets, questions_config(tmp_path, ROWS, long, algo=frozen))
    assert cut.level is Level.WARNING and "a long reply of the frozen model will be cut" in cut.text


def test_an_evaluation_that_measures_demonstrations_must_have_some(tmp_path: Path) -> None:
    (tmp_path / "heldout.jsonl").write_text('{"question": "9+9=?", "answer": "18"}\n')
    asked = f"{{type = 'questions', path = '{tmp_path}/heldout.jsonl', split = 'all'}}"
    heldout = f"[orchestrator.eval]\ndemonstration_nll = true\nenv = [{asked}]"
    finding = examine_run(check_demonstrations, questions_config(tmp_path, ROWS, env=heldout, algo=GRPO))
    assert finding.level is Level.WARNING
    assert "evaluation env 'questions' has no demonstration, so `orchestrator.eval.demonstration_nll` measures nothing" in finding.text


def test_demonstrations_of_several_turns_are_measured_as_a_whole(tmp_path: Path) -> None:
    run = tools_config(tmp_path)
    finding = examine_run(check_demonstrations, run)
    assert finding.level is Level.GOOD, finding.text
    assert "tasks have a demonstration, worth 1 on average" in finding.text
    needed = re.search(r"and (\d+) with its prompt; window 160, row 160", finding.text)
    assert needed is not None
    one_less = int(needed[1]) - 1
    finding = examine_run(check_demonstrations, tools_config(tmp_path, f"--inference.max_model_len={one_less}"))
    assert finding.level is Level.BAD and "are too long" in finding.text


@pytest.mark.parametrize("tool_format", ["xml", "mistral"])
def test_demonstrations_whose_calls_the_policy_would_not_read_are_told(tmp_path: Path, tool_format: str) -> None:
    wide = ("--inference.max_model_len=512", "--trainer.row_length=512")
    finding = examine_run(check_demonstrations, tools_config(tmp_path, *wide, env=f"demonstration_format = '{tool_format}'"))
    assert finding.level is Level.WARNING and "calls of tools in them are not read as such; `demonstration_format` is not" in finding.text
