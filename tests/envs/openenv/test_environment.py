"""Rollouts on an OpenEnv server: tasks, groups, rewards that are there and rewards that are not, and servers that misbehave."""

import asyncio
import gc
import json
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest

from jaxrl.config.env import ExampleConfig, OpenEnvConfig
from jaxrl.config.reward import PythonRewardConfig
from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.base import Environment, Reply, TaskSpec
from jaxrl.envs.build import build_environment
from jaxrl.envs.openenv.connection import Connection
from jaxrl.envs.openenv.environment import OpenEnvEnvironment
from jaxrl.envs.play import play_rollout
from jaxrl.errors import ConfigError, EnvUnreachableError
from jaxrl.types import Boundary, Rollout
from tests.envs.openenv.stub import StubServer, World
from tests.envs.policies import make_rollout, open_session, saying


class Served(Protocol):
    """A server that runs."""

    @property
    def base_url(self) -> str: ...


def built(server: Served, **settings: Any) -> Environment:
    return build_environment(OpenEnvConfig(**{"base_url": server.base_url, "request_deadline_s": 10.0, **settings}))


async def played(env: Environment, *specs: TaskSpec, says: tuple[str, ...] = ("1",), deadline_s: float = 20.0) -> list[Rollout]:
    """Return the rollouts of some tasks, played at the same time, by a policy that says `says` turn by turn."""
    rollouts = [make_rollout(dict(spec), member=member) for member, spec in enumerate(specs)]
    sessions = [open_session(saying(*says), rollout) for rollout in rollouts]
    await asyncio.gather(*(play_rollout(env, *pair, deadline_s) for pair in zip(rollouts, sessions, strict=True)))
    return rollouts


def failures(rollouts: list[Rollout]) -> list[str]:
    return [f"{rollout.failure.boundary}: {rollout.failure.message}" for rollout in rollouts if rollout.failure is not None]


def test_a_task_is_what_the_server_says_of_it_and_what_it_is_reset_with() -> None:
    with StubServer() as server:
        tasks = built(server, num_tasks=2).tasks()
        assert tasks[1] == {"id": "train/1", "difficulty": 1, "group": "stub", "index": 1, "split": "train", "seed": 0}
        assert [task["id"] for task in built(server, split="test", seeds=[4, 9]).tasks()] == [
            *("test/0|s4", "test/0|s9", "test/1|s4"),
            *("test/1|s9", "test/2|s4", "test/2|s9"),
        ]


async def test_the_members_of_a_group_are_reset_to_the_same_split_index_and_seed() -> None:
    with StubServer(World(splits={"test": 3})) as server:
        env = built(server, split="test", seeds=[5])
        rollouts = await played(env, *[env.tasks()[1]] * 4)
        assert server.world.resets == [{"split": "test", "index": 1, "seed": 5}] * 4
        assert {rollout.nodes[0].content for rollout in rollouts} == {"Say 1, split test, seed 5."}
        assert [rollout.reward for rollout in rollouts] == [1.0] * 4
        await played(env, env.tasks()[1] | {"seed": 6})
        assert server.world.resets[-1]["seed"] == 6, "an evaluation may play a task under another seed"
        assert (server.world.sessions, server.world.closed_politely) == (0, 5)


async def test_the_reward_the_costs_and_the_rewards_of_turns_are_the_servers() -> None:
    with StubServer(World(num_steps=3)) as server:
        (last,) = await played(built(server), built(server).tasks()[1], says=("1", "0", "1"))
        assert (last.reward, last.turn_rewards, last.stop_reason, last.is_truncated) == (1.0, [1.0, 0.0, 1.0], "done", False)
        assert last.metrics == {"forks": 0.0, "service_spend": 0.75, "session_wait_s": last.metrics["session_wait_s"]}
        assert [node.content for node in last.nodes if node.role == "user"] == ["Say 1, split train, seed 0.", "You said 1.", "You said 0."]
        (total,) = await played(built(server, reward_of="sum"), built(server).tasks()[1], says=("1", "0", "1"))
        assert total.reward == 2.0


