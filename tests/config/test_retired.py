"""Keys of earlier designs: each fails with its exact key and what to write instead, from a file and from the command line."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from jaxrl.config.algorithm import AlgorithmConfig
from jaxrl.config.load import load_config
from jaxrl.config.retired import RETIRED, take_retired
from jaxrl.config.schema import section_types
from jaxrl.errors import ConfigError

MINIMAL = """
[orchestrator]
[orchestrator.model]
name = "models/tiny"
[[orchestrator.train.env]]
type = "reverse_text"
[[orchestrator.eval.env]]
type = "reverse_text"
"""

TABLES = {
    "orchestrator.train.env.0": "[[orchestrator.train.env]]\n",
    "orchestrator.eval.env.0": "[[orchestrator.eval.env]]\n",
    "orchestrator.model": "[orchestrator.model]\n",
    "orchestrator": "[orchestrator]\n",
}
"""Table -> its header in the text above."""

OF_THE_RUN = [
    ("orchestrator.training_mode", "opd", "", "a mode is an algorithm: `orchestrator.algo.type`"),
    ("orchestrator.teacher", {"model": {"name": "t"}}, "", "`orchestrator.algo.teacher`, of the algorithm 'opd'"),
    ("orchestrator.policy", {"name": "m"}, "", "the policy is `orchestrator.model`"),
    ("orchestrator.student", {"name": "m"}, "", "the policy, which learns, is `orchestrator.model`"),
    ("orchestrator.client", {"base_url": ["http://127.0.0.1:8000/v1"]}, "", "`orchestrator.model.client`"),
    ("orchestrator.model.model", "m", "", "its name as `orchestrator.model.name`"),
]
"""Key, what an earlier configuration has there, what of that is shown after the key, and a part of the hint."""

OF_AN_ALGORITHM = [
    ("advantage", "custom", "", "how credit is given is the algorithm itself, `ALGO.type`"),
    ("advantage", {"type": "custom", "import_path": "a:b"}, "", "how credit is given is the algorithm itself, `ALGO.type`"),
    *(
        (key, value, f"='{name}'", hint)
        for name, hint in (
            ("default", "reward minus the group's mean is `ALGO.type`='grpo'"),
            ("group_norm", "nothing is divided by the group's standard deviation; `ALGO.type`='grpo' subtracts its mean"),
            ("none", "the algorithms without advantages are `ALGO.type`='sft', 'opd' and 'opsd'"),
        )
        for key, value in (("advantage", name), ("advantage.type", name), ("type", name))
    ),
    ("name", "grpo", "", "the algorithm is chosen by `ALGO.type`"),
    ("loss", {"type": "rl"}, "", "the form of the policy gradient is `trainer.loss`"),
    ("model", {"name": "t"}, "", "`ALGO.teacher` of 'opd', `ALGO.sampling.source` of 'sft'"),
    ("token_scorer", {"type": "teacher"}, "", "`ALGO.type`='opd' with `ALGO.teacher`"),
    ("observations", ["tool"], "", "is said by role: `ALGO.roles` of 'echo'"),
    ("observation_weight", 0.1, "", "the weight of a role is its `alpha`"),
]

ALGORITHM_TABLES = ["orchestrator.algo", "orchestrator.train.env.0.algo", "orchestrator.eval.env.0.algo"]

CASES = OF_THE_RUN + [
    (f"{table}.{key}", value, shown, hint.replace("ALGO", table))
    for table in ALGORITHM_TABLES
    for key, value, shown, hint in OF_AN_ALGORITHM
]


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def write(tmp_path: Path, key: str, value: Any) -> Path:
    """Write a configuration that is right but for one key."""
    text = MINIMAL
    for table, header in TABLES.items():
        if key.startswith(f"{table}."):
            with_type = 'algo.type = "grpo"\n' if ".algo." in key and not key.endswith("algo.type") else ""
            text = MINIMAL.replace(header, f"{header}{with_type}{key.removeprefix(f'{table}.')} = {toml(value)}\n")
            break
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:`orchestrator.eval.env.0.algo` is not used")
@pytest.mark.parametrize("origin", ["file", "command line"])
@pytest.mark.parametrize(("key", "value", "shown", "hint"), CASES, ids=[f"{key}{shown}" for key, _, shown, _ in CASES])
def test_a_key_of_an_earlier_design_fails_alone_with_its_exact_key_and_its_hint(
    tmp_path: Path, origin: str, key: str, value: Any, shown: str, hint: str
) -> None:
    if origin == "file":
        message = error_of(path := write(tmp_path, key, value))
        assert message.startswith(f"`{key}`{shown} (from `{path}`) is of an earlier design: ")
    else:
        path = tmp_path / "run.toml"
        path.write_text(MINIMAL)
        with_type = [f"--{key.partition('.algo.')[0]}.algo.type", "grpo"] if ".algo." in key and not key.endswith("algo.type") else []
        message = error_of(path, *with_type, f"--{key}", value if isinstance(value, str) else json.dumps(value))
        assert message.startswith(f"`{key}`{shown} (from the command line) is of an earlier design: ")
    assert hint in message


def test_every_retired_key_has_a_case_above() -> None:
    assert {key.replace(".0.", ".N.") + shown for key, _, shown, _ in CASES} == set(RETIRED)


def test_hints_point_to_what_is_there() -> None:
    """Once `echo` is built, its hint must stop saying that it is not."""
    types = {section.model_fields["type"].default for section in section_types(get_args(AlgorithmConfig)[0])}
    for key, hint in RETIRED.items():
        assert ("not built yet" in hint) == ("'echo'" in hint and "echo" not in types), key


def test_retired_keys_are_listed_first_and_together_with_every_other_problem(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    old = "training_mode = 'rl'\nbatch_sise = 8\nalgo = {type = 'none', name = 'x'}\n"
    path.write_text(MINIMAL.replace("[orchestrator]\n", f"[orchestrator]\n{old}"))
    message = error_of(path, "--orchestrator.student.name", "s", "--run.max_steps", "0", "--trainer.rows")
    lines = message.splitlines()
    assert lines[0] == "7 settings are wrong:"
    keys = ("orchestrator.training_mode", "orchestrator.algo.type", "orchestrator.algo.name", "orchestrator.student")
    for line, key in zip(lines[1:5], keys, strict=True):
        assert line.startswith(f"- `{key}`") and "is of an earlier design" in line
    for part in ("`trainer.rows` needs a value", "`run.max_steps`=0", "did you mean `orchestrator.batch_size`?"):
        assert part in message


def test_a_free_table_may_hold_any_key(tmp_path: Path) -> None:
    """Parameters of a dataset are the dataset's own, and no key of theirs is retired."""
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    env = {"type": "reasoning_gym", "dataset": "d", "parameters": {"algo": {"name": "x"}, "teacher": 1}}
    config = load_config(path, ["--orchestrator.train.env", json.dumps([env])])
    assert config.orchestrator.train.env[0].model_dump()["parameters"] == env["parameters"]


def test_the_older_spelling_with_hyphens_is_known_too(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    assert error_of(path, "--orchestrator.training-mode", "opd").startswith("`orchestrator.training-mode` (from the command line) is of an")


def test_taking_retired_keys_out_leaves_the_others_as_they_were() -> None:
    tables = {"orchestrator": {"algo": {"type": "grpo", "loss": 1}, "train": {"env": [{"type": "t", "algo": {"type": "none", "x": 1}}]}}}
    kept = {"orchestrator": {"algo": {"type": "grpo"}, "train": {"env": [{"type": "t"}]}}}
    found = take_retired(tables)
    assert [key.path for key in found] == [("orchestrator", "algo", "loss"), ("orchestrator", "train", "env", 0, "algo", "type")]
    assert tables == kept
    assert take_retired(unchanged := copy.deepcopy(kept)) == [] and unchanged == kept
