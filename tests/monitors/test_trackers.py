"""`jaxrl.monitors.trackers`: what TensorBoard and wandb get, in which order, and that none of them can hold up a run."""

import json
import logging
import struct
import threading
import time
from importlib import metadata
from pathlib import Path

import pytest

from jaxrl.config.load import load_config
from jaxrl.config.monitors import MonitorsConfig, TensorBoardConfig, WandbConfig
from jaxrl.errors import ConfigError
from jaxrl.monitors import MonitorSet
from jaxrl.monitors.trackers import STEPS, Tracker, WandbWriter, open_trackers

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


class ListWriter:
    """Keeps the rows; raises, or waits, when it is told to."""

    def __init__(self, fails_at: int | None = None, gate: threading.Event | None = None) -> None:
        self.rows: list[tuple[str, int]] = []
        self.is_closed = False
        self._fails_at, self._gate = fails_at, gate

    def write(self, family: str, step: int, values: object) -> None:
        if self._gate is not None:
            self._gate.wait(10)
        if step == self._fails_at:
            raise OSError("the server is gone")
        self.rows.append((family, step))

    def close(self) -> None:
        self.is_closed = True


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    """Read every event file of a folder back, in the order of the files."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            if event.HasField("session_log"):
                found.append(("START", event.step, 0.0))
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value if value.HasField("simple_value")]
    return found


def test_event_files_hold_every_point_and_a_resume_hides_the_steps_that_are_done_again(tmp_path: Path) -> None:
    config = MonitorsConfig(tensorboard=TensorBoardConfig(), terminal=False, plot=False)
    m = MonitorSet(tmp_path, config, name="run", max_steps=9, run_config={"api_key": "do-not-show"})
    for step in (1, 2, 3):
        m.log_step(step, {"loss/total": step / 2, "broken": float("nan")})
    m.log_eval(2, "sums", {"success_rate": 0.25})
    m.close()
    m = MonitorSet(tmp_path, config, name="run", max_steps=9, resume_step=2)
    m.log_step(3, {"loss/total": 8.0})
    m.close()
    points = [("loss/total", 1, 0.5), ("loss/total", 2, 1.0), ("loss/total", 3, 1.5), ("eval/sums/success_rate", 2, 0.25)]
    assert scalars(tmp_path / "tensorboard") == [*points, ("START", 3, 0.0), ("loss/total", 3, 8.0)]
    files = sorted((tmp_path / "tensorboard").iterdir())
    assert b"api_key" in files[0].read_bytes() and b"do-not-show" not in files[0].read_bytes()


def records(path: Path) -> list[bytes]:
    """Read the records of wandb's log: a header of 7 bytes, then blocks of 32 KiB of pieces (crc, length, type, data)."""
    data, at, found, parts = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            found.append(parts)
            parts = b""
    return found


def wandb_rows(folder: Path) -> list[dict[str, float]]:
    """Read the history of every offline run of a folder back."""
    from wandb.proto.wandb_internal_pb2 import Record

    history = [Record.FromString(data).history for path in sorted(folder.glob("offline-run-*/*.wandb")) for data in records(path)]
    rows = [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in part.item} for part in history if part.item]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def test_an_offline_run_of_wandb_has_an_axis_per_family_and_a_resume_goes_on_with_it(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    config = MonitorsConfig(wandb=WandbConfig(mode="offline", tags=["a"]))
    try:
        (tracker,) = open_trackers(tmp_path, config, name="run", run_config={"x": 1}, resume_step=None)
        tracker.log(STEPS, 1, {"loss/total": 0.5})
        tracker.log(STEPS, 2, {"loss/total": 0.25})
        tracker.log("sums", 1, {"eval/sums/success_rate": 0.125})
        tracker.close()
        first_id = json.loads((tmp_path / "wandb.json").read_text())["id"]
        again = WandbWriter(tmp_path, WandbConfig(mode="offline"), name="run", run_config={}, is_resumed=True)
        again.write(STEPS, 2, {"loss/total": 9.0})
        again.write(STEPS, 3, {"loss/total": 0.75})
        again.close()
    finally:
        wandb.teardown()
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"id": first_id, "last_steps": {"step": 3, "sums": 1}}
    assert {path.name for path in (tmp_path / "wandb").glob("*/*.wandb")} == {f"run-{first_id}.wandb"}
    assert wandb_rows(tmp_path / "wandb") == [
        {"step": 1, "loss/total": 0.5},
        {"step": 2, "loss/total": 0.25},
        {"eval/sums/step": 1, "eval/sums/success_rate": 0.125},
        {"step": 3, "loss/total": 0.75},
    ]


def test_a_sink_that_fails_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    writer = ListWriter(fails_at=2)
    tracker = Tracker("far", lambda: writer)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3, 4):
            tracker.log(STEPS, step, {"x": 1.0})
        tracker.close()
    assert writer.rows == [(STEPS, 1)] and writer.is_closed
    assert [r.getMessage() for r in caplog.records] == ["tracker 'far' failed, the run goes on without it: OSError: the server is gone"]


def test_a_sink_that_cannot_be_opened_is_one_warning_and_takes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def open_writer() -> ListWriter:
        raise ConnectionError("no key")

    tracker = Tracker("far", open_writer)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            tracker.log(STEPS, step, {})
        tracker.close()
    assert [r.getMessage() for r in caplog.records] == ["tracker 'far' failed, the run goes on without it: ConnectionError: no key"]


def test_a_sink_that_is_stuck_holds_up_neither_a_row_nor_the_end_for_long(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    writer = ListWriter(gate=gate)
    tracker = Tracker("far", lambda: writer, queue_rows=2)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        for step in range(9):
            tracker.log(STEPS, step, {})
        tracker.close(deadline_s=0.2)
        tracker.log(STEPS, 99, {})
    assert time.monotonic() - started < 5
    gate.set()
    assert [r.getMessage().split(";")[0].partition(" from")[0] for r in caplog.records] == [
        "tracker 'far' is slower than the run and loses rows,",
        "tracker 'far' did not take the last rows within 0.2 s",
    ]


@pytest.mark.parametrize(("section", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_tracker_without_its_package_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, section: str, package: str
) -> None:
    def missing(name: str) -> None:
        assert name == package
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(ConfigError, match=rf"package {package}, which is not installed.*jaxrl\[{section}\]"):
        load_config(QUICKSTART, [f"--monitors.{section}={{}}"])
    assert load_config(QUICKSTART, []).monitors.tensorboard is None, "off by default"