async def test_a_budget_ends_an_episode_with_the_reward_so_far() -> None:
    with StubServer(World(num_steps=3)) as server:
        env = built(server, budget=BudgetConfig(max_turns=2))
        (rollout,) = await played(env, env.tasks()[1], says=("1", "0"))
        assert (rollout.reward, rollout.stop_reason, rollout.is_truncated) == (0.0, "max_turns", True)
        assert server.world.sessions == 0


async def test_a_server_that_gives_no_reward_leaves_the_rollout_without_one() -> None:
    with StubServer(World(gives_reward=False)) as server:
        (rollout,) = await played(built(server), built(server).tasks()[0], says=("0",))
        assert (rollout.reward, rollout.turn_rewards, rollout.failure, rollout.stop_reason) == (None, None, None, "done")


async def test_a_null_between_rewards_is_no_zero() -> None:
    given = iter([1.0, None])

    def frame(kind: str, data: dict[str, Any]) -> str | None:
        if kind != "step":
            return None
        reward = next(given)
        told = {"observation": {"question": "?"}, "reward": reward, "done": reward is None}
        return json.dumps({"type": "observation", "data": told})

    with StubServer(World(frame=frame)) as server:
        (rollout,) = await played(built(server), built(server).tasks()[0], says=("0", "1"))
        assert (rollout.reward, rollout.turn_rewards, rollout.num_turns) == (1.0, None, 2)


async def test_a_server_that_ignores_its_seed_or_its_index_is_played_as_it_is() -> None:
    """Its first observations tell: the same task is another one each time, or two tasks are the same."""
    with StubServer(World(ignores_seed=True)) as server:
        env = built(server)
        twice = await played(env, env.tasks()[1], env.tasks()[1])
        assert len({rollout.nodes[0].content for rollout in twice}) == 2
    with StubServer(World(ignores_index=True)) as server:
        env = built(server)
        two = await played(env, env.tasks()[1], env.tasks()[2])
        assert len({rollout.nodes[0].content for rollout in two}) == 1


async def test_a_server_that_dies_after_10_episodes_fails_the_rollouts_that_come_later() -> None:
    with StubServer(World(dies_after=10, splits={"train": 20})) as server:
        env = built(server)
        rollouts = [rollout for spec in env.tasks()[:13] for rollout in await played(env, spec)]
        assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, *[0.0] * 8, None, None, None]
        died, gone, _ = failures(rollouts)
        assert died.startswith("env: ") and "the server ended the session" in died
        assert "no session can be opened" in gone
        assert [rollout.failure.boundary for rollout in rollouts[10:] if rollout.failure] == [Boundary.ENV] * 3


async def test_a_server_at_capacity_is_waited_for_and_every_rollout_is_played() -> None:
    with StubServer(World(capacity=2)) as server:
        env = built(server)
        rollouts = await played(env, *[env.tasks()[1]] * 8)
        assert [rollout.reward for rollout in rollouts] == [1.0] * 8
        assert server.world.most_sessions == 2
        assert server.world.refusals > 0
        assert max(rollout.metrics["session_wait_s"] for rollout in rollouts) > 0


async def test_no_more_sessions_are_opened_than_the_setting_allows() -> None:
    with StubServer() as server:
        env = built(server, max_sessions=3)
        assert [rollout.reward for rollout in await played(env, *[env.tasks()[1]] * 8)] == [1.0] * 8
        assert (server.world.most_sessions, server.world.refusals) == (3, 0)


async def test_a_server_that_stays_at_capacity_fails_the_rollout_in_words_when_it_waited_long_enough() -> None:
    with StubServer(World(capacity=0)) as server:
        env = built(server, capacity_deadline_s=0.2)
        rollouts = await played(env, env.tasks()[0])
        (failure,) = failures(rollouts)
        assert "no session of" in failure and "`capacity_deadline_s`=0.2 s (refused " in failure and failure.startswith("env: ")


