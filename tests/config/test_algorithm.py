"""The algorithms' configuration: what each may be set to, who inherits what, and what is refused or warned of before a run."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from jaxrl.config.algorithm import AlgorithmBase, AlgorithmConfig, EchoConfig, GRPOConfig, OPDConfig, OPSDConfig, SFTConfig
from jaxrl.config.dump import dump_toml
from jaxrl.config.env import ReverseTextEnvConfig
from jaxrl.config.load import load_config
from jaxrl.config.run import RunConfig
from jaxrl.config.schema import section_types
from jaxrl.errors import ConfigError

FROZEN = {"name": "big", "base_url": ["http://127.0.0.1:8000/v1"]}
EVERY_FROZEN = FROZEN | {"api_key_var": "BIG_KEY", "timeout_s": 9.0, "max_concurrency": 3, "max_attempts": 2, "ready_deadline_s": 9.0}
POLICY_SOURCE = {"sampling": {"source": "policy"}}

FULL: dict[str, list[dict[str, Any]]] = {
    "grpo": [
        POLICY_SOURCE
        | {"length_penalty": {"type": "tokens", "completion_weight": 0.5, "tool_response_weight": 2.0}, "credit": "rollout"},
        POLICY_SOURCE | {"length_penalty": {"type": "turns"}, "credit": "rollout"},
    ],
    "echo": [
        POLICY_SOURCE
        | {
            "length_penalty": {"type": "turns"},
            "credit": "rollout",
            "roles": {role: {"alpha": 0.5} for role in ("system", "user", "assistant")}
            | {"tool": {"alpha": 2.0, "tool_names": ["a", "b"]}},
            "filter": {"import_path": "my.filters:keep", "kwargs": {"words": ["x"], "depth": {"n": 1}}},
        },
    ],
    "max_rl": [POLICY_SOURCE],
    "rloo": [POLICY_SOURCE],
    "reinforce": [POLICY_SOURCE | {"decay": 0.5}],
    "rae": [POLICY_SOURCE | {"decay": 0.5}],
    "opd": [POLICY_SOURCE | {"teacher": EVERY_FROZEN}],
    "opsd": [POLICY_SOURCE | {"demo_key": "answer", "template": 'Say "{{":\n\t{demonstration}'}],
    "sft": [{"sampling": {"source": EVERY_FROZEN}}, {"sampling": {"source": "demonstrations"}}],
}
"""Algorithm -> its settings with every optional part set, once for each kind of part."""

CLASSES = {s.model_fields["type"].default: s for s in section_types(get_args(AlgorithmConfig)[0]) if issubclass(s, AlgorithmBase)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def load(file: Path, *overrides: str, orchestrator: str = "", env: str = "", more: str = "") -> RunConfig:
    """Load a run of one environment called `words`, with text added to its tables."""
    file.write_text(
        f"[orchestrator]\n{orchestrator}\n[orchestrator.model]\nname = 'models/tiny'\n"
        f"[[orchestrator.train.env]]\ntype = 'reverse_text'\nname = 'words'\n{env}\n{more}"
    )
    return load_config(file, overrides)


def error_of(file: Path, *overrides: str, **texts: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, *overrides, **texts)
    return str(caught.value).replace(" (from the command line)", "").replace(f" (from `{file}`)", "")


def warnings_of(file: Path, *overrides: str, **texts: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(file, *overrides, **texts)
    return [str(warning.message) for warning in caught]


# Classes


def test_the_defaults_of_an_algorithm_are_its_recommended_settings(file: Path) -> None:
    config = load(file)
    assert config.orchestrator.algo_of(config.orchestrator.train.env[0]) == GRPOConfig()
    plain = {"sampling": {"source": "policy"}, "length_penalty": None, "credit": "rollout"}
    assert GRPOConfig().model_dump() == plain | {"type": "grpo"}
    assert EchoConfig().model_dump() == plain | {"type": "echo", "roles": None, "filter": None}


def test_each_algorithm_says_what_it_feeds_and_whom_it_compares() -> None:
    said = {name: (section.action_loss_type, section.is_group_relative) for name, section in CLASSES.items()}
    assert said == {
        "grpo": ("rl", True),
        "echo": ("rl", True),
        "max_rl": ("rl", True),
        "rloo": ("rl", True),
        "reinforce": ("rl", False),
        "rae": ("rl", False),
        "opd": ("ref_kl", False),
        "opsd": ("ref_kl", False),
        "sft": ("ce", False),
    }


def test_echo_alone_feeds_two_losses() -> None:
    assert EchoConfig().loss_types == ("rl", "ce")
    assert all(section.model_construct().loss_types == (section.action_loss_type,) for name, section in CLASSES.items() if name != "echo")


def test_each_source_says_who_plays() -> None:
    frozen, demonstrations = (SFTConfig.model_validate(settings) for settings in FULL["sft"])
    for config, live, model in ((GRPOConfig(), True, True), (frozen, False, True), (demonstrations, False, False)):
        assert (config.samples_from_live_policy, config.samples_from_model) == (live, model)


def test_each_frozen_model_is_found_under_its_key() -> None:
    frozen, demonstrations = (SFTConfig.model_validate(settings) for settings in FULL["sft"])
    taught = OPDConfig.model_validate(FULL["opd"][0])
    assert frozen.frozen_models == {"sampling.source": frozen.sampling.source}
    assert taught.frozen_models == {"teacher": taught.teacher}
    assert GRPOConfig().frozen_models == demonstrations.frozen_models == {}


@pytest.mark.filterwarnings("ignore:.* learns from what an environment says")
@pytest.mark.parametrize(("name", "settings"), [(name, settings) for name, variants in FULL.items() for settings in variants])
def test_a_dump_of_every_algorithm_with_every_part_set_loads_equal(file: Path, name: str, settings: dict[str, Any]) -> None:
    """Once as the algorithm of the run, once as that of an environment."""
    text = json.dumps({"type": name} | settings)
    for key in ("orchestrator.algo", "orchestrator.train.env.0.algo"):
        config = load(file, f"--{key}", text)
        algo = config.orchestrator.algo_of(config.orchestrator.train.env[0])
        assert algo.model_dump(exclude_none=True) == {"type": name} | settings
        assert algo.model_fields_set | {"type"} == set(CLASSES[name].model_fields), "a field that this test does not set"
        file.write_text(dumped := dump_toml(config), encoding="utf-8", newline="")
        again = load_config(file)
        assert again == config and dump_toml(again) == dumped


# Inheritance


def test_an_environment_without_an_algorithm_of_its_own_inherits_that_of_the_run(file: Path) -> None:
    config = load(file, orchestrator="algo = {type = 'reinforce', decay = 0.5}", more="[[orchestrator.train.env]]\ntype = 'reverse_text'")
    orchestrator = config.orchestrator
    assert [env.algo for env in orchestrator.train.env] == [None, None]
    assert all(orchestrator.algo_of(env) is orchestrator.algo for env in orchestrator.train.env)


@pytest.mark.parametrize("algo", [{"type": "rae"}, {"type": "reinforce"}])
def test_an_environment_with_an_algorithm_of_its_own_inherits_no_setting_of_the_runs(file: Path, algo: dict[str, Any]) -> None:
    """Neither `decay`, which both have, nor anything else: what an environment's table does not say is the class's default."""
    second = "[[orchestrator.train.env]]\ntype = 'reverse_text'"
    config = load(
        file, "--orchestrator.train.env.0.algo", json.dumps(algo), orchestrator="algo = {type = 'reinforce', decay = 0.5}", more=second
    )
    own, inherited = (config.orchestrator.algo_of(env) for env in config.orchestrator.train.env)
    assert own.model_dump(exclude={"sampling"}) == algo | {"decay": 0.95}
    assert inherited.model_dump(exclude={"sampling"}) == {"type": "reinforce", "decay": 0.5}


def test_an_algorithm_that_no_environment_takes_is_a_warning(file: Path) -> None:
    said = warnings_of(file, orchestrator="algo.type = 'rloo'", env="algo.type = 'max_rl'")
    assert said == ["`orchestrator.algo` is not used: every training environment has an `algo` of its own"]
    assert warnings_of(file, env="algo.type = 'max_rl'") == []


# Roles of echo

FEEDBACK = "[[orchestrator.train.env]]\ntype = 'feedback'\ndataset = 'chain_sum'\nname = 'talk'\n"
TOOLS = "[[orchestrator.train.env]]\ntype = 'tools'\ndataset = 'chain_sum'\nname = 'sums'\n"
WORLD = "[[orchestrator.train.env]]\ntype = 'python'\nimport_path = 'my_world:World'\n"
ROLES = [
    # overrides of `orchestrator.algo`, weight of each role
    ((), {"tool": 0.1}),
    (("--orchestrator.algo.roles.user.alpha", "0.2"), {"user": 0.2}),
    (("--orchestrator.algo.roles.user.alpha", "0.2", "--orchestrator.algo.roles.tool.alpha", "0.3"), {"user": 0.2, "tool": 0.3}),
    (("--orchestrator.algo.roles.tool.tool_names", '["calculator"]'), {"tool": 0.1}),
    (("--orchestrator.algo.roles", '{"assistant": {}}'), {"assistant": 0.1}),
]


@pytest.mark.parametrize(("overrides", "table"), ROLES, ids=[str(table) for _, table in ROLES])
def test_a_role_that_is_set_replaces_the_default_table_from_a_file_and_from_the_command_line(
    file: Path, overrides: tuple[str, ...], table: dict[str, float]
) -> None:
    more, env = WORLD, "algo.type = 'grpo'"
    from_command_line = load(file, "--orchestrator.algo.type", "echo", *overrides, env=env, more=more).orchestrator.algo
    lines = "".join(f"{key.removeprefix('--orchestrator.')} = {value.replace(': ', ' = ')}\n" for key, value in pairs(overrides))
    from_file = load(file, orchestrator="algo.type = 'echo'\n" + lines.replace('{"', "{").replace('" =', " ="), env=env, more=more)
    for algo in (from_command_line, from_file.orchestrator.algo):
        assert isinstance(algo, EchoConfig)
        assert {name: role.alpha for name, role in algo.table.items()} == table
    file.write_text(dump_toml(from_file))
    assert load_config(file) == from_file


def pairs(arguments: tuple[str, ...]) -> list[tuple[str, str]]:
    return list(zip(arguments[::2], arguments[1::2], strict=True))


def test_a_role_on_the_command_line_joins_those_of_the_file(file: Path) -> None:
    text = "algo = {type = 'echo', roles.tool = {alpha = 0.5, tool_names = ['calculator']}}"
    algo = load(file, "--orchestrator.algo.roles.user.alpha", "0.2", orchestrator=text, env="algo.type = 'grpo'", more=FEEDBACK)
    roles = algo.orchestrator.algo.model_dump(exclude_none=True)["roles"]
    assert roles == {"user": {"alpha": 0.2}, "tool": {"alpha": 0.5, "tool_names": ["calculator"]}}


def test_echo_where_the_environment_says_nothing_after_the_first_reply_is_a_warning(file: Path) -> None:
    one_attempt = f"{FEEDBACK}budget.max_turns = 1\n"
    said = warnings_of(file, orchestrator="algo.type = 'echo'", more=WORLD + one_attempt.replace("talk", "once"))
    assert len(said) == 1 and said[0].startswith("`orchestrator.algo.type`='echo' learns from what an environment says after the policy's ")
    assert "env 'words', 'once' ends with that reply" in said[0]


def test_echo_that_listens_to_another_role_or_tool_than_speaks_is_a_warning(file: Path) -> None:
    def said(env: str, roles: str) -> list[str]:
        return warnings_of(file, env="algo.type = 'grpo'", orchestrator=f"algo = {{type = 'echo', {roles}}}", more=env)

    assert said(FEEDBACK, "roles.user.alpha = 0.1") == said(TOOLS, "roles.tool.tool_names = ['add', 'calculator']") == []
    (wrong_role,) = said(FEEDBACK, "roles.tool.alpha = 0.1")
    assert "env 'talk' says it in the role 'user', which `roles` does not have" in wrong_role and "set `roles.user.alpha`" in wrong_role
    (wrong_name,) = said(TOOLS, "roles.tool.tool_names = ['calculater']")
    assert "env 'sums' has no tool of `roles.tool.tool_names`=['calculater'], so" in wrong_name and "it has ['calculator']" in wrong_name


def test_credit_by_turn_is_refused_where_there_is_one_turn_and_loaded_where_there_are_more(file: Path) -> None:
    own, silent = "algo = {type = 'grpo'}", FEEDBACK + "algo = {type = 'grpo', credit = 'turn'}\n"
    several = f"{silent}turn_rewards = true\n"
    assert load(file, env=own, more=several).orchestrator.train.env[1].algo == GRPOConfig(credit="turn")
    message = error_of(file, env=own, more=silent)
    assert "env 'talk' gives no reward for each turn" in message and "set its `turn_rewards`=true" in message
    assert "env 'sums' gives no reward for each turn" in error_of(file, env=own, more=TOOLS + "algo = {type = 'grpo', credit = 'turn'}\n")
    message = error_of(file, env=own, more=f"{several}budget.max_turns = 1")
    assert message.startswith("`orchestrator.train.env.1.algo.credit`='turn': env 'talk' ends with the first reply")


# Overrides


def test_another_type_on_the_command_line_drops_what_only_the_files_type_has(file: Path) -> None:
    opd = "algo = {type = 'opd', teacher = {name = 'big', base_url = ['http://127.0.0.1:8000/v1']}, sampling.source = 'policy'}"
    for at, texts in (("orchestrator", {"orchestrator": opd}), ("orchestrator.train.env.0", {"env": opd})):
        with pytest.warns(UserWarning, match=rf"`{at}\.algo\.type` was changed to 'opsd' .* are not used: `{at}\.algo\.teacher`$"):
            config = load(file, f"--{at}.algo.demo-key", "answer", f"--{at}.algo.type", "opsd", **texts)
        assert config.orchestrator.algo_of(config.orchestrator.train.env[0]) == OPSDConfig(demo_key="answer")


def test_one_setting_of_a_source_or_of_a_teacher_may_be_overridden(file: Path) -> None:
    sft = "algo = {type = 'sft', sampling.source = {name = 'big', base_url = ['http://127.0.0.1:8000/v1']}}"
    algo = load(file, "--orchestrator.algo.sampling.source.timeout-s", "5", orchestrator=sft).orchestrator.algo
    assert (source := algo.frozen_models["sampling.source"]).name == "big" and source.timeout_s == 5.0
    opd = load(
        file, "--orchestrator.algo.type", "opd", "--orchestrator.algo.teacher.name", "big",
        "--orchestrator.algo.teacher.base_url", '["http://127.0.0.1:8000/v1"]',
    ).orchestrator.algo  # fmt: skip
    assert isinstance(opd, OPDConfig) and opd.teacher.model_dump(include=set(FROZEN)) == FROZEN


# Refusals: every message opens with the full key

ALGO_ERRORS = [
    ("{type = 'opd'}", ".teacher` is missing: expected a table with `base_url` and `name` (The frozen model to come closer to"),
    ("{type = 'opd', teacher = 'policy'}", ".teacher`='policy': the policy cannot be its own teacher"),
    ("{type = 'opd', teacher = 'big'}", ".teacher`='big': expected a table with `base_url` and `name`"),
    ("{type = 'opd', teacher = {name = 'big'}}", ".teacher.base_url` is missing"),
    ("{type = 'opd', teacher = {name = 'big', base_url = 'http://h/v1'}}",
     ".teacher.base_url`='http://h/v1': expected a list, such as '[\"http://h/v1\"]', not empty"),
    ("{type = 'opd', teacher = {name = 'big', base_url = []}}", ".teacher.base_url`=[]: expected a list, such as '[\"a\", \"b\"]', "
     "not empty"),
    ("{type = 'opd', teacher = {name = 'big', base_url = ['http://h:1']}}", ".teacher.base_url`: a base URL ends in /v1, got 'http://h:1'"),
    ("{type = 'sft'}", ".sampling.source`='policy': `sft` learns from somebody else's replies"),
    ("{type = 'sft', sampling.source = {name = 'big'}}", ".sampling.source.base_url` is missing"),
    ("{type = 'sft', sampling.source = 'polcy'}", ".sampling.source`='polcy': expected one of 'policy', 'demonstrations' or a table with "
     "`base_url` and `name`; did you mean 'policy'?"),
    ("{type = 'sft', sampling.source = 3}", ".sampling.source`=3: expected one of 'policy', 'demonstrations' or a table with"),
    ("{type = 'opsd', template = 'Look: {demo}'}", ".template` has another field than {demonstration}"),
    ("{type = 'opsd', template = 'Look: {demonstration.x}'}", ".template` has another field than {demonstration}"),
    ("{type = 'opsd', template = 'Look: {demonstration:{x}}'}", ".template` has another field than {demonstration}"),
    ("{type = 'opsd', template = 'Look: {{demonstration}}'}", ".template` does not show the demonstration"),
    ("{type = 'opsd', template = 'Look: } {demonstration}'}", ".template` cannot be filled in (Single '}' encountered"),
    ("{type = 'opsd', demo_key = ''}", ".demo_key`='': expected a string, not empty"),
    ("{type = 'rae', decay = 1.0}", ".decay`=1.0: expected a number >= 0 and < 1; the default is 0.95"),
    ("{type = 'grpo', length_penalty = {type = 'tokens', completion_weight = -1}}", ".length_penalty.completion_weight`=-1: expected a "
     "number >= 0"),
    ("{type = 'grpo', length_penalty = {type = 'words'}}", ".length_penalty.type`='words': expected one of 'tokens', 'turns'"),
    ("{type = 'grpo', credit = 'turns'}", ".credit`='turns': expected one of 'rollout', 'turn'; did you mean 'turn'?"),
    ("{type = 'grpo', credit = 'turn'}", ".credit`='turn': env 'words' ends with the first reply"),
    ("{type = 'grpo', credit = 'turn', length_penalty.type = 'turns'}", ".length_penalty` multiplies the rewards of whole rollouts"),
    ("{type = 'echo', roles = {}}", ".roles` is empty, so nothing that the environment says would be learned from"),
    ("{type = 'echo', roles.tool.alpha = 0}", ".roles.tool.alpha`=0: expected a number > 0; the default is 0.1"),
    ("{type = 'echo', roles.user.alpha = -1}", ".roles.user.alpha`=-1: expected a number > 0"),
    ("{type = 'echo', roles.user.alpha = inf}", ".roles.user.alpha`=inf: expected a number > 0"),
    ("{type = 'echo', roles.tool.tool_names = []}", ".roles.tool.tool_names`=[]: expected a list"),
    ("{type = 'echo', filter = {import_path = 'keep'}}", ".filter.import_path`='keep': expected"),
    ("{type = 'grop'}", ".type`='grop': expected one of 'grpo', "),
    ("'grpo'", "`='grpo': expected a table whose `type` is one of 'grpo', 'echo', 'max_rl', "),
]  # fmt: skip
"""An algorithm's table, and how the message goes on after the table's key."""


@pytest.mark.parametrize("at", ["orchestrator", "orchestrator.train.env.0"])
@pytest.mark.parametrize(("algo", "said"), ALGO_ERRORS, ids=[algo for algo, _ in ALGO_ERRORS])
def test_an_algorithm_that_cannot_be_is_refused_by_its_full_key(file: Path, at: str, algo: str, said: str) -> None:
    text = f"algo = {algo}"
    message = error_of(file, orchestrator=text) if at == "orchestrator" else error_of(file, env=text)
    assert message.startswith(f"`{at}.algo{said}")


@pytest.mark.parametrize("source", ["'demonstrations'", "{name = 'big', base_url = ['http://127.0.0.1:8000/v1']}"])
@pytest.mark.parametrize("name", [name for name, section in CLASSES.items() if section.action_loss_type != "ce"])
def test_only_cross_entropy_can_learn_from_what_the_policy_did_not_sample(file: Path, name: str, source: str) -> None:
    teacher = "teacher = {name = 't', base_url = ['http://127.0.0.1:8000/v1']}, " if name == "opd" else ""
    message = error_of(file, env=f"algo = {{type = '{name}', {teacher}sampling.source = {source}}}")
    shown = source if source.startswith("'") else "a frozen model ('big')"
    assert message.startswith(
        f"`orchestrator.train.env.0.algo.sampling.source` is {shown}, but `type`='{name}' feeds the {CLASSES[name].action_loss_type} loss, "
    )
    assert message.endswith("use `source`='policy', or `type`='sft' to learn from what somebody else wrote")


UNKNOWN_KEYS = [
    ("{type = 'opd', teacher = {name = 't', base_url = ['http://h/v1'], api_key = 'K'}}", "teacher.api_key", "teacher.api_key_var"),
    ("{type = 'sft', sampling.source = {name = 't', base_url = ['http://h/v1'], timeout = 3}}", "sampling.source.timeout",
     "sampling.source.timeout_s"),
    ("{type = 'grpo', length_penalty = {type = 'tokens', completion_weigth = 2}}", "length_penalty.completion_weigth",
     "length_penalty.completion_weight"),
    ("{type = 'opsd', demokey = 'x'}", "demokey", "demo_key"),
    ("{type = 'echo', roles.tools.alpha = 1}", "roles.tools", "roles.tool"),
    ("{type = 'echo', roles.tool.tool_name = ['x']}", "roles.tool.tool_name", "roles.tool.tool_names"),
]  # fmt: skip


@pytest.mark.parametrize(("algo", "key", "near"), UNKNOWN_KEYS, ids=[key for _, key, _ in UNKNOWN_KEYS])
def test_an_unknown_key_inside_an_algorithm_names_the_nearest_one(file: Path, algo: str, key: str, near: str) -> None:
    for at, table in (("orchestrator.algo", "orchestrator"), ("orchestrator.train.env.0.algo", "env")):
        assert error_of(file, **{table: f"algo = {algo}"}) == f"unknown key `{at}.{key}`; did you mean `{at}.{near}`?"


def test_a_setting_of_another_algorithm_names_that_algorithm(file: Path) -> None:
    message = error_of(file, orchestrator="algo.teacher = {name = 't'}")
    assert message == "unknown key `orchestrator.algo.teacher`; it belongs to `orchestrator.algo.type`='opd', this is 'grpo'"
    assert "`orchestrator.algo.type`='reinforce' or 'rae', this is 'grpo'" in error_of(file, "--orchestrator.algo.decay", "0.5")


def test_token_sampling_and_the_source_of_rollouts_are_not_mistaken_for_each_other(file: Path) -> None:
    assert error_of(file, "--orchestrator.sampling.source", "policy").endswith("that key belongs to `orchestrator.algo.sampling.source`")
    assert error_of(file, "--orchestrator.algo.sampling.top_p", "1").endswith("that key belongs to `orchestrator.sampling.top_p`")


def test_python_shows_the_same_sentence_at_the_same_place() -> None:
    with pytest.raises(ValidationError) as caught:
        OPDConfig.model_validate({"teacher": "policy"})
    assert [(error["loc"], error["msg"].startswith("Value error, `teacher`='policy': the policy")) for error in caught.value.errors()] == [
        (("teacher",), True)
    ]


# Token sampling

SFT_FROZEN = "algo = {type = 'sft', sampling.source = {name = 'big', base_url = ['http://127.0.0.1:8000/v1']}}"
SFT_DEMONSTRATIONS = "algo = {type = 'sft', sampling.source = 'demonstrations'}"


@pytest.mark.parametrize(
    ("settings", "opening"),
    [
        ("top_p = 0.5", "`{at}.sampling.top_p`=0.5: env 'words' samples from the policy"),
        ("top_k = 3", "`{at}.sampling.top_k`=3: env 'words' samples from the policy"),
        ("top_p = 0.5, min_p = 0.1", "`{at}.sampling.top_p`=0.5, `{at}.sampling.min_p`=0.1: env 'words' samples from the policy"),
        ("temperature = 0", "`{at}.sampling.temperature`=0: env 'words' samples from the policy, and a greedy one has no logprob"),
    ],
)
def test_the_policy_may_be_neither_cut_nor_greedy_and_a_frozen_model_may(file: Path, settings: str, opening: str) -> None:
    text = f"sampling = {{{settings}}}"
    assert error_of(file, orchestrator=text).startswith(opening.format(at="orchestrator"))
    assert error_of(file, env=text).startswith(opening.format(at="orchestrator.train.env.0"))
    assert warnings_of(file, orchestrator=text, env=SFT_FROZEN) == []
    assert warnings_of(file, env=f"{SFT_FROZEN}\n{text}") == []
    assert warnings_of(file, orchestrator=text, env=SFT_DEMONSTRATIONS) == []


def test_one_environment_that_plays_the_policy_is_enough_to_refuse_the_sampling_that_it_inherits(file: Path) -> None:
    second = "[[orchestrator.train.env]]\ntype = 'reverse_text'"
    message = error_of(file, orchestrator="sampling.temperature = 0", env=SFT_FROZEN, more=second)
    assert message.startswith("`orchestrator.sampling.temperature`=0: env 'reverse_text' samples from the policy")


def test_token_sampling_of_demonstrations_is_a_warning_because_no_token_is_sampled(file: Path) -> None:
    assert warnings_of(file, env=f"{SFT_DEMONSTRATIONS}\nsampling.temperature = 0.5") == [
        "`orchestrator.train.env.0.sampling` is not used: env 'words' takes its rollouts from demonstrations "
        "(`orchestrator.train.env.0.algo.sampling.source`), so no token is sampled; leave it out"
    ]


def test_a_limit_of_reply_tokens_binds_models_and_not_demonstrations(file: Path) -> None:
    limits = "[inference]\nmax_model_len = 64\n"
    assert warnings_of(file, env=SFT_DEMONSTRATIONS, more=limits) == [], "the default of 256 tokens is more than the window"
    for env in ("", SFT_FROZEN):
        opening = "`orchestrator.sampling.max_tokens`=256 leaves no room for a prompt of env 'words' in `inference.max_model_len`=64"
        assert error_of(file, env=env, more=limits).startswith(opening)


@pytest.mark.parametrize("algo", ["{type = 'opsd'}", "{type = 'opd', teacher = {name = 't', base_url = ['http://127.0.0.1:8000/v1']}}"])
def test_distillation_at_another_temperature_than_1_is_a_warning(file: Path, algo: str) -> None:
    hot = "sampling.temperature = 0.7\n"
    inherited, own = warnings_of(file, orchestrator=hot, env=f"algo = {algo}"), warnings_of(file, env=f"{hot}algo = {algo}")
    for said, at in ((inherited, "orchestrator"), (own, "orchestrator.train.env.0")):
        assert len(said) == 1 and said[0].startswith(f"`{at}.sampling.temperature`=0.7: `op") and said[0].endswith("; use 1")
    assert warnings_of(file, env=f"algo = {algo}") == []
    assert warnings_of(file, orchestrator=hot) == [], "grpo's logprobs are those of the temperature that it samples at"


# Groups and coefficients


def test_comparing_the_rollouts_of_a_group_of_one_is_a_warning(file: Path) -> None:
    for name, section in CLASSES.items():
        algo = f"algo = {json.dumps({'type': name} | FULL[name][0])}".replace('": ', '" = ')
        said = [text for text in warnings_of(file, env=f"{algo}", orchestrator="group_size = 1") if "group_size" in text]
        assert len(said) == section.is_group_relative, name
        for text in said:
            assert text.startswith(f"`orchestrator.group_size`=1: `{name}` (`orchestrator.train.env.0.algo.type`) compares the rollouts")


def test_a_setting_that_several_environments_inherit_is_warned_of_once_with_their_names(file: Path) -> None:
    second = "[[orchestrator.train.env]]\ntype = 'reverse_text'\nname = 'more'\n"
    for orchestrator, more in (("group_size = 1", second), ("sampling.temperature = 0.7\nalgo.type = 'opsd'", second)):
        said = warnings_of(file, orchestrator=orchestrator, more=more)
        assert len(said) == 1 and "env 'words', 'more' " in said[0], said
    assert len(warnings_of(file, orchestrator="group_size = 1", more=second + "algo.type = 'rloo'")) == 2, "two settings"


@pytest.mark.parametrize(("name", "component"), [("grpo", "rl"), ("opsd", "ref_kl"), ("sft", "ce")])
def test_a_coefficient_of_0_for_all_that_an_algorithm_feeds_is_refused(file: Path, name: str, component: str) -> None:
    algo = SFT_DEMONSTRATIONS if name == "sft" else f"algo.type = '{name}'"
    opening = f"`orchestrator.train.env.0.coefficients.{component}`=0: `{name}` feeds no other loss component, so nothing of env 'words'"
    assert error_of(file, env=f"{algo}\ncoefficients.{component} = 0").startswith(opening)
    assert warnings_of(file, env=f"{algo}\ncoefficients.{component} = 0.5") == []


def test_a_coefficient_of_a_component_that_an_algorithm_never_feeds_is_a_warning(file: Path) -> None:
    assert warnings_of(file, env="coefficients = {rl = 2, ce = 0, ref_kl = 0.5}") == [
        f"`orchestrator.train.env.0.coefficients.{setting} is not used: `grpo`, the algorithm of env 'words', feeds only rl; leave it out"
        for setting in ("ce`=0", "ref_kl`=0.5")
    ]


@pytest.mark.parametrize("value", ["-1", "inf", "nan"])
def test_a_coefficient_is_a_finite_number_that_is_not_negative(file: Path, value: str) -> None:
    opening = f"`orchestrator.train.env.0.coefficients.rl`={value}: expected a number >= 0"
    assert error_of(file, env=f"coefficients.rl = {value}").startswith(opening)


# Evaluation and import paths


def test_what_an_evaluation_environment_sets_in_vain_is_a_warning_each(file: Path) -> None:
    header = "[[orchestrator.eval.env]]\ntype = 'reverse_text'\n"
    settings = "algo.type = 'rloo'\nratio = 2\ntasks.type = 'sequential'\ncoefficients.rl = 2\ntruncated = 'drop'\nreward_deadline_s = 5"
    said = warnings_of(file, more=f"{header}{header}name = 'b'\n{settings}")
    assert [text.partition(":")[0] for text in said] == [
        f"`orchestrator.eval.env.1.{name}` is not used" for name in ("algo", "coefficients", "ratio", "tasks", "truncated")
    ]
    assert all("env 'b' is only measured" in text for text in said)


def test_a_dump_that_writes_every_default_of_an_evaluation_environment_out_warns_of_nothing(file: Path) -> None:
    config = load(file, more="[[orchestrator.eval.env]]\ntype = 'reverse_text'")
    file.write_text(dump_toml(config))
    assert "ratio = 1.0" in file.read_text()
    assert load_config(file) == config
    assert config.orchestrator.eval.env == [ReverseTextEnvConfig()]


def test_hosted_runs_refuse_every_import_path_by_its_key(file: Path) -> None:
    reward = "reward = {type = 'python', import_path = 'my.rewards:score'}"
    evaluation = f"[[orchestrator.eval.env]]\ntype = 'reverse_text'\n{reward}"
    assert warnings_of(file, env=reward, more=evaluation) == []
    message = error_of(file, "--run.allow_import_paths", "false", env=reward, more=evaluation)
    assert message.startswith(
        "`orchestrator.eval.env.0.reward.import_path`='my.rewards:score'; "
        "`orchestrator.train.env.0.reward.import_path`='my.rewards:score' would run code"
    )
    assert "`run.allow_import_paths`=false refuses every import path" in message
    echo = "algo = {type = 'echo', filter.import_path = 'my.filters:keep'}"
    message = error_of(file, "--run.allow_import_paths", "false", more=TOOLS + echo)
    assert message.startswith("`orchestrator.train.env.1.algo.filter.import_path`='my.filters:keep' would run code")
    assert warnings_of(file, "--run.allow_import_paths", "false", env="reward.type = 'math_verify'") == []
