"""`jaxrl.monitors.terminal`: plain lines for a log, a live view for a person."""

import io
import logging
import os
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from jaxrl.monitors.terminal import _FIGURES, EngineMeter, LastingConsole, Terminal, _figures, sparkline

VALUES = {"rollout/reward/mean": 0.4375, "mismatch/kl/mean": 1.2e-7, "throughput/generated_tokens_per_s": 6312.4, "time/step_s": 1.5}


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain(clock: Clock | None = None, first_step: int = 0) -> tuple[Terminal, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=40)
    return Terminal("run", 60, first_step=first_step, console=console, clock=clock or Clock()), out


def test_without_a_terminal_each_step_is_one_line_whatever_the_width() -> None:
    terminal, out = plain()
    terminal.step(7, VALUES)
    terminal.step(8, {"rollout/reward/mean": 0.5})
    assert out.getvalue().splitlines() == [
        "step  7/60  reward 0.438  mismatch KL 1.2e-07  generated tok/s 6,312  step s 1.50",
        "step  8/60  reward 0.500",
    ]


def test_a_phase_is_named_once_in_a_log() -> None:
    terminal, out = plain()
    for done in (0, 1, 2, 0, 1, 2):
        terminal.progress("compiling", done, 2)
    assert out.getvalue() == "compiling ...\n"


def test_a_log_says_how_long_a_phase_took_the_first_time_and_that_a_long_one_goes_on() -> None:
    clock = Clock()
    terminal, out = plain(clock)
    for now, done in ((0, 0), (29, 1), (31, 2), (45, 3), (62, 4), (100, 0), (150, 4)):
        clock.now = 100.0 + now
        terminal.progress("compiling", done, 4, f"prefill {done}")
    terminal.progress("training", 0, 2)
    clock.now += 0.5
    terminal.progress("training", 2, 2)
    assert out.getvalue().splitlines() == [
        "compiling ...",
        "compiling 2/4 prefill 2, 0:31",
        "compiling took 62.0 s",
        "training ...",
    ]


def test_a_log_that_was_silent_for_long_shows_its_meters() -> None:
    clock = Clock()
    terminal, out = plain(clock)
    terminal.meter("engine", lambda: "12 running")
    for seconds in (20, 15, 10, 10):
        clock.now += seconds
        terminal.tick()
    terminal.step(1, {})
    clock.now += 29
    terminal.tick()
    terminal.close()
    assert [line for line in out.getvalue().splitlines() if line.startswith("engine")] == ["engine: 12 running"]


def test_the_meter_of_an_engine_shows_the_speed_of_the_last_seconds() -> None:
    clock, tokens = Clock(), 0.0

    def stats() -> dict[str, float]:
        return {"running": 3.0, "waiting": 1.0, "generated_tokens": tokens}

    meter = EngineMeter(stats, clock)
    assert meter() == "3 running, 1 waiting, 0 tokens, 0 tok/s"
    for _ in range(20):
        clock.now, tokens = clock.now + 1, tokens + 100
        meter()
    assert meter() == "3 running, 1 waiting, 2,000 tokens, 100 tok/s"
    for _ in range(5):
        clock.now += 1
        meter()
    assert meter().endswith(", 0 tok/s")


def test_a_log_shows_what_is_waited_for_every_thirty_seconds_at_most() -> None:
    clock = Clock()
    terminal, out = plain(clock)
    for now, text in ((0, "a"), (1, "b"), (29, "c"), (31, "d"), (32, ""), (70, "e")):
        clock.now = now
        terminal.status(text)
    assert out.getvalue().splitlines() == ["a", "d", "e"]


def test_what_is_said_stays_as_it_is_spelled() -> None:
    terminal, out = plain()
    terminal.say("a :smile: [b]face[/b]")
    assert out.getvalue() == "a :smile: [b]face[/b]\n"


def test_the_summary_compares_the_first_and_last_rewards_and_the_evaluations() -> None:
    clock = Clock()
    terminal, out = plain(clock)
    terminal.evaluation(0, "sum", {"success_rate": 0.25, "se": 0.1})
    for step in range(1, 5):
        terminal.step(step, {"rollout/reward/mean": step / 10})
    terminal.evaluation(4, "sum", {"success_rate": 0.75})
    clock.now += 3723
    terminal.close()
    terminal.close()
    assert out.getvalue().splitlines()[-1] == (
        "4 steps in 1:02:03; reward 0.150 -> 0.350 (mean of 2 first and last); sum success_rate 0.250 -> 0.750"
    )


SUPERVISED = {"rollout/reward/mean": 1.0, "tokens/ce": 40.0, "ce/nll/mean": 2.0, "tokens/rl": 0.0, "tokens/ref_kl": 0.0}


def test_where_the_policy_plays_nothing_the_loss_is_the_headline_and_the_reward_is_no_learning() -> None:
    terminal, out = plain()
    terminal.step(1, SUPERVISED)
    terminal.step(2, SUPERVISED | {"ce/nll/mean": 0.5})
    terminal.close()
    assert out.getvalue().splitlines() == [
        "step  1/60  NLL 2.000  reward 1.000",
        "step  2/60  NLL 0.500  reward 1.000",
        "2 steps in 0:00; NLL 2.000 -> 0.500 (mean of 1 first and last)",
    ]