async def test_the_deadline_of_a_rollout_stands_still_while_it_waits_for_its_session() -> None:
    world = World(capacity=0)
    with StubServer(world) as server:
        env = built(server)
        waiting = asyncio.create_task(played(env, env.tasks()[1], deadline_s=1.0))
        await asyncio.sleep(1.2)
        world.capacity = 1
        (rollout,) = await waiting
        assert (rollout.reward, rollout.failure) == (1.0, None)


async def test_a_cancelled_rollout_closes_its_session_and_gives_its_place_back() -> None:
    world = World(answer_gate=asyncio.Event())
    with StubServer(world) as server:
        env = built(server, max_sessions=1)
        rollout = make_rollout(dict(env.tasks()[1]))
        playing = asyncio.create_task(play_rollout(env, rollout, open_session(saying("1"), rollout), 20.0))
        async with asyncio.timeout(10):
            while world.sessions == 0:
                await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        world.answer_gate = None
        (other,) = await played(env, env.tasks()[1])
        assert other.reward == 1.0


async def test_a_crowd_of_which_half_is_cancelled_leaves_no_session_and_no_place_taken() -> None:
    world = World(capacity=1, num_steps=2)
    with StubServer(world) as server:
        env = built(server)
        playing = [asyncio.create_task(played(env, env.tasks()[1], says=("1", "1"))) for _ in range(64)]
        async with asyncio.timeout(20):
            while world.num_episodes < 3:
                await asyncio.sleep(0.001)
        for task in playing[::2]:
            task.cancel()
        await asyncio.wait(playing)
        done = [task.result()[0] for task in playing if not task.cancelled()]
        assert [rollout.reward for rollout in done] == [1.0] * len(done) and len(done) >= 32
        assert (world.most_sessions, world.sessions) == (1, 0)
        assert isinstance(env, OpenEnvEnvironment) and env._room.taken == 0


async def test_a_connection_that_was_refused_is_closed_though_the_server_does_not_hang_up() -> None:
    world = World(capacity=1, hangs_up=False)
    with StubServer(world) as server:
        env = built(server)
        assert [rollout.reward for rollout in await played(env, *[env.tasks()[1]] * 6)] == [1.0] * 6
        assert world.refusals >= 5
        async with asyncio.timeout(10):
            while world.refused_open:
                await asyncio.sleep(0.01)


async def test_400_rollouts_leave_nothing_behind() -> None:
    with StubServer(World(capacity=8)) as server:
        env = built(server)
        for _ in range(10):
            assert [rollout.failure for rollout in await played(env, *[env.tasks()[1]] * 40)] == [None] * 40
        gc.collect()
        assert server.world.sessions == 0 and asyncio.all_tasks() == {asyncio.current_task()}
        kept = sum(isinstance(thing, Connection) for thing in gc.get_objects())
        assert kept < 10, "threads may hold the last ones"


def test_an_environment_goes_on_in_a_second_event_loop_where_the_first_one_ended_at_capacity() -> None:
    world = World(capacity=0)
    with StubServer(world) as server:
        env = built(server, capacity_deadline_s=15.0)

        async def given_up() -> None:
            waiting = asyncio.create_task(played(env, *[env.tasks()[1]] * 3))
            while world.refusals < 4:
                await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.wait([waiting])

        asyncio.run(given_up())
        world.capacity = 1
        assert [rollout.reward for rollout in asyncio.run(played(env, *[env.tasks()[1]] * 3))] == [1.0] * 3


