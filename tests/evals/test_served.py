"""A served model as the one who is measured: what is sent, what is recorded, and that it is seeded as an engine in process would be."""

from __future__ import annotations

from typing import Any

from jaxrl.config.env import SamplingConfig, ToolsEnvConfig
from jaxrl.envs.build import build_environment
from jaxrl.envs.play import play_rollout
from jaxrl.errors import EndpointDownError
from jaxrl.evals.served import ServedPolicy
from jaxrl.inference.endpoint import ChatReply, ChatRequest, GenerateRequest
from jaxrl.types import Boundary, Rollout, Task, ToolCall
from tests.builders import make_rollout
from tests.envs.policies import IM_END, ids_of
from tests.evals.worlds import Sums, live
from tests.fakes import ScriptedEndpoint

SAMPLING = SamplingConfig(temperature=0.7, top_p=0.9, max_tokens=16, stop=["END"])
HI = [{"role": "user", "content": "1 + 1 ="}]


class Talker:
    """Answers in order, and keeps what it was asked."""

    def __init__(self, *replies: ChatReply | Exception) -> None:
        self.replies = list(replies)
        self.asked: list[ChatRequest] = []

    async def chat(self, request: ChatRequest) -> ChatReply:
        self.asked.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


async def test_a_reply_is_sampled_with_the_seed_that_the_engine_in_process_would_have() -> None:
    def reply(request: GenerateRequest, version: int) -> list[int]:
        seeds.append(request.sampling.seed)
        return [*ids_of("2"), IM_END]

    seeds: list[int] = []
    for policy in (live(ScriptedEndpoint(reply)), ServedPolicy(talker := Talker(ChatReply("2", is_stopped=True)), run_seed=11)):
        session = policy.open_session(make_rollout(member=3, draw_index=9), SAMPLING, "template")
        await session.ask(HI)
    sampling = talker.asked[0].sampling
    assert seeds == [sampling.seed]
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.stop) == (0.7, 0.9, 16, ("END",))


async def test_thinking_that_was_set_apart_is_part_of_the_text_and_not_of_the_content() -> None:
    thought, cut = ChatReply("7", True, reasoning="3 + 4", num_tokens=9), ChatReply("", False, reasoning="3 +", num_tokens=3)
    rollout = make_rollout(None, turns=())
    session = ServedPolicy(Talker(thought, cut), run_seed=0).open_session(rollout, SAMPLING, "template")
    first, second = await session.ask(HI), await session.ask(HI)
    assert (first.text, first.content, first.reasoning, first.num_tokens) == ("<think>3 + 4</think>7", "7", "3 + 4", 9)
    assert (second.text, second.is_stopped) == ("<think>3 +", False)
    assert rollout.completion_text == "<think>3 +" and rollout.num_completion_tokens == 12 and rollout.is_truncated


async def test_an_environment_with_tools_is_played_by_a_server_that_reads_calls() -> None:
    env = build_environment(ToolsEnvConfig(dataset="chain_sum", num_tasks=4))
    spec: dict[str, Any] = env.tasks()[0]
    expression = spec["question"].split(":")[1].replace("=", "").strip()
    call = ToolCall("c1", "calculator", {"expression": expression}, raw=f'{{"expression": "{expression}"}}')
    talker = Talker(ChatReply("", True, tool_calls=(call,)), ChatReply(spec["answer"], True))
    rollout = Rollout(task=Task(env.name, spec["id"], spec), group_id="g", member=0, draw_index=0)
    try:
        await play_rollout(env, rollout, ServedPolicy(talker, run_seed=0).open_session(rollout, SAMPLING, "template"), 20.0)
    finally:
        env.close()
    assert rollout.reward == 1.0 and rollout.num_turns == 2
    assert talker.asked[0].tools[0]["function"]["name"] == "calculator"
    asked, said, told = talker.asked[1].messages
    assert said["tool_calls"][0]["function"]["arguments"] == {"expression": expression}
    assert (told["role"], told["content"], told["tool_call_id"]) == ("tool", spec["answer"], "c1") and asked["role"] == "user"


async def test_a_server_that_is_gone_fails_the_episode_at_the_policy() -> None:
    env, rollout = Sums(), Rollout(task=Task("sums", "s1", {"id": "s1", "a": 1}), group_id="g", member=0, draw_index=0)
    session = ServedPolicy(Talker(EndpointDownError("nobody answers")), run_seed=0).open_session(rollout, SAMPLING, "template")
    await play_rollout(env, rollout, session, 20.0)
    assert rollout.failure is not None and (rollout.failure.boundary, rollout.failure.type) == (Boundary.POLICY, "EndpointDownError")
    assert rollout.reward is None


async def test_nobody_counts_the_versions_of_a_served_model() -> None:
    async with ServedPolicy(Talker(), run_seed=0).hold("a test") as version:
        assert version is None
