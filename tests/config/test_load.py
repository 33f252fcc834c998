"""`jaxrl.config.load`: files, overrides, errors for people, and TOML that reads back."""

import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.config.dump import dump_toml, redact
from jaxrl.config.load import build_parser, load_config, parse_cli
from jaxrl.config.run import RunConfig
from jaxrl.errors import ConfigError

MINIMAL = """
[orchestrator.model]
name = "models/tiny"
[[orchestrator.train.env]]
type = "reverse_text"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def with_text(file: Path, text: str) -> Path:
    file.write_text(MINIMAL + text)
    return file


def error_of(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return str(caught.value)


# Overrides


def test_the_command_line_wins_over_the_file(file: Path) -> None:
    with_text(file, "[run]\nmax_steps = 5\nseed = 3")
    config = load_config(file, ["--run.max_steps", "7"])
    assert (config.run.max_steps, config.run.seed) == (7, 3)


@pytest.mark.parametrize("tokens", [["--run.max_steps", "7"], ["--run.max_steps=7"], ["--run.max-steps", "7"]])
def test_an_override_may_use_a_space_or_an_equals_sign_and_kebab_case(file: Path, tokens: list[str]) -> None:
    assert load_config(file, tokens).run.max_steps == 7


def test_values_are_json_or_toml_or_text_and_a_text_field_takes_text_as_it_is(file: Path) -> None:
    config = load_config(
        file,
        [
            *("--trainer.optimizer.lr", "5e-5", "--run.name", "007", "--orchestrator.sampling.stop", '["a", "null"]'),
            *("--orchestrator.model.name", "a=b c", "--run.max_steps", "1_000", "--trainer.remat", "layer"),
        ],
    )
    assert config.trainer.optimizer.lr == 5e-5
    assert (config.run.name, config.orchestrator.model.name, config.run.max_steps) == ("007", "a=b c", 1000)
    assert config.orchestrator.sampling.stop == ["a", "null"]
    assert config.trainer.remat == "layer"


def test_a_boolean_may_be_a_bare_flag_and_nothing_else_may(file: Path) -> None:
    with_text(file, "[monitors]\nplot = false")
    assert load_config(file, ["--monitors.plot", "--run.seed", "1"]).monitors.plot is True
    assert load_config(file, ["--monitors.terminal=false"]).monitors.terminal is False
    assert error_of(file, "--run.seed").startswith("`run.seed` needs a value")


def test_null_unsets_a_value_of_the_file_where_null_is_allowed(file: Path) -> None:
    with_text(file, "[trainer.checkpoint]\nevery_n_steps = 5")
    assert load_config(file, ["--trainer.checkpoint.every_n_steps", "null"]).trainer.checkpoint.every_n_steps is None
    assert "`run.max_steps`=null" in error_of(file, "--run.max_steps", "null")


def test_list_items_are_set_by_index_appended_at_the_end_and_given_as_json(file: Path) -> None:
    config = load_config(
        file,
        [
            *("--orchestrator.train.env.0.ratio", "2", "--orchestrator.train.env.1.type", "reverse_text"),
            *("--orchestrator.train.env.1.name", "second", "--orchestrator.eval.env", '[{"type": "reverse_text", "seed": 9}]'),
        ],
    )
    assert [(env.name, env.ratio) for env in config.orchestrator.train.env] == [(None, 2.0), ("second", 1.0)]
    assert [env.model_dump()["seed"] for env in config.orchestrator.eval.env] == [9]


def test_an_index_beyond_the_end_names_the_length(file: Path) -> None:
    assert "`orchestrator.train.env` is a list of 1: expected an index from 0 to 1" in error_of(
        file, "--orchestrator.train.env.2.ratio", "1"
    )


def test_an_index_into_a_default_list_starts_from_the_default(file: Path) -> None:
    """The defaults stay in their order, and the one that was named changes."""
    before = load_config(file).orchestrator.post_batch_filters
    assert before[2].type == "zero_advantage" and before[2].enforce
    after = load_config(file, ["--orchestrator.post_batch_filters.2.enforce", "false"]).orchestrator.post_batch_filters
    assert after == [*before[:2], before[2].model_copy(update={"enforce": False})]


def test_the_more_specific_override_wins_whatever_the_order(file: Path) -> None:
    whole, part = ["--trainer.mesh", '{"data": 2, "fsdp": 2}'], ["--trainer.mesh.data", "4"]
    for tokens in (whole + part, part + whole):
        assert load_config(file, tokens).trainer.mesh.model_dump() == {"data": 4, "fsdp": 2, "tensor": 1}


def test_of_two_equal_overrides_the_later_wins(file: Path) -> None:
    assert load_config(file, ["--run.seed", "1", "--run.seed", "2"]).run.seed == 2


def test_keys_of_a_free_table_are_taken_as_written(file: Path) -> None:
    env = '[{"type": "reasoning_gym", "dataset": "chain_sum"}]'
    config = load_config(file, ["--orchestrator.train.env", env, "--orchestrator.train.env.0.parameters.min-terms", "3"])
    assert config.orchestrator.train.env[0].model_dump()["parameters"] == {"min-terms": 3}


# Types and defaults


def test_a_changed_type_drops_the_fields_that_only_the_old_type_has(file: Path) -> None:
    with_text(file, '[trainer.optimizer.schedule]\ntype = "linear"\nwarmup_steps = 3\ndecay_steps = 5')
    with pytest.warns(UserWarning, match=r"`trainer\.optimizer\.schedule\.decay_steps`"):
        config = load_config(file, ["--trainer.optimizer.schedule.type", "cosine"])
    assert config.trainer.optimizer.schedule.model_dump() == {"type": "cosine", "warmup_steps": 3, "min_lr": 0.0}


@pytest.mark.parametrize("is_type_first", [True, False])
def test_fields_of_the_new_type_may_stand_before_or_after_the_type(file: Path, is_type_first: bool) -> None:
    tokens = [["--trainer.loss.type", "ipo"], ["--trainer.loss.ipo_threshold", "0.5"]]
    config = load_config(file, [t for pair in (tokens if is_type_first else tokens[::-1]) for t in pair])
    assert config.trainer.loss.model_dump() == {"type": "ipo", "ipo_threshold": 0.5, "adv_tau": 1.0, "kl_tau": 1e-3}


def test_a_section_without_a_type_keeps_the_default_type(file: Path) -> None:
    with_text(file, "[trainer.loss]\nkl_tau = 0.5")
    assert load_config(file).trainer.loss.model_dump()["type"] == "default"
    assert load_config(file, ["--inference.num_slots", "4"]).inference.model_dump()["num_slots"] == 4


def test_a_section_given_in_part_keeps_what_its_default_sets(file: Path) -> None:
    """Evaluation is greedy by default; naming another sampling key must not make it sample."""
    with_text(file, "[orchestrator.eval.sampling]\nmax_tokens = 9")
    sampling = load_config(file, ["--orchestrator.eval.sampling.top_k", "3"]).orchestrator.eval.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.top_k) == (0.0, 9, 3)


# Errors


@pytest.mark.parametrize("section", ["run", "trainer.optimizer", "orchestrator.train.env.0"])
def test_an_unknown_key_is_the_same_error_from_a_file_and_from_the_command_line(file: Path, section: str) -> None:
    key, near = {"run": ("max_stepz", "max_steps"), "trainer.optimizer": ("betta1", "beta1")}.get(section, ("rato", "ratio"))
    from_line = error_of(file, f"--{section}.{key}", "3")
    header = "" if section.endswith(".0") else f"[{section}]\n"
    from_file = error_of(with_text(file, f"{header}{key} = 3"))
    assert from_line == f"unknown key `{section}.{key}` (from the command line); did you mean `{section}.{near}`?"
    assert from_file == from_line.replace("the command line", f"`{file}`")


def test_an_unknown_section_is_named_and_the_nearest_given(file: Path) -> None:
    assert error_of(file, "--trianer.rows", "3") == "unknown key `trianer` (from the command line); did you mean `trainer`?"


def test_a_key_of_another_section_is_pointed_to(file: Path) -> None:
    assert error_of(file, "--run.batch_size", "8").endswith("that key belongs to `orchestrator.batch_size`")


def test_a_run_is_synchronous_unless_told_otherwise_because_the_engine_shares_the_trainers_devices(file: Path) -> None:
    assert load_config(file).async_level == 0
    assert load_config(file, ["--orchestrator.max_async_level=1"]).async_level == 1


def test_a_list_of_runs_is_refused_with_the_reason(file: Path) -> None:
    assert "a trainer trains one run; start a process for each" in error_of(with_text(file, "[[run]]\nname = 'a'\n[[run]]\nname = 'b'\n"))


def test_several_errors_are_all_listed(file: Path) -> None:
    message = error_of(file, "--run.max_steps", "x", "--run.sed", "1", "--trainer.overlong", "drpo", "--trainer.rows")
    assert message.startswith("4 settings are wrong:\n- ")
    for part in ("`run.max_steps`='x'", "unknown key `run.sed`", "did you mean 'drop'?", "`trainer.rows` needs a value"):
        assert part in message


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--run.max_steps", "0"], "`run.max_steps`=0: expected an integer >= 1; the default is 100"),
        (["--run.max_steps", "1.5"], "`run.max_steps`=1.5: expected an integer >= 1; the default is 100"),
        (["--trainer.optimizer.lr", "NaN"], "`trainer.optimizer.lr`='NaN': expected a number > 0; the default is 1e-06"),
        (["--trainer.loss.type", "ip"], "`trainer.loss.type`='ip': expected one of 'default', 'ipo'; did you mean 'ipo'?"),
        (["--orchestrator.model.lora", "8"], "`orchestrator.model.lora`=8: expected null"),
        (["--orchestrator.model.trust_remote_code"], "`orchestrator.model.trust_remote_code`=true is not supported: code that "
         "ships with a tokenizer is never run"),
        (["--orchestrator.eval.sampling.min_p", "1"], "`orchestrator.eval.sampling.min_p`=1: expected a number >= 0 and < 1; "
         "the default is 0.0"),
        (["--orchestrator.train.env.1.ratio", "2"], "`orchestrator.train.env.1.type` is missing: expected one of "
         "'reasoning_gym', 'questions', 'reverse_text', 'tools', 'feedback', 'python', 'agent', 'openenv', 'verifiers'"),
        (["--orchestrator.train.env", "3"], "`orchestrator.train.env`=3: expected a list of tables"),
        (["--orchestrator.train.env.0.min_chars", "9"], "`orchestrator.train.env.0.min_chars`=9 exceeds `max_chars`=5"),
        (["--orchestrator.model.name.x", "1"], "`orchestrator.model.name`='models/tiny' is a value, not a table: it has no keys to set"),
        (["stray"], "expected configuration overrides such as `--run.max_steps 10`, got 'stray'"),
    ],
)  # fmt: skip
def test_a_wrong_value_says_what_was_expected_and_from_where_it_came(file: Path, tokens: list[str], message: str) -> None:
    assert error_of(file, *tokens).replace(" (from the command line)", "") == message


def test_a_missing_key_says_what_it_is_for(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[[orchestrator.train.env]]\ntype = "reasoning_gym"\n[orchestrator.model]\n')
    message = error_of(path)
    assert "`orchestrator.model.name` is missing: expected a string (A Hugging Face directory" in message
    assert "set `dataset` in `orchestrator.train.env.0` or give `--orchestrator.train.env.0.dataset`" in message


def test_files_that_cannot_be_read_are_configuration_errors(tmp_path: Path) -> None:
    (tmp_path / "quickstart.toml").write_text("[run\n")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    (tmp_path / "config.toml").write_text("")
    assert "did you mean" in error_of(tmp_path / "quikstart.toml")
    assert re.search(r"not valid TOML: .*line 1", error_of(tmp_path / "quickstart.toml"))
    assert error_of(tmp_path).endswith(f"did you mean `{tmp_path / 'config.toml'}`?")
    assert "UTF-8" in error_of(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    "tokens",
    [
        ["--orchestrator.sampling.stop", '["http://me:hunter2@host/v1"]'],
        ["--orchestrator.train.env", '[{"type": "reasoning_gym", "dataset": "x", "parameters": {"api_key": "0123456789"}}]'],
        ["--orchestrator.train.env.0.system_prompt", "Use sk-abcdefghijklmnop0123 now"],
    ],
)
def test_a_secret_is_refused_without_showing_it(file: Path, tokens: list[str]) -> None:
    message = error_of(file, *tokens)
    assert "looks like a secret" in message
    assert not any(secret in message for secret in ("hunter2", "0123456789", "abcdefghijklmnop"))


def test_null_in_a_free_table_is_refused_because_toml_cannot_keep_it(file: Path) -> None:
    env = '[{"type": "reasoning_gym", "dataset": "x", "parameters": {"low": null}}]'
    assert "`orchestrator.train.env.0.parameters.low`=null" in error_of(file, "--orchestrator.train.env", env)


# Writing


def test_a_dump_documents_every_field_and_comments_null_out(file: Path) -> None:
    text = dump_toml(load_config(file))
    assert "# Optimizer steps of the whole run, resumed parts included.\nmax_steps = 100\n" in text
    assert "# token_batch_size =\n" in text
    for line in text.splitlines():
        assert not line.startswith("# ."), "a field without a description"


json_values = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=30, deadline=None)
@given(
    parameters=st.dictionaries(st.text(max_size=8), json_values, max_size=3),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
    lr=st.floats(1e-12, 1.0),
    schedule=st.sampled_from([{"type": "constant"}, {"type": "cosine", "min_lr": 1e-9}, {"type": "linear", "decay_steps": 7}]),
    every_n_steps=st.none() | st.integers(1, 9),
    filters=st.lists(
        st.sampled_from(
            [{"type": "zero_advantage", "enforce": False}, {"type": "repetition", "window": 7}, {"type": "min_reward", "threshold": 0.5}]
        ),
        unique_by=lambda own: own["type"],
    ),
)
def test_loading_a_dump_gives_the_same_configuration(
    tmp_path_factory: pytest.TempPathFactory,
    parameters: dict[str, Any],
    stop: list[str],
    lr: float,
    schedule: dict[str, Any],
    every_n_steps: int | None,
    filters: list[dict[str, Any]],
) -> None:
    env = {"type": "reasoning_gym", "dataset": "chain_sum", "parameters": parameters, "tiers": [{"name": "a", "parameters": parameters}]}
    config = RunConfig.model_validate(
        {
            "orchestrator": {
                "model": {"name": "m"},
                "sampling": {"stop": stop},
                "train": {"env": [env]},
                "post_batch_filters": filters,
                "eval": {"sampling": {"temperature": 0.5}},
            },
            "trainer": {"optimizer": {"lr": lr, "schedule": schedule}, "checkpoint": {"every_n_steps": every_n_steps}},
        }
    )
    path = tmp_path_factory.mktemp("dump") / "config.toml"
    text = dump_toml(config)
    path.write_text(text, encoding="utf-8", newline="")
    again = load_config(path)
    assert again == config
    assert dump_toml(again) == text


# The command line


def test_the_command_line_is_split_into_file_overrides_and_flags() -> None:
    path, overrides, flags = parse_cli(["--run.max_steps", "3", "--config", "a.toml", "--monitors.plot", "--dry-run", "--run.name=x y"])
    assert path == Path("a.toml")
    assert overrides == ["--run.max_steps=3", "--monitors.plot", "--run.name=x y"]
    assert flags.dry_run and flags.resume is None


def test_a_negative_number_is_the_value_of_its_key() -> None:
    assert parse_cli(["--config", "a.toml", "--trainer.optimizer.lr", "-1e-3"]).overrides == ["--trainer.optimizer.lr=-1e-3"]


def test_resuming_reads_the_run_folders_own_configuration() -> None:
    assert parse_cli(["--resume", "runs/x"]).path == Path("runs/x/config.toml")


@pytest.mark.parametrize("text", ["", "[run]\noutput_dir = '/where/it/was'\n"])
def test_a_run_folder_that_was_moved_is_resumed_where_it_is_now(file: Path, text: str) -> None:
    run_dir = with_text(file, text).rename(file.parent / "config.toml").parent
    path, overrides, _ = parse_cli(["--resume", str(run_dir)])
    assert load_config(path, overrides).run_dir == run_dir


def test_a_command_may_add_flags_of_its_own() -> None:
    parser = build_parser("python -m jaxrl.doctor", "Check.")
    parser.add_argument("--check")
    assert parse_cli(["--config", "a.toml", "--check", "resume"], parser).flags.check == "resume"


@pytest.mark.parametrize("argv", [[], ["--config", "a", "--resume", "b"], ["--config", "a", "--confg", "b"], ["--config", "a", "stray"]])
def test_a_wrong_command_line_ends_with_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_cli(argv)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_help_ends_with_code_0_and_shows_how_to_set_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_cli(["--help"])
    assert caught.value.code == 0
    assert "--orchestrator.train.env.0.ratio 2" in " ".join(capsys.readouterr().out.split())


# Secrets


def test_redaction_goes_by_the_name_and_by_the_form_of_a_value() -> None:
    shown = redact(
        {"OPENAI_API_KEY": "x", "hf-token": "y", "api_key_var": "MY_KEY", "max_tokens": 4, "n": None, "list": [{"password": "z"}]}
        | {"note": "Authorization: Bearer abcdefgh12345678", "model": "hf_abcdefghijklmnopqrst"}
    )
    assert shown == {
        "OPENAI_API_KEY": "<redacted>",
        "hf-token": "<redacted>",
        "api_key_var": "MY_KEY",
        "max_tokens": 4,
        "n": None,
        "list": [{"password": "<redacted>"}],
        "note": "Authorization: <redacted>",
        "model": "<redacted>",
    }


def test_loading_warns_of_nothing_when_nothing_is_odd(file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isfinite(load_config(file).trainer.optimizer.lr)


def test_settings_of_an_external_server_warn_that_the_embedded_engine_does_not_use_them(file: Path) -> None:
    with pytest.warns(UserWarning, match=r"`orchestrator.model.client` is not used"):
        config = load_config(file, ["--orchestrator.model.client.timeout_s", "5"])
    with pytest.warns(UserWarning, match=r"`orchestrator.model.client` is not used"):
        file.write_text(dump_toml(config))
        assert load_config(file) == config
