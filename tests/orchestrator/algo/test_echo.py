"""Which tokens ECHO learns from and how much, over a table of hand-made rollouts; and what a filter may do to that."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxrl.batching import pack, rollout_to_samples
from jaxrl.config.algorithm import EchoConfig, EchoFilterConfig
from jaxrl.config.env import SamplingConfig
from jaxrl.config.filters import ZeroAdvantageFilterConfig
from jaxrl.errors import ConfigError
from jaxrl.orchestrator.algo import AlgorithmContext, Echo, build_algorithm
from jaxrl.orchestrator.draws import Draw
from jaxrl.orchestrator.filters import apply_filters, build_filters, is_zero_advantage
from jaxrl.orchestrator.groups import OpenGroup
from jaxrl.orchestrator.sources import PolicySource
from jaxrl.types import Boundary, Group, Node, Rollout, Task
from tests.fakes import ScriptedPool, ToyEnv
from tests.inference.rendering.styles import STYLES, ids_of, renderer_of, user
from tests.orchestrator.algo.crediting import credit
from tests.orchestrator.test_sink import _sink
from tests.orchestrator.wiring import make_env, renderer


def said(parent: int | None, role: str, ids: list[int], content: list[int] | None = None, name: str | None = None, **more: Any) -> Node:
    """Return a message that nobody sampled; `content` is 1 on its own text."""
    is_content = None if content is None else np.array(content, bool)
    return Node(parent, role, "said", np.array(ids, np.int32), is_content=is_content, name=name, **more)


def reply(parent: int, ids: list[int], num_scaffold: int = 0) -> Node:
    """Return a reply of the policy, after that many tokens of generation prompt."""
    num = len(ids) - num_scaffold
    return Node(
        parent, "assistant", "reply", np.array(ids, np.int32), sampled=True, num_sampled=num,
        logprobs=np.full(num, -0.5, np.float32), versions=np.zeros(num, np.int32), finish_reason="stop",
    )  # fmt: skip


def made(nodes: list[Node], member: int = 0, reward: float = 1.0) -> Rollout:
    rollout = Rollout(Task("toy", "t", {"id": "t"}), "toy/0", member, draw_index=0, nodes=nodes, reward=reward)
    rollout.samples = rollout_to_samples(rollout)
    return rollout


def echo(config: dict[str, Any] | None = None) -> Echo:
    algorithm = build_algorithm(
        EchoConfig.model_validate(config or {}), ScriptedPool(), AlgorithmContext(env_name="toy", renderer=renderer())
    )
    assert isinstance(algorithm, Echo)
    return algorithm


def weights_of(rollout: Rollout) -> list[list[float] | None]:
    """Return the ce weights of each sample, rounded as float32 is written; None where no stream is shipped."""
    streams = [sample.ce_weights for sample in rollout.samples]
    return [None if stream is None else [round(value, 6) for value in stream.tolist()] for stream in streams]


ALL = {"roles": {"system": {"alpha": 0.2}, "user": {"alpha": 0.3}, "assistant": {"alpha": 0.4}, "tool": {"alpha": 0.5}}}
CALCULATOR = {"roles": {"tool": {"alpha": 0.5, "tool_names": ["calculator"]}}}
START = [said(None, "user", [1, 2]), reply(0, [3, 4])]
TWO_TURNS = [*START, said(1, "tool", [5, 6]), reply(2, [7, 8])]
EVERY_ROLE = [
    *[said(None, "system", [1]), said(0, "user", [2]), said(1, "assistant", [3]), said(2, "tool", [4]), reply(3, [5, 6], 1)],
    *[said(4, "system", [7]), said(5, "user", [8]), said(6, "assistant", [9]), said(7, "tool", [10]), reply(8, [11, 12, 13], 2)],
]
SHARED = [*START, said(1, "tool", [5, 6]), reply(2, [7]), said(2, "user", [8]), reply(4, [9])]
"""Two branches, [1 .. 6, 7] and [1 .. 6, 8, 9], that share the tool's answer 5, 6."""

