"""What a rollout holds when somebody says its replies in words: the environment itself, or a model of another vocabulary."""

from collections.abc import Sequence

import numpy as np
import pytest

from jaxrl.batching import rollout_to_samples
from jaxrl.config.env import SamplingConfig
from jaxrl.envs.base import Demonstration, Message
from jaxrl.envs.play import play_rollout
from jaxrl.envs.text_session import Demonstrator, ForeignModel, TextSession
from jaxrl.envs.transcript import Window
from jaxrl.errors import EngineError, EnvError, PromptTooLongError
from jaxrl.inference.endpoint import ChatReply, ChatRequest, sampling_seed
from jaxrl.inference.rendering import Renderer
from jaxrl.types import Boundary, Rollout
from tests.envs.policies import IM_END, RENDERER, ids_of, make_rollout, open_session, saying
from tests.fakes import ToyEnv

HI: list[Message] = [{"role": "user", "content": "hi"}]


def demonstrating(rollout: Rollout, text: Demonstration | None = "11", *, window: int = 512) -> TextSession:
    source = Demonstrator(rollout, lambda spec: text)
    return TextSession(source, RENDERER, rollout, window=Window(window), writer="demonstrations")


class Talker:
    """A model that answers in words, from a list."""

    def __init__(self, *replies: ChatReply) -> None:
        self.replies = list(replies)
        self.requests: list[ChatRequest] = []

    async def chat(self, request: ChatRequest) -> ChatReply:
        self.requests.append(request)
        return self.replies[len(self.requests) - 1]


def talking(talker: Talker, rollout: Rollout, *, sampling: SamplingConfig | None = None, window: int = 512) -> TextSession:
    sampling = sampling or SamplingConfig()
    source = ForeignModel(talker, rollout, sampling, run_seed=0)
    return TextSession(source, RENDERER, rollout, window=Window(window), writer="frozen", stop=sampling.stop)


async def test_a_demonstration_is_the_tokens_that_the_policy_would_write_and_has_no_logprobs_or_versions() -> None:
    shown, played = make_rollout(), make_rollout()
    messages: list[Message] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "8 + 3"}]
    reply = await demonstrating(shown).ask(messages)
    same = await open_session(saying("11"), played).ask(messages)
    assert reply == same and (reply.text, reply.is_stopped, reply.num_tokens) == ("11", True, 3)
    for left, right in zip(shown.nodes, played.nodes, strict=True):
        assert left.token_ids.tolist() == right.token_ids.tolist()
        assert (left.role, left.content, left.parent, left.num_sampled) == (right.role, right.content, right.parent, right.num_sampled)
    last = shown.nodes[-1]
    assert last.token_ids[-3:].tolist() == [*ids_of("11"), IM_END] and last.finish_reason == "stop"
    assert last.logprobs is None and last.versions is None and last.source == "demonstrations" and last.temperature == 1.0
    assert shown.oldest_version is None
    (sample,) = rollout_to_samples(shown)
    assert sample.loss_mask.sum() == 3 and not sample.inference_logprobs.any()


async def test_the_environments_own_scorer_rewards_a_demonstration() -> None:
    rollout = make_rollout({"id": "t", "question": "8 + 3"})
    env = ToyEnv(reward=lambda text: float(text == "11"))
    await play_rollout(env, rollout, demonstrating(rollout), 10.0)
    assert (rollout.reward, rollout.failure) == (1.0, None)


@pytest.mark.parametrize("text", [None, 11, [], ["a", None]])
async def test_a_task_without_a_demonstration_is_an_error_that_names_environment_and_task(text: object) -> None:
    rollout = make_rollout({"id": "t", "question": "8 + 3"})
    await play_rollout(ToyEnv(), rollout, demonstrating(rollout, text), 10.0)  # type: ignore[arg-type]
    assert rollout.failure is not None and rollout.failure.boundary is Boundary.ENV and rollout.reward is None
    assert "env 'toy', task 't': the environment has no demonstration for this task" in rollout.failure.message


