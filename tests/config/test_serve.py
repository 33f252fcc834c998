"""`ServeConfig`: its rules, and that it loads like a run's configuration."""

from pathlib import Path

import pytest

from jaxrl.config.dump import dump_toml
from jaxrl.config.load import load_config, parse_cli
from jaxrl.config.serve import ServeConfig
from jaxrl.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.toml"
    path.write_text('[model]\nname = "models/tiny/"\n[inference]\nnum_slots = 4\n')
    return path


def load(file: Path, *overrides: str) -> ServeConfig:
    return load_config(file, overrides, ServeConfig)


def test_a_server_loads_overrides_and_reads_its_own_dump_back(file: Path) -> None:
    config = load(file, "--server.port", "0", "--inference.max_model_len=64")
    assert (config.server.port, config.engine.num_slots, config.engine.max_model_len, config.served_name) == (0, 4, 64, "tiny")
    assert config.request_deadline_s == config.engine.request_deadline_s == 600
    (copy := file.with_name("copy.toml")).write_text(dump_toml(config))
    assert load(copy) == config


def test_a_mistake_names_the_key_of_the_server(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key `server.prot` \(from the command line\); did you mean `server.port`"):
        load(file, "--server.prot", "1")
    with pytest.raises(ConfigError, match=r"`server.port`=70000 .* expected an integer >= 0 and <= 65535; the default is 8000"):
        load(file, "--server.port", "70000")
    with pytest.raises(ConfigError, match="looks like a secret"):
        load(file, "--model.name", "sk-0123456789abcdef0123")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "myhost"])
def test_a_host_that_others_can_reach_needs_a_key(file: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=r"lets other machines in, .*--server.api_key_var"):
        load(file, "--server.host", host)
    assert load(file, "--server.host", host, "--server.api_key_var", "KEY").server.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_this_machine_alone_needs_none(file: Path, host: str) -> None:
    assert load(file, "--server.host", host).server.is_local


def test_a_key_in_place_of_its_variables_name_is_refused_without_showing_it(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"`server.api_key_var`: expected the name of an environment variable") as caught:
        load(file, "--server.api_key_var", "sesame-0123456789")
    assert "sesame" not in str(caught.value)


def test_a_deadline_that_the_engine_would_never_let_come_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"`server.request_deadline_s`=900 would never be reached"):
        load(file, "--server.request_deadline_s", "900")
    assert load(file, "--inference.request_deadline_s", "30").request_deadline_s == 30


def test_a_server_is_no_proxy(file: Path) -> None:
    file.write_text('[model]\nname = "models/tiny/"\n[inference]\ntype = "openai"\n')
    with pytest.raises(ConfigError, match="is no proxy"):
        load(file)


def test_overrides_are_told_by_the_sections_of_the_root() -> None:
    path, overrides, _ = parse_cli(["--config", "a.toml", "--server", "{}", "--model.name", "x"], root=ServeConfig)
    assert (str(path), overrides) == ("a.toml", ["--server={}", "--model.name=x"])
