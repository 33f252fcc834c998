"""The check of rewards: functions that are called in worker processes, sound ones and others."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from jaxrl import launch
from jaxrl.config.load import load_config
from jaxrl.config.run import RunConfig
from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, Level
from jaxrl.doctor.probes import OneReply, rollout_of
from jaxrl.doctor.rewards import check_rewards
from jaxrl.doctor.settings import check_budgets
from jaxrl.envs.play import play_rollout
from jaxrl.errors import ConfigError
from jaxrl.launch import build_worlds
from tests.doctor.patients import MODEL, examine_run, questions_config, tools_config

ROWS = [{"question": f"{n}+1=?", "answer": str(n + 1), "demonstration": str(n + 1)} for n in range(3)]


def look(directory: Path, function: str, *settings: str) -> Finding:
    reward = f"reward = {{type = 'python', import_path = '{function}'}}"
    return examine_run(check_rewards, questions_config(directory, ROWS, env="\n".join([reward, *settings])))


def test_a_reward_that_tells_right_from_wrong_is_good(tmp_path: Path) -> None:
    finding = look(tmp_path, "tests.doctor.grading:fair")
    assert finding.level is Level.GOOD
    assert "env 'questions' (`reward.type`='python'): its demonstration is worth 1, nonsense is worth 0, after" in finding.text
    assert "at most of 30 s" in finding.text


@pytest.mark.parametrize(
    ("function", "level", "said"),
    [
        ("wordy", Level.BAD, "its demonstration got no reward: env 'questions': reward function 'GRADING:wordy' returned 'yes' (str)"),
        ("squeamish", Level.BAD, "nonsense got no reward: env 'questions': reward function 'GRADING:squeamish' raised ValueError"),
        ("mute", Level.WARNING, "its demonstration is not scored, nonsense is not scored"),
        ("blind", Level.WARNING, "the reference reply is worth no more than nonsense"),
    ],
)
def test_a_reward_that_is_none_or_says_nothing_is_told(tmp_path: Path, function: str, level: Level, said: str) -> None:
    finding = look(tmp_path, f"tests.doctor.grading:{function}")
    assert finding.level is level
    assert said.replace("GRADING", "tests.doctor.grading") in finding.text


def test_a_reward_that_never_returns_is_bad_at_its_deadline_and_holds_up_no_other_check(tmp_path: Path) -> None:
    settings = "reward = {type = 'python', import_path = 'tests.doctor.grading:sleeps'}\nreward_deadline_s = 0.3\nreward_workers = 3"
    run = questions_config(tmp_path, ROWS, env=settings)
    began_s = time.monotonic()
    finding = examine_run(check_rewards, run)
    assert finding.level is Level.BAD and "was not done after 0.3 s" in finding.text and "left out of their groups" in finding.text
    assert examine_run(check_budgets, run).is_good
    assert time.monotonic() - began_s < 15


def test_a_function_that_cannot_be_imported_fails_whatever_needs_the_environment_and_is_looked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_built = 0

    def count(config: RunConfig):  # type: ignore[no-untyped-def]
        nonlocal num_built
        num_built += 1
        return build_worlds(config)

    monkeypatch.setattr(launch, "build_worlds", count)
    reward = "reward = {type = 'python', import_path = 'tests.doctor.grading:fairer'}"
    with Examination(questions_config(tmp_path, ROWS, env=reward)) as exam:
        for check in (check_rewards, check_budgets):
            with pytest.raises(ConfigError, match=r"'tests\.doctor\.grading:fairer'"):
                check(exam)
    assert num_built == 1


def test_the_worker_processes_end_with_the_examination(tmp_path: Path) -> None:
    reward = "reward = {type = 'python', import_path = 'tests.doctor.grading:fair'}"
    with Examination(questions_config(tmp_path, ROWS, env=reward)) as exam:
        check_rewards(exam)
        (env,), _ = exam.worlds
    rollout = rollout_of(env, env.tasks()[0])
    asyncio.run(play_rollout(env, rollout, OneReply(exam.renderer, rollout), 5.0))
    assert rollout.failure is not None and "its worker processes are closed" in rollout.failure.message


def test_a_demonstration_of_several_turns_is_played_with_the_tools_that_it_calls(tmp_path: Path) -> None:
    finding = examine_run(check_rewards, tools_config(tmp_path))
    assert finding.level is Level.GOOD, finding.text
    assert "env 'chain_sum' (its own scorer): its demonstration is worth 1, nonsense is worth 0" in finding.text
    # Calls that the policy's parser does not read are never run.
    finding = examine_run(check_rewards, tools_config(tmp_path, env="demonstration_format = 'mistral'"))
    assert finding.level is Level.WARNING and "its demonstration is worth 0" in finding.text


def test_an_environment_that_rewards_each_turn_is_good_whatever_the_number_of_turns(tmp_path: Path) -> None:
    world = "type = 'feedback'\ndataset = 'chain_sum'\nnum_tasks = 20\nbudget = {max_turns = 3}\nturn_rewards = true"
    settings = f"[orchestrator]\nmodel = {{name = '{MODEL}'}}\nsampling = {{max_tokens = 32}}\n"
    text = f"{settings}[[orchestrator.train.env]]\n{world}\n[inference]\nmax_model_len = 256\n[trainer]\nrow_length = 256\n"
    (tmp_path / "run.toml").write_text(text)
    finding = examine_run(check_rewards, load_config(tmp_path / "run.toml", []))
    assert finding.level is Level.GOOD, finding.text
    assert "its demonstration is worth 1, nonsense is worth 0" in finding.text


async def test_the_replies_of_every_conversation_of_a_probe_are_counted(tmp_path: Path) -> None:
    with Examination(questions_config(tmp_path, ROWS)) as exam:
        rollout = rollout_of(exam.worlds[0][0], {"id": "t"})
        session = OneReply(exam.renderer, rollout, ["4", "5"])
        question = [{"role": "user", "content": "hi"}]
        said = [await begin().ask(question) for begin in (lambda: session, session.fork, session.restart)]
    assert [reply.text for reply in said] == ["4", "5", "4"]
    assert rollout.num_turns == 3 and [node.content for node in rollout.nodes] == ["4", "5", "4"]
