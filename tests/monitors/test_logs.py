"""`jaxrl.monitors.logs`: what stands in the files of a run's log folder, and what must never stand there."""

import json
import logging
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from jaxrl.errors import ConfigError
from jaxrl.monitors import logs
from jaxrl.monitors.logs import Redactor, logging_to, secrets_in

FAKE_KEY = "sk-" + "a1B2c3D4e5F6g7H8i9J0"


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run.jsonl").read_text(encoding="utf-8").splitlines()]


def test_each_record_is_a_line_for_people_and_an_object_for_programs(tmp_path: Path) -> None:
    with logging_to(tmp_path) as log:
        logging.getLogger("jaxrl.trainer.checkpoint").info("saved\nstep %d", 3, extra={"bytes": 7})
        log.step = 3
        logging.getLogger("somelib.part").info("chatter")
        logging.getLogger("somelib.part").error("a library failed")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("an old setting", UserWarning, stacklevel=1)
    logging.getLogger("jaxrl.trainer").info("after the run")
    assert [(r["component"], r["level"], r["step"]) for r in rows(tmp_path)] == [
        ("trainer", "info", None),
        ("somelib", "error", 3),
        ("warning", "warning", 3),
    ]
    assert rows(tmp_path)[0]["message"] == "saved\nstep 3" and rows(tmp_path)[0]["extra"] == {"bytes": 7}
    text = (tmp_path / "run.log").read_text(encoding="utf-8")
    assert "INFO jaxrl.trainer.checkpoint: saved" in text and "an old setting" in text and "after the run" not in text


def test_a_secret_reaches_no_log_whatever_way_it_comes(tmp_path: Path) -> None:
    secrets = secrets_in({"WANDB_API_KEY": "0123456789abcdef", "HOME": "/home/someone", "MY_TOKEN": "short"})
    assert secrets == ["0123456789abcdef", "short"]
    log = logging.getLogger("jaxrl.inference.pool")
    with logging_to(tmp_path, Redactor(secrets)):
        try:
            raise RuntimeError(f"401 for Bearer {FAKE_KEY} at http://me:hunter22@host/v1")
        except RuntimeError:
            log.exception("sent 0123456789abcdef and {'api_key': 'anything-at-all'}")
        log.warning("x", extra={"hf_token": "anything-at-all", "url": f"http://host/?key={FAKE_KEY}"})
        log.warning("x", extra={"sent": {"headers": ["0123456789abcdef"]}, "error": ValueError("0123456789abcdef")})
    for file in tmp_path.iterdir():
        text = file.read_text(encoding="utf-8")
        assert not [secret for secret in (FAKE_KEY, "hunter22", "0123456789abcdef", "anything-at-all") if secret in text], file
        assert "401 for" in text, "the rest of the message is there"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("password=p@ssw0rd!x of", "password=<redacted> of"),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "Authorization: Basic <redacted>"),
        ("X-Api-Key: abcdefgh12345678", "X-Api-Key: <redacted>"),
        ('{\\"api_key\\": \\"abcdefgh1234\\"}', '{\\"api_key\\": \\"<redacted>\\"}'),
        ("https://user:p@ss@host/x and http://:hunter22@host", "https://<redacted>@host/x and http://<redacted>@host"),
        ("at http://host:8000/x, mail a@b", "at http://host:8000/x, mail a@b"),
    ],
)
def test_secrets_are_cut_in_the_forms_that_they_take(text: str, shown: str) -> None:
    assert Redactor()(text) == shown


def test_a_long_text_is_searched_in_a_time_of_its_length() -> None:
    started = time.monotonic()
    Redactor()("a-" * 50_000 + "://a" * 10_000 + "api_key " * 10_000)
    assert time.monotonic() - started < 5


def test_a_record_is_bounded_and_cannot_steer_a_terminal(tmp_path: Path) -> None:
    with logging_to(tmp_path):
        logging.getLogger("jaxrl.x").warning("\x1b[31mred\r%s", "y" * 300_000)
    assert "\\x1b[31mred\\x0dyyy" in rows(tmp_path)[0]["message"]
    for name in ("run.log", "run.jsonl"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert len(text) < 101_000 and "more characters" in text and "\x1b" not in text


def test_logs_that_cannot_be_written_are_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written to .*logs.*choose another `run.output_dir`"), logging_to(tmp_path / "logs"):
        pass


def test_what_only_resembles_a_secret_stays() -> None:
    for text in ("max_tokens=12345678", "token: <|im_end|>", "author: somebody-long", "eos_token_id=123456789"):
        assert Redactor(["short"])(text) == text


def test_a_log_file_is_rolled_over_before_it_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 2000)
    with logging_to(tmp_path):
        for number in range(200):
            logging.getLogger("jaxrl.x").info("line %d of many", number)
    assert sum(path.stat().st_size for path in tmp_path.glob("run.log*")) <= 4 * 2000
    assert "line 199 of many" in (tmp_path / "run.log").read_text(encoding="utf-8")


def test_an_exception_that_ends_a_thread_is_logged_with_its_traceback(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError(f"no luck with {FAKE_KEY}")

    with logging_to(tmp_path) as log:
        thread = threading.Thread(target=fail, name="helper")
        thread.start()
        thread.join()
    (row,) = rows(tmp_path)
    assert row["component"] == "threads" and "'helper'" in row["message"] and "in fail" in row["exception"]
    assert log.failed_threads == ["thread 'helper': ValueError: no luck with <redacted>"]


CRASH = """
import ctypes, sys
from pathlib import Path
from jaxrl.monitors.logs import logging_to
for name in ("clean", "crash"):
    with logging_to(Path(sys.argv[1]) / name):
        if name == "crash":
            ctypes.string_at(0)
"""


def test_a_segmentation_fault_leaves_the_stacks_and_an_orderly_end_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in (tmp_path / "crash" / "faults.txt").read_text()
    assert not (tmp_path / "clean" / "faults.txt").exists()