TABLE = [
    # nodes, settings, ce weights of each sample
    pytest.param(TWO_TURNS, {}, [[0, 0, 0, 0, 0.1, 0.1, 0, 0]], id="two turns: the tool's answer, at the default"),
    pytest.param([*START, said(1, "tool", [5, 6], [0, 1]), reply(2, [7, 8])], {}, [[0, 0, 0, 0, 0, 0.1, 0, 0]], id="no template text"),
    pytest.param([*START, said(1, "tool", [5, 6], [0, 0]), reply(2, [7, 8])], {}, [None], id="a message of template text alone"),
    pytest.param([*START, said(1, "tool", [5, 6], [0, 1, 1]), reply(2, [7])], {},
                 [[0, 0, 0, 0, 0.1, 0.1, 0]], id="attribution of another length"),
    pytest.param([*START, said(1, "user", [5, 6]), reply(2, [7, 8])], {}, [None], id="the default table has no user"),
    pytest.param(TWO_TURNS, {"roles": {"user": {}}}, [None], id="setting a role replaces the table"),
    pytest.param(START, ALL, [None], id="a prompt is no observation, whatever its role"),
    pytest.param(EVERY_ROLE, ALL, [[0, 0, 0, 0, 0, 0, 0.2, 0.3, 0.4, 0.5, 0, 0, 0]], id="every role, before and after the first reply"),
    pytest.param(EVERY_ROLE, {"roles": {"assistant": {}}}, [[0] * 8 + [0.1] + [0] * 4], id="replies that the environment made"),
    pytest.param([*START, said(1, "tool", [5])], {}, [[0, 0, 0, 0, 0.1]], id="what is said after the last reply"),
    pytest.param([said(None, "user", [1]), reply(0, [2], 1), said(1, "tool", [3]), reply(2, [4])], {}, [[0, 0, 0.1, 0]], id="empty reply"),
    pytest.param([*START, said(1, "tool", [5], name="calculator"), said(2, "tool", [6], name="search"), said(3, "tool", [7]),
                  reply(4, [8])], CALCULATOR, [[0, 0, 0, 0, 0.5, 0, 0, 0]], id="answers of one tool alone"),
    pytest.param(SHARED, ALL, [[0, 0, 0, 0, 0.5, 0.5, 0], [0, 0, 0, 0, 0, 0, 0.3, 0]], id="a shared observation trains once"),
    pytest.param([*START, said(1, "tool", [5]), reply(2, [6]), said(0, "tool", [7]), reply(4, [8]), said(5, "tool", [9])], {},
                 [[0, 0, 0, 0, 0.1, 0], [0, 0, 0, 0, 0.1]], id="a second branch has a first reply of its own"),
    pytest.param([*START, said(1, "assistant", [5], is_retold=True), said(2, "tool", [6], is_retold=True), said(3, "tool", [7]),
                  reply(4, [8])], ALL, [[0, 0, 0, 0, 0, 0, 0.5, 0]], id="a history that is told again is not learned again"),
    pytest.param([*START, said(0, "assistant", [4], is_retold=True), said(2, "user", [5]), reply(3, [6])], ALL,
                 [None, [0, 0, 0, 0.3, 0]], id="a reply that is told again is a reply: what follows it is an observation"),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "config", "expected"), TABLE)
async def test_observations_get_the_weight_of_their_role(nodes, config, expected):
    rollout = made([replace(node) for node in nodes])
    await echo(config).finalize_rollout(rollout)
    assert weights_of(rollout) == expected


@pytest.mark.parametrize(("nodes", "config", "expected"), TABLE)
async def test_no_observation_is_an_rl_member_and_the_members_are_counted_as_the_table_says(nodes, config, expected):
    rollouts = [made([replace(node) for node in nodes], member, reward) for member, reward in enumerate((1.0, 0.0))]
    algorithm = echo(config)
    for rollout in rollouts:
        await algorithm.finalize_rollout(rollout)
    await algorithm.finalize_group(rollouts)
    sampled = sum(node.num_sampled for node in nodes)
    weighted = sum(weight != 0 for weights in expected if weights is not None for weight in weights)
    for rollout in rollouts:
        assert rollout.failure is None
        assert not any((sample.members().rl & sample.members().ce).any() for sample in rollout.samples)
        assert all(sample.rl_weights is None and not sample.loss_mask[sample.members().ce].any() for sample in rollout.samples)
        batch = pack(rollout.samples, row_length=32, rows=1, shards=1, max_segments=4, step=1)
        assert batch.member_counts.tolist() == [[sampled, weighted, 0]]
    assert [rollout.mean_advantage() for rollout in rollouts] == [0.5, -0.5], "grpo's credit"