@pytest.mark.parametrize(("told", "held"), [("11", "1 reply"), (["11"], "1 reply"), (["8", "11"], "2 replies")])
async def test_a_demonstration_that_is_asked_for_more_turns_than_it_has_is_an_error(told: Demonstration, held: str) -> None:
    rollout = make_rollout({"id": "t", "question": "8 + 3"})
    await play_rollout(ToyEnv(num_turns=3), rollout, demonstrating(rollout, told), 10.0)
    turn = 1 + (1 if isinstance(told, str) else len(told))
    assert rollout.failure is not None and rollout.failure.boundary is Boundary.ENV
    assert f"asked for turn {turn}, but the task's demonstration has {held}; have `demonstration` return a list" in rollout.failure.message


async def test_a_demonstration_of_several_turns_is_said_turn_by_turn() -> None:
    shown, played = make_rollout({"id": "t", "question": "8 + 3"}), make_rollout({"id": "t", "question": "8 + 3"})
    env = ToyEnv(num_turns=2, reward=lambda text: float(text == "11"))
    await play_rollout(env, shown, demonstrating(shown, ["add them", "11"]), 10.0)
    await play_rollout(env, played, open_session(saying("add them", "11"), played), 10.0)
    assert shown.failure is None and shown.reward == played.reward == 1.0
    assert [node.token_ids.tolist() for node in shown.nodes] == [node.token_ids.tolist() for node in played.nodes]
    (sample,) = rollout_to_samples(shown)
    assert sample.loss_mask.sum() == len(ids_of("add them")) + len(ids_of("11")) + 2


async def test_a_demonstration_is_of_the_main_conversation_alone() -> None:
    session = demonstrating(make_rollout(), ["8", "11"])
    await session.ask(HI)
    with pytest.raises(EnvError, match="asked in a conversation beside the main one"):
        await session.fork().ask(HI)
    assert (await session.ask(HI)).text == "11"


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


async def test_a_foreign_model_is_offered_no_tools() -> None:
    talker = Talker(ChatReply("11", is_stopped=True))
    with pytest.raises(EnvError, match="offers tools, and the model that writes the replies has another vocabulary"):
        await talking(talker, make_rollout()).ask(HI, tools=[TOOL])
    assert talker.requests == []


async def test_a_fork_of_a_foreign_models_session_has_a_seed_and_a_name_of_its_own() -> None:
    talker = Talker(*(ChatReply(text, is_stopped=True) for text in ("1", "2", "3")))
    rollout = make_rollout(member=3, draw_index=9)
    session = talking(talker, rollout)
    await session.ask(HI)
    await session.fork().ask([{"role": "user", "content": "more"}])
    await session.restart().ask(HI)
    assert [r.request_id for r in talker.requests] == ["g9/3/0", "g9/3/0.0", "g9/3/1.0"]
    assert [r.sampling.seed for r in talker.requests] == [sampling_seed(0, "toy", 9, 3, turn) for turn in (0, "0.0", "1.0")]
    assert [len(r.messages) for r in talker.requests] == [1, 3, 1] and [node.parent for node in rollout.nodes] == [None, 0, 1, 2, 0]


async def test_a_demonstration_that_does_not_fit_is_an_error_and_is_never_cut() -> None:
    num_prompt = len(RENDERER.open_turn(None, HI).prompt_ids)
    rollout = make_rollout()
    with pytest.raises(EnvError, match=r"the reply has 3 tokens, and its prompt leaves room for 2; raise `inference.max_model_len`"):
        await demonstrating(rollout, window=num_prompt + 2).ask(HI)
    assert rollout.nodes == []
    assert (await demonstrating(rollout, window=num_prompt + 3).ask(HI)).is_stopped
    with pytest.raises(PromptTooLongError, match="leaves no room for a reply"):
        await demonstrating(make_rollout(), window=num_prompt).ask(HI)


async def test_a_demonstration_that_only_begins_to_fit_is_an_error_and_no_conversation_that_a_full_window_ended() -> None:
    num_prompt = len(RENDERER.open_turn(None, HI).prompt_ids)
    session = demonstrating(make_rollout(), ["11", "12"], window=num_prompt + 3)
    await session.ask(HI)
    with pytest.raises(EnvError, match=r"turn 2: the prompt has .* which leaves no room for a reply"):
        await session.ask(HI)


async def test_a_demonstration_that_holds_the_end_of_a_turn_is_an_error() -> None:
    said = r"the reply holds '<\|im_end\|>', which ends a reply of the policy: nothing can follow it, .*; leave it out"
    with pytest.raises(EnvError, match=said):
        await demonstrating(make_rollout(), "1<|im_end|>1").ask(HI)
    with pytest.raises(EngineError, match=said):
        await talking(Talker(ChatReply("1<|im_end|>", is_stopped=True)), make_rollout()).ask(HI)