@pytest.mark.parametrize(
    ("told", "expected"), [(None, None), (2, 2.0), (True, "got True"), (-1, "got -1"), ("3", "got '3'"), (10**400, "got 1000")]
)
async def test_a_cost_is_a_number_from_0_on_or_not_told(told: Any, expected: float | str | None) -> None:
    with StubServer(World(metadata={"service_spend": told})) as server:
        (rollout,) = await played(built(server), built(server).tasks()[1])
        if isinstance(expected, str):
            assert "`service_spend` of an observation's metadata must be a number from 0 on, " + expected in failures([rollout])[0]
        else:
            assert rollout.failure is None and rollout.metrics.get("service_spend") == expected


async def test_a_session_that_is_lost_in_mid_rollout_is_a_failure_and_the_next_one_is_played() -> None:
    replies = iter([asyncio.Event()])

    def frame(kind: str, data: dict[str, Any]) -> str | None:
        if kind == "step" and next(replies, None):
            raise RuntimeError("the server's own mistake ends its connection")
        return None

    with StubServer(World(frame=frame)) as server:
        env = built(server)
        first, second = [(await played(env, env.tasks()[1]))[0] for _ in range(2)]
        assert (first.reward, first.num_turns) == (None, 1) and "the server ended the session" in failures([first])[0]
        assert (second.reward, second.failure) == (1.0, None)


async def test_what_the_environment_raises_fails_its_rollout_alone() -> None:
    with StubServer() as server:
        env = built(server)
        (rollout,) = await played(env, env.tasks()[0], says=("raise",))
        assert (rollout.reward, rollout.num_turns) == (None, 1), "what was said is in the log"
        assert "`step` was refused (EXECUTION_ERROR): the environment raised" in failures([rollout])[0]
        assert [other.reward for other in await played(env, env.tasks()[1])] == [1.0]
        assert server.world.sessions == 0


async def test_a_setting_that_does_not_fit_the_server_is_said_in_words() -> None:
    with StubServer() as server:
        (asked,) = await played(built(server, question_key="prompt"), built(server).tasks()[0])
        (told,) = failures([asked])
        assert "`question_key`='prompt' must be a text in every observation, and it is not there" in told
        assert "the observation has the fields: question." in told
        (acted,) = await played(built(server, action={"reply": "{reply}"}), built(server).tasks()[0])
        assert "VALIDATION_ERROR" in failures([acted])[0]
        with pytest.raises(
            ConfigError, match=r"env 'openenv': the server has no `split`='valid'; it has the splits 'train', 'test' \(asked .*500"
        ):
            built(server, split="valid")
        with pytest.raises(ConfigError, match=r"cannot be listed: .*404: unknown environment"):
            built(server, server_env="chess")
        with pytest.raises(ConfigError, match="scores itself"):
            built(server, reward=PythonRewardConfig(import_path="math:floor"))
    with pytest.raises(EnvUnreachableError, match=r"env 'openenv': `base_url`='http://127.0.0.1:\d+': .*the server cannot be reached"):
        built(server)


async def test_a_server_that_lists_no_tasks_has_tasks_of_a_seed_alone() -> None:
    with StubServer(World(has_task_api=False)) as server:
        with pytest.raises(ConfigError, match=r"the server lists no tasks: .*501.* Set `num_tasks`"):
            built(server)
        with pytest.raises(ConfigError, match=r"give `seeds`=\[1, 2\] its first one alone"):
            built(server, num_tasks=3, seeds=[1, 2])
        env = built(server, num_tasks=3, seeds=[40])
        assert env.tasks() == [{"id": "seed-40", "seed": 40}, {"id": "seed-41", "seed": 41}, {"id": "seed-42", "seed": 42}]
        (rollout,) = await played(env, env.tasks()[2], says=("42",))
        assert (server.world.resets, rollout.reward) == ([{"seed": 42}], 1.0)


async def test_the_whole_observation_may_be_shown_after_a_system_prompt_and_examples() -> None:
    with StubServer() as server:
        env = built(server, question_key="", system_prompt="Answer.", examples=[ExampleConfig(question="Say 2", answer="2")])
        (rollout,) = await played(env, env.tasks()[1])
        assert [node.content for node in rollout.nodes][:4] == ["Answer.", "Say 2", "2", '{"question": "Say 1, split train, seed 0."}']
        assert env.demonstration(env.tasks()[0]) is None


