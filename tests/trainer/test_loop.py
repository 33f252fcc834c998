"""The trainer's loop: what follows a step and in which order, what a failure leaves behind, and exact resumption."""

import queue
import threading

import jax
import numpy as np
import pytest

from jaxrl.blame import component_of_error
from jaxrl.config.trainer import CheckpointConfig
from jaxrl.devices import DeviceThread
from jaxrl.errors import CheckpointError, DeadlineError, RunFailedError
from jaxrl.losses import measured
from jaxrl.trainer.checkpoint import Checkpointer
from jaxrl.trainer.compiles import num_compiles
from jaxrl.trainer.loop import ORCHESTRATOR_PART, Trainer, split_by_sample
from jaxrl.trainer.step import densify
from jaxrl.trainer.throughput import throughput_metrics
from tests.trainer.tiny import SPEC, make_batch, make_config, make_programs, make_sample, make_state, take_step, to_host

WAIT_S = 30.0


class ListChannel:
    """Both sides of a channel in one thread: batches that were there from the start, and a list of what came back."""

    def __init__(self, batches, is_closed=True):
        self.batches = queue.Queue()
        for batch in batches:
            self.batches.put(batch)
        if is_closed:
            self.batches.put(None)
        self.events = []
        self.reports = []
        self.failure = None

    def receive(self, timeout_s):
        try:
            return self.batches.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineError(f"no batch within {timeout_s} s") from None

    def report(self, report):
        self.events.append(f"report {report.step}")
        self.reports.append(report)

    def announce(self, version):
        self.events.append(f"announce {version}")

    def fail(self, exception):
        self.failure = exception


@pytest.fixture
def device():
    thread = DeviceThread("test", deadline_s=120.0)
    thread.start()
    yield thread
    thread.stop(WAIT_S)


class Harness:
    """A trainer of the tiny model with everything around it in plain sight."""

    def __init__(self, device, batches, *, state=None, is_closed=True, **arguments):
        checkpoint = arguments.pop("checkpoint", CheckpointConfig())
        self.config = make_config()
        self.programs = make_programs(self.config)
        self.channel = ListChannel(batches, is_closed)
        self.published = {}
        defaults = {"checkpointer": None, "snapshot": self.snapshot, "max_steps": 100, "batch_deadline_s": WAIT_S}
        defaults |= {"publish": self.publish}
        self.trainer = Trainer(
            self.programs,
            make_state(self.programs) if state is None else state,
            self.config.model_copy(update={"checkpoint": checkpoint, **arguments.pop("config", {})}),
            device=device,
            channel=self.channel,
            **(defaults | arguments),
        )

    def publish(self, version, params):
        self.channel.events.append(f"publish {version}")
        self.published[version] = to_host(params)

    def snapshot(self):
        self.channel.events.append("snapshot")
        return f"orchestrator at {self.trainer.step}".encode()


def batch_of(step, poison=False):
    """A batch of a step whose number, lengths and streams vary from step to step."""
    streams = ("advantages", "ce_weights") if step % 2 else ("advantages",)
    samples = [
        make_sample(10 * step + i, 4 + (3 * i + step) % 10, num_prompt=2, streams=streams) for i in range(2 * step)
    ]
    batch = make_batch(samples, make_config(), step)
    if poison:
        micro_batch = batch.micro_batches[0]
        row, position = np.argwhere(micro_batch.loss_mask)[1]
        micro_batch.advantages[row, position] = np.nan
    return batch


def assert_trees_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, to_host(found), to_host(expected))


def test_each_version_is_published_announced_saved_and_reported_in_this_order_also_after_a_skipped_step(
    device, tmp_path
):
    programs = make_programs(make_config())
    checkpointer = Checkpointer(tmp_path, 5, programs.mesh)
    harness = Harness(
        device,
        [batch_of(1), batch_of(2, poison=True), batch_of(3)],
        checkpointer=checkpointer,
        checkpoint=CheckpointConfig(every_n_steps=2),
        max_steps=3,
    )
    harness.trainer.run()
    assert harness.channel.events == [
        *("publish 1", "announce 1", "report 1"),
        *("publish 2", "announce 2", "snapshot", "report 2"),
        *("publish 3", "announce 3", "snapshot", "report 3"),
    ]
    assert [(report.step, report.version, report.skipped) for report in harness.channel.reports] == [
        *((1, 1, False), (2, 2, True), (3, 3, False))
    ]
    assert_trees_equal(harness.published[2], harness.published[1])
    assert (harness.published[3]["embed"]["weight"] != harness.published[2]["embed"]["weight"]).any()
    assert checkpointer.complete_steps() == [2, 3]
    assert checkpointer.restore(2, programs.abstract_state)[1] == {ORCHESTRATOR_PART: b"orchestrator at 2"}
    assert harness.channel.failure is None and harness.trainer.step == 3


