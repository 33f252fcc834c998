"""A conversation of several turns: what the hooks see, what ends it, and what becomes of a hook that breaks."""

import asyncio
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl.config.env import SamplingConfig
from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.chat import ChatEnvironment, Episode
from jaxrl.envs.play import play_rollout
from jaxrl.errors import ConfigError
from jaxrl.types import Boundary, Rollout
from tests.envs.policies import IM_END, RENDERER, ids_of, make_rollout, open_session, saying
from tests.fakes import ScriptedEndpoint


class GuessANumber(ChatEnvironment):
    """Find a number from 1 to 9; after each guess the world says whether it is higher or lower."""

    def reset(self, episode: Episode) -> str:
        return "Guess a number from 1 to 9."

    def done(self, episode: Episode) -> str | bool:
        episode.turn_rewards.append(1.0 if episode.last.text == episode.spec["number"] else -0.1)
        return "found" if episode.turn_rewards[-1] == 1.0 else False

    def reply(self, episode: Episode) -> str:
        return "higher" if episode.last.text < episode.spec["number"] else "lower"


SPEC = {"id": "7", "number": "7"}


async def played(env: ChatEnvironment, endpoint: ScriptedEndpoint, *, deadline_s: float = 10.0, **session: Any) -> Rollout:
    rollout = make_rollout(dict(env.tasks()[0]))
    await play_rollout(env, rollout, open_session(endpoint, rollout, **session), deadline_s)
    return rollout


def guessing(*, budget: BudgetConfig | None = None, **hooks: Callable[[Episode], Any]) -> GuessANumber:
    """Return the game, with some of its hooks replaced."""

    def method(name: str, hook: Callable[[Episode], Any]) -> Callable[[GuessANumber, Episode], Any]:
        def called(self: GuessANumber, episode: Episode) -> Any:
            return hook(episode)

        called.__name__ = name
        return called

    kind = type("Guess", (GuessANumber,), {name: method(name, hook) for name, hook in hooks.items()})
    return kind("guess", [SPEC], budget=budget)


async def test_the_game_of_the_document_is_played_and_takes_fewer_than_30_lines() -> None:
    text = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (game,) = (block for block in blocks if "class GuessANumber" in block)
    (asking,) = (block for block in blocks if "class Asking" in block)
    assert len(game.partition("class GuessANumber")[2].strip().splitlines()) < 30
    names: dict[str, Any] = {}
    exec(game + asking, names)
    env = names["GuessANumber"]("guess", highest=7)
    rollout = make_rollout(dict(env.tasks()[-1]))
    await play_rollout(env, rollout, open_session(saying("seven", "5", "7"), rollout), 10.0)
    assert [node.content for node in rollout.nodes][2::2] == ["That is no number.", "Higher."] and rollout.reward == 1 / 3
    lost = make_rollout(dict(env.tasks()[0]))
    env = names["Asking"]("asking", highest=7, budget=BudgetConfig(max_turns=2))
    endpoint = ScriptedEndpoint(lambda request, _: [*ids_of("2"), IM_END])
    await play_rollout(env, lost, open_session(endpoint, lost), 10.0)
    assert (lost.reward, lost.stop_reason, lost.num_turns, lost.metrics["sub_conversations"]) == (0.0, "max_turns", 5, 3)


async def test_a_conversation_goes_on_until_the_world_says_that_it_is_done() -> None:
    rollout = await played(GuessANumber("guess", [SPEC]), saying("5", "8", "7", "never asked"))
    assert [node.content for node in rollout.nodes] == ["Guess a number from 1 to 9.", "5", "higher", "8", "lower", "7"]
    assert rollout.turn_rewards == [-0.1, -0.1, 1.0] and rollout.reward == pytest.approx(0.8), "by default the sum of the turns"
    assert (rollout.stop_reason, rollout.is_truncated, rollout.failure, len(rollout.leaves)) == ("found", False, None, 1)