@dataclass
class Listed(World):
    """Tells of given tasks."""

    given: list[dict[str, Any]] = field(default_factory=list)

    def task(self, split: str, index: int) -> dict[str, Any]:
        return self.given[index]


def test_a_task_without_an_id_is_named_by_its_place_and_any_other_id_is_a_text() -> None:
    with StubServer(Listed(given=[{"id": None}, {}, {"id": 7}], splits={"train": 3})) as server:
        assert [task["id"] for task in built(server).tasks()] == ["train-0", "train-1", "7"]
    refused = r"every task needs an `id` of its own, got 1 ids for 2 tasks"
    with StubServer(Listed(given=[{"id": 7}, {"id": "7"}], splits={"train": 2})) as server, pytest.raises(ConfigError, match=refused):
        built(server)
    with StubServer(World(splits={"train": 0})) as server, pytest.raises(ConfigError, match="`split`='train' of the server has no tasks"):
        built(server)


async def test_the_reset_is_by_place_and_by_the_configured_seed_whatever_the_server_says_of_a_task() -> None:
    world = Listed(given=[{"id": "a", "index": 9, "seed": 8, "split": "test"}], splits={"train": 1})
    with StubServer(world) as server:
        env = built(server, seeds=[5])
        assert env.tasks() == [{"id": "a", "index": 0, "seed": 5, "split": "train"}]
        await played(env, env.tasks()[0])
        assert world.resets == [{"split": "train", "index": 0, "seed": 5}]


async def test_a_reward_that_comes_with_the_first_observation_is_for_no_reply() -> None:
    frame = json.dumps({"type": "observation", "data": {"observation": {"question": "?"}, "reward": 7.0, "done": False}})
    with StubServer(World(frame=lambda kind, data: frame if kind == "reset" else None, gives_reward=False)) as server:
        (rollout,) = await played(built(server), built(server).tasks()[1])
        assert (rollout.reward, rollout.turn_rewards, rollout.failure) == (None, None, None)


def test_the_first_tasks_of_a_large_split_are_listed_and_no_others() -> None:
    with StubServer(World(splits={"train": 1_000})) as server:
        assert len(built(server, num_tasks=3).tasks()) == 3
        assert [body for route, body in server.world.bodies if route == "task_range"] == [{"split": "train", "start": 0, "stop": 3}]
        assert len(built(server, num_tasks=2_000).tasks()) == 1_000, "all that there are"


def test_listing_very_many_tasks_is_said_with_the_setting_that_takes_fewer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxrl.envs.openenv.environment.MANY_TASKS", 4)
    with StubServer(World(splits={"train": 5, "test": 4})) as server:
        built(server, split="test"), built(server, num_tasks=5)
        assert caplog.text == ""
        built(server)
        assert "env 'openenv': all 5 tasks of `split`='train' are listed first; `num_tasks` takes fewer" in caplog.text


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:port", "http://[::1", "http://", "http://127.0.0.1:0"])
def test_an_address_that_is_none_is_a_mistake_of_the_configuration(url: str) -> None:
    with pytest.raises(ConfigError, match=r"env 'openenv': `base_url`: expected the address of an OpenEnv server, .*, got "):
        build_environment(OpenEnvConfig(base_url=url))


