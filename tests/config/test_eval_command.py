"""What the words of `jaxrl eval` mean: environments, splits, checkpoints, flags."""

from pathlib import Path

import pytest

from jaxrl.config.checkpoints import RunCheckpoint, newest_step_name, run_checkpoint
from jaxrl.config.env import OpenEnvConfig, PythonEnvConfig, QuestionsEnvConfig, ReasoningGymEnvConfig, VerifiersEnvConfig
from jaxrl.config.eval_command import LADDERS, SPEC_KINDS, EvalCommandConfig, dataset_of, env_tables, with_split
from jaxrl.config.eval_flags import build_eval_parser, parse_eval_flags
from jaxrl.config.load import load_config, take_overrides
from jaxrl.errors import ConfigError


@pytest.mark.parametrize(
    ("spec", "section", "key", "value"),
    [
        ("reasoning_gym:chain_sum", ReasoningGymEnvConfig, "dataset", "chain_sum"),
        ("questions:data/test.jsonl", QuestionsEnvConfig, "path", "data/test.jsonl"),
        ("openenv:http://127.0.0.1:8765", OpenEnvConfig, "base_url", "http://127.0.0.1:8765"),
        ("verifiers:my_set", VerifiersEnvConfig, "taskset", "my_set"),
        ("py:my_package.worlds:make", PythonEnvConfig, "import_path", "my_package.worlds:make"),
    ],
)
def test_a_spec_is_the_table_of_an_environment_and_overrides_go_over_it(spec: str, section: type, key: str, value: str) -> None:
    env = load_config({"env": env_tables(spec)}, ["--env.name=mine"], EvalCommandConfig).env
    assert type(env) is section and getattr(env, key) == value and env.name == "mine"


def test_a_ladder_is_ten_difficulties_from_two_terms_of_a_digit_to_seven_of_five() -> None:
    tiers = env_tables("reasoning_gym:chain_sum@tiers")["tiers"]
    assert (
        [tier["name"] for tier in tiers]
        == ["2x1", "3x1", "3x2", "4x2", "4x3", "5x3", "5x4", "6x4", "6x5", "7x5"]
        == list(LADDERS["chain_sum"])
    )
    assert tiers[-1]["parameters"] == {"min_terms": 7, "max_terms": 7, "min_digits": 5, "max_digits": 5}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("reasoning_gim:chain_sum", "did you mean 'reasoning_gym:chain_sum'?"),
        ("chain_sum", "expected a kind of environment, a colon"),
        ("questions:", "such as reasoning_gym:chain_sum, "),
        ("py:worlds", "expected an import path such as 'py:my_package.worlds:make'"),
        ("reasoning_gym:leg_counting@tiers", "tiers are of chain_sum only"),
        ("reasoning_gym:chain_sum@2x9", "no tier '2x9'; chain_sum has 2x1, 3x1"),
    ],
)
def test_a_spec_that_is_none_is_refused_in_words(spec: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        env_tables(spec)
    assert said in str(caught.value)


def test_what_is_held_out_is_played_unless_a_split_is_asked_for() -> None:
    def split(kind: str, asked: str | None) -> str:
        return with_split({"type": kind}, asked)["split"]

    assert [split(kind, None) for kind in ("reasoning_gym", "tools", "questions", "openenv")] == ["heldout", "heldout", "all", "test"]
    assert [split(kind, "test") for kind in ("reasoning_gym", "questions", "openenv")] == ["heldout", "heldout", "test"]
    assert split("openenv", "validation") == "validation" and split("reasoning_gym", "train") == "train"
    assert with_split({"type": "python"}, None) == {"type": "python"}
    with pytest.raises(ConfigError, match="has no splits"):
        with_split({"type": "python"}, "test")


def test_overrides_are_taken_out_and_the_rest_is_the_parsers() -> None:
    argv = ["reasoning_gym:chain_sum", "--env.num_tasks", "5", "--limit", "3", "--inference.num_slots=4", "-o", "a.b"]
    overrides, rest = take_overrides(argv, EvalCommandConfig)
    assert overrides == ["--env.num_tasks=5", "--inference.num_slots=4"]
    flags = parse_eval_flags(rest, build_eval_parser())
    assert (flags.spec, flags.limit, flags.output_dir, flags.resume) == ("reasoning_gym:chain_sum", 3, Path("a.b"), True)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["a:b", "--limt", "3"], "unknown flag --limt; did you mean `--limit`?"),
        (["a:b", "--zzz"], "a setting of the environment is given as `--env.zzz`"),
        (["a:b", "c:d"], "unexpected argument 'c:d'; one ENV_SPEC is played"),
        (["a:b", "--limit", "0"], "expected a whole number of at least 1, got '0'"),
        (["a:b", "--seeds", "1,x"], "expected whole numbers with commas between them, such as 0,1, got '1,x'"),
        (["a:b", "--temperature", "nan"], "expected a number of at least 0, got 'nan'"),
    ],
)
def test_a_flag_that_is_wrong_ends_with_code_2_in_words(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_eval_flags(argv, build_eval_parser())
    assert caught.value.code == 2 and said in capsys.readouterr().err


def test_help_fits_a_terminal_and_names_every_kind_of_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = build_eval_parser().format_help()
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"{word}:{kind.example}" in text for word, kind in SPEC_KINDS.items())


def test_a_checkpoint_is_a_run_one_of_its_steps_or_a_model(tmp_path: Path) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    (run / "checkpoints" / "step_000004").mkdir(parents=True)
    model.mkdir()
    (model / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"whose config\.toml says which model"):
        run_checkpoint(str(run / "checkpoints" / "step_000004"))
    (run / "config.toml").write_text("")
    assert run_checkpoint(str(run)) == run_checkpoint(str(run / "checkpoints")) == RunCheckpoint(run, None)
    assert run_checkpoint(str(run / "checkpoints" / "step_000004")) == RunCheckpoint(run, 4)
    assert run_checkpoint(str(model)) is None and run_checkpoint("org/name") is None
    (run / "checkpoints" / "step_000012").mkdir()
    (run / "checkpoints" / "step_000020.orbax-checkpoint-tmp").mkdir()
    assert (newest_step_name(run), newest_step_name(model)) == ("step_000012", None)
    (model / "config.toml").write_text("")
    assert run_checkpoint(str(model)) is None, "an exported model is a model, whatever lies beside it"
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="the run has no checkpoint yet"):
        run_checkpoint(str(tmp_path))


def test_the_tasks_of_a_runs_environment_are_called_as_on_the_command_line_and_no_secret_is_told() -> None:
    assert dataset_of(OpenEnvConfig(base_url="http://me:secret@host:8000")) == "openenv:http://<redacted>@host:8000"
    assert dataset_of(PythonEnvConfig(import_path="my.env:make")) == "py:my.env:make"