async def test_hooks_may_be_coroutine_functions_and_return_messages() -> None:
    async def reset(episode: Episode) -> list[dict[str, str]]:
        await asyncio.sleep(0)
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess."}]

    async def score(episode: Episode) -> float:
        episode.metrics["turns"], episode.info["last"] = len(episode.replies), episode.last.text
        return 0.25

    rollout = await played(guessing(reset=reset, score=score), saying("7"))
    assert [node.role for node in rollout.nodes] == ["system", "user", "assistant"]
    assert (rollout.reward, rollout.metrics["turns"], rollout.info) == (0.25, 1.0, {"last": "7"})


async def test_plain_hooks_run_off_the_event_loop_and_one_after_the_other() -> None:
    seen: list[threading.Thread] = []

    def score(episode: Episode) -> float:
        seen.append(threading.current_thread())
        return 1.0

    await played(guessing(score=score), saying("7"))
    assert seen[0] is not threading.main_thread() and seen[0].daemon


BUDGETS = [
    ({"max_turns": 2}, ["1", "2", "3"], "max_turns", 2),
    ({"max_completion_tokens": 4}, ["1", "2", "3"], "max_completion_tokens", 2),
    ({"max_duration_s": 25.0}, ["1", "2", "3", "4"], "max_duration", 3),
]


@pytest.mark.parametrize(("budget", "texts", "reason", "num_turns"), BUDGETS, ids=[row[2] for row in BUDGETS])
async def test_a_budget_ends_a_conversation_under_its_name(budget: dict[str, Any], texts: list[str], reason: str, num_turns: int) -> None:
    seconds = iter(range(0, 1000, 10))  # every look at the clock is ten seconds later
    env = GuessANumber("guess", [SPEC], budget=BudgetConfig(**budget), clock=lambda: float(next(seconds)))
    rollout = await played(env, saying(*texts))
    assert (rollout.stop_reason, rollout.is_truncated, rollout.failure) == (reason, True, None)
    assert rollout.num_turns == num_turns and rollout.reward == pytest.approx(-0.1 * num_turns), "it is scored all the same"


async def test_a_reply_that_the_token_limit_cut_ends_a_conversation() -> None:
    endless = ScriptedEndpoint(lambda request, _: [70, 71, 72, 73])
    rollout = await played(GuessANumber("guess", [SPEC]), endless, sampling=SamplingConfig(max_tokens=2))
    assert (rollout.stop_reason, rollout.is_truncated, rollout.num_turns, rollout.failure) == ("max_tokens", True, 1, None)


async def test_what_the_world_calls_done_is_done_whatever_limit_is_reached_with_it() -> None:
    rollout = await played(GuessANumber("guess", [SPEC], budget=BudgetConfig(max_turns=1)), saying("7"))
    assert (rollout.stop_reason, rollout.is_truncated, rollout.reward) == ("found", False, 1.0)


async def test_a_full_window_in_the_middle_is_a_truncated_end_with_a_reward_and_at_the_beginning_a_failure() -> None:
    first = len(RENDERER.open_turn(None, [{"role": "user", "content": "Guess a number from 1 to 9."}]).prompt_ids)
    rollout = await played(GuessANumber("guess", [SPEC]), saying("5", "8"), window=first + 4)
    assert (rollout.stop_reason, rollout.is_truncated, rollout.failure) == ("window_full", True, None)
    assert rollout.num_turns == 1 and rollout.reward == pytest.approx(-0.1)
    refused = await played(GuessANumber("guess", [SPEC]), saying("5"), window=first)
    assert refused.failure is not None and refused.failure.boundary is Boundary.POLICY and refused.stop_reason == "prompt_too_long"
    assert refused.reward is None and refused.is_truncated


async def test_max_tokens_of_a_later_turn_is_what_the_window_has_left() -> None:
    endpoint = saying("5", "8", "7")
    await played(GuessANumber("guess", [SPEC]), endpoint, sampling=SamplingConfig(max_tokens=400), window=200)
    assert [request.sampling.max_tokens + len(request.token_ids) for request in endpoint.requests] == [200, 200, 200]


