"""A plain function as the one who is measured: what it is told, what it may return, and what happens while and after it runs."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from jaxrl.config.env import SamplingConfig
from jaxrl.envs.base import Message
from jaxrl.envs.session import eval_seed_scope
from jaxrl.envs.single_turn import SingleTurnEnvironment
from jaxrl.envs.words import WordsReply
from jaxrl.errors import ConfigError, DeadlineError, EngineError, NoReplyError, PolicyFunctionError
from jaxrl.evals import EnvEvalHarness, EvalConfig, EvalPolicy
from jaxrl.evals.functions import BatchFunctionPolicy, FunctionPolicy
from jaxrl.inference.endpoint import sampling_seed
from tests.envs.policies import make_rollout

HI: list[Message] = [{"role": "user", "content": "hi"}]
GREEDY = SamplingConfig(temperature=0.0)
LOOK = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
DEADLINE_S = 10.0


async def ask(policy: FunctionPolicy | BatchFunctionPolicy, messages: list[Message] = HI, **settings: Any) -> Any:
    """Ask one question of a policy that is held meanwhile."""
    async with policy.hold("a test"):
        return await policy.open_session(make_rollout(), GREEDY, "template").ask(messages, **settings)


async def awaited(messages: list[Message]) -> str:
    await asyncio.sleep(0)
    return messages[-1]["content"].upper()


class Shouts:
    async def __call__(self, messages: list[Message]) -> str:
        return messages[-1]["content"].upper()


@pytest.mark.parametrize(
    "reply",
    [lambda messages: messages[-1]["content"].upper(), awaited, Shouts(), lambda messages: awaited(messages)],
    ids=["plain", "coroutine function", "object", "returns a coroutine"],
)
async def test_a_function_of_any_kind_is_given_the_messages_and_its_text_is_the_reply(reply: Callable[..., Any]) -> None:
    said = await ask(FunctionPolicy(reply))
    assert (said.text, said.num_tokens, said.is_stopped) == ("HI", 0, True)


async def test_it_is_given_the_whole_conversation_and_may_change_it() -> None:
    heard: list[list[str]] = []

    def reply(messages: list[Message]) -> str:
        heard.append([message["content"] for message in messages])
        messages.clear()
        return f"reply {len(heard)}"

    policy = FunctionPolicy(reply, count_tokens=len)
    async with policy.hold("a test"):
        session = policy.open_session(make_rollout(), GREEDY, "template")
        await session.ask(HI)
        second = await session.ask([{"role": "user", "content": "more"}])
    assert heard == [["hi"], ["hi", "reply 1", "more"]] and second.num_tokens == len("reply 2")
    assert session.rollout.num_completion_tokens == 14


async def test_it_is_told_sampling_seed_and_tools_if_it_has_parameters_for_them() -> None:
    told: dict[str, Any] = {}

    def reply(messages: list[Message], *, sampling: SamplingConfig, seed: int, tools: list[Any], style: str = "plain") -> WordsReply:
        told.update(sampling=sampling, seed=seed, tools=tools)
        return WordsReply("cut", is_stopped=False, num_tokens=7)

    said = await ask(FunctionPolicy(reply, run_seed=3, count_tokens=len), tools=[LOOK])
    assert told == {"sampling": GREEDY, "seed": sampling_seed(3, eval_seed_scope("toy"), 0, 0, "0"), "tools": [LOOK]}
    assert (said.text, said.num_tokens, said.is_stopped) == ("cut", 7, False)


def broken(messages: list[Message]) -> str:
    raise KeyError("weights")


def broken_batch(conversations: list[list[Message]]) -> list[str]:
    raise KeyError("weights")


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (FunctionPolicy(broken), r"the function 'broken' raised KeyError: 'weights' \(test_functions.py, line \d+, in broken\)"),
        (FunctionPolicy(lambda messages: None), "'<lambda>': it must return the text of a reply, or a `WordsReply`, got NoneType"),
        (BatchFunctionPolicy(broken_batch), "the function 'broken_batch' raised KeyError: 'weights'"),
        (BatchFunctionPolicy(lambda conversations: []), "was given 1 conversations and must return as many replies, got 0"),
        (BatchFunctionPolicy(lambda conversations: [3]), "must return the text of a reply, or a `WordsReply`, got int"),  # type: ignore[list-item]
    ],
)
async def test_what_it_does_wrong_is_a_failure_of_the_policy(policy: FunctionPolicy | BatchFunctionPolicy, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        await ask(policy)


async def test_tools_that_it_cannot_be_told_of_are_an_error_and_no_wrong_answer() -> None:
    with pytest.raises(EngineError, match="has no parameter `tools`"):
        await ask(FunctionPolicy(lambda messages: "hi"), tools=[LOOK])
    with pytest.raises(EngineError, match="use `FunctionPolicy`"):
        await ask(BatchFunctionPolicy(lambda conversations: ["hi"]), tools=[LOOK])


async def test_a_plain_function_runs_as_often_at_the_same_time_as_it_has_workers() -> None:
    both = threading.Barrier(2, timeout=DEADLINE_S)

    def reply(messages: list[Message]) -> str:
        both.wait()  # passes only if two are here at the same time
        return "met"

    policy = FunctionPolicy(reply, num_workers=2)
    async with policy.hold("a test"):
        sessions = [policy.open_session(make_rollout(member=member), GREEDY, "template") for member in range(4)]
        assert [said.text for said in await asyncio.gather(*(session.ask(HI) for session in sessions))] == ["met"] * 4


async def test_a_function_of_batches_gets_all_that_wait_up_to_its_limit_in_order() -> None:
    sizes: list[int] = []

    def replies(conversations: list[list[Message]], sampling: SamplingConfig) -> list[str]:
        assert sampling == GREEDY
        sizes.append(len(conversations))
        return [messages[-1]["content"].upper() for messages in conversations]

    policy = BatchFunctionPolicy(replies, max_batch_size=3, count_tokens=len)
    async with policy.hold("a test"):
        sessions = [policy.open_session(make_rollout(member=member), GREEDY, "template") for member in range(7)]
        asked = [session.ask([{"role": "user", "content": f"q{member}"}]) for member, session in enumerate(sessions)]
        assert [said.text for said in await asyncio.gather(*asked)] == [f"Q{member}" for member in range(7)]
        later = await sessions[0].ask(HI)
    assert sizes == [3, 3, 1, 1] and (later.text, later.num_tokens) == ("HI", 2)


async def test_samplings_are_not_mixed_in_one_batch() -> None:
    seen: list[tuple[float, int]] = []

    def replies(conversations: list[list[Message]], sampling: SamplingConfig) -> list[str]:
        seen.append((sampling.temperature, len(conversations)))
        return ["a"] * len(conversations)

    policy = BatchFunctionPolicy(replies)
    async with policy.hold("a test"):
        sessions = [policy.open_session(make_rollout(), SamplingConfig(temperature=t), "template") for t in (0.0, 1.0, 0.0)]
        await asyncio.gather(*(session.ask(HI) for session in sessions))
    assert seen == [(0.0, 2), (1.0, 1)]


async def test_holding_gives_the_version_and_ends_once_nothing_of_the_function_runs() -> None:
    started, may_return, is_over = threading.Event(), threading.Event(), threading.Event()

    def reply(messages: list[Message]) -> str:
        started.set()
        may_return.wait(DEADLINE_S)
        is_over.set()
        return "late"

    policy = FunctionPolicy(reply, version=lambda: 5)
    async with policy.hold("a test") as version:
        assert version == 5
        asking = asyncio.create_task(policy.open_session(make_rollout(), GREEDY, "template").ask(HI))
        await asyncio.to_thread(started.wait, DEADLINE_S)
        asking.cancel()  # as a deadline would
        await asyncio.gather(asking, return_exceptions=True)
        assert not is_over.is_set()
        may_return.set()
    assert is_over.is_set()
    with pytest.raises(EngineError, match="answers only while its policy is held"):
        await policy.open_session(make_rollout(), GREEDY, "template").ask(HI)


async def test_a_function_that_never_returns_is_named_when_the_evaluation_ends() -> None:
    started, may_return = threading.Event(), threading.Event()

    def stuck(messages: list[Message]) -> str:
        started.set()
        may_return.wait(DEADLINE_S)
        return ""

    policy = FunctionPolicy(stuck, stop_deadline_s=0.01)
    try:
        with pytest.raises(DeadlineError, match=r"a test is over, and a call of the function 'stuck' still runs after 0\.01 s"):
            async with policy.hold("a test"):
                asking = asyncio.create_task(policy.open_session(make_rollout(), GREEDY, "template").ask(HI))
                await asyncio.to_thread(started.wait, DEADLINE_S)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
    finally:
        may_return.set()


async def test_tokens_that_nobody_counted_are_no_zero_in_the_scores() -> None:
    env = SingleTurnEnvironment("sums", [{"id": "a"}, {"id": "b"}], lambda spec: spec["id"], lambda spec, text: 1.0)
    said = {"a": WordsReply("a b", num_tokens=2), "b": WordsReply("b")}
    policy = FunctionPolicy(lambda messages: said[messages[-1]["content"]])
    result = await EnvEvalHarness(env, policy).run(EvalConfig(dataset="sums"))
    assert [row["completion_tokens"] for row in result.rows] == [2, None] and result.scores["mean_completion_tokens"] == 2.0
    uncounted = await EnvEvalHarness(env, FunctionPolicy(lambda messages: "b")).run(EvalConfig(dataset="sums"))
    assert uncounted.scores["success_rate"] == 1.0 and "mean_completion_tokens" not in uncounted.scores


def test_a_policy_without_workers_or_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="`num_workers` must be at least 1"):
        FunctionPolicy(lambda messages: "", num_workers=0)
    with pytest.raises(ValueError, match="`max_batch_size` must be at least 1"):
        BatchFunctionPolicy(lambda conversations: [], max_batch_size=0)


def ones(num_tasks: int) -> SingleTurnEnvironment:
    return SingleTurnEnvironment("sums", [{"id": str(a)} for a in range(num_tasks)], lambda spec: spec["id"], lambda spec, text: 1.0)


@pytest.mark.parametrize(
    "policy",
    [
        FunctionPolicy(lambda messages: 3),  # type: ignore[arg-type, return-value]
        BatchFunctionPolicy(lambda conversations: [3] * len(conversations)),  # type: ignore[list-item]
    ],
    ids=["one", "batch"],
)
async def test_a_function_that_returns_no_text_ends_an_evaluation_at_once(policy: EvalPolicy) -> None:
    told: list[int] = []
    harness = EnvEvalHarness(ones(100), policy, concurrency=1, on_progress=lambda done, planned: told.append(done))
    with pytest.raises(NoReplyError, match=r"evaluation of 'sums': .*return the text of a reply, or a `WordsReply`, got int") as caught:
        await harness.run(EvalConfig(dataset="sums"))
    assert told == [0, 1] and isinstance(caught.value, TypeError)


async def test_batches_of_what_is_no_list_end_it_too() -> None:
    with pytest.raises(NoReplyError, match="'<lambda>': it must return a list of replies, got str"):
        await EnvEvalHarness(ones(1), BatchFunctionPolicy(lambda conversations: "7")).run(EvalConfig(dataset="sums"))


async def test_a_function_that_always_raises_is_to_be_corrected_and_no_server_is_waited_for() -> None:
    said = r"the policy is a function, and gave no reply in 8 episodes in a row, .*raised KeyError: 'weights'.*: correct the function"
    with pytest.raises(PolicyFunctionError, match=said):
        await EnvEvalHarness(ones(20), FunctionPolicy(broken), concurrency=1).run(EvalConfig(dataset="sums"))


def test_a_bare_function_in_place_of_a_policy_is_told_what_to_wrap_it_in() -> None:
    with pytest.raises(ConfigError, match=r"'sums': expected a policy, got a function; a function is measured as `FunctionPolicy"):
        EnvEvalHarness(ones(1), lambda messages: "3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"expected a policy, got a str; see `jaxrl\.evals\.EvalPolicy`"):
        EnvEvalHarness(ones(1), "smollm2")  # type: ignore[arg-type]