async def test_an_empty_demonstration_is_the_end_of_the_turn_alone() -> None:
    rollout = make_rollout()
    assert (await demonstrating(rollout, "").ask(HI)).num_tokens == 1
    assert rollout.nodes[-1].token_ids[-1] == IM_END


async def test_what_a_foreign_model_says_is_encoded_with_the_policys_tokenizer() -> None:
    talker, rollout = Talker(ChatReply("11", is_stopped=True), ChatReply("so lo", is_stopped=False)), make_rollout(member=3, draw_index=9)
    session = talking(talker, rollout, sampling=SamplingConfig(temperature=0.0, top_p=0.5, max_tokens=20))
    first, second = await session.ask(HI), await session.ask([{"role": "user", "content": "more"}])
    assert (first.text, first.is_stopped, first.num_tokens) == ("11", True, 3)
    assert (second.text, second.is_stopped) == ("so lo", False)
    assert rollout.nodes[1].token_ids[-3:].tolist() == [*ids_of("11"), IM_END]
    assert rollout.nodes[3].token_ids[-len(ids_of("so lo")) :].tolist() == ids_of("so lo"), "cut by the limit: nothing is appended"
    assert [node.finish_reason for node in rollout.nodes if node.sampled] == ["stop", "length"]
    assert {node.source for node in rollout.nodes if node.sampled} == {"frozen"}
    assert all(node.logprobs is None and node.versions is None for node in rollout.nodes)
    assert [m["content"] for m in talker.requests[1].messages] == ["hi", "11", "more"]
    assert [r.sampling.seed for r in talker.requests] == [sampling_seed(0, "toy", 9, 3, turn) for turn in (0, 1)]
    asked = talker.requests[0].sampling
    assert (asked.temperature, asked.top_p, asked.max_tokens) == (0, 0.5, 20)
    assert rollout.metrics["forks"] == 0 and len(rollout_to_samples(rollout)) == 1


async def test_a_foreign_reply_that_is_longer_in_the_policys_tokens_than_its_window_is_cut_as_by_the_limit() -> None:
    num_prompt = len(RENDERER.open_turn(None, HI).prompt_ids)
    talker, rollout = Talker(ChatReply("11111", is_stopped=True)), make_rollout()
    reply = await talking(talker, rollout, window=num_prompt + 2).ask(HI)
    assert (reply.num_tokens, reply.is_stopped, rollout.nodes[-1].finish_reason) == (2, False, "length")
    assert talker.requests[0].sampling.max_tokens == 2
    assert rollout.nodes[-1].token_ids[-2:].tolist() == ids_of("11111")[:2]


async def test_a_foreign_reply_that_a_stop_string_ended_holds_it_and_no_stop_id() -> None:
    talker, rollout = Talker(ChatReply("ok STOP", is_stopped=True, stop_string="STOP")), make_rollout()
    reply = await talking(talker, rollout, sampling=SamplingConfig(stop=["STOP"])).ask(HI)
    assert (reply.text, reply.is_stopped) == ("ok ", True)
    assert rollout.nodes[-1].token_ids[-reply.num_tokens :].tolist() == ids_of("ok STOP")


async def test_a_failure_of_the_model_is_the_policys_boundary() -> None:
    class Down(Talker):
        async def chat(self, request: ChatRequest) -> ChatReply:
            raise EngineError("every endpoint is down")

    rollout = make_rollout({"id": "t", "question": "8 + 3"})
    await play_rollout(ToyEnv(), rollout, talking(Down(), rollout), 10.0)
    assert rollout.failure is not None and rollout.failure.boundary is Boundary.POLICY


class Prefixed(Renderer):
    """A tokenizer whose bare texts begin with a token of their own."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        ids: Sequence[int] = ids_of(text)
        return np.asarray([1, *ids] if add_special_tokens else ids, np.int32)


async def test_nothing_is_put_before_a_reply() -> None:
    rollout = make_rollout()
    renderer = Prefixed(RENDERER.tokenizer, RENDERER.chat_template, RENDERER.stop_ids)
    session = TextSession(Demonstrator(rollout, lambda spec: "11"), renderer, rollout, window=Window(512), writer="demonstrations")
    assert (await session.ask(HI)).num_tokens == 3