@pytest.mark.parametrize("style", STYLES)
async def test_with_every_style_of_template_each_later_message_is_learned_once_and_nothing_else(style):
    """Also with those that drop earlier thinking, where every turn is a branch of its own whose history is written anew."""
    own = renderer_of(style)
    script = iter(["<think>a1</think>Eins", "<think>b2</think>Zwei", "<think>c3</think>Drei"])
    pool = ScriptedPool(lambda request, version: [*ids_of(own, next(script)).tolist(), request.sampling.stop_ids[0]])
    source = PolicySource(pool, own, SamplingConfig(max_tokens=64), run_seed=0, window=2000, places=asyncio.Semaphore(1))
    rollout = Rollout(Task("toy", "t", {"id": "t"}), "toy/0", 0, draw_index=0, reward=1.0)
    session = source.open_session(rollout)
    for question in ("Frage?", "Wirklich?", "Ganz?"):
        await session.ask([user(question)])
    rollout.samples = rollout_to_samples(rollout)
    await echo({"roles": {role: {} for role in ("system", "user", "assistant")}}).finalize_rollout(rollout)
    learned = [own.decode(s.token_ids[s.ce_weights > 0]) for s in rollout.samples if s.ce_weights is not None]
    assert "".join(learned) == "Wirklich?Ganz?"
    assert len(rollout.samples) == (1 if rollout.metrics["forks"] == 0 else 3)


async def test_the_observation_tokens_of_each_role_are_counted_in_the_rollout_log():
    rollout = made([replace(node) for node in SHARED])
    await echo(ALL).finalize_rollout(rollout)
    counted = {name: value for name, value in rollout.metrics.items() if name.startswith("observation_tokens/")}
    assert counted == {f"observation_tokens/{role}": num for role, num in (("system", 0), ("user", 1), ("assistant", 0), ("tool", 2))}


async def test_a_length_penalty_works_as_in_grpo():
    rollouts = [made([replace(node) for node in nodes], member) for member, nodes in enumerate((START, TWO_TURNS))]
    assert await credit(echo({"length_penalty": {"type": "turns"}}), rollouts) == pytest.approx([1 / 6, -1 / 6])  # 1 + 1 - 1 / 1.5, and 1


async def test_missing_attribution_is_said_once_in_the_log(caplog):
    algorithm = echo()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await algorithm.finalize_rollout(made([*START, said(1, "tool", [5, 6], [0, 1]), reply(2, [7])]))
        assert not caplog.records
        for _ in range(2):
            await algorithm.finalize_rollout(made([replace(node) for node in TWO_TURNS]))
    assert [record.message for record in caplog.records] == [
        "env 'toy': nothing says which tokens of its messages are template text, so `echo` learns from whole messages (said once)"
    ]


def test_a_run_without_a_renderer_is_refused():
    with pytest.raises(ConfigError, match=r"env 'toy': `algo.type`='echo' learns from the tokens .* no renderer"):
        build_algorithm(EchoConfig(), ScriptedPool(), AlgorithmContext(env_name="toy"))


# Equal rewards


async def test_a_group_of_equal_rewards_has_observations_to_learn_from_and_is_not_dropped_for_its_advantages():
    rollouts = [made([replace(node) for node in nodes], member) for member, nodes in enumerate((TWO_TURNS, START))]
    assert await credit(echo(), rollouts) == [0.0, 0.0]
    assert [is_zero_advantage(rollout) for rollout in rollouts] == [False, True]
    result = apply_filters(rollouts, build_filters([ZeroAdvantageFilterConfig()], {"toy": 9}))
    assert (result.kept, [rollout.member for rollout, _ in result.dropped]) == ([rollouts[0]], [1])


# Filters


def keep_all(rollout: Rollout) -> list[list[bool]]:
    return [[True] * len(sample) for sample in rollout.samples]


def keep_ids(rollout: Rollout, ids: list[list[int]]) -> list[list[bool]]:
    """Keep the tokens of given ids, a list for each branch."""
    return [[token_id in own for token_id in sample.token_ids.tolist()] for sample, own in zip(rollout.samples, ids, strict=True)]


async def keep_later(rollout: Rollout) -> list[np.ndarray]:
    await asyncio.sleep(0)
    return [np.arange(len(sample)) >= 5 for sample in rollout.samples]


def answer(rollout: Rollout, value: Any) -> Any:
    return value


