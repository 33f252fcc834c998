"""`python -m jaxrl.eval` against a scripted server: exit codes, files, JSON, resuming, comparing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from jaxrl import eval as command
from jaxrl import rollouts
from jaxrl.config.dump import dump_toml
from jaxrl.config.eval_command import EvalCommandConfig
from jaxrl.config.eval_flags import build_eval_parser, parse_eval_flags
from jaxrl.config.evals import library_versions, settings_in_evaluation
from jaxrl.config.load import load_config, take_overrides
from jaxrl.evals.book import EPISODES, RESULT
from jaxrl.evals.result import EvalResult
from jaxrl.launch.measuring import eval_config
from tests.inference.wire_server import MODEL, Answer, Call, FakeModel, WireServer

SUMS = "py:tests.eval_worlds:sums"


class Adder(FakeModel):
    """Adds two numbers, as long as the first is below `below`; after `dies_after` replies it answers nobody any more."""

    def __init__(self) -> None:
        super().__init__()
        self.say = self._add
        self.below = 100
        self.dies_after: int | None = None
        self.num_said = 0

    def __call__(self, call: Call) -> Answer:
        if self.dies_after is not None and self.num_said >= self.dies_after:
            return Answer(503, {"error": "gone"})
        return super().__call__(call)

    def _add(self, question: str) -> str:
        self.num_said += 1
        first, second = question.removesuffix(" =").split(" + ")
        return str(int(first) + int(second)) if int(first) < self.below else "no idea"


class Served:
    """A server in a thread of its own."""

    def __init__(self) -> None:
        self.model = Adder()
        self.server = WireServer(self.model)

    @property
    def flags(self) -> list[str]:
        return ["--llm-endpoint", self.server.base_url, "--model", MODEL]

    @contextlib.contextmanager
    def running(self) -> Iterator[Served]:
        loop, is_up = asyncio.new_event_loop(), threading.Event()
        stop = asyncio.Event()

        async def serve() -> None:
            async with self.server.running():
                is_up.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
        thread.start()
        assert is_up.wait(10)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(10)
            loop.close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxrl.inference.http.Backoff.wait_s", lambda *arguments: 0.0)
    with Served().running() as running:
        yield running


def run(served: Served, *argv: str, spec: str = SUMS) -> int:
    return command.main([spec, *served.flags, *argv])


def result(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / RESULT).read_text())


def test_an_evaluation_prints_a_table_and_leaves_its_rows_and_scores(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.model.below = 9
    assert run(served, "--limit", "11") == 0
    shown = capsys.readouterr()
    folder = Path("evals") / f"tests.eval_worlds-sums-{MODEL}"
    scores = result(str(folder))["scores"]
    assert (scores["n_scored"], scores["success_rate"]) == (11, 9 / 11), "of both difficulties in turn: 0 to 5, and 6 to 10"
    assert {name: kind["n"] for name, kind in scores["by_difficulty"].items()} == {"large": 5, "small": 6}
    assert all(word in shown.out for word in ("81.8 % ± 11.6 %", "reproducible", "yes", "small", str(folder)))
    assert "11 of 11 episodes" in shown.err and "Traceback" not in shown.err
    assert (folder / "success_by_difficulty.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_all_that_is_on_standard_output(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(served, "--json", "-o", "out") == 0
    shown = capsys.readouterr()
    (line,) = shown.out.splitlines()
    value = json.loads(line)
    assert {**result("out"), "output_dir": "out", "comparison": None} == value and shown.err


def test_a_repeat_asks_for_nothing_and_writes_the_same_bytes(served: Served) -> None:
    assert run(served, "-o", "a") == 0
    num_said, before = served.model.num_said, {name: Path("a", name).read_bytes() for name in (EPISODES, RESULT)}
    assert run(served, "-o", "a") == 0 and served.model.num_said == num_said
    assert run(served, "-o", "a", "--no-resume") == 0 and served.model.num_said == 2 * num_said
    assert {name: Path("a", name).read_bytes() for name in (EPISODES, RESULT)} == before
    assert run(served, "-o", "a", "--limit", "3") == 2, "another evaluation in the same folder"


def test_a_server_that_dies_ends_the_evaluation_and_the_same_command_goes_on(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(served, "-o", "whole") == 0
    served.model.num_said, served.model.dies_after = 0, 4
    assert run(served, "-o", "torn", "--concurrency", "1", "--env.kwargs.num_tasks", "12", "--no-resume") == 5
    shown = capsys.readouterr().err
    assert "Unreachable" in shown and "What was played is kept. Once that is mended, go on with:" in shown
    assert "jaxrl.eval" in shown and "--no-resume" not in shown.split("go on with:")[1]
    rows = [json.loads(line) for line in Path("torn", EPISODES).read_text().splitlines()]
    assert [row["status"] for row in rows].count("ok") == 4
    served.model.dies_after = None
    served.model.num_said = 0
    assert run(served, "-o", "torn", "--concurrency", "1", "--env.kwargs.num_tasks", "12") == 0
    assert served.model.num_said == 8, "what was played is not played again"
    assert "4 of 12 episodes are there already" in capsys.readouterr().err
    assert Path("torn", EPISODES).read_bytes() == Path("whole", EPISODES).read_bytes()


def test_episodes_that_met_no_server_end_with_5_though_the_evaluation_came_to_its_end(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.model.dies_after = 9
    assert run(served, "-o", "out", "--concurrency", "12") == 5
    assert "3 of 12 episodes met no server" in capsys.readouterr().err
    assert result("out")["scores"]["n_error"] == 3


def test_who_cannot_be_reached_ends_with_5_at_once(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.server.port = 1  # where nobody listens
    assert run(served) == 5
    shown = capsys.readouterr().err
    assert "cannot be reached" in shown and "Nothing was played yet. Once that is mended" in shown


def test_an_openenv_server_that_cannot_be_reached_ends_with_5(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("websockets")
    for argv in (["openenv:http://127.0.0.1:1"], ["openenv", "--base-url", "http://127.0.0.1:1"]):
        assert command.main([*argv, *served.flags]) == 5
        assert "`base_url`='http://127.0.0.1:1'" in capsys.readouterr().err


def test_a_comparison_lists_what_was_fixed_and_what_regressed(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.model.below = 6
    assert run(served, "-o", "before") == 0
    served.model.below = 5
    flags = ("--compare", "before/result.json", "--fail-on-regression")
    assert run(served, "-o", "after", *flags) == 4
    shown = capsys.readouterr()
    assert "12 tasks compared: 0 fixed, 1 regressed" in shown.out and "regressed (1): s5" in shown.out
    assert "1 tasks regressed" in shown.err
    served.model.below = 100
    assert run(served, "-o", "better", *flags, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["comparison"]["fixed"]) == 6
    num_said = served.model.num_said
    assert run(served, "-o", "fewer", "--limit", "6", *flags) == 2
    assert "limit None before, 6 after" in capsys.readouterr().err and served.model.num_said == num_said, "seen before anything is played"
    assert run(served, "-o", "fewer", "--limit", "6", "--force", *flags) == 0


def test_a_world_that_does_not_repeat_itself_is_told_and_ends_with_3_where_that_is_asked(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = "py:tests.eval_worlds:restless"
    assert run(served, "-o", "out", spec=spec) == 0
    assert "no" in capsys.readouterr().out.split("reproducible")[1].splitlines()[0]
    assert run(served, "-o", "out", "--require-reproducible", spec=spec) == 3
    assert run(served, "-o", "calm", "--require-reproducible", "--probe-policy") == 0
    assert result("calm")["scores"]["probes"][-1]["kind"] == "policy"


def test_a_gate_on_p_lets_a_few_changes_pass_and_stops_a_fall(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(served, "-o", "before") == 0
    flags = ("--compare", "before/result.json", "--fail-on-regression", "--regression-p", "0.05")
    served.model.below = 11
    assert run(served, "-o", "nearly", *flags) == 0, "one of twelve regressed: p = 1"
    assert "python -m jaxrl.rollouts nearly --task s11" in capsys.readouterr().out
    assert rollouts.main(["nearly", "--task", "s11"]) == 0 and "11 + 11 =" in capsys.readouterr().out
    served.model.below = 6
    assert run(served, "-o", "worse", *flags) == 4, "six of twelve: p = 0.03"
    assert "6 tasks regressed and 0 were fixed, p = 0.0312 (--regression-p 0.05)" in capsys.readouterr().err


def test_fewer_tasks_than_were_asked_for_and_seeds_that_change_nothing_are_told(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    assert run(served, "-o", "many", "--limit", "500", "--seeds", "0,1") == 0
    few, seeds = [record.getMessage() for record in caplog.records]
    assert few == "asked for 500 tasks, the environment has 12"
    assert seeds.startswith("no task began differently under another seed (`seeds` 0,1)") and "same episodes 2 times" in seeds
    caplog.clear()
    assert run(served, "-o", "drawn", "--limit", "12", "--seeds", "0,1", "--temperature", "0.5") == 0
    assert not caplog.records


def test_a_split_is_named_where_it_leaves_fewer_tasks_than_were_asked_for(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.model.say = lambda question: "7"
    flags = ("--env.num_tasks", "400", "--env.parameters", "{min_digits = 3, max_digits = 3}")
    assert run(served, "-o", "out", *flags, spec="reasoning_gym:chain_sum") == 0
    few = next(record.getMessage() for record in caplog.records if record.getMessage().startswith("asked for"))
    assert few.startswith("asked for 400 tasks, the environment has ")
    assert few.endswith(": `split`='heldout' keeps about 10 % of the distinct questions, of which `--env.num_tasks` 400 were generated")


def test_nothing_scored_is_a_failure(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(served, "-o", "out", spec="py:tests.eval_worlds:broken") == 1
    shown = capsys.readouterr()
    assert "the board fell over" in shown.out and "No episode was scored" in shown.err


def test_seeds_and_samples_are_played_and_told(served: Served) -> None:
    assert run(served, "-o", "out", "--limit", "2", "--seeds", "0,5", "--samples-per-task", "3", "--temperature", "0.5") == 0
    value = result("out")
    assert value["scores"]["n_scored"] == 12 and value["scores"]["pass@k"] == {"1": 1.0, "2": 1.0, "3": 1.0}
    sent = [call.body for call in served.server.calls if call.method == "POST"]
    assert {body["temperature"] for body in sent} == {0.5} and len({body["seed"] for body in sent}) == 12


ENDPOINT = ["--llm-endpoint", "http://127.0.0.1:1", "--model", "m"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([SUMS], "say who is measured"),
        ([SUMS, *ENDPOINT, "--checkpoint", "x"], "say who is measured"),
        ([SUMS, "--llm-endpoint", "http://127.0.0.1:1"], "`--llm-endpoint` needs `--model NAME`"),
        (
            [SUMS, "--llm-endpoint", "127.0.0.1:1/v1", "--model", "m"],
            "`--llm-endpoint`: expected an address such as http://127.0.0.1:8000/v1",
        ),
        ([SUMS, *ENDPOINT, "--samples-per-task", "3"], "at temperature 0 would play the same"),
        ([SUMS, *ENDPOINT, "--split", "test"], "an environment of type 'python' has no splits"),
        ([SUMS, *ENDPOINT, "--fail-on-regression"], "`--fail-on-regression` needs `--compare"),
        ([SUMS, *ENDPOINT, "--regression-p", "0.05"], "`--regression-p` needs `--compare"),
        ([SUMS, *ENDPOINT, "--compare", "none.json"], "`none.json` cannot be read"),
        ([SUMS, *ENDPOINT, "--api-key-var", "JAXRL_NO_SUCH_KEY"], "the environment variable JAXRL_NO_SUCH_KEY is not set"),
        ([SUMS, *ENDPOINT, "--num-slots", "4"], "are for `--checkpoint`; leave them out"),
        ([SUMS, *ENDPOINT, "--env.kwarg", "{}"], "unknown key `env.kwarg` (from the command line); did you mean `env.kwargs`?"),
        ([SUMS, *ENDPOINT, "--top-p", "2"], "`--top-p`: Input should be less than or equal to 1"),
        (["reasoning_gym:chain_sum", *ENDPOINT, "--max-turns", "2"], "has one turn; leave it out"),
        (["reasoning_gym:chain_sun", *ENDPOINT], "did you mean 'chain_sum' or"),
        ([SUMS, *ENDPOINT, "--base-url", "http://127.0.0.1:1"], "the address of an OpenEnv server"),
        (["config:none.toml#x", *ENDPOINT], "there is no configuration file `none.toml`"),
        ([SUMS, "--checkpoint", "no/such/model"], "is not a directory on this machine"),
    ],
)
def test_what_does_not_go_together_ends_with_2_in_words(
    argv: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    assert command.main(argv) == 2
    shown = capsys.readouterr().err
    assert "Configuration error" in shown and said in shown and "Traceback" not in shown
    assert list(tmp_path.iterdir()) == []


def test_the_server_must_have_the_model(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([SUMS, "--llm-endpoint", served.server.base_url, "--model", "other"]) == 2
    assert f"does not serve 'other'; it serves '{MODEL}'" in capsys.readouterr().err


def test_an_environment_of_a_run_is_measured_as_the_run_measures_it(served: Served) -> None:
    config = Path(__file__).parents[1] / "configs" / "quickstart.toml"
    request = command.read_request(
        parse_eval_flags([f"config:{config}", *served.flags, "--limit", "2"], build_eval_parser()), [], lambda text: None
    )
    assert request.dataset == "reasoning_gym:chain_sum", "as the run itself calls it, so that both can be compared"
    assert request.command.env.split == "heldout"  # type: ignore[union-attr]
    assert request.parameters.sampling.max_tokens == 32 and request.parameters.sampling.temperature == 0.0
    assert request.parameters.limit == 2 and request.is_in_turns and request.num_asked == 2
    argv = [f"config:{config}#chain_sum", *served.flags, "--env.num_tasks=50", "--split", "test"]
    overrides, rest = take_overrides(argv, EvalCommandConfig)
    trained = command.read_request(parse_eval_flags(rest, build_eval_parser()), overrides, lambda text: None)
    assert (trained.command.env.split, trained.command.env.num_tasks) == ("heldout", 50)  # type: ignore[union-attr]
    assert not trained.is_in_turns, "its tasks are those that the run measures"
    assert trained.parameters.sampling == request.parameters.sampling, "that of evaluation"
    assert trained.num_asked == 50


def test_a_run_folder_names_its_environments_and_its_base_policy_can_be_compared_with_the_trained(tmp_path: Path) -> None:
    config = load_config(
        Path(__file__).parents[1] / "configs" / "quickstart.toml",
        ["--run.seed=5", "--orchestrator.eval.num_tasks=7", "--orchestrator.eval.success_threshold=0.5"],
    )
    (tmp_path / "config.toml").write_text(dump_toml(config))
    (env,) = config.orchestrator.eval.env
    measured = eval_config(config.orchestrator.eval, env, "base")
    EvalResult(measured, "x", 0, 0, {"per_task": {"a": {"success_rate": 1.0}}}, []).to_json(tmp_path / "base.json")
    argv = [f"config:{tmp_path}#{env.name}", *ENDPOINT, "--compare", str(tmp_path / "base.json")]
    request = command.read_request(parse_eval_flags(argv, build_eval_parser()), [], lambda text: None)
    assert request.run_seed == 5 and not request.is_in_turns
    again = command.read_request(parse_eval_flags([*argv, "--limit", "7"], build_eval_parser()), [], lambda text: None)
    assert not again.is_in_turns and again.parameters == request.parameters, "as many as the run plays are those that it plays"
    assert request.command.inference == config.engine, "the same window, whoever is measured"
    assert request.parameters == measured.eval_parameters.model_copy(update={"model": "m"})
    assert library_versions(request.command.env) == measured.library_versions == {"reasoning-gym": metadata.version("reasoning-gym")}
    assert settings_in_evaluation(request.command.env) == measured.env_parameters
    assert request.before is not None and request.before.config.dataset == request.dataset == "reasoning_gym:chain_sum"


FRESH = """
import sys
from jaxrl import eval
code = eval.main(sys.argv[1:])
assert code == 0, code
assert not {"jax", "transformers", "orbax", "flax"} & sys.modules.keys()
"""


def test_a_served_model_is_measured_without_jax(served: Served) -> None:
    argv = [sys.executable, "-c", FRESH, SUMS, *served.flags, "--limit", "3"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
