"""The one protocol that anything which generates tokens speaks: tokens in, tokens out, with logprobs and versions.

An `Endpoint` is the embedded engine's client or an HTTP server's client; one whose weights can be replaced is a
`PolicyEndpoint`. Environments never see either (they see an `envs.base.Session`). Requests and answers are plain numpy;
nothing here retries, renders text or knows a policy version of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxrl.types import ToolCall

NO_VERSION = -1
"""In place of a policy version: nothing is served, or the tokens are those of a frozen model, which has none."""


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """A stop id or a stop string was reached; a stop id is among the returned tokens."""
    LENGTH = "length"
    """The token limit, or the end of the window, was reached."""
    CANCELLED = "cancelled"
    """The request was cancelled; the tokens so far are returned."""


@dataclass(frozen=True, slots=True)
class TokenSampling:
    """How one request's tokens are sampled. Frozen: a second turn cannot find the first turn's values changed."""

    max_tokens: int
    """Tokens to sample at most, `>= 1`."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """In (0, 1]; 1 keeps all tokens."""
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    """In [0, 1); 0 keeps all tokens."""
    seed: int = 0
    """63-bit; with a token's position it fixes the token's noise, whatever else is in the batch."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the reply; the one that did is among the returned tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the reply; the tokens that hold one are among the returned tokens."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue."""

    request_id: str
    """Unique among the endpoint's live requests."""
    token_ids: np.ndarray
    """[P] int32, P >= 1."""
    sampling: TokenSampling
    """How its tokens are sampled."""
    num_top_logprobs: int = 0
    """Alternatives per sampled token to report; an endpoint that cannot refuses the request."""
    wants_logprobs: bool = True
    """False if nobody will look at the sampled tokens' logprobs; an endpoint may give them all the same."""
    cache_salt: str | None = None
    """Prompts with different salts share no cached prefix: what one policy version computed is of no use to the next. None for
    a model that stays as it is. An endpoint without a prefix cache, such as the embedded engine, has no use for it."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled after a prompt; all arrays have the same length `N >= 0`."""

    token_ids: np.ndarray
    """[N] int32, the sampled stop id included."""
    logprobs: np.ndarray
    """[N] float32 under the distribution that was sampled from (after temperature and truncation); under that of
    temperature 1 where `temperature` is 0, since the logprob of a point mass says nothing. NaN where the request wanted
    none and the endpoint gave none."""
    versions: np.ndarray
    """[N] int32, the policy version that sampled each token; `NO_VERSION` where a frozen model did."""
    finish_reason: FinishReason
    """Why it ended."""
    top_ids: np.ndarray | None = None
    """[N, K] int32, the likeliest tokens at each place, best first, K = `num_top_logprobs`; None if none were asked for."""
    top_logprobs: np.ndarray | None = None
    """[N, K] float32 of `top_ids`, under the distribution of `logprobs`; minus infinity for a token that truncation left out."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One conversation to continue in words, by a server that renders and decodes with the tokenizer of its own model."""

    request_id: str
    """For messages."""
    messages: tuple[Mapping[str, Any], ...]
    """At least one, each with `role` and `content`; an assistant's may have `tool_calls`, with JSON objects as arguments or the text that
    is none, and a tool's has `tool_call_id`. Thinking is not sent back: some servers refuse it."""
    sampling: TokenSampling
    """How its tokens are sampled; `max_tokens` counts the server's own, and `stop_ids`, ids of another vocabulary, are not sent."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """What the reply may call, as OpenAI's API has it."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What a server wrote after a conversation."""

    text: str
    """The reply without what the server sets apart, and without the text of a stop id; a stop string that ended it is at its end, where
    the server says which one did."""
    is_stopped: bool
    """False if the token limit cut it."""
    stop_string: str = ""
    """The stop string that ended it; empty if a stop id did, or the limit."""
    reasoning: str = ""
    """What the server set apart as thinking."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tools that it asks for; none unless the request offered some."""
    num_tokens: int | None = None
    """Tokens of the reply in the server's vocabulary; None if it does not say."""
    num_prompt_tokens: int = 0
    """Tokens that it was shown; 0 if the server does not say."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What a policy says of given tokens, each judged by those before it; index 0 is 0 throughout."""

    logprobs: np.ndarray
    """[L] float32."""
    ranks: np.ndarray | None = None
    """[L] int32, 1 for the likeliest token; None from an endpoint that does not tell."""
    top_ids: np.ndarray | None = None
    """[L, K] int32, the likeliest tokens, best first."""
    top_logprobs: np.ndarray | None = None
    """[L, K] float32 of `top_ids`."""


@dataclass(frozen=True, slots=True)
class EndpointHealth:
    """What an endpoint says of itself."""

    is_ready: bool
    """True if it takes requests."""
    version: int
    """The policy version that it serves; `NO_VERSION` if it does not answer, or serves a frozen model."""
    num_running: int = 0
    """Requests that are being decoded."""
    num_waiting: int = 0
    """Requests that wait for a place."""
    detail: dict[str, float] = field(default_factory=dict)
    """Whatever else it counts, by name."""
    problem: str = ""
    """Why it is not ready, for people; empty if it is, or does not say."""


@runtime_checkable
class Endpoint(Protocol):
    """Something that generates and scores. Every method may be called from the event loop's thread only."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a prompt.

        Cancelling the awaiting task cancels the request in the endpoint.

        Raises:
          PromptTooLongError: the prompt leaves no room for one token.
          EngineError: the request was refused or lost.
          DeadlineError: the endpoint's own request deadline passed.
        """
        ...

    async def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Return [L] float32 logprobs of the given [L] tokens, each given those before it; index 0 is 0.0."""
        ...

    async def health(self) -> EndpointHealth:
        """Report readiness, load and the version that is being served."""
        ...

    async def close(self) -> None:
        """Give back what the client holds; outstanding requests are cancelled."""
        ...


@runtime_checkable
class PolicyEndpoint(Endpoint, Protocol):
    """An endpoint of the policy: it takes new weights while it serves."""

    async def pause(self) -> None:
        """Hold all decoding after the current step; requests stay where they are."""
        ...

    async def resume(self) -> None:
        """Decode again."""
        ...

    async def load(self, version: int) -> None:
        """Take published policy `version`; returns once every later token is sampled from it."""
        ...


def version_salt(version: int) -> str:
    """Return the cache salt of prompts that go to a policy version.

    Example:
      >>> version_salt(3)
      'v3'
    """
    return f"v{version}"


def sampling_seed(run_seed: int, env_name: str, draw_index: int, member: int, turn: int | str) -> int:
    """Return the 63-bit seed of one turn's token stream.

    Two turns of a run never share a stream (up to hash collisions), and a task that is drawn again is sampled anew
    because its draw index differs. Token t of the reply is then sampled with the seed and the absolute position of t.

    Args:
      run_seed: `run.seed`.
      env_name: the environment; evaluation uses a name that no training environment can have.
      draw_index: which draw of that environment the group came from.
      member: index within the group.
      turn: 0-based policy turn within the rollout; of a conversation beside the main one, its place and the turn in words.

    Returns:
      An integer in [0, 2^63).

    Example:
      >>> sampling_seed(0, "add", 0, 0, 0) != sampling_seed(0, "add", 0, 1, 0)
      True
    """
    text = f"{run_seed}\x1f{env_name}\x1f{draw_index}\x1f{member}\x1f{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