def test_the_loop_makes_the_same_updates_as_the_programs_alone(device):
    harness = Harness(device, [batch_of(1), batch_of(2)])
    harness.trainer.run()
    state = make_state(harness.programs)
    for step in (1, 2):
        state, metrics = take_step(harness.programs, state, batch_of(step))
        assert measured(metrics).items() <= harness.channel.reports[step - 1].metrics.items()
        assert_trees_equal(harness.published[step], state.params)


def test_after_warm_up_steps_of_any_make_up_compile_nothing(device, tmp_path):
    harness = Harness(
        device,
        [batch_of(step) for step in range(1, 6)],
        checkpointer=Checkpointer(tmp_path, 1, make_programs(make_config()).mesh),
        checkpoint=CheckpointConfig(every_n_steps=2),
        should_report_logprobs=True,
    )
    before_state = to_host(harness.trainer.state)
    harness.trainer.warm_up()
    assert_trees_equal(harness.trainer.state, before_state)
    compiled = num_compiles()
    harness.trainer.run()
    assert len({len(batch_of(step).micro_batches) for step in range(1, 6)}) > 1
    assert [report.metrics["compile/count"] for report in harness.channel.reports] == [compiled] * 5


def test_reports_carry_speed_and_packing_of_real_tokens(device):
    ticks = iter(range(1000))
    batch = make_batch([make_sample(0, 4), make_sample(1, 9)], make_config())
    harness = Harness(device, [batch], peak=1e6, clock=lambda: float(next(ticks)))
    harness.trainer.run()
    metrics = harness.channel.reports[0].metrics
    assert metrics["time/train_s"] == metrics["time/publish_s"] == metrics["time/wait_for_batch_s"] == 1.0
    assert throughput_metrics(batch, SPEC, 1.0, 1e6).items() <= metrics.items()
    assert metrics["throughput/train_tokens_per_s"] == batch.num_tokens
    assert metrics["checkpoint/failed"] == 0.0
    without_peak = Harness(device, [batch_of(1)])
    without_peak.trainer.run()
    assert "throughput/mfu_frac" not in without_peak.channel.reports[0].metrics


def test_token_logprobs_are_those_of_each_sample_alone_in_the_order_of_the_samples(device):
    samples = [make_sample(seed, length) for seed, length in enumerate((4, 12, 7, 3, 9, 5))]
    config = make_config()
    harness = Harness(device, [make_batch(samples, config)], should_report_logprobs=True)
    programs, state = harness.programs, make_state(harness.programs)
    harness.trainer.run()
    found = harness.channel.reports[0].token_logprobs
    assert len(make_batch(samples, config).micro_batches) > 1
    for sample, logprobs in zip(samples, found, strict=True):
        arrays = densify(make_batch([sample], config).micro_batches[0])
        denominators = programs.psum_denominators(np.ones((1, 3), np.int32))
        _, alone_BT = programs.grad_step(state, programs.zero_accumulator(), arrays, denominators)
        row = int(np.argwhere(arrays["segment_ids"])[0, 0])
        assert logprobs.dtype == np.float32 and logprobs[0] == 0.0 and (logprobs[1:] < 0).all()
        np.testing.assert_allclose(logprobs, alone_BT[row, : len(sample)], rtol=1e-4, atol=1e-5)


def test_splitting_by_sample_keeps_every_value_once_and_in_order():
    samples = [make_sample(seed, 3 + seed) for seed in range(8)]
    batch = make_batch(samples, make_config())
    values = [np.where(mb.segment_ids != 0, mb.token_ids, -1).astype(np.float32) for mb in batch.micro_batches]
    for sample, tokens in zip(samples, split_by_sample(batch, values), strict=True):
        np.testing.assert_array_equal(tokens, sample.token_ids)


def test_two_runs_of_n_steps_are_one_run_of_2n_bit_for_bit(device, tmp_path):
    # The poisoned step is in both histories: the count of skipped steps is part of the state and moves the schedule.
    history = [batch_of(1), batch_of(2, poison=True)]
    straight = Harness(device, [*history, batch_of(3), batch_of(4)], max_steps=4)
    straight.trainer.run()
    checkpointer = Checkpointer(tmp_path, 1, straight.programs.mesh)
    first = Harness(device, history, checkpointer=checkpointer)
    first.trainer.run()
    step = checkpointer.latest_complete()
    state, parts = checkpointer.restore(step, first.programs.abstract_state)
    assert (step, parts) == (2, {ORCHESTRATOR_PART: b"orchestrator at 2"})
    second = Harness(device, [batch_of(3), batch_of(4)], state=state, start_step=step, max_steps=4)
    second.trainer.run()
    assert_trees_equal(second.trainer.state, straight.trainer.state)
    timeless = [
        {
            name: value
            for name, value in report.metrics.items()
            if not name.startswith(("time/", "throughput/", "compile/", "memory/"))
        }
        for report in (*straight.channel.reports[2:], *second.channel.reports)
    ]
    assert timeless[:2] == timeless[2:]


