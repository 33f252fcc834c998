"""`jaxrl.envs.agent`: programs that speak OpenAI's API play the policy, with the real client, and every token is recorded."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest

from jaxrl.batching import rollout_to_samples
from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.agent import AgentEnvironment
from jaxrl.envs.base import Outcome
from jaxrl.envs.gateway import talk
from jaxrl.envs.play import play_rollout
from jaxrl.errors import EngineError
from jaxrl.inference.endpoint import GenerateRequest
from jaxrl.types import Rollout
from tests.envs.policies import make_rollout, open_session, path_ids
from tests.fakes import ScriptedEndpoint
from tests.inference.rendering.styles import ADD, renderer_of

STYLE = renderer_of("qwen3")
END = STYLE.turn_end_id


def ids_of(text: str) -> list[int]:
    return [*STYLE.encode(text, add_special_tokens=False).tolist(), END]


def telling(*texts: str, **branches: str) -> ScriptedEndpoint:
    """Return an endpoint that answers turn t of the main conversation with `texts[t]`, and that of another one by its name."""

    def reply(request: GenerateRequest, version: int) -> list[int]:
        turn = request.request_id.rpartition("/")[2]
        return ids_of(texts[int(turn)] if turn.isdecimal() else branches["b" + turn.replace(".", "_")])

    return ScriptedEndpoint(reply)


def call_text(a: int, b: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


Play = Callable[..., Any]


@pytest.fixture
async def play() -> AsyncIterator[Play]:
    """Give a function that plays one rollout of an agent; the servers end with the test."""
    environments: list[AgentEnvironment] = []

    async def played(
        agent: Callable[..., Any], endpoint: ScriptedEndpoint, *, deadline_s: float = 20.0, window: int = 4096, **options: Any
    ) -> Rollout:
        env = AgentEnvironment("toy", [{"id": "t"}], agent, **options)
        environments.append(env)
        rollout = make_rollout()
        await play_rollout(env, rollout, open_session(endpoint, rollout, window=window, renderer=STYLE), deadline_s)
        return rollout

    yield played
    for env in environments:
        env.close()
        env.close()


def client(base_url: str, api_key: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, **options)


def check_exact(rollout: Rollout, endpoint: ScriptedEndpoint) -> None:
    """Assert that the path to each reply is what was sent for it and what was sampled, and that nothing else was sampled."""
    sampled = [index for index, node in enumerate(rollout.nodes) if node.sampled]
    paths = [path_ids(rollout, index).tolist() for index in sampled]
    asked = [[*request.token_ids.tolist(), *endpoint.reply(request, 0)] for request in endpoint.requests]
    assert sorted(paths) == sorted(asked)


async def five_turns(spec: dict[str, Any], base_url: str, api_key: str, *, is_stream: bool) -> float:
    """Add up with a tool four times, then answer."""
    question = {"role": "user", "content": [{"type": "text", "text": "1+2+3+4+5"}]}
    messages: list[Any] = [{"role": "system", "content": "Use the tool."}, question]
    async with client(base_url, api_key) as api:
        assert [model.id async for model in api.models.list()] == ["policy"]
        for _ in range(5):
            request: dict[str, Any] = {"model": "any-name", "messages": messages, "tools": [ADD]}
            if is_stream:
                async with api.chat.completions.stream(**request) as stream:
                    completion = await stream.get_final_completion()
            else:
                completion = await api.chat.completions.create(**request)
            choice = completion.choices[0]
            messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
            if choice.finish_reason != "tool_calls":
                break
            for call in choice.message.tool_calls or ():
                arguments = json.loads(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])})
    return 1.0 if choice.message.content == "15" and choice.finish_reason == "stop" else 0.0


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_openai_client_plays_five_turns_with_tools_and_the_ids_are_those_that_were_sampled(play: Play, is_stream: bool) -> None:
    endpoint = telling("<think>\nHm.\n</think>\n\n" + call_text(1, 2), "Next. " + call_text(3, 3), call_text(6, 4), call_text(10, 5), "15")
    rollout = await play(functools.partial(five_turns, is_stream=is_stream), endpoint)
    assert (rollout.failure, rollout.reward, rollout.stop_reason) == (None, 1.0, "done")
    assert rollout.num_turns == 5 and [node.parent for node in rollout.nodes].count(None) == 1
    assert [len(node.tool_calls) for node in rollout.nodes if node.sampled] == [1, 1, 1, 1, 0]
    assert [(node.name, node.content) for node in rollout.nodes if node.role == "tool"] == [("add", str(n)) for n in (3, 6, 10, 15)]
    check_exact(rollout, endpoint)
    (sample,) = rollout_to_samples(rollout)
    whole = [token for request in endpoint.requests for token in endpoint.reply(request, 0)]
    assert sample.token_ids[sample.loss_mask].tolist() == whole, "each sampled token trains once, in one branch"


async def ask(api: openai.AsyncOpenAI, messages: list[Any], **more: Any) -> str:
    """Have the policy reply, and append what it said."""
    completion = await api.chat.completions.create(model="policy", messages=messages, **more)
    messages.append(completion.choices[0].message.model_dump(exclude_none=True))
    return completion.choices[0].message.content or ""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_a_sub_agent_is_a_branch_of_its_own_and_the_main_conversation_goes_on_where_it_was(play: Play) -> None:
    async def agent(spec: dict[str, Any], base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as api:
            main, sub = [user("plan")], [{"role": "system", "content": "You help."}, user("part")]
            said = [await ask(api, main), await ask(api, sub)]
            main.append(user("the helper says " + said[1]))
            sub.append(user("more"))
            said += [await ask(api, main), await ask(api, sub)]
            assert said == ["A", "S", "B", "T"]
        return 0.5

    endpoint = telling("A", "B", b0_0="S", b0_1="T")
    rollout = await play(agent, endpoint)
    assert rollout.failure is None
    assert [(node.parent, node.content) for node in rollout.nodes] == [
        (None, "plan"), (0, "A"), (None, "You help."), (2, "part"), (3, "S"),
        (1, "the helper says S"), (5, "B"), (4, "more"), (7, "T"),
    ]  # fmt: skip
    assert rollout.metrics["sub_conversations"] == 1
    check_exact(rollout, endpoint)
    assert len(rollout_to_samples(rollout)) == 2


async def test_compaction_forks_at_what_is_left_and_an_earlier_point_can_be_gone_on_from(play: Play) -> None:
    async def agent(spec: dict[str, Any], base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as api:
            chat = [user("q")]
            await ask(api, chat)
            long = [*chat, user("tell me all")]
            await ask(api, long)
            again = [*chat, user("in short")]
            await ask(api, again)
            await ask(api, [user("q"), user("Summary: it is short.")])
            await ask(api, [*again, user("done?")])
        return 1.0

    endpoint = telling("A", "much", b1_0="little", b0_0="C", b1_1="yes")
    rollout = await play(agent, endpoint)
    assert rollout.failure is None, rollout.failure
    assert [(node.parent, node.content) for node in rollout.nodes] == [
        (None, "q"), (0, "A"), (1, "tell me all"), (2, "much"), (1, "in short"), (4, "little"),
        (0, "Summary: it is short."), (6, "C"), (5, "done?"), (8, "yes"),
    ]  # fmt: skip
    check_exact(rollout, endpoint)
    trained = [STYLE.decode(sample.token_ids[sample.loss_mask]) for sample in rollout_to_samples(rollout)]
    assert trained == ["A<|im_end|>much<|im_end|>", "C<|im_end|>", "little<|im_end|>yes<|im_end|>"]


async def test_what_an_agent_writes_in_place_of_the_policy_is_not_the_policys(play: Play) -> None:
    async def agent(spec: dict[str, Any], base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as api:
            chat = [user("q")]
            await ask(api, chat)
            await ask(api, [chat[0], chat[1] | {"content": "Better."}, user("next")])
        return 1.0

    endpoint = telling("A", b0_0="B")
    rollout = await play(agent, endpoint)
    assert [(node.parent, node.content, node.sampled) for node in rollout.nodes] == [
        (None, "q", False), (0, "A", True), (0, "Better.", False), (2, "next", False), (3, "B", True),
    ]  # fmt: skip
    check_exact(rollout, endpoint)


async def test_requests_side_by_side_each_get_a_reply_of_their_own(play: Play) -> None:
    async def agent(spec: dict[str, Any], base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as api:
            chat = [user("q")]
            await ask(api, chat)
            says = await asyncio.gather(*(ask(api, [*chat, user("again")]) for _ in range(5)))
            assert sorted(says) == ["B", "C", "D", "E", "F"]
        return 1.0

    endpoint = telling("A", "B", b1_0="C", b1_0_0="D", b1_0_0_0="E", b1_0_0_0_0="F")
    rollout = await play(agent, endpoint)
    assert rollout.failure is None, rollout.failure
    assert [node.content for node in rollout.nodes if not node.sampled] == ["q", "again"]
    assert [node.parent for node in rollout.nodes if node.sampled] == [0, 2, 2, 2, 2, 2]
    check_exact(rollout, endpoint)


async def test_a_plain_function_runs_in_a_thread_and_may_give_an_outcome_as_a_dict(play: Play) -> None:
    threads: list[str] = []

    def agent(spec: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        with openai.OpenAI(base_url=base_url, api_key=api_key) as api:
            completion = api.chat.completions.create(model="m", messages=[user("q")])  # type: ignore[list-item]
            usage = completion.usage
        assert usage is not None
        metrics = {"prompt": usage.prompt_tokens, "reply": usage.completion_tokens}
        return {"reward": 0.25, "stop_reason": "solved", "metrics": metrics, "turn_rewards": [0.25]}

    rollout = await play(agent, telling("A"))
    assert (rollout.reward, rollout.stop_reason, rollout.turn_rewards, threads) == (0.25, "solved", [0.25], ["agent toy"])
    assert rollout.metrics["prompt"] == len(rollout.nodes[0].token_ids) + len(rollout.nodes[1].token_ids) - 2
    assert rollout.metrics["reply"] == 2


async def test_the_calls_that_a_client_cannot_be_told_are_told_as_text_and_the_conversation_still_goes_on(play: Play) -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>'

    async def agent(spec: dict[str, Any], base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as api:
            chat = [user("q")]
            assert "add" in await ask(api, chat, tools=[ADD]) and "tool_calls" not in chat[-1]
            chat.append(user("that was no JSON"))
            await ask(api, chat, tools=[ADD])
            chat.append(user("and without tools?"))
            assert "add" in await ask(api, chat, tools=[ADD], tool_choice="none")
        return 1.0

    endpoint = telling(broken, "sorry", call_text(1, 2))
    rollout = await play(agent, endpoint)
    assert rollout.failure is None, rollout.failure
    assert [node.parent for node in rollout.nodes] == [None, *range(len(rollout.nodes) - 1)]
    assert [node.tool_calls[0].error != "" for node in rollout.nodes if node.tool_calls] == [True, False]
    check_exact(rollout, endpoint)


# What goes wrong


async def test_a_failure_of_the_policy_fails_the_rollout_at_once_though_the_agent_swallows_it(play: Play) -> None:
    seen: list[Any] = []

    async def agent(spec: dict[str, Any], base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as api:
            try:
                await ask(api, [user("q")])
            except openai.InternalServerError as error:
                seen.append(error.code)
            try:
                await asyncio.sleep(60)
            finally:
                seen.append("cleaned up")
        return 1.0

    endpoint = telling("A")
    endpoint.failure = EngineError("the engine lost it")
    rollout = await play(agent, endpoint)
    assert rollout.failure is not None and rollout.reward is None
    assert (rollout.failure.boundary, rollout.failure.type, rollout.failure.message) == ("policy", "EngineError", "the engine lost it")
    assert seen in (["policy_failed", "cleaned up"], []) and len(endpoint.requests) == 1, "no client tries again"


@pytest.mark.parametrize(("value", "boundary", "words"), [
    (1.0, "env", "returned 1.0 without one reply of the policy"),
    (None, "env", "without one reply of the policy"),
])  # fmt: skip
async def test_an_agent_that_never_asks_leaves_nothing_to_learn_from(play: Play, value: Any, boundary: str, words: str) -> None:
    rollout = await play(lambda spec, base_url, api_key: value, telling())
    assert rollout.failure is not None and rollout.failure.boundary == boundary and words in rollout.failure.message


@pytest.mark.parametrize(("value", "boundary", "words"), [
    ("good", "grader", "a reward must be a finite number or None, got 'good'"),
    (float("nan"), "grader", "got nan"),
    ({"reward": 1.0, "rewards": 2}, "env", "returned a dict that has 'rewards'; it may have 'reward', 'stop_reason'"),
    ({"score": 1.0}, "env", "returned a dict that has no 'reward'"),
    ({"reward": 1.0, "turn_rewards": [1.0, 2.0]}, "grader", "needs one reward for each of the 1 replies"),
])  # fmt: skip
async def test_what_is_no_reward_is_no_reward(play: Play, value: Any, boundary: str, words: str) -> None:
    async def agent(spec: dict[str, Any], base_url: str, api_key: str) -> Any:
        async with client(base_url, api_key) as api:
            await ask(api, [user("q")])
        return value

    rollout = await play(agent, telling("A"))
    assert rollout.failure is not None and rollout.failure.boundary == boundary and words in rollout.failure.message


async def test_an_agent_that_crashes_or_calls_exit_fails_its_rollout_with_its_turns_kept(play: Play) -> None:
    for error in (KeyError("lost"), SystemExit(3)):

        async def agent(spec: dict[str, Any], base_url: str, api_key: str, error: BaseException = error) -> float:
            async with client(base_url, api_key) as api:
                await ask(api, [user("q")])
            raise error

        rollout = await play(agent, telling("A"))
        assert rollout.failure is not None and rollout.failure.boundary == "env" and rollout.num_turns == 1
        assert "lost" in rollout.failure.message or "SystemExit(3)" in rollout.failure.message


async def test_an_agent_that_hangs_ends_at_the_deadline_and_a_thread_that_goes_on_is_refused(play: Play) -> None:
    async def hanging(spec: dict[str, Any], base_url: str, api_key: str) -> float:
        await asyncio.sleep(60)
        return 1.0

    go_on = threading.Event()
    late: list[Any] = []
    over = threading.Event()

    def blocking(spec: dict[str, Any], base_url: str, api_key: str) -> float:
        go_on.wait(30)
        with openai.OpenAI(base_url=base_url, api_key=api_key) as api:
            try:
                api.chat.completions.create(model="m", messages=[user("q")])  # type: ignore[list-item]
            except openai.AuthenticationError as error:
                late.append(error.body)
            with pytest.raises(openai.AuthenticationError):
                api.models.list()
        over.set()
        return 1.0

    endpoint = telling("A")
    for agent in (hanging, blocking):
        rollout = await play(agent, endpoint, deadline_s=0.2)
        assert rollout.failure is not None and rollout.failure.boundary == "timeout"
    go_on.set()
    await until(over.is_set)
    assert late[0]["code"] == "invalid_api_key" and endpoint.requests == []


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0.01)


async def test_a_request_that_waits_when_the_agent_returns_is_given_up_and_leaves_no_trace(play: Play) -> None:
    requests: list[asyncio.Task[Any]] = []
    apis: list[openai.AsyncOpenAI] = []

    async def agent(spec: dict[str, Any], base_url: str, api_key: str) -> float:
        api = client(base_url, api_key)
        apis.append(api)
        await ask(api, [user("q")])
        await endpoint.pause()
        requests.append(asyncio.create_task(ask(api, [user("other")])))
        await until(lambda: len(endpoint.requests) == 2)
        return 1.0

    endpoint = telling("A", b0_0="B")
    rollout = await play(agent, endpoint)
    assert rollout.reward == 1.0 and [node.content for node in rollout.nodes] == ["q", "A"]
    await endpoint.resume()
    with pytest.raises(openai.AuthenticationError):
        await requests[0]
    await apis[0].close()
    assert rollout.num_turns == 1 and endpoint.num_cancelled == 1


async def test_a_client_that_hangs_up_gives_its_request_up_and_may_send_it_again(play: Play) -> None:
    async def agent(spec: dict[str, Any], base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as api:
            chat = [user("q")]
            await ask(api, chat)
            await endpoint.pause()
            with pytest.raises(asyncio.TimeoutError):
                async with asyncio.timeout(0.3):
                    await ask(api, [*chat, user("next")])
            await until(lambda: endpoint.num_cancelled == 1)
            await endpoint.resume()
            assert await ask(api, [*chat, user("next")]) == "B"
        return 1.0

    endpoint = telling("A", "B")
    rollout = await play(agent, endpoint)
    assert rollout.failure is None, rollout.failure
    assert [node.content for node in rollout.nodes] == ["q", "A", "next", "B"] and rollout.metrics.get("sub_conversations") is None
    assert len(endpoint.requests) == 3


async def test_a_budget_that_is_used_up_refuses_what_comes_after_and_is_the_stop_reason(play: Play) -> None:
    async def agent(spec: dict[str, Any], base_url: str, api_key: str, *, is_careful: bool) -> float:
        async with client(base_url, api_key) as api:
            await ask(api, [user("q")])
            await ask(api, [user("q2")])
            try:
                await ask(api, [user("q3")])
            except openai.BadRequestError as error:
                assert error.code == "max_turns"
                if not is_careful:
                    raise
        return 0.5

    for is_careful, reward in ((True, 0.5), (False, None)):
        rollout = await play(functools.partial(agent, is_careful=is_careful), telling("A", b0_0="B"), budget=BudgetConfig(max_turns=2))
        assert (rollout.failure, rollout.reward, rollout.stop_reason, rollout.is_truncated) == (None, reward, "max_turns", True)


@pytest.mark.parametrize(("budget", "limit"), [
    ({"max_completion_tokens": 3}, "max_completion_tokens"), ({"max_duration_s": 5.0}, "max_duration"), ({"max_turns": 2}, "max_turns"),
])  # fmt: skip
async def test_each_limit_of_a_budget_has_its_name(play: Play, budget: dict[str, Any], limit: str) -> None:
    now = [0.0]

    async def agent(spec: dict[str, Any], base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as api:
            for question in ("q", "q2", "q3"):
                await ask(api, [user(question)])
                now[0] += 2.5
        return 1.0

    rollout = await play(agent, telling("A", b0_0="B"), budget=BudgetConfig(**budget), clock=lambda: now[0])
    assert (rollout.stop_reason, rollout.num_turns) == (limit, 2)


async def test_a_conversation_that_is_too_long_is_told_so_and_fails_the_rollout_only_if_the_agent_does_not_mend_it(play: Play) -> None:
    async def agent(spec: dict[str, Any], base_url: str, api_key: str, *, is_compacting: bool, error: Exception | None = None) -> float:
        async with client(base_url, api_key) as api:
            chat = [user("q")]
            await ask(api, chat)
            chat.append(user("x " * 100))
            try:
                await ask(api, chat)
            except openai.BadRequestError as refused:
                assert refused.code == "context_length_exceeded"
                if not is_compacting:
                    raise
                await ask(api, [user("short")])
                if error is not None:
                    raise error from refused
        return 1.0

    rollout = await play(functools.partial(agent, is_compacting=True), telling("A", b0_0="B"), window=60)
    assert rollout.failure is None and rollout.reward == 1.0 and rollout.num_turns == 2
    rollout = await play(functools.partial(agent, is_compacting=False), telling("A"), window=60)
    assert rollout.failure is not None and (rollout.failure.boundary, rollout.failure.type) == ("policy", "PromptTooLongError")
    assert (rollout.stop_reason, rollout.is_truncated) == ("prompt_too_long", True)
    later = functools.partial(agent, is_compacting=True, error=ValueError("another matter"))
    rollout = await play(later, telling("A", b0_0="B"), window=60)
    assert rollout.failure is not None and (rollout.failure.boundary, rollout.failure.type) == ("env", "ValueError")


async def test_a_flood_of_requests_is_held_back_and_harms_nobody_else(play: Play) -> None:
    statuses: list[int] = []

    async def flooding(spec: dict[str, Any], base_url: str, api_key: str) -> float:
        await endpoint.pause()
        body = {"messages": [user("q")]}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=20) as http:
            posts = [asyncio.create_task(http.post(f"{base_url}/chat/completions", json=body)) for _ in range(40)]
            await until(lambda: sum(post.done() for post in posts) == 40 - talk.MAX_PARALLEL)
            await endpoint.resume()
            statuses.extend([(await post).status_code for post in posts])
        return 1.0

    endpoint = ScriptedEndpoint(lambda request, version: ids_of("A"))
    rollout = await play(flooding, endpoint, budget=BudgetConfig(max_turns=64))
    assert rollout.failure is None, rollout.failure
    assert statuses.count(200) == talk.MAX_PARALLEL and statuses.count(429) == 40 - talk.MAX_PARALLEL
    assert rollout.num_turns == talk.MAX_PARALLEL


async def test_a_rollout_has_a_key_of_its_own_and_the_server_is_on_this_machine_alone(play: Play) -> None:
    async def agent(spec: dict[str, Any], base_url: str, api_key: str) -> float:
        assert base_url.startswith("http://127.0.0.1:")
        name, _, secret = api_key.partition(".")
        async with httpx.AsyncClient() as http:
            keys = ["nothing", name, f"{name}.", f"{name}.{secret[:-1]}", f"{name}.{secret}x", f".{secret}", f"{name}.\u00e9"]
            for key in keys:
                for path in ("models", "chat/completions"):
                    method = "GET" if path == "models" else "POST"
                    response = await http.request(method, f"{base_url}/{path}", headers={"Authorization": f"Bearer {key}".encode()})
                    assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
            wrong = await http.get(f"{base_url}/models", headers={"Authorization": f"Basic {api_key}"})
            nowhere = await http.get(f"{base_url}/files", headers={"Authorization": f"Bearer {api_key}"})
            method = await http.get(f"{base_url}/chat/completions", headers={"Authorization": f"Bearer {api_key}"})
            assert (wrong.status_code, nowhere.status_code, method.status_code) == (401, 404, 405)
        async with client(base_url, api_key) as api:
            await ask(api, [user("q")])
        return 1.0

    rollout = await play(agent, telling("A"))
    assert rollout.failure is None, rollout.failure


async def test_a_body_that_is_too_large_or_cannot_be_used_is_refused_in_words_and_nothing_is_asked(play: Play) -> None:
    async def agent(spec: dict[str, Any], base_url: str, api_key: str) -> float:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=20) as http:
            big = await http.post(f"{base_url}/chat/completions", content=iter_bytes(17 * 2**20))
            assert big.status_code == 413
            bad = await http.post(f"{base_url}/chat/completions", content=b"{")
            assert bad.status_code == 400 and bad.headers["x-should-retry"] == "false"
            # Somewhere here lie bodies that can be read, and of which nothing can be said without going too deep.
            deep = [await http.post(f"{base_url}/chat/completions", content=nested(depth)) for depth in range(940, 1000)]
            assert {reply.status_code for reply in deep} == {400}
            refused = await http.post(f"{base_url}/chat/completions", json={"messages": [{"role": "alien", "content": "x"}]})
            assert refused.status_code in (200, 400)
        async with client(base_url, api_key) as api:
            with pytest.raises(openai.BadRequestError, match="`n`=2 is not supported"):
                await ask(api, [user("q")], n=2)
            await ask(api, [user("q")])
        return 1.0

    rollout = await play(agent, ScriptedEndpoint(lambda request, version: ids_of("A")))
    assert rollout.failure is None, rollout.failure


def nested(depth: int) -> str:
    return f'{{"messages": [{"[" * depth}{"]" * depth}]}}'


async def iter_bytes(num: int) -> AsyncIterator[bytes]:
    for _ in range(num // 65536):
        yield b"x" * 65536


async def test_what_a_request_says_of_sampling_is_not_heeded_and_said_once(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    async def agent(spec: dict[str, Any], base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as api:
            for question in ("q", "q2"):
                await ask(api, [user(question)], temperature=0.2, max_tokens=1, top_p=1, stop=None)
        return 1.0

    endpoint = telling("A", b0_0="B")
    with caplog.at_level(logging.WARNING, logger="jaxrl"):
        rollout = await play(agent, endpoint)
    assert rollout.failure is None, rollout.failure
    assert [request.sampling.temperature for request in endpoint.requests] == [1.0, 1.0]
    said = [record.getMessage() for record in caplog.records if record.name.startswith("jaxrl")]
    assert [text.partition(",")[0] for text in said] == [
        "env 'toy': the agent asks for `temperature`=0.2", "env 'toy': the agent asks for `max_tokens`=1",
    ]  # fmt: skip


async def test_two_rollouts_at_once_share_a_server_and_nothing_else(play: Play) -> None:
    async def agent(spec: dict[str, Any], base_url: str, api_key: str) -> Outcome:
        urls.add(base_url)
        async with client(base_url, api_key) as api:
            chat = [user("q")]
            first = await ask(api, chat)
            await asyncio.sleep(0.05)
            chat.append(user("again"))
            return Outcome(1.0, info={"said": [first, await ask(api, chat)]})

    urls: set[str] = set()
    env = AgentEnvironment("toy", [{"id": "t"}], agent)
    rollouts = [make_rollout(member=member) for member in range(2)]
    endpoints = [telling("A", "B"), telling("C", "D")]
    try:
        await asyncio.gather(*(
            play_rollout(env, rollout, open_session(endpoint, rollout, window=4096, renderer=STYLE), 20.0)
            for rollout, endpoint in zip(rollouts, endpoints, strict=True)
        ))  # fmt: skip
    finally:
        env.close()
    assert [rollout.info["said"] for rollout in rollouts] == [["A", "B"], ["C", "D"]] and len(urls) == 1
    for rollout, endpoint in zip(rollouts, endpoints, strict=True):
        check_exact(rollout, endpoint)