def answer_arrays(rollout: Rollout, dtype: str) -> Any:
    return [np.ones(len(sample), dtype) for sample in rollout.samples]


def answer_pair(rollout: Rollout) -> dict[str, int]:
    return {"a": 1, "b": 2}


def ask_an_empty_iterator(rollout: Rollout) -> Any:
    return next(iter(()))


def leave(rollout: Rollout) -> Any:
    raise SystemExit(3)


RELEASE = threading.Event()


def hang(rollout: Rollout) -> Any:
    RELEASE.wait(60)


NO_FUNCTION = 5


def filtered_by(name: str, **kwargs: Any) -> dict[str, Any]:
    return ALL | {"filter": {"import_path": f"{__name__}:{name}", "kwargs": kwargs}}


FILTERED = [
    pytest.param(TWO_TURNS, filtered_by("keep_all"), [[0, 0, 0, 0, 0.5, 0.5, 0, 0]], id="True adds nothing"),
    pytest.param(TWO_TURNS, filtered_by("keep_ids", ids=[[1, 3, 6, 7]]), [[0, 0, 0, 0, 0, 0.5, 0, 0]], id="False takes a token out"),
    pytest.param(TWO_TURNS, filtered_by("keep_ids", ids=[[]]), [None], id="nothing is left"),
    pytest.param(TWO_TURNS, filtered_by("keep_later"), [[0, 0, 0, 0, 0, 0.5, 0, 0]], id="a coroutine function that returns arrays"),
    pytest.param(TWO_TURNS, filtered_by("answer_arrays", dtype="bool"), [[0, 0, 0, 0, 0.5, 0.5, 0, 0]], id="arrays of bool"),
    pytest.param(SHARED, filtered_by("keep_ids", ids=[[6], [5, 8]]), [[0, 0, 0, 0, 0, 0.5, 0], [0, 0, 0, 0, 0.5, 0, 0.3, 0]],
                 id="a shared token trains on the branch whose mask keeps it"),
    pytest.param(SHARED, filtered_by("keep_ids", ids=[[6], [5, 6]]), [[0, 0, 0, 0, 0, 0.5, 0], [0, 0, 0, 0, 0.5, 0, 0, 0]],
                 id="and once if both masks do"),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "config", "expected"), FILTERED)
async def test_a_filter_narrows_what_is_learned_from(nodes, config, expected):
    rollout = made([replace(node) for node in nodes])
    await echo(config).finalize_rollout(rollout)
    assert weights_of(rollout) == expected


ROW = [True] * 8
WRONG = [
    # the filter's answer, what is said of it
    pytest.param(filtered_by("answer", value=None), "returned a NoneType; it must return 1 masks, one for each branch", id="nothing"),
    pytest.param(filtered_by("answer_pair"), "returned a dict; it must return 1 masks", id="a table"),
    pytest.param(filtered_by("answer", value=[ROW, ROW]), "returned 2 masks; it must return 1 masks", id="too many masks"),
    pytest.param(filtered_by("answer", value=[]), "returned 0 masks; it must return 1 masks", id="too few masks"),
    pytest.param(filtered_by("answer", value=ROW), "returned 8 masks; it must return 1 masks", id="one mask without a list around it"),
    pytest.param(filtered_by("answer", value=[True]), "returned a bool as mask; the mask of branch 0 must have 8 bools", id="no mask"),
    pytest.param(filtered_by("answer", value=["TTTTTTTT"]), "returned a str as mask; the mask of branch 0 must have 8 bools", id="a text"),
    pytest.param(filtered_by("answer", value=[ROW[:7]]), "returned a mask of 7; the mask of branch 0 must have 8 bools", id="short mask"),
    pytest.param(filtered_by("answer", value=[[*ROW[:7], 1]]), "returned 1 at token 7; the mask of branch 0 must have", id="a number"),
    pytest.param(filtered_by("answer_arrays", dtype="int8"), "returned np.int8(1) at token 0; the mask", id="array of numbers"),
    pytest.param(filtered_by("ask_an_empty_iterator"), "StopIteration", id="it raises"),
    pytest.param(filtered_by("leave"), "3 (test_echo.py", id="it wants to end the process"),
]