def test_a_checkpoint_that_fails_on_the_way_is_counted_and_the_run_goes_on(device, tmp_path):
    room = iter([0, 0, 10**12])
    programs = make_programs(make_config())
    checkpointer = Checkpointer(tmp_path, 1, programs.mesh, free=lambda _: next(room))
    harness = Harness(
        device,
        [batch_of(1), batch_of(2)],
        checkpointer=checkpointer,
        checkpoint=CheckpointConfig(every_n_steps=1),
        max_steps=2,
    )
    harness.trainer.run()
    assert [report.metrics["checkpoint/failed"] for report in harness.channel.reports] == [1.0, 1.0]
    assert checkpointer.complete_steps() == [2]


def test_a_last_checkpoint_that_fails_is_an_error_of_the_run(device, tmp_path):
    programs = make_programs(make_config())
    checkpointer = Checkpointer(tmp_path, 1, programs.mesh, free=lambda _: 0)
    harness = Harness(device, [batch_of(1)], checkpointer=checkpointer, max_steps=1)
    with pytest.raises(CheckpointError, match="step_000001 could not be written"):
        harness.trainer.run()
    assert isinstance(harness.channel.failure, CheckpointError)
    assert harness.channel.events == ["publish 1", "announce 1", "snapshot", "report 1", "snapshot"]


def test_a_closed_channel_ends_the_run_early_with_a_checkpoint_of_the_last_step(device, tmp_path):
    checkpointer = Checkpointer(tmp_path, 1, make_programs(make_config()).mesh)
    harness = Harness(device, [batch_of(1), batch_of(2)], checkpointer=checkpointer)
    harness.trainer.run()
    assert checkpointer.complete_steps() == [2] and harness.channel.failure is None


def test_too_many_skipped_steps_in_a_row_end_the_run_and_save_the_last_good_weights(device, tmp_path):
    checkpointer = Checkpointer(tmp_path, 1, make_programs(make_config()).mesh)
    batches = [batch_of(1, poison=True), batch_of(2), batch_of(3, poison=True), batch_of(4, poison=True), batch_of(5)]
    harness = Harness(device, batches, checkpointer=checkpointer, config={"max_skipped_steps": 2})
    with pytest.raises(RunFailedError, match=r"2 consecutive steps, up to step 4 .*Saved: .*step_000004"):
        harness.trainer.run()
    assert isinstance(harness.channel.failure, RunFailedError)
    assert [report.skipped for report in harness.channel.reports] == [True, False, True, True]
    restored, _ = checkpointer.restore(4, harness.programs.abstract_state)
    assert_trees_equal(restored.params, harness.published[2])
    assert int(restored.num_skipped) == 3


def test_a_batch_of_another_step_is_refused(device):
    harness = Harness(device, [batch_of(3)])
    with pytest.raises(
        RunFailedError, match="stands at step 0 and expected the batch of step 1, got the batch of step 3"
    ):
        harness.trainer.run()
    assert harness.channel.reports == []


def test_a_weight_changed_after_packing_is_noticed_before_the_update(device):
    batch = batch_of(2)
    batch.step = 1
    micro_batch = batch.micro_batches[0]
    micro_batch.loss_mask[tuple(np.argwhere(micro_batch.loss_mask)[0])] = False
    harness = Harness(device, [batch])
    before = to_host(harness.trainer.state)
    with pytest.raises(RunFailedError, match="the packer counted"):
        harness.trainer.run()
    assert_trees_equal(harness.trainer.state, before)
    assert harness.channel.events == []


def test_no_batch_within_the_deadline_fails_the_channel(device):
    harness = Harness(device, [], is_closed=False, batch_deadline_s=0.05)
    with pytest.raises(DeadlineError):
        harness.trainer.run()
    assert isinstance(harness.channel.failure, DeadlineError)