def test_where_the_policy_plays_and_learns_from_what_it_is_told_the_reward_leads_and_the_loss_is_shown() -> None:
    terminal, out = plain()
    for step in (1, 2):
        terminal.step(step, SUPERVISED | {"tokens/rl": 9.0, "ce/nll/mean": 4.0 / step})
    terminal.close()
    assert out.getvalue().splitlines()[1:] == [
        "step  2/60  reward 1.000  NLL 2.000",
        "2 steps in 0:00; reward 1.000 -> 1.000 (mean of 1 first and last); NLL 4.000 -> 2.000 (mean of 1 first and last)",
    ]


def test_the_distance_to_the_reference_is_shown_where_tokens_move_towards_one() -> None:
    terminal, out = plain()
    for step in (1, 2):
        terminal.step(step, {"rollout/reward/mean": 0.5, "tokens/ref_kl": 8.0, "ref_kl/log_ratio/mean": -0.25 / step, "ce/nll/mean": 1.0})
    terminal.close()
    assert out.getvalue().splitlines()[1:] == [
        "step  2/60  reward 0.500  reference KL 0.125",
        "2 steps in 0:00; reward 0.500 -> 0.500 (mean of 1 first and last); reference KL 0.250 -> 0.125 (mean of 1 first and last)",
    ]


def test_of_several_environments_each_has_its_reward_and_those_that_the_policy_plays_come_first() -> None:
    terminal, out = plain()
    values = SUPERVISED | {"tokens/rl": 9.0, "tokens/rl/sums": 9.0, "tokens/ce/shown": 40.0, "rollout/reward/mean": 0.75}
    for step in (1, 2):
        terminal.step(step, values | {"rollout/reward/mean/shown": 1.0, "rollout/reward/mean/sums": 0.25 * step})
    terminal.close()
    assert out.getvalue().splitlines()[1:] == [
        "step  2/60  reward 0.750 (sums 0.500, shown 1.000)  NLL 2.000",
        "2 steps in 0:00; reward 0.750 -> 0.750 (mean of 1 first and last); reward of sums 0.250 -> 0.500; reward of shown 1.000 -> 1.000; "
        "NLL 2.000 -> 2.000 (mean of 1 first and last)",
    ]


def test_the_summary_of_a_resumed_run_says_which_steps_it_is_about() -> None:
    terminal, out = plain(first_step=6)
    for step in (7, 8):
        terminal.step(step, {"rollout/reward/mean": step / 10})
    terminal.close()
    assert out.getvalue().splitlines()[-1] == (
        "2 steps of this start, from step 7, in 0:00; reward 0.700 -> 0.800 (mean of 1 first and last)"
    )


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_narrow_view_breaks_no_figure_and_no_phase_over_two_lines(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=30, _environ={"TERM": "xterm"})
    terminal = Terminal("run", 60, first_step=6, console=console, clock=Clock())
    figures = {name: 0.125 for name, _, _ in _FIGURES} | {"rollout/reward/mean": 0.125, "tokens/ce": 9.0, "ce/nll/mean": 2.5}
    figures |= {"rollout/reward/mean/sums": 0.1, "rollout/reward/mean/letters": 0.15}
    figures |= {"throughput/generated_tokens_per_s": 123456.0, "memory/host_rss_gib": 1.5}
    for step in range(7, 60):
        terminal.step(step, figures)
    terminal.progress("compiling", 3, 11, "psum_denominators")
    live = terminal._live
    assert live is not None
    with console.capture() as capture:
        console.print(terminal._render())
    terminal.close()
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capture.get()).splitlines()
    for label, value in _figures(figures):
        assert any(f"{label} {value}" in line for line in lines), (label, lines)
    assert any("generated tok/s 123,456" in line for line in lines)
    for part in ("step 59/60", "psum_denominators  3/11, 0:00", "NLL from step 7", "lowest 2.500", "reward 0.125", "reward of sums 0.100"):
        assert any(part in line for line in lines), (part, lines)
    assert len({len(line) for line in lines}) == 1


def test_of_many_scores_a_log_shows_those_for_people_and_of_unknown_ones_all() -> None:
    terminal, out = plain()
    terminal.evaluation(0, "sum", {"n_planned": 8, "success_rate": 0.25, "mean_reward": 0.5})
    terminal.evaluation(3, "game", {"elo": 1200.0})
    assert out.getvalue().splitlines() == ["eval v0 sum  success_rate 0.25  mean_reward 0.5", "eval v3 game  elo 1200"]


def test_markup_in_names_is_shown_as_it_is() -> None:
    terminal, out = plain()
    terminal.status("[red]env[/red]")
    assert out.getvalue() == "[red]env[/red]\n"