@pytest.mark.parametrize("ending", ["/", "/ws", "/ws/", "?a=1", "/ws?session_id=7#top"])
async def test_however_the_address_is_written_and_whatever_proxy_is_set_a_server_here_is_reached(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ws_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with StubServer() as server:
        env = built(server, base_url=server.base_url.replace("http", "ws" if "ws" in ending else "http") + ending)
        assert [rollout.reward for rollout in await played(env, env.tasks()[1])] == [1.0]


def test_a_password_in_the_address_is_in_no_message() -> None:
    with pytest.raises(EnvUnreachableError) as unreachable:
        build_environment(OpenEnvConfig(base_url="http://me:secret@127.0.0.1:9"))
    assert "secret" not in str(unreachable.value) and "http://127.0.0.1:9" in str(unreachable.value)


async def test_braces_in_a_reply_are_text_wherever_it_is_put() -> None:
    with StubServer(World(frame=lambda kind, data: seen.append(data) if kind == "step" else None)) as server:  # type: ignore[func-returns-value]
        seen: list[dict[str, Any]] = []
        action = {"answer": "{reply}", "deep": [{"n": 1, "told": ["<{reply}>", None, True]}]}
        await played(built(server, action=action), built(server).tasks()[1], says=("{reply} {0.__class__} %s",))
        reply = "{reply} {0.__class__} %s"
        assert seen == [{"answer": reply, "deep": [{"n": 1, "told": [f"<{reply}>", None, True]}]}]


class Polite:
    """An adapter of a user's."""

    def message(self, observation: dict[str, Any], spec: TaskSpec) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Please: {observation['question']} ({spec['id']})"}]

    async def action(self, reply: Reply, spec: TaskSpec) -> dict[str, Any]:
        return {"answer": reply.text.removeprefix("I say ")}


class Mute:
    """An adapter of a user's that lacks something."""

    def message(self, observation: dict[str, Any], spec: TaskSpec) -> str:
        return ""


class Silent(Polite):
    """An adapter of a user's whose message is none."""

    def message(self, observation: dict[str, Any], spec: TaskSpec) -> Any:
        return None


class Listing(Polite):
    """An adapter of a user's whose action is none."""

    async def action(self, reply: Reply, spec: TaskSpec) -> Any:
        return ["answer"]


async def test_a_users_own_adapter_words_messages_and_actions() -> None:
    with StubServer() as server:
        env = built(server, import_path=f"{__name__}:Polite")
        (rollout,) = await played(env, env.tasks()[1], says=("I say 1",))
        assert (rollout.reward, rollout.nodes[0].content) == (1.0, "Please: Say 1, split train, seed 0. (train/1)")
        (failed,) = await played(built(server, import_path=f"{__name__}:Listing"), env.tasks()[1])
        assert "`action` must return a dict, got ['answer'] of type list" in failures([failed])[0]
        (silent,) = await played(built(server, import_path=f"{__name__}:Silent"), env.tasks()[1])
        assert "`message` must return a text or a list of messages, got None" in failures([silent])[0]
        with pytest.raises(ConfigError, match=r"returned a Mute without a method `action`"):
            built(server, import_path=f"{__name__}:Mute")
        with pytest.raises(ConfigError, match=r"was called without arguments and raised TypeError"):
            built(server, import_path="json:loads")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"seeds": [1, 1]}, "each once"),
        ({"seeds": [-1]}, "0 or above"),
        ({"action": {"answer": "yes"}}, "no reply would ever reach the server"),
        ({"action": {"{reply}": ["yes", 3]}}, "no reply would ever reach the server"),
        ({"base_url": "127.0.0.1:8000"}, "base_url"),
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        OpenEnvConfig(**{"base_url": "http://127.0.0.1:8000", **settings})


async def test_an_observation_that_nobody_could_read_is_refused_before_it_is_rendered() -> None:
    def frame(kind: str, data: dict[str, Any]) -> str | None:
        told = {"observation": {"question": "x" * 1_000_001}, "reward": None, "done": False}
        return json.dumps({"type": "observation", "data": told}) if kind == "reset" else None

    with StubServer(World(frame=frame)) as server:
        (rollout,) = await played(built(server), built(server).tasks()[1])
    assert failures([rollout]) == [
        "env: env 'openenv': an observation is shown as 1,000,001 characters, and 1,000,000 is the most; show one field of it "
        "(`question_key`), or cut it in an adapter of yours (`import_path`)"
    ]
    assert rollout.nodes == []
