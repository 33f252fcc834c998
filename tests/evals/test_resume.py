"""The folder of an evaluation: what it holds, that a repeat writes it again, and that nothing paid for is played twice."""

import asyncio
import json
import logging
import random
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.config.env import SamplingConfig
from jaxrl.config.evals import EvalConfig
from jaxrl.envs.base import Outcome, Session, TaskSpec
from jaxrl.envs.words import WordsPrompt, WordsReply
from jaxrl.errors import ConfigError, EndpointDownError, RunFailedError
from jaxrl.evals import EvalResult, score_rows
from jaxrl.evals.book import EpisodeBook, read_episodes
from jaxrl.monitors.folder import only_writer
from jaxrl.monitors.jsonl import read_lines
from jaxrl.types import ToolCall
from tests.evals.worlds import Coin, Sums, asking, files_of, harness

WARM = SamplingConfig(temperature=1.0, max_tokens=16)
ODD = {4: "raises", 5: "unscored"}
NUM_TASKS, NUM_EPISODES = 7, 14


def two_samples() -> EvalConfig:
    return asking(samples_per_task=2, sampling=WARM)


def world() -> Sums:
    return Sums(NUM_TASKS, odd=ODD, fields={"difficulty": 1, "group": "plus"})


async def evaluate(directory: Path, policy: Coin | None = None, **options: object) -> EvalResult:
    run = {name: options.pop(name) for name in ("step", "resume") if name in options}
    return await harness(world(), policy=policy or Coin(), output_dir=directory, **options).run(two_samples(), **run)


async def stopped_after(directory: Path, num_answers: int, *, concurrency: int = 1) -> Coin:
    """Begin the evaluation, and cancel it when so many answers were given."""
    policy = Coin()
    policy.stall_after = num_answers
    # The first questions are the slowest, so that later episodes wait for them.
    policy.latency_s = {"0 + 0 =": 0.02, "1 + 1 =": 0.01}
    evaluation = asyncio.create_task(evaluate(directory, policy, concurrency=concurrency))
    await asyncio.wait_for(policy.stalled.wait(), 10)
    evaluation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await evaluation
    return policy


@pytest.fixture
async def whole(tmp_path: Path) -> dict[str, bytes]:
    """The files of an evaluation that nothing happened to."""
    await evaluate(tmp_path / "whole", concurrency=1)
    return files_of(tmp_path / "whole")