def test_a_checkpoint_can_be_asked_for_from_another_thread_while_the_run_waits(device, tmp_path):
    checkpointer = Checkpointer(tmp_path, 1, make_programs(make_config()).mesh)
    harness = Harness(device, [batch_of(1)], is_closed=False, checkpointer=checkpointer)
    thread = threading.Thread(target=harness.trainer.run)
    thread.start()
    while not harness.channel.reports:
        thread.join(0.01)
    assert harness.trainer.checkpoint_now() == tmp_path / "step_000001"
    restored, parts = checkpointer.restore(1, harness.programs.abstract_state)
    assert int(restored.step) == 1 and parts == {ORCHESTRATOR_PART: b"orchestrator at 1"}
    harness.channel.batches.put(None)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert Harness(device, []).trainer.checkpoint_now() is None


def test_a_start_step_other_than_the_state_s_is_refused(device):
    harness = Harness(device, [batch_of(4)], start_step=3)
    with pytest.raises(RunFailedError, match="started at step 3 with a state of step 0"):
        harness.trainer.run()


@pytest.mark.parametrize(("part", "component"), [("publish", "weights"), ("receive", "trainer")])
def test_a_failure_is_named_after_its_part_before_the_other_arm_sees_it(device, monkeypatch, part, component):
    def fail(*_):
        raise MemoryError("no room")

    harness = Harness(device, [batch_of(1)], **({"publish": fail} if part == "publish" else {}))
    if part == "receive":
        monkeypatch.setattr(harness.channel, "receive", fail)
    seen = []
    monkeypatch.setattr(harness.channel, "fail", lambda error: seen.append(component_of_error(error)))
    with pytest.raises(MemoryError):
        harness.trainer.run()
    assert seen == [component]


def test_progress_counts_micro_batches_and_tells_the_speed(device):
    batch = make_batch([make_sample(seed, 15) for seed in range(8)], make_config())
    shown, ticks = [], iter(range(1000))
    harness = Harness(device, [batch], progress=lambda *args: shown.append(args), clock=lambda: float(next(ticks)))
    harness.trainer.run()
    assert [call[:3] for call in shown] == [("training", done, 4) for done in range(5)]
    assert shown[0][3] == "" and shown[1][3] == f"{batch.num_tokens / 4 / 2:,.0f} tok/s", "two ticks of the clock after the start"


def test_progress_does_not_count_the_micro_batch_in_flight(device, monkeypatch):
    batch = make_batch([make_sample(seed, 15) for seed in range(8)], make_config())
    events = []
    harness = Harness(device, [batch], progress=lambda phase, done, total, detail: events.append(done))
    grad_step, wait = harness.programs.grad_step, jax.block_until_ready

    def dispatch(*arguments):
        events.append("dispatched")
        return grad_step(*arguments)

    def wait_for(arrays):
        if arrays is not None:
            events.append("waited")
        return wait(arrays)

    monkeypatch.setattr(harness.programs, "grad_step", dispatch)
    monkeypatch.setattr(jax, "block_until_ready", wait_for)
    harness.trainer.run()
    steps = [event for done in (1, 2, 3) for event in ("dispatched", "waited", done)]
    assert events == [0, "dispatched", *steps, 4]


def test_engine_ticks_run_between_micro_batches_and_a_failing_tick_ends_the_run(device):
    batch = make_batch([make_sample(seed, 15) for seed in range(8)], make_config())
    assert len(batch.micro_batches) == 4
    harness = Harness(device, [batch, batch_of(2)])
    harness.trainer.warm_up()
    num_ticks_in_step = 0

    def tick():
        nonlocal num_ticks_in_step
        if harness.channel.reports:
            raise ValueError("the engine broke")
        num_ticks_in_step += 1

    device.attach_engine(lambda: True, tick)
    with pytest.raises(ValueError, match="the engine broke"):
        harness.trainer.run()
    assert num_ticks_in_step > len(batch.micro_batches)
    assert isinstance(harness.channel.failure, ValueError) and device.failure is harness.channel.failure
    assert [report.step for report in harness.channel.reports] == [1]


def test_a_mean_over_the_tokens_of_a_component_is_absent_where_it_has_none(device):
    def metrics_of(*samples):
        harness = Harness(device, [make_batch(list(samples), make_config())])
        harness.trainer.run()
        return harness.channel.reports[0].metrics
    plain = metrics_of(make_sample(0, 6))
    assert plain["tokens/ce"] == plain["tokens/ref_kl"] == 0 and plain["tokens/rl"] == 4
    assert "ce/nll/mean" not in plain and "ref_kl/log_ratio/mean" not in plain and "mismatch/kl/mean" in plain
    sample = make_sample(0, 6, streams=("advantages", "ce_weights", "ref_kl_weights", "ref_logprobs"))
    full = metrics_of(sample)
    assert full["tokens/ce"] == full["tokens/ref_kl"] == 4
    assert full["ce/nll/mean"] > 0 and full["ref_kl/log_ratio/mean"] != 0