def test_on_a_terminal_the_view_shows_step_reward_phase_and_wait_and_log_lines_go_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    handler = logging.StreamHandler()
    root = logging.getLogger()
    root.addHandler(handler)
    stream = handler.stream
    try:
        console = Console(file=out, force_terminal=True, width=100, height=30, _environ={"TERM": "xterm"})
        terminal = Terminal("run", 60, console=console, clock=Clock())
        terminal.step(7, VALUES)
        terminal.progress("generating", 3, 8, "group 2")
        terminal.meter("engine", lambda: "12 running")
        terminal.meter("broken", lambda: str(1 / 0))
        terminal.status("waiting for the trainer")
        logging.getLogger("jaxrl.test").warning("careful")
        live = terminal._live
        assert live is not None
        live.refresh()
        assert "\x1b[?25h" not in out.getvalue(), "the view hides the cursor"
        terminal.abandon()
        assert "\x1b[?25h" in out.getvalue()
        terminal.close()
    finally:
        root.removeHandler(handler)
    text = out.getvalue()
    shown = ("jaxrl · run", "step 7/60", "0.438", "generating", "group 2  3/8, 0:00", "engine  12 running", "waiting for the trainer")
    for part in (*shown, "careful"):
        assert part in text
    assert handler.stream is stream


@settings(max_examples=50)
@given(values=st.lists(st.floats(-1e6, 1e6), max_size=120), width=st.integers(1, 48))
def test_a_sparkline_is_as_long_as_its_values_but_never_wider_than_asked(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(len(values), width)


def test_a_sparkline_of_equal_values_is_flat_and_of_rising_values_rises() -> None:
    assert sparkline([0.5, 0.5, 0.5], 9) == "▁▁▁"
    assert sparkline([float(i) for i in range(16)], 8) == "▁▂▃▄▅▆▇█"


def test_the_time_left_is_estimated_from_the_steps_after_the_first() -> None:
    clock = Clock()
    terminal, _ = plain(clock)
    clock.now += 600
    terminal.step(1, {})
    assert terminal._seconds_left() is None
    clock.now += 2
    terminal.step(2, {})
    assert terminal._seconds_left() == 2.0 * 58


def test_a_reward_that_is_no_number_and_a_name_with_brackets_do_not_end_the_view() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    terminal = Terminal("a [/run]", 9, console=console)
    for step, reward in enumerate((0.25, float("nan"), float("inf"), 0.5), start=1):
        terminal.step(step, {"rollout/reward/mean": reward})
    terminal.close()
    assert "a [/run]" in console.file.getvalue() and "0.250 -> 0.500" in console.file.getvalue()


def test_a_reader_that_goes_away_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        terminal = Terminal("run", 9, console=LastingConsole(file=file))
        terminal.step(1, VALUES)
        terminal.step(2, VALUES)
        terminal.close()
    assert [record.getMessage().split(";")[0] for record in caplog.records] == ["nobody reads what the run prints any more"]


KINDS = {
    f"tasks/sums/key/{key}/{what}": value
    for key, share, solved in ((0, 0.1, 0.95), (1, 0.6, 0.5), (2, 0.3, 0.1))
    for what, value in (("p_hat", solved), ("prob", share), ("cost", 9.0))
}
LINE = "tasks of sums  0: 10% of draws, 0.95 solved; 1: 60%, 0.50; 2: 30%, 0.10"


def test_a_log_tells_of_kinds_of_tasks_at_the_first_step_each_tenth_of_the_run_each_evaluation_and_the_end(caplog) -> None:
    caplog.set_level(logging.INFO)
    out = io.StringIO()
    terminal = Terminal("run", 100, console=Console(file=out, width=300), clock=Clock())
    terminal.evaluation(0, "held", {"success_rate": 0.1})
    for step in range(1, 25):
        terminal.step(step, {"time/step_s": 1.0} | KINDS)
        if step == 14:
            terminal.evaluation(13, "held", {"success_rate": 0.2})
            terminal.evaluation(13, "other", {"success_rate": 0.2})
    terminal.close()
    assert out.getvalue().splitlines().count(LINE) == 5
    assert caplog.messages == [f"step {step}: {LINE}" for step in (1, 10, 14, 20, 24)]


def test_the_log_of_a_run_has_the_kinds_of_tasks_below_a_live_view_too(caplog) -> None:
    caplog.set_level(logging.INFO)
    terminal = Terminal("run", 60, console=Console(file=io.StringIO(), force_terminal=True, width=60), clock=Clock())
    terminal.step(1, VALUES | KINDS)
    terminal.close()
    assert caplog.messages == [f"step 1: {LINE}"]


def test_the_view_shows_kinds_of_tasks_without_breaking_the_line() -> None:
    out = io.StringIO()
    terminal = Terminal("run", 60, console=Console(file=out, force_terminal=True, width=60), clock=Clock())
    terminal.step(1, VALUES | KINDS)
    shown = [line for line in render_of(terminal, 60) if "tasks of sums" in line]
    terminal.close()
    assert len(shown) == 1 and "0: 10% of draws, 0.95 solved; 1: 60%" in shown[0] and "…" in shown[0]


def render_of(terminal: Terminal, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(terminal._render())
    return out.getvalue().splitlines()