async def test_the_folder_holds_the_plan_the_rows_the_result_and_the_times_apart(tmp_path: Path) -> None:
    result = await evaluate(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["episodes.jsonl", "plan.json", "result.json", "timings.jsonl"]
    rows = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert [row["episode_id"] for row in rows] == [f"s{a}|n{n}" for a in range(NUM_TASKS) for n in range(2)]
    assert rows == result.rows == read_episodes(tmp_path)
    assert json.dumps(score_rows(rows, 1.0)) == json.dumps(result.scores), "scores follow from the file alone"
    assert [row["status"] for row in rows[8:12]] == ["error", "error", "unscored", "unscored"]
    assert {key: rows[8][key] for key in ("reward", "difficulty", "group", "index", "sample", "version")} == {
        "reward": None, "difficulty": 1, "group": "plus", "index": 4, "sample": 0, "version": 3,
    }  # fmt: skip
    times = {row["episode_id"]: row for row in map(json.loads, (tmp_path / "timings.jsonl").read_text().splitlines())}
    assert times.keys() == {row["episode_id"] for row in rows}
    assert times["s0|n0"]["metrics"] == {"sums/duration_s": 0.5} and rows[0]["metrics"] == {"sums/a": 0.0}


async def test_two_runs_in_fresh_folders_are_equal_byte_for_byte_whatever_the_concurrency(tmp_path: Path, whole: dict[str, bytes]) -> None:
    policy = Coin()
    policy.latency_s = {f"{a} + {a} =": 0.01 * (NUM_TASKS - a) for a in range(NUM_TASKS)}
    await evaluate(tmp_path / "many", policy, concurrency=64)
    assert policy.answered != sorted(policy.answered), "episodes ended out of order"
    assert files_of(tmp_path / "many") == whole
    assert {row["reward"] for row in read_episodes(tmp_path / "many")} == {0.0, 1.0, None}, "the coin fell on both sides"


@pytest.mark.parametrize(("num_answers", "concurrency"), [(0, 1), (1, 3), (3, 1), (6, 5), (9, 64)])
async def test_a_stopped_run_that_is_resumed_plays_the_rest_and_writes_the_same_bytes(
    tmp_path: Path, whole: dict[str, bytes], num_answers: int, concurrency: int
) -> None:
    first = await stopped_after(tmp_path / "half", num_answers, concurrency=concurrency)
    assert not (tmp_path / "half" / "result.json").exists()
    assert concurrency > 1 or (tmp_path / "half" / "episodes.partial.jsonl").read_bytes() == b"", "only what is early is written twice"
    second = Coin()
    await evaluate(tmp_path / "half", second, concurrency=concurrency)
    assert files_of(tmp_path / "half") == whole
    assert len(first.answered) == num_answers and len(second.answered) == 12 - num_answers, "no answer was asked for twice"


async def test_an_episode_that_ends_before_its_turn_is_on_disk_at_once(tmp_path: Path) -> None:
    policy = Coin()
    policy.latency_s = {"0 + 0 =": 60.0}
    evaluation = asyncio.create_task(evaluate(tmp_path, policy))
    async with asyncio.timeout(10):
        while len(policy.answered) < 10 or len((tmp_path / "episodes.partial.jsonl").read_text().splitlines()) < 12:
            await asyncio.sleep(0.005)
    assert (tmp_path / "episodes.jsonl").read_text() == ""
    evaluation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await evaluation


async def test_a_killed_process_loses_at_most_what_was_in_flight(tmp_path: Path, whole: dict[str, bytes]) -> None:
    """The process ends without any clean-up, from within the answer to the seventh question."""
    script = f"""
import asyncio, os, sys
from pathlib import Path
from tests.evals.test_resume import evaluate
from jaxrl.types import ToolCall
from tests.evals.worlds import Coin

class Killed(Coin):
    async def answer(self, prompt, seed):
        if len(self.answered) == 6:
            os._exit(9)
        return await super().answer(prompt, seed)

asyncio.run(evaluate(Path({str(tmp_path / "killed")!r}), Killed(), concurrency=1))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], timeout=60, capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    assert len(read_episodes(tmp_path / "killed")) == 6
    await evaluate(tmp_path / "killed")
    assert files_of(tmp_path / "killed") == whole


@pytest.mark.parametrize("name", ["episodes.jsonl", "episodes.partial.jsonl"])
async def test_a_torn_last_line_is_dropped_with_a_word_and_played_again(
    tmp_path: Path, whole: dict[str, bytes], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    await evaluate(tmp_path / "torn", concurrency=1)
    lines = (tmp_path / "torn" / "episodes.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "torn" / "episodes.jsonl").write_bytes(b"".join(lines[:3]))
    with (tmp_path / "torn" / name).open("ab") as file:
        file.write(lines[6][:-20])
    with caplog.at_level(logging.WARNING):
        await evaluate(tmp_path / "torn")
    assert "the last line is incomplete and is left out" in caplog.text
    assert files_of(tmp_path / "torn") == whole


@pytest.mark.parametrize("line", [b'{"episode_id": "s0|n', b"[]", b'{"episode_id": "s99|n0", "error": null}'])
async def test_a_damaged_line_elsewhere_is_an_error_that_names_it(tmp_path: Path, line: bytes) -> None:
    await evaluate(tmp_path)
    lines = (tmp_path / "episodes.jsonl").read_bytes().splitlines()
    damaged = b"\n".join([lines[0], line, *lines[2:]]) + b"\n"
    (tmp_path / "episodes.jsonl").write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"episodes\.jsonl`, line 2: .*resume=False"):
        await evaluate(tmp_path)
    assert (tmp_path / "episodes.jsonl").read_bytes() == damaged


async def test_a_finished_evaluation_is_read_and_not_played_again(tmp_path: Path, whole: dict[str, bytes]) -> None:
    await evaluate(tmp_path / "again")
    policy = Coin()
    result = await evaluate(tmp_path / "again", policy)
    assert policy.answered == [] and result.scores["n_planned"] == NUM_EPISODES
    assert files_of(tmp_path / "again") == whole


async def test_what_failed_for_want_of_an_answer_or_of_time_is_played_again_and_other_errors_are_kept(tmp_path: Path) -> None:
    policy = Coin()
    policy.failing = {"2 + 2 ="}
    env = Sums(5, odd={0: "is gone", 1: "raises", 3: "hangs"})
    measured = harness(env, policy=policy, output_dir=tmp_path, rollout_deadline_s=0.1)
    result = await measured.run(asking())
    assert [row["error"] and row["error"]["stage"] for row in result.rows] == ["env", "env", "policy", "timeout", None]
    policy.failing, env.odd, env.played = set(), {}, []
    result = await measured.run(asking())
    assert [spec["id"] for spec in env.played] == ["s0", "s2", "s3"]
    assert [row["error"] and row["error"]["stage"] for row in result.rows] == [None, "env", None, None, None]


async def test_a_folder_of_another_evaluation_is_refused_and_left_alone(tmp_path: Path) -> None:
    await evaluate(tmp_path)
    before = files_of(tmp_path)
    measured = harness(world(), policy=Coin(), output_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"holds another evaluation: `config\.eval_parameters\.samples_per_task` is 2 there and 3 here"):
        await measured.run(asking(samples_per_task=3, sampling=WARM))
    with pytest.raises(ConfigError, match="`step` is 0 there and 4 here"):
        await measured.run(two_samples(), step=4)
    other = harness(Sums(NUM_TASKS), policy=Coin(), output_dir=tmp_path)
    with pytest.raises(ConfigError, match="`tasks_sha` is"):
        await other.run(two_samples())
    with pytest.raises(ConfigError, match="episodes of policy version 3, and version 8 is served now"):
        await evaluate(tmp_path, Coin(version=8))
    assert files_of(tmp_path) == before


async def test_episodes_without_a_plan_or_with_a_damaged_one_are_refused(tmp_path: Path) -> None:
    await evaluate(tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ConfigError, match=r"plan\.json` is damaged"):
        await evaluate(tmp_path)
    (tmp_path / "plan.json").unlink()
    with pytest.raises(ConfigError, match=r"has episodes but no `plan\.json`"):
        await evaluate(tmp_path)


async def test_beginning_anew_keeps_the_old_files_under_a_number(tmp_path: Path, whole: dict[str, bytes]) -> None:
    directory = tmp_path / "anew"
    await evaluate(directory)
    for number in (1, 2):
        policy = Coin()
        await evaluate(directory, policy, resume=False)
        assert len(policy.answered) == 12
        assert (directory / f"episodes.jsonl.bak{number}").read_bytes() == whole["episodes.jsonl"]
        assert (directory / f"result.json.bak{number}").read_bytes() == whole["result.json"]
    assert {name: content for name, content in files_of(directory).items() if ".bak" not in name} == whole


async def test_two_evaluations_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with only_writer(tmp_path), pytest.raises(ConfigError, match="another process is writing there"):
        await evaluate(tmp_path)
    await evaluate(tmp_path)


async def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written into"):
        await evaluate(tmp_path / "file")


async def test_a_disk_that_is_full_ends_the_evaluation_in_words(tmp_path: Path) -> None:
    class Full:
        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

        def close(self) -> None: ...

    book = EpisodeBook(["a|n0"], tmp_path)
    book.open({}, resume=True)
    book._files["timings.jsonl"].close()
    book._files["timings.jsonl"] = Full()
    book.put(0, {"episode_id": "a|n0"}, {})
    with pytest.raises(RunFailedError, match=r"cannot be written any more .*No space left"):
        book.flush()
    book.close()


async def test_a_disk_that_fills_up_in_the_middle_of_a_line_and_then_has_room_again_costs_that_line_only(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    class Wordy(Coin):
        """Fills the disk from within the answer to the sixth question: no file may grow any more, but by a few bytes."""

        async def answer(self, prompt: WordsPrompt, seed: int) -> WordsReply:
            if len(self.answered) == 5:
                largest = max(path.stat().st_size for path in (tmp_path / "full").iterdir())
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 100, allowed[1]))
            return await super().answer(prompt, seed)

    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(RunFailedError, match=r"cannot be written any more .*File too large"):
            await evaluate(tmp_path / "full", Wordy(), concurrency=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert not (tmp_path / "full" / "episodes.jsonl").read_bytes().endswith(b"\n"), "a line is torn"
    await evaluate(tmp_path / "full")
    assert files_of(tmp_path / "full") == whole


def test_nothing_is_written_behind_a_torn_line_though_there_is_room_again(tmp_path: Path) -> None:
    ids = [f"a|n{n}" for n in range(7)]
    book = EpisodeBook(ids, tmp_path)
    book.open({}, resume=True)
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    for place in range(1, 5):  # all of them early
        book.put(place, {"episode_id": ids[place], "text": "x" * 30_000}, {})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, allowed[1]))
        with pytest.raises(RunFailedError, match="cannot be written any more"):
            book.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    for place in (5, 6):
        book.put(place, {"episode_id": ids[place]}, {})
        book.flush()
    book.close()
    assert [row["episode_id"] for row in read_lines(tmp_path / "episodes.partial.jsonl")] == ids[1:3]


async def test_a_result_that_cannot_be_written_is_said_and_written_by_the_next_start(tmp_path: Path, whole: dict[str, bytes]) -> None:
    directory = tmp_path / "folder"
    (directory / "result.json.new").mkdir(parents=True)
    with pytest.raises(RunFailedError, match=r"result\.json` cannot be written .* all episodes are kept"):
        await evaluate(directory)
    (directory / "result.json.new").rmdir()
    policy = Coin()
    await evaluate(directory, policy)
    assert policy.answered == [] and files_of(directory) == whole


async def test_after_a_kill_in_the_middle_of_any_line_the_rest_is_played_and_the_files_are_the_same(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """The bytes that a kill leaves: any beginning of what was written, in both files, whatever had got to the disk of either."""
    chance = random.Random(5)
    lines = whole["episodes.jsonl"].splitlines(keepends=True)
    for attempt in range(12):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        (directory / "plan.json").write_bytes(whole["plan.json"])
        early = [lines[place] for place in sorted(chance.sample(range(NUM_EPISODES), chance.randrange(NUM_EPISODES)))]
        for name, written in (("episodes.jsonl", lines), ("episodes.partial.jsonl", early), ("timings.jsonl", early)):
            content = b"".join(written)
            (directory / name).write_bytes(content[: chance.randrange(len(content) + 1)])
        await evaluate(directory)
        assert files_of(directory) == whole
        for line in (directory / "timings.jsonl").read_text().splitlines():
            json.loads(line)


async def test_a_row_that_lacks_what_scores_need_is_a_damaged_one(tmp_path: Path) -> None:
    await evaluate(tmp_path)
    lines = (tmp_path / "episodes.jsonl").read_text().splitlines(keepends=True)
    for damage in ({"status": None}, {"token_versions": None}, {"error": "it broke"}, {"episode_id": ["s0|n0"]}):
        row = json.loads(lines[2]) | damage
        row = {key: value for key, value in row.items() if value is not None or key in ("error", "seed", "split", "stop_reason")}
        (tmp_path / "episodes.jsonl").write_text("".join([*lines[:2], json.dumps(row) + "\n", *lines[3:]]))
        with pytest.raises(ConfigError, match="line 3: not an episode of this evaluation"):
            await evaluate(tmp_path)


async def test_what_is_nested_too_deeply_to_be_written_costs_no_row(tmp_path: Path) -> None:
    class Deep(Coin):
        async def answer(self, prompt: WordsPrompt, seed: int) -> WordsReply:
            deep: list = []
            for _ in range(200_000):  # Python 3.13 writes thousands of levels
                deep = [deep]
            call = ToolCall("c1", "sum", {"x": deep}, raw="{}")
            return replace(await super().answer(prompt, seed), tool_calls=(call,))

    result = await evaluate(tmp_path, Deep())
    rows = read_episodes(tmp_path)
    assert [row["episode_id"] for row in rows] == [row["episode_id"] for row in result.rows] and len(rows) == NUM_EPISODES
    assert rows[0]["messages"] == "cannot be written: RecursionError" and rows[0]["error"] == result.rows[0]["error"]
    assert json.dumps(score_rows(rows, 1.0)) == json.dumps(result.scores)


async def test_ids_of_any_letters_and_numbers_that_are_none_are_rows_that_are_read_as_they_were(tmp_path: Path) -> None:
    class Odd(Sums):
        def __init__(self) -> None:
            super().__init__(4)
            odd = ["a|n0", "a|s0", 'a\n\u2028\x85"', "\ud800 \U0001f600"]
            self._tasks = [
                {**spec, "id": name, "difficulty": float("nan"), "group": ["g"]} for spec, name in zip(self._tasks, odd, strict=True)
            ]

    config = asking(seeds=(0, -1), samples_per_task=2, sampling=WARM)
    first = await harness(Odd(), policy=Coin(), output_dir=tmp_path).run(config)
    written = files_of(tmp_path)
    assert len({row["episode_id"] for row in first.rows}) == 16 and read_episodes(tmp_path) == first.rows
    assert first.rows[2]["episode_id"] == "a|n0|s-1|n0" and first.rows[0]["difficulty"] is None
    again = await harness(Odd(), policy=Coin(), output_dir=tmp_path).run(config)
    assert again.scores == first.scores and files_of(tmp_path) == written
    assert EvalResult.from_json(tmp_path / "result.json").scores == json.loads(json.dumps(first.scores))


async def test_what_the_environment_writes_into_a_task_reaches_no_other_episode_and_no_row(tmp_path: Path) -> None:
    class Careless(Sums):
        async def play(self, spec: TaskSpec, session: Session) -> Outcome:
            outcome = await super().play(dict(spec), session)
            spec["deck"].clear()
            spec |= {"a": 99, "difficulty": "none", "seed": "gone"}
            return outcome

        def question(self, spec: TaskSpec) -> str:
            assert spec["deck"] == [1, 2] and spec["a"] < 99
            return super().question(spec)

    env = Careless(3, fields={"deck": [1, 2], "difficulty": 1})
    result = await harness(env, policy=Coin(), should_probe=True).run(asking(seeds=(5,), samples_per_task=2, sampling=WARM))
    assert result.scores["n_scored"] == 6 and result.scores["reproducible"] is True
    assert {(row["difficulty"], row["seed"]) for row in result.rows} == {(1, 5)}
    assert env.tasks() == [{"id": f"s{a}", "a": a, "deck": [1, 2], "difficulty": 1} for a in range(3)]


async def test_progress_of_a_resumed_run_begins_where_it_was(tmp_path: Path) -> None:
    await stopped_after(tmp_path, 6)
    told: list[tuple[int, int]] = []
    await evaluate(tmp_path, concurrency=1, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(done, NUM_EPISODES) for done in range(6, NUM_EPISODES + 1)]


async def test_an_evaluation_whose_policy_never_answers_ends_early_and_keeps_its_rows(tmp_path: Path) -> None:
    policy = Coin()
    policy.failing = {f"{a} + {a} =" for a in range(100)}
    env = Sums(100)
    with pytest.raises(EndpointDownError, match=r"did not answer 8 episodes in a row, .* the first one: EngineError: nobody"):
        await harness(env, policy=policy, output_dir=tmp_path, concurrency=2).run(asking())
    assert len(env.played) <= 10 and not (tmp_path / "result.json").exists()
    assert [row["error"]["stage"] for row in read_episodes(tmp_path)] == ["policy"] * len(read_episodes(tmp_path))
    policy.failing = set()
    result = await harness(env, policy=policy, output_dir=tmp_path).run(asking())
    assert result.scores["n_scored"] == 100 and len(policy.answered) == 100


async def test_an_evaluation_whose_policy_goes_away_ends_early_too() -> None:
    policy = Coin()
    policy.failing = {f"{a} + {a} =" for a in range(20, 100)}
    with pytest.raises(EndpointDownError, match="12 episodes in a row"):
        await harness(Sums(100), policy=policy, concurrency=12).run(asking())
    policy.failing = {f"{a} + {a} =" for a in range(0, 100, 2)}
    result = await harness(Sums(100), policy=policy, concurrency=1).run(asking())
    assert (result.scores["n_error"], result.scores["error_rate"]) == (50, 0.5), "failures among answers are data"


async def test_a_small_evaluation_without_any_answer_is_no_result() -> None:
    policy = Coin()
    policy.failing = {"0 + 0 =", "1 + 1 ="}
    with pytest.raises(EndpointDownError, match="2 episodes in a row"):
        await harness(Sums(2), policy=policy).run(asking())


async def test_the_last_episode_of_many_that_gets_no_answer_again_is_a_row_again(tmp_path: Path) -> None:
    policy = Coin()
    policy.failing = {"1 + 1 ="}
    for _ in range(2):
        result = await harness(Sums(3), policy=policy, output_dir=tmp_path).run(asking())
        assert [row["status"] for row in result.rows] == ["ok", "error", "ok"]


async def test_a_world_that_dies_after_ten_episodes_leaves_rows_that_say_so(tmp_path: Path) -> None:
    env = Sums(40, odd=dict.fromkeys(range(10, 40), "raises"))
    result = await harness(env, policy=Coin(), output_dir=tmp_path).run(asking())
    assert [row["status"] for row in read_episodes(tmp_path)] == ["ok"] * 10 + ["error"] * 30
    scores = result.scores
    assert (scores["n_planned"], scores["n_scored"], scores["n_error"], scores["error_rate"]) == (40, 10, 30, 0.75)
    assert scores["success_rate_strict"] == scores["success_rate"] * 10 / 40


async def test_a_world_that_gives_no_reward_leaves_unscored_rows_and_no_success_rate(tmp_path: Path) -> None:
    env = Sums(3, odd=dict.fromkeys(range(3), "unscored"))
    result = await harness(env, policy=Coin(), output_dir=tmp_path).run(asking())
    assert [(row["status"], row["reward"]) for row in result.rows] == [("unscored", None)] * 3
    assert result.scores["n_unscored"] == 3 and "success_rate" not in result.scores and result.scores["success_rate_strict"] == 0.0


async def test_an_error_names_no_address_in_memory() -> None:
    class Board:
        pass

    class Broken(Sums):
        async def play(self, spec, session):  # type: ignore[no-untyped-def]
            raise RuntimeError(f"{Board()!r} is full")

    result = await harness(Broken(1)).run(asking())
    message = result.rows[0]["error"]["message"]
    assert re.search(r"Board object at 0x\.\.\.> is full", message)


@given(st.lists(st.sampled_from([None, "raises", "unscored", "fails"]), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_whatever_becomes_of_episodes_there_is_one_row_for_each_and_scores_follow_from_the_rows(
    odd: list[str | None], num_samples: int, concurrency: int
) -> None:
    policy = Coin()
    policy.failing = {f"{a} + {a} =" for a, what in enumerate(odd) if what == "fails"}
    env = Sums(len(odd), odd={a: what for a, what in enumerate(odd) if what is not None})
    measured = harness(env, policy=policy, concurrency=concurrency)
    config = asking(seeds=(1, 2), samples_per_task=num_samples, sampling=WARM)
    try:
        result = measured.run_from_config(config)
    except EndpointDownError:
        assert "fails" in odd
        return
    rows = [json.loads(json.dumps(row)) for row in result.rows]
    assert [row["episode_id"] for row in rows] == [f"s{a}|s{s}|n{n}" for a in range(len(odd)) for s in (1, 2) for n in range(num_samples)]
    assert [row["status"] for row in rows[:: 2 * num_samples]] == [
        {None: "ok", "raises": "error", "unscored": "unscored", "fails": "error"}[what] for what in odd
    ]
    assert all((row["reward"] is None) == (row["status"] != "ok") for row in rows)
    assert json.dumps(score_rows(rows, 1.0)) == json.dumps(result.scores)
    counts = result.scores
    assert counts["n_planned"] == len(rows) == counts["n_scored"] + counts["n_error"] + counts["n_unscored"]


def test_run_from_config_needs_no_event_loop(tmp_path: Path) -> None:
    result = harness(world(), policy=Coin(), output_dir=tmp_path).run_from_config(two_samples())
    assert result.scores["n_planned"] == NUM_EPISODES and result.step == 0


async def test_run_from_config_says_what_to_do_where_an_event_loop_is_running() -> None:
    with pytest.raises(RuntimeError, match=r"use `await harness\.run\(config\)` there"):
        harness(world(), policy=Coin()).run_from_config(two_samples())


async def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = await evaluate(tmp_path)
    read = EvalResult.from_json(tmp_path / "result.json")
    assert (read.config, read.env_name, read.step, read.version) == (result.config, "sums", 0, 3)
    assert read.scores == result.scores and read.flat_scores() == result.flat_scores() and read.rows == []
    written = json.loads((tmp_path / "result.json").read_text())
    assert list(written) == ["config", "scores"], "OpenEnv's `EvalResult` and `EvalConfig` refuse any other field"
    assert list(written["config"]) == ["harness_name", "harness_version", "library_versions", "dataset", "eval_parameters"]
    read.to_json(tmp_path / "copy.json")
    assert (tmp_path / "copy.json").read_bytes() == (tmp_path / "result.json").read_bytes()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"scores": {}, "config": {"dataset": "d", "what": 1}}'])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ConfigError, match="is no result of an evaluation"):
        EvalResult.from_json(tmp_path / "result.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        EvalResult.from_json(tmp_path / "nowhere.json")