@pytest.mark.parametrize(("config", "message"), WRONG)
async def test_a_wrong_answer_of_a_filter_fails_its_rollout_at_the_algorithm_and_no_other(config, message):
    rollouts = [made([replace(node) for node in nodes], member) for member, nodes in enumerate((TWO_TURNS, START))]
    algorithm = echo(config)
    algorithm._filter = choose(algorithm._filter)
    assert await credit(algorithm, rollouts) == [None, 0.0]
    failure = rollouts[0].failure
    assert failure.boundary is Boundary.ALGORITHM and rollouts[0].reward is None
    assert message in failure.message
    if "mask" in message:
        assert failure.message.startswith(f"env 'toy', task 't': the filter '{config['filter']['import_path']}' returned ")


def choose(function):
    """Return a filter that answers for the first member only, and keeps all of the others."""
    return lambda rollout, **kwargs: keep_all(rollout) if rollout.member else function(rollout, **kwargs)


async def test_a_filter_that_hangs_costs_its_rollout_and_not_the_run():
    algorithm = echo(filtered_by("hang"))
    env = make_env(ScriptedPool(), ToyEnv("toy"), algorithm=algorithm, rollout_deadline_s=0.1)
    rollout = made([replace(node) for node in TWO_TURNS])
    opened = OpenGroup(0, Draw("toy", {"id": "t"}, 0), env, Group("toy/0", rollout.task, 0, size=1, version=0), [rollout], 0.0)
    try:
        await _sink().add(opened, rollout)
    finally:
        RELEASE.set()
    assert rollout.failure.boundary is Boundary.ALGORITHM
    assert rollout.failure.message == "the algorithm's hook took more than 0.1 s"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:keep", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{__name__}:no_such_name", "cannot be imported: AttributeError"),
        (f"{__name__}:NO_FUNCTION", "is a int; name a class or a function"),
    ],
)
def test_a_filter_that_cannot_be_called_is_refused_before_a_rollout_is_played(path, message):
    with pytest.raises(ConfigError, match=f"^env 'toy': `algo.filter.import_path`='{path}' {message}"):
        echo({"filter": EchoFilterConfig(import_path=path).model_dump()})


ANSWERED = [*START, said(1, "user", [5]), said(2, "tool", [6], name="search"), reply(3, [7])]


@pytest.mark.parametrize(
    ("nodes", "config", "words"),
    [
        (ANSWERED, CALCULATOR,
         "after its first reply there were messages of user and tool ('search'), and `algo.roles` has tool (`tool_names` 'calculator'); "
         "name a role that occurs, such as `algo.roles.user.alpha`=0.1, or use `algo.type`='grpo'"),
        ([*START, said(1, "user", [5]), reply(2, [7])], {},
         "after its first reply there were messages of user, and `algo.roles` has tool; "
         "name a role that occurs, such as `algo.roles.user.alpha`=0.1, or use `algo.type`='grpo'"),
        ([*START, said(1, "tool", [5], name="search"), reply(2, [7])], CALCULATOR,
         "after its first reply there were messages of tool ('search'), and `algo.roles` has tool (`tool_names` 'calculator'); "
         "name a tool that occurs in `algo.roles.tool.tool_names`, or use `algo.type`='grpo'"),
        (START, {}, "no message came after its first reply; see why it calls no tool, or give it more turns, or use `algo.type`='grpo'"),
        ([*START, said(1, "tool", [5], [0]), reply(2, [7])], {},
         "after its first reply there were messages of tool, of which no token was left: all are template text, or `algo.filter` "
         "takes them out; see to that, or use `algo.type`='grpo'"),
    ],
)  # fmt: skip
async def test_learning_from_nothing_is_said_once_after_64_rollouts(nodes, config, words, caplog):
    algorithm = echo(config)
    with caplog.at_level(logging.WARNING):
        for _ in range(63):
            await algorithm.finalize_rollout(made([replace(node) for node in nodes]))
        assert not caplog.records
        for _ in range(130):
            await algorithm.finalize_rollout(made([replace(node) for node in nodes]))
    assert [record.message for record in caplog.records] == [
        f"env 'toy': `echo` has learned from nothing that the environment said, in 64 rollouts: {words} (said once)"
    ]


async def test_an_environment_that_says_something_to_learn_from_is_never_warned_of(caplog):
    algorithm = echo()
    spoken = [*START, said(1, "tool", [5], [1]), reply(2, [7])]
    with caplog.at_level(logging.WARNING):
        await algorithm.finalize_rollout(made(spoken))
        for _ in range(200):
            await algorithm.finalize_rollout(made([replace(node) for node in START]))
    assert not caplog.records
