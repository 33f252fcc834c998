"""`jaxrl.launch.compile_cache`: a second process compiles nothing, and a cache that is broken costs one warning."""

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxrl.launch import compile_cache
from jaxrl.launch.compile_cache import cache_folder, use_compile_cache
from jaxrl.trainer.compiles import num_cache_hits, num_compiles

OPTIONS = ("jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")

SECOND_PROCESS = """
import sys
import jax
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
x = jax.device_put(jax.numpy.asarray(__import__("numpy").arange(12.0, dtype="float32").reshape(3, 4)))
before = len(hits)
def triple(x):
    return jax.numpy.tanh(x @ x.T) * 3
print(jax.jit(triple)(x).tobytes().hex(), len(hits) - before)
"""


@pytest.fixture(autouse=True)
def _cache_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process use a cache, and put everything back."""
    before = {name: jax.config.values[name] for name in OPTIONS}
    filters = list(logging.getLogger("py.warnings").filters)
    monkeypatch.setattr(compile_cache, "MIN_COMPILE_S", 0.0)
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    logging.getLogger("py.warnings").filters[:] = filters


def compile_and_run() -> tuple[str, int, int]:
    """Compile one program anew, as far as this process goes; return its result, and the programs made and read for it."""
    x = jax.device_put(jnp.arange(12.0, dtype="float32").reshape(3, 4))

    def triple(x):
        return jnp.tanh(x @ x.T) * 3

    made, read = num_compiles(), num_cache_hits()
    result = jax.jit(triple)(x)
    return result.tobytes().hex(), num_compiles() - made, num_cache_hits() - read


def test_a_second_process_reads_what_the_first_one_compiled_and_computes_the_same_bits(tmp_path: Path) -> None:
    folder = use_compile_cache(directory=str(tmp_path))
    assert folder is not None and folder == cache_folder(str(tmp_path)) and folder.parent == tmp_path
    result, made, read = compile_and_run()
    assert (made, read) == (1, 0)
    env = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "true"}
    done = subprocess.run([sys.executable, "-c", SECOND_PROCESS, str(folder)], capture_output=True, text=True, env=env, timeout=100)
    assert done.stdout.split() == [result, "1"], done.stderr
    assert done.stderr == "", "no word about machine features"
    assert compile_and_run() == (result, 1, 1), "a program that is read counts as made: after warm-up neither may happen"


def test_a_damaged_cache_is_one_warning_and_everything_is_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = use_compile_cache(directory=str(tmp_path))
    assert folder is not None
    result, _, _ = compile_and_run()
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-20])
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        try:
            assert compile_and_run() == (result, 1, 0)
            assert compile_and_run() == (result, 1, 0)
        finally:
            logging.captureWarnings(False)
    (record,) = caplog.records
    assert f"the compile cache {folder} is damaged or full" in record.getMessage()
    assert "delete the folder" in record.getMessage()


def test_a_cache_that_cannot_be_written_is_one_warning_and_no_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert use_compile_cache(directory=str(tmp_path / "file")) is None
        assert use_compile_cache(directory="~no-such-user/cache") is None
    for record in caplog.records:
        assert "cannot be used, so every program is compiled" in record.getMessage()
    assert len(caplog.records) == 2
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_a_cache_that_is_switched_off_or_set_up_by_other_means_is_left_alone(tmp_path: Path) -> None:
    assert use_compile_cache(is_on=False, directory=str(tmp_path)) is None
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    assert use_compile_cache(directory=str(tmp_path)) is None
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "theirs")
    jax.config.update("jax_enable_compilation_cache", False)
    assert use_compile_cache(directory=str(tmp_path)) is None
    assert not list(tmp_path.iterdir())


def test_by_default_programs_are_kept_in_the_user_s_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder().parent == tmp_path / "jaxrl" / "xla"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder().parent == tmp_path / "home" / ".cache" / "jaxrl" / "xla"


def test_the_oldest_programs_go_when_the_cache_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache_folder(str(tmp_path))
    folder.mkdir()
    for age_s, name in enumerate(("new", "middle", "old")):
        (folder / name).write_bytes(b"x" * 100)
        os.utime(folder / name, (10_000 - age_s, 10_000 - age_s))
    (folder / "a folder").mkdir()
    (folder / "deleted meanwhile").symlink_to("nothing")
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 250)
    assert use_compile_cache(directory=str(tmp_path)) == folder
    assert sorted(path.name for path in folder.iterdir()) == ["a folder", "deleted meanwhile", "middle", "new"]
