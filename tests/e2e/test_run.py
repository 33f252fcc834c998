"""Whole runs in this process: what the run folder says, compilations, asynchronous mode, evaluation, publication."""

import asyncio
import contextlib
import itertools
import json
import re
import subprocess
import sys
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from jaxrl.engine import EmbeddedEndpoint
from jaxrl.envs.build import build_environment
from jaxrl.envs.single_turn import SingleTurnEnvironment
from jaxrl.errors import CheckpointError, ConfigError, DeadlineError, RunFailedError
from jaxrl.launch import array_arm, training
from jaxrl.launch.side_by_side import side_by_side
from jaxrl.monitors.metrics import MEANINGS
from jaxrl.trainer.compiles import num_compiles
from tests.e2e.runs import EVALUATED, UNMEASURED, checkpoints_of, metrics, rollouts, run_here, small_run
from tests.test_surface import METRICS

BUCKETS = ("trained", "gated", "stale", "overlong_dropped", "unscored", "errored", "cancelled", "filtered/zero_advantage", "pending")


def is_balanced(row: dict[str, float]) -> bool:
    return sum(row[f"ledger/{bucket}"] for bucket in BUCKETS) == row["ledger/dispatched"]


def promised_metrics() -> set[str]:
    """The names that a row of the small run must have; the peak of this CPU is not known, so there is no utilisation."""
    names = {name.replace("<env>", "chain_sum").replace("<name>", "zero_advantage") for name in METRICS}
    ledger = {f"ledger/{bucket}" for bucket in BUCKETS}
    ratios = ("zero_signal_fraction", "signal_groups_per_episode", "signal_groups_per_cost")
    tasks = {f"tasks/chain_sum/{counter}" for counter in ("groups", "signal_groups", "episodes", "cost", *ratios)}
    names |= {"memory/host_rss_gib", "memory/host_peak_gib", "compile/cache_hits"}
    return names - {"ledger/<bucket>", "throughput/mfu_frac"} | ledger | tasks


def has_meaning(metric: str) -> bool:
    return any(re.fullmatch(re.sub(r"<\w+>", ".+", re.escape(name)), metric) for name in MEANINGS)


def trained_tokens(rollout: dict) -> list[tuple[str, str, float, float]]:
    """Return text, origin, trainer logprob and sampling logprob of each trained token of a rollout."""
    (branch,) = rollout["samples"]
    streams = branch["streams"]
    tokens = zip(branch["text"], branch["origin"], streams.get("trainer_logprobs", []), streams["inference_logprobs"], strict=False)
    return [token for token, why in zip(tokens, branch["why_untrained"], strict=False) if why is None]