def breaking(error: BaseException) -> Callable[[Episode], Any]:
    def hook(episode: Episode) -> Any:
        raise error

    return hook


@pytest.mark.parametrize(
    ("hook", "boundary", "num_turns"),
    [("reset", Boundary.ENV, 0), ("done", Boundary.ENV, 1), ("reply", Boundary.ENV, 1), ("score", Boundary.GRADER, 1)],
)
@pytest.mark.parametrize("error", [KeyError("lost"), SystemExit(3), StopIteration(), KeyboardInterrupt()])
async def test_a_hook_that_raises_leaves_the_turns_and_no_reward(
    hook: str, boundary: Boundary, num_turns: int, error: BaseException
) -> None:
    text = "7" if hook == "score" else "5"
    rollout = await played(guessing(**{hook: breaking(error)}), saying(text, "7"))
    assert rollout.failure is not None and rollout.failure.boundary is boundary
    if isinstance(error, KeyError | SystemExit):  # a coroutine cannot raise the others, or the run would end with them
        assert rollout.failure.type == type(error).__name__
    else:
        assert type(error).__name__ in rollout.failure.type + rollout.failure.message
    assert rollout.reward is None and rollout.num_turns == num_turns and rollout.turn_rewards is None


@pytest.mark.parametrize(("hook", "boundary"), [("reply", Boundary.ENV), ("score", Boundary.GRADER)])
async def test_a_plain_hook_that_hangs_fails_its_rollout_by_name_and_holds_up_nobody(hook: str, boundary: Boundary) -> None:
    never = threading.Event()
    env = guessing(**{hook: lambda episode: never.wait()})
    env._hook_deadline_s = 0.1
    try:
        stuck, other = await asyncio.gather(
            played(env, saying("7" if hook == "score" else "5")), played(GuessANumber("guess", [SPEC]), saying("7"))
        )
    finally:
        never.set()
    assert other.reward == 1.0
    assert stuck.failure is not None and stuck.failure.boundary is boundary
    assert f"env 'guess': what `{hook}` returns was not there after 0.1 s" in stuck.failure.message


async def test_a_rollout_past_its_deadline_fails_at_timeout_whatever_hook_it_waits_for() -> None:
    async def reply(episode: Episode) -> str:
        await asyncio.sleep(60)
        return ""

    rollout = await played(guessing(reply=reply), saying("5"), deadline_s=0.1)
    assert rollout.failure is not None and rollout.failure.boundary is Boundary.TIMEOUT and rollout.num_turns == 1


async def test_a_world_that_has_nothing_to_say_is_an_error() -> None:
    rollout = await played(guessing(reply=lambda episode: []), saying("5"))
    assert rollout.failure is not None and rollout.failure.boundary is Boundary.ENV
    assert rollout.failure.message == "env 'guess': `reply` returned no message; end a conversation in `done`"


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([], "override `score`"),
        ([1.0, 1.0], "needs one reward for each of the 1 replies"),
        ([float("nan")], "the reward of turn 0 must be"),
    ],
)
async def test_turn_rewards_are_one_finite_number_for_each_reply_or_none_at_all(rewards: list[float], said: str) -> None:
    def done(episode: Episode) -> bool:
        episode.turn_rewards += rewards
        return True

    rollout = await played(guessing(done=done), saying("7"))
    assert rollout.failure is not None and rollout.failure.boundary is Boundary.GRADER and said in rollout.failure.message


async def test_a_score_of_its_own_stands_beside_the_rewards_of_turns() -> None:
    rollout = await played(guessing(score=lambda episode: None), saying("5", "7"))
    assert (rollout.reward, rollout.failure, rollout.turn_rewards) == (None, None, [-0.1, 1.0])


