"""A function as the one who is measured: conversations go in, replies come out, whatever makes them.

In: a function of the caller's, such as one around another library's `generate`. Out: an `EvalPolicy`. The function runs in threads of
its own, so that it may block, and is left alone again before an evaluation ends: training may go on with its weights. What it raises
fails an episode at the policy; what it returns and is no reply ends the evaluation.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxrl.blame import in_words
from jaxrl.config.env import SamplingConfig
from jaxrl.config.turns import History
from jaxrl.envs.session import eval_seed_scope
from jaxrl.envs.words import WordsPrompt, WordsReply, WordsSession
from jaxrl.errors import NoReplyError, PolicyFunctionError
from jaxrl.evals.threads import HeldThreads
from jaxrl.inference.endpoint import sampling_seed
from jaxrl.types import Rollout

Answer = str | WordsReply
"""A reply: its text, or what else is known of it beside."""
Reply = Callable[..., Answer | Awaitable[Answer]]
"""`reply(messages)`: the conversation so far, as a list of messages in OpenAI's shape, in; a reply out. It may be a coroutine function.
Of these it is told what it has a parameter for: `sampling`, a `SamplingConfig`; `seed`, an integer of 63 bits that differs for every
turn that is sampled; `tools`, the schemas of what may be called."""
ReplyBatch = Callable[..., Sequence[Answer]]
"""`replies(conversations)`: several conversations in, one reply for each out, in their order; told `sampling` likewise."""


class FunctionPolicy:
    """A policy that is one function.

    Args:
      reply: see `Reply`.
      num_workers: calls of a plain function that run at the same time. An episode's deadline counts the wait for a free one: give the
        harness no more `concurrency` than the function can serve in time.
      count_tokens: text -> tokens, for the scores; None counts none.
      version: the version of the policy, asked once per evaluation; None if nobody counts.
      run_seed: part of every `seed`.
      stop_deadline_s: how long an evaluation that ends waits for calls that still run.

    Example:
      >>> policy = FunctionPolicy(lambda messages: messages[-1]["content"].upper())
    """

    def __init__(
        self,
        reply: Reply,
        *,
        num_workers: int = 1,
        count_tokens: Callable[[str], int] | None = None,
        version: Callable[[], int] | None = None,
        run_seed: int = 0,
        stop_deadline_s: float = 300.0,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"`num_workers` must be at least 1, got {num_workers}")
        self._reply = reply
        self._wanted = _parameters_of(reply) & {"sampling", "seed", "tools"}
        self._name = _name_of(reply)
        self._threads = HeldThreads(num_workers, self._name, version, stop_deadline_s)
        self._count_tokens = count_tokens
        self._run_seed = run_seed

    def hold(self, holder: str) -> AbstractAsyncContextManager[int | None]:
        """See `EvalPolicy.hold`: whoever changes what the function uses waits until an evaluation is over.

        Raises:
          DeadlineError: a call of the function still runs long after the evaluation.
        """
        return self._threads.hold(holder)

    def open_session(self, rollout: Rollout, sampling: SamplingConfig, history: History) -> WordsSession:
        """See `EvalPolicy.open_session`; `history` has no meaning where only words are known."""
        return _FunctionSession(self, rollout, sampling)

    async def answer(self, rollout: Rollout, prompt: WordsPrompt, sampling: SamplingConfig) -> WordsReply:
        """Return the function's reply to a conversation.

        Raises:
          PolicyFunctionError: the function raised, or cannot be told of the tools that there are.
          NoReplyError: it returned something else.
        """
        if prompt.tools and "tools" not in self._wanted:
            raise PolicyFunctionError(
                f"the environment offers tools, and {self._name} has no parameter `tools` to be told of them; add one"
            )
        seed = sampling_seed(self._run_seed, eval_seed_scope(rollout.env_name), rollout.draw_index, rollout.member, prompt.turn)
        told = {"sampling": sampling, "seed": seed, "tools": list(prompt.tools)}
        arguments = {key: told[key] for key in self._wanted}
        messages = list(prompt.messages)
        try:
            if _is_coroutine_function(self._reply):
                answer = self._reply(messages, **arguments)
            else:
                answer = await self._threads.call(lambda: self._reply(messages, **arguments))
            return _checked(await answer if inspect.isawaitable(answer) else answer, self._name, self._count_tokens)
        except Exception as error:
            raise _failure(self._name, error) from error


class BatchFunctionPolicy:
    """A policy that is one function of several conversations at a time: of all that wait whenever it is free.

    Which conversations are together depends on timing, and so does what follows from it, such as how a model rounds.

    Args:
      replies: see `ReplyBatch`; one call runs at a time.
      max_batch_size: conversations of one call at most; a harness of this `concurrency` can fill it.
      count_tokens: text -> tokens, for the scores; None counts none.
      version: the version of the policy, asked once per evaluation; None if nobody counts.
      stop_deadline_s: how long an evaluation that ends waits for a call that still runs.

    Example:
      >>> policy = BatchFunctionPolicy(lambda conversations: [messages[-1]["content"].upper() for messages in conversations])
    """

    def __init__(
        self,
        replies: ReplyBatch,
        *,
        max_batch_size: int = 64,
        count_tokens: Callable[[str], int] | None = None,
        version: Callable[[], int] | None = None,
        stop_deadline_s: float = 300.0,
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"`max_batch_size` must be at least 1, got {max_batch_size}")
        self._replies = replies
        self._is_told_sampling = "sampling" in _parameters_of(replies)
        self._name = _name_of(replies)
        self._threads = HeldThreads(1, self._name, version, stop_deadline_s)
        self._count_tokens = count_tokens
        self._max_batch_size = max_batch_size
        self._waiting: list[_Waiting] = []
        self._serving: asyncio.Task[None] | None = None

    def hold(self, holder: str) -> AbstractAsyncContextManager[int | None]:
        """See `FunctionPolicy.hold`."""
        return self._threads.hold(holder)

    def open_session(self, rollout: Rollout, sampling: SamplingConfig, history: History) -> WordsSession:
        """See `FunctionPolicy.open_session`."""
        return _FunctionSession(self, rollout, sampling)

    async def answer(self, rollout: Rollout, prompt: WordsPrompt, sampling: SamplingConfig) -> WordsReply:
        """Return the function's reply to a conversation.

        Raises:
          PolicyFunctionError: the function raised, or there are tools.
          NoReplyError: it returned something else.
        """
        if prompt.tools:
            raise PolicyFunctionError(
                f"the environment offers tools, of which a function of several conversations, as {self._name} is, cannot be told; use "
                "`FunctionPolicy`"
            )
        waiting = _Waiting(prompt, sampling, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve(), name="function policy")
        return await waiting.reply

    async def _serve(self) -> None:
        """Call the function until nobody waits; whoever gave up meanwhile is left out."""
        await asyncio.sleep(0)  # those who are about to ask do so first
        while self._waiting:
            waiting = [entry for entry in self._waiting if not entry.reply.done()]
            batch = [entry for entry in waiting if entry.sampling == waiting[0].sampling][: self._max_batch_size]
            self._waiting = [entry for entry in waiting if entry not in batch]
            if batch:
                await self._answer_all(batch, batch[0].sampling)

    async def _answer_all(self, batch: Sequence[_Waiting], sampling: SamplingConfig) -> None:
        conversations = [list(entry.prompt.messages) for entry in batch]
        arguments = {"sampling": sampling} if self._is_told_sampling else {}
        try:
            given = await self._threads.call(lambda: self._replies(conversations, **arguments))
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise NoReplyError(f"it must return a list of replies, got {type(given).__name__}")
            replies = list(given)
            if len(replies) != len(batch):
                raise NoReplyError(f"it was given {len(batch)} conversations and must return as many replies, got {len(replies)}")
            answers = [_checked(reply, self._name, self._count_tokens) for reply in replies]
        except Exception as error:
            for entry in batch:
                if not entry.reply.done():
                    entry.reply.set_exception(_failure(self._name, error))
            return
        for entry, answer in zip(batch, answers, strict=True):
            if not entry.reply.done():
                entry.reply.set_result(answer)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """One turn that waits for a batch."""

    prompt: WordsPrompt
    sampling: SamplingConfig
    reply: asyncio.Future[WordsReply]


class _Answering(Protocol):
    """Whoever answers the sessions below."""

    async def answer(self, rollout: Rollout, prompt: WordsPrompt, sampling: SamplingConfig) -> WordsReply: ...


class _FunctionSession(WordsSession):
    """The conversation of one episode with a function."""

    def __init__(self, policy: _Answering, rollout: Rollout, sampling: SamplingConfig) -> None:
        super().__init__(rollout, temperature=sampling.temperature, stop=sampling.stop)
        self._policy = policy
        self._sampling = sampling

    async def _write(self, prompt: WordsPrompt) -> WordsReply:
        return await self._policy.answer(self.rollout, prompt, self._sampling)


def _checked(answer: Any, name: str, count_tokens: Callable[[str], int] | None) -> WordsReply:
    reply = WordsReply(answer) if isinstance(answer, str) else answer
    if not isinstance(reply, WordsReply):
        raise NoReplyError(f"it must return the text of a reply, or a `WordsReply`, got {type(reply).__name__}")
    if reply.num_tokens is None and count_tokens is not None:
        return replace(reply, num_tokens=count_tokens(reply.text))
    return reply


def _failure(name: str, error: Exception) -> PolicyFunctionError:
    if isinstance(error, NoReplyError):
        return NoReplyError(f"{name}: {error}")
    return PolicyFunctionError(f"{name} raised {in_words(error)}")


def _name_of(function: Callable[..., Any]) -> str:
    return f"the function {getattr(function, '__name__', type(function).__name__)!r}"


def _parameters_of(function: Callable[..., Any]) -> set[str]:
    """Return the names of the parameters that a function can be given by name; none if nobody knows."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {parameter.name for parameter in parameters if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)}


def _is_coroutine_function(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