def test_a_synchronous_run_writes_its_folder_and_measures_no_mismatch(tmp_path):
    run_dir = tmp_path / "run"
    outcome = run_here(small_run(run_dir, *EVALUATED, "--run.max_steps=3", "--trainer.checkpoint.every_n_steps=2"))
    rows = metrics(run_dir)

    assert outcome.is_complete
    assert sorted(rows) == [0, 1, 2, 3]
    folder = {"config.toml", "environment.json", "metrics.jsonl", "rollouts", "evals", "checkpoints", "logs"}
    assert {path.name for path in run_dir.iterdir()} == folder
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"step_000002", "step_000003"}
    assert "eval/chain_sum_heldout/success_rate" in rows[0]
    assert "eval/chain_sum_heldout/success_rate" in rows[3]
    for step in (1, 2, 3):
        assert len(rollouts(run_dir, step)) == 32
        assert is_balanced(rows[step])
        assert 0 <= rows[step]["mismatch/kl/mean"] < 1e-6
        assert rows[step]["mismatch/ratio/max"] < 1 + 1e-4
        assert rows[step]["policy/staleness_steps/max"] == 0
        assert rows[step]["policy/version"] == step
        assert promised_metrics() - rows[step].keys() == set()
        tokens = [token for rollout in rollouts(run_dir, step) for token in trained_tokens(rollout)]
        assert {origin for _, origin, _, _ in tokens} == {"policy"} and any(text == "<|im_end|>" for text, *_ in tokens)
        np.testing.assert_allclose([token[2] for token in tokens], [token[3] for token in tokens], atol=1e-3, err_msg="trainer, engine")
    assert [name for row in rows.values() for name in row if name != "step" and not has_meaning(name)] == []
    start_up = json.loads((run_dir / "environment.json").read_text())["start_up"]
    assert start_up["load_s"] > 0 and start_up["compile_s"] > 0 and start_up["programs"] >= 4
    assert (start_up["programs_from_cache"], start_up["compile_cache"]) == (0, None), "tests compile for themselves"
    assert {path.name for path in (run_dir / "logs").iterdir()} == {"run.log", "run.jsonl"}
    records = [json.loads(line) for line in (run_dir / "logs" / "run.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["message"].startswith("done:")] == [3]
    assert any(re.fullmatch(r"compiled grad_step in [\d.]+ s", r["message"]) for r in records)

    assert run_here(small_run(run_dir, *EVALUATED, "--run.max_steps=3"), resume=True).is_complete, "there is nothing left to do"
    with pytest.raises(ConfigError, match="at step 3 already"):
        run_here(small_run(run_dir, *EVALUATED, "--run.max_steps=2"), resume=True)
    assert metrics(run_dir) == rows


def test_nothing_is_compiled_after_warm_up(tmp_path, monkeypatch):
    """Prompts and replies differ in length from step to step, and micro-batches in number; no program may notice."""
    run_dir = tmp_path / "run"
    before = num_compiles()
    jax.jit(lambda x: x + 1)(np.zeros(7, np.float32))
    assert num_compiles() == before + 1, "the counter must see a new shape, or the rest of this test says nothing"

    warm = []

    @contextlib.contextmanager
    def counted(*args):
        with array_arm(*args) as arm:
            warm.append(num_compiles())
            yield arm

    monkeypatch.setattr(training, "array_arm", counted)
    run_here(small_run(run_dir, *EVALUATED, "--run.max_steps=20", "--trainer.rows=1", "--trainer.head_chunk_tokens=96"))
    rows = metrics(run_dir)
    counts = [rows[step]["compile/count"] for step in range(1, 21)]
    assert counts == warm * 20, "the base evaluation and the first step compile nothing"
    assert num_compiles() == warm[0], "the last evaluation and the last checkpoint compile nothing either"
    assert len({rows[step]["rollout/completion_tokens/mean"] for step in range(1, 21)}) > 10, "lengths did vary"


class OnceSlow(EmbeddedEndpoint):
    """Takes its time before one update, so that the trainer publishes a further version before this one is loaded."""

    leads: list[int] = []
    """How many versions the newest one published was ahead of the one loaded, for each update."""

    async def pause(self) -> None:
        if len(self.leads) == 5:
            await asyncio.sleep(1.0)
        await super().pause()

    async def load(self, version: int) -> None:
        self.leads.append(self._weight_store.newest - version)
        await super().load(version)


def test_one_step_ahead_keeps_the_ledger_balanced_and_staleness_within_its_bound(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    monkeypatch.setattr(training, "EmbeddedEndpoint", OnceSlow)
    ahead = ("--orchestrator.max_async_level=1", "--orchestrator.max_staleness_steps=1")
    # Measured on the way: an evaluation holds the served version while the trainer publishes further ones.
    run_here(small_run(run_dir, *EVALUATED, *ahead, "--run.max_steps=20", "--orchestrator.eval.every_n_steps=4"))
    assert max(OnceSlow.leads) == 1, "a version that is not the newest any more was still there to be loaded"
    rows = metrics(run_dir)
    measured = [step for step, row in rows.items() if "eval/chain_sum_heldout/success_rate" in row]
    assert measured[0] == 0 and measured[-1] == 20 and len(measured) > 3
    assert all(rows[step]["eval/chain_sum_heldout/n_other_version"] == 0 for step in measured)
    assert all(is_balanced(rows[step]) for step in range(1, 21))
    assert max(rows[step]["policy/staleness_steps/max"] for step in range(1, 21)) <= 1
    assert any(rows[step]["policy/staleness_steps/mean"] > 0 for step in range(1, 21)), "generation did run ahead"
    assert rows[20]["ledger/pending"] == 0


def test_evaluation_does_not_change_what_is_trained(tmp_path):
    often, never = tmp_path / "often", tmp_path / "never"
    run_here(small_run(often, *EVALUATED, "--run.max_steps=3", "--orchestrator.eval.every_n_steps=1"))
    run_here(small_run(never, *UNMEASURED, "--run.max_steps=3"))
    assert "eval/chain_sum_heldout/success_rate" in metrics(often)[2]
    assert "eval/chain_sum_heldout/success_rate" not in metrics(never)[2]
    for step in (1, 2, 3):
        assert rollouts(often, step) == rollouts(never, step)


def test_a_run_folder_is_never_written_over(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="holds a run already"):
        run_here(small_run(tmp_path / "run"))
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        run_here(small_run(tmp_path / "run"), resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_folder_that_another_process_writes_into_is_refused_and_left_alone(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    holds_it = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print('held', flush=True); input()"
    command = [sys.executable, "-c", holds_it, str(run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process is writing into the run folder"):
            run_here(small_run(run_dir))
        other.communicate("\n")
    assert list(run_dir.iterdir()) == []


def test_a_resume_that_is_refused_leaves_the_folders_configuration_as_it_was(tmp_path):
    run_dir = tmp_path / "run"
    checkpoints_of(run_dir).save(1, {"x": jax.numpy.zeros(1)}, {})
    (run_dir / "config.toml").write_text("as it was")
    with pytest.raises(ConfigError, match="512 positions"):
        run_here(small_run(run_dir, "--inference.max_model_len=600", "--trainer.row_length=600"), resume=True)
    assert (run_dir / "config.toml").read_text() == "as it was"


def test_a_run_that_fails_says_what_is_saved_and_how_to_resume(tmp_path, caplog, monkeypatch):
    run_dir = tmp_path / "run"
    rewards = itertools.chain(itertools.islice(itertools.cycle([0.0, 1.0]), 32), itertools.repeat(0.0))

    async def score(spec, text):
        """Tell the first step's replies apart, and no later ones."""
        return next(rewards)

    closed: list[bool] = []
    env = SingleTurnEnvironment("sums", [{"id": "1"}], lambda spec: "1 + 1 =", score, close=lambda: closed.append(True))
    monkeypatch.setattr(training, "build_environment", lambda env_config: env)
    with pytest.raises(RunFailedError, match="step 2: 1 batches in a row gave nothing to train on"):
        run_here(small_run(run_dir, *UNMEASURED, "--orchestrator.max_empty_batches=1"))
    assert closed, "environments give back what they hold, however a run ends"
    assert "step 1 is saved; resume with" in caplog.text
    assert f"--resume {run_dir}" in caplog.text
    report = json.loads((run_dir / "crash.json").read_text())
    assert (report["component"], report["last_reported_step"], report["saved_step"]) == ("orchestrator", 1, 1)
    assert report["parts"].keys() == {"device thread", "engine", "orchestrator", "trainer", "policy"}
    assert report["parts"]["trainer"] == "1 of 200 steps done", report["parts"]
    assert report["environment"]["packages"]["jax"] == jax.__version__


def test_an_evaluation_may_take_longer_than_any_wait(tmp_path, monkeypatch):
    async def slow_score(spec, text):
        await asyncio.sleep(2.5)
        return 1.0

    def build(env_config):
        if env_config.name == "slow":
            return SingleTurnEnvironment("slow", [{"id": "1"}], lambda spec: "1 + 1 =", slow_score)
        return build_environment(env_config)

    monkeypatch.setattr(training, "build_environment", build)
    slow = ('--orchestrator.eval.env=[{"type": "reverse_text", "name": "slow"}]', "--orchestrator.wait_deadline_s=2")
    assert run_here(small_run(tmp_path / "run", *slow, "--run.max_steps=1")).is_complete


async def test_a_trainer_that_fails_for_a_deadline_of_its_own_is_not_called_late():
    training: Future[None] = Future()
    training.set_exception(DeadlineError("its own"))
    with pytest.raises(DeadlineError, match="its own"):
        await side_by_side(asyncio.sleep(0), training)


async def test_the_first_failure_is_raised_and_the_second_logged(caplog):
    async def play() -> None:
        raise RunFailedError("nothing to train on")

    training: Future[None] = Future()
    training.set_exception(CheckpointError("the disk is full"))
    with pytest.raises(RunFailedError, match="nothing to train on"):
        await side_by_side(play(), training)
    assert "the trainer failed too: CheckpointError: the disk is full" in caplog.text


def test_held_out_questions_that_are_trained_on_are_refused_before_any_device_is_used(tmp_path):
    config = small_run(tmp_path / "run", "--orchestrator.eval.env.0.split=train", "--orchestrator.eval.env.0.seed=7000000")
    with pytest.raises(ConfigError, match="also trained on"):
        run_here(config)