async def test_a_hook_may_ask_a_sub_agent_whose_turns_are_branches_of_the_rollout() -> None:
    async def reply(episode: Episode) -> str:
        advice = await episode.session.restart().ask([{"role": "user", "content": "Higher or lower?"}])
        return advice.text

    texts = {"0": "5", "0.0": "higher", "1": "7"}
    endpoint = ScriptedEndpoint(lambda request, _: [*ids_of(texts[request.request_id.rpartition("/")[2]]), IM_END])
    env = guessing(reply=reply, score=lambda episode: float(len(episode.replies)), done=lambda episode: episode.last.text == "7")
    rollout = await played(env, endpoint)
    assert rollout.failure is None and rollout.reward == 2.0 and rollout.num_turns == 3 and len(rollout.leaves) == 2
    assert (rollout.metrics["sub_conversations"], rollout.metrics["forks"]) == (1, 0)


async def test_a_hook_may_go_on_from_a_summary_in_a_new_conversation() -> None:
    def reply(episode: Episode) -> str:
        episode.session = episode.session.restart()
        return f"You said {episode.last.text}. Guess again."

    texts = {"0": "5", "0.0": "8", "0.0.0": "7"}
    endpoint = ScriptedEndpoint(lambda request, _: [*ids_of(texts[request.request_id.rpartition("/")[2]]), IM_END])
    rollout = await played(guessing(reply=reply), endpoint)
    assert (rollout.stop_reason, rollout.failure, rollout.turn_rewards) == ("found", None, [-0.1, -0.1, 1.0])
    assert [node.content for node in rollout.nodes if node.parent is None] == [
        "Guess a number from 1 to 9.", "You said 5. Guess again.", "You said 8. Guess again."
    ]  # fmt: skip


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


async def test_the_tools_of_an_environment_are_offered_in_every_turn() -> None:
    env = GuessANumber("guess", [SPEC])
    env.tools = [TOOL]
    endpoint = saying("5", "7")
    rollout = await played(env, endpoint)
    assert all('"name": "add"' in RENDERER.decode(request.token_ids) for request in endpoint.requests)
    assert rollout.metrics["forks"] == 0


@pytest.mark.parametrize("tasks", [[], [{"number": "7"}], [SPEC, SPEC]])
def test_tasks_need_ids_of_their_own(tasks: list[dict]) -> None:
    with pytest.raises(ConfigError, match="env 'guess'"):
        GuessANumber("guess", tasks)


async def test_what_the_policy_sampled_is_recorded_as_it_came_also_where_weights_changed_meanwhile() -> None:
    endpoint = ScriptedEndpoint(lambda request, _: [*ids_of("5555"), IM_END], latency=lambda _: 0.01)
    env = guessing(budget=BudgetConfig(max_turns=2))
    rollout = make_rollout(SPEC)
    playing = asyncio.create_task(play_rollout(env, rollout, open_session(endpoint, rollout), 10.0))
    while not endpoint.requests:
        await asyncio.sleep(0)
    await endpoint.load(1)
    await playing
    first, second = (node for node in rollout.nodes if node.sampled)
    assert first.versions is not None and first.versions.tolist() == [0, 0, 0, 1, 1]
    assert second.versions is not None and second.versions.tolist() == [1] * 5
    np.testing.assert_array_equal(first.token_ids[-5:], [*ids_of("5555"), IM_END])


@pytest.mark.parametrize("hook", ["reset", "reply"])
async def test_a_role_that_there_is_not_is_told_in_words(hook: str) -> None:
    env = guessing(**{hook: lambda episode: [{"role": "user", "content": "hi"}, {"role": "tools", "content": "4"}]})
    rollout = await played(env, saying("5", "7"))
    assert rollout.failure is not None and (rollout.failure.boundary, rollout.failure.type) == (Boundary.ENV, "EnvError")
    assert rollout.failure.message == (
        f"env 'guess': message 1 of `{hook}`: `role` must be one of system, user, assistant, tool, got 'tools'; did you mean 'tool'?"
    )


async def test_a_role_that_is_like_no_other_gets_no_guess() -> None:
    rollout = await played(guessing(reset=lambda episode: [{"role": "moderator", "content": "hi"}]), saying("5"))
    assert rollout.failure is not None and rollout.failure.message.endswith("got 'moderator'")
