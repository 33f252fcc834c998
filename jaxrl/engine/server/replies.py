"""Reply bodies: generations to JSON, whole or as the events of a stream.

In: a `Job` and what the engine gave for it. Out: bytes in the shapes of OpenAI's API and of vLLM's additions to it. Run in worker
threads: decoding and encoding never hold up the event loop. What a chat was told is remembered when its reply is over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from jaxrl.engine.requests import BROKEN
from jaxrl.engine.server.bodies import Job
from jaxrl.engine.server.chats import Chats
from jaxrl.engine.server.text import Ending, TextFollower, end_text
from jaxrl.inference.chat.wire import finish_word
from jaxrl.inference.endpoint import FinishReason, Generation, PromptScores
from jaxrl.inference.rendering import Renderer

FINISH_WORDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}
DONE = b"data: [DONE]\n\n"
"""The last event of every stream."""

OBJECTS = {"completion": "text_completion", "chat": "chat.completion"}
CHUNK_OBJECTS = {"completion": "text_completion", "chat": "chat.completion.chunk"}


class Tokens(Protocol):
    """A run of sampled tokens: a `Generation`, or a part of one as it comes."""

    @property
    def token_ids(self) -> np.ndarray: ...  # noqa: D102
    @property
    def logprobs(self) -> np.ndarray: ...  # noqa: D102
    @property
    def top_ids(self) -> np.ndarray | None: ...  # noqa: D102
    @property
    def top_logprobs(self) -> np.ndarray | None: ...  # noqa: D102


class ReplyWriter:
    """Writes the replies to one request."""

    def __init__(self, job: Job, reply_id: str, model: str, created: int, renderer: Renderer, chats: Chats) -> None:
        """Take what every part of the reply repeats.

        Args:
          job: the request.
          reply_id: the reply's `id`.
          model: the served name.
          created: Unix time in seconds.
          renderer: turns tokens into text.
          chats: tells and remembers the replies of chats.
        """
        self._job = job
        self._renderer = renderer
        self._chats = chats
        self._head: dict[str, Any] = {"id": reply_id, "created": created, "model": model}
        self._texts: dict[int, str] = {}
        choices = range(job.num_sequences)
        sampling = job.sampling
        self._followers = [TextFollower(renderer.decode, sampling.stop, sampling.stop_ids) for _ in choices] if job.is_stream else []
        self._tellers = [chats.teller(job.chat, sampling) for _ in choices] if job.chat is not None else []
        self._num_streamed = [0 for _ in choices]
        self._measures = [TextFollower(renderer.decode, (), ()) for _ in choices]
        self._num_chars = [0 for _ in choices]

    def whole(self, generations: Sequence[Generation], scores: Sequence[PromptScores]) -> bytes:
        """Return the body of a finished request: `generations` one per choice, `scores` one per prompt if asked for."""
        job = self._job
        prompt_logprobs = [self._prompt_logprobs(ids, score) for ids, score in zip(job.prompts, scores, strict=False)]
        usage = self._usage(sum(len(generation.token_ids) for generation in generations))
        if job.kind == "generate":
            fields = {
                "request_id": self._head["id"],
                "usage": usage,
                "prompt_logprobs": prompt_logprobs[0] if prompt_logprobs else None,
                "prompt_token_ids": job.prompts[0].tolist() if job.returns_token_ids else None,
                "output_mode": "tokens",
                "choices": [self._tokens_choice(index, generation) for index, generation in enumerate(generations)],
            }
            return msgspec.json.encode(self._head | fields | {"seed": job.sampling.seed})
        choices = [self._text_choice(index, generation) for index, generation in enumerate(generations)]
        fields = {"object": OBJECTS[job.kind], "choices": choices, "usage": usage, "seed": job.sampling.seed}
        if job.kind == "completion":
            for index, choice in enumerate(choices):
                prompt = index // job.num_choices
                if prompt_logprobs:
                    choice["prompt_logprobs"] = prompt_logprobs[prompt]
                if job.returns_token_ids:
                    choice["prompt_token_ids"] = job.prompts[prompt].tolist()
        else:
            if prompt_logprobs:
                fields["prompt_logprobs"] = prompt_logprobs[0]
            if job.returns_token_ids:
                fields["prompt_token_ids"] = job.prompts[0].tolist()
        return msgspec.json.encode(self._head | fields)

    def opening(self) -> bytes:
        """Return the events that come before any token; the choices have one prompt, which is told once."""
        if self._job.kind == "completion":
            return b""
        delta = {"role": "assistant", "content": ""}
        shown = {"prompt_token_ids": self._job.prompts[0].tolist()} if self._job.returns_token_ids else {}
        return b"".join(
            self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], **(shown if index == 0 else {}))
            for index in range(self._job.num_sequences)
        )

    def chunk(self, index: int, tokens: Tokens) -> bytes:
        """Return the event of a choice's next tokens; none if they are to be told later and nobody asked for the tokens themselves."""
        job, token_ids = self._job, tokens.token_ids.tolist()
        choice: dict[str, Any] = {"index": index, "logprobs": self._logprobs(index, tokens), "finish_reason": None}
        if job.kind == "completion":
            choice["text"] = self._followers[index].push(token_ids)
        else:
            self._tellers[index].add(token_ids)
            choice["delta"] = self._tellers[index].delta()
            if not choice["delta"] and choice["logprobs"] is None and not job.returns_token_ids:
                return b""
        if job.returns_token_ids:
            choice["token_ids"] = token_ids
            if job.kind == "completion" and not self._num_streamed[index]:
                choice["prompt_token_ids"] = job.prompts[index // job.num_choices].tolist()
        self._num_streamed[index] += len(token_ids)
        return self._event([choice])

    def closing(self, index: int, generation: Generation) -> bytes:
        """Return the events that end a choice, with the text that was held back."""
        end = {"index": index, "logprobs": None, "finish_reason": FINISH_WORDS[generation.finish_reason]}
        end["stop_reason"] = self._end(generation).stop_reason
        if self._job.kind == "completion":
            return self._event([end | {"text": self._followers[index].push([], is_last=True)}])
        delta, finish = self._close_chat(index, generation, end["stop_reason"])
        rest = self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]) if delta else b""
        return rest + self._event([end | {"delta": {}, "finish_reason": finish}])

    def last(self, num_tokens: int) -> bytes:
        """Return the events that end a stream of `num_tokens` sampled tokens."""
        usage = self._event([], usage=self._usage(num_tokens)) if self._job.has_stream_usage else b""
        return usage + DONE

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        body = {**self._head, "object": CHUNK_OBJECTS[self._job.kind], "choices": choices, **more}
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    def _usage(self, num_completion: int) -> dict[str, int]:
        num_prompt = sum(len(token_ids) for token_ids in self._job.prompts)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_completion, "total_tokens": num_prompt + num_completion}

    def _end(self, generation: Generation) -> Ending:
        job = self._job
        return end_text(
            generation.token_ids.tolist(),
            generation.finish_reason,
            stops=job.sampling.stop,
            stop_ids=job.sampling.stop_ids,
            user_stop_ids=job.user_stop_ids,
            decode=self._renderer.decode,
        )

    def _text_choice(self, index: int, generation: Generation) -> dict[str, Any]:
        text, stop_reason = self._end(generation)
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": FINISH_WORDS[generation.finish_reason],
            "stop_reason": stop_reason,
            "logprobs": self._logprobs(index, generation),
        }
        if self._job.kind == "chat":
            self._tellers[index].add(generation.token_ids.tolist())
            _, choice["finish_reason"] = self._close_chat(index, generation, stop_reason)
            choice["message"] = self._tellers[index].message
        else:
            choice["text"] = text
        if self._job.returns_token_ids:
            choice["token_ids"] = generation.token_ids.tolist()
        return choice

    def _close_chat(self, index: int, generation: Generation, stop_reason: str | int | None) -> tuple[dict[str, Any], str]:
        """End what is told of a choice and remember it; return what was left to tell, and the reason that it ended."""
        assert self._job.chat is not None
        teller = self._tellers[index]
        delta = teller.end(stop_reason if isinstance(stop_reason, str) else None)
        if generation.finish_reason is not FinishReason.CANCELLED:
            self._chats.close(self._job.chat, teller.message, generation.token_ids)
        return delta, finish_word(FINISH_WORDS[generation.finish_reason], teller.num_calls)

    def _tokens_choice(self, index: int, generation: Generation) -> dict[str, Any]:
        content = None
        if self._job.num_top is not None:
            content = [
                {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": logprob, "rank": _rank(token_id, tops)}
                | {"top_logprobs": [{"token_id": i, "logprob": p, "rank": rank} for rank, (i, p) in enumerate(tops, start=1)]}
                for token_id, logprob, tops in self._each(generation)
            ]
        return {
            "index": index,
            "finish_reason": FINISH_WORDS[generation.finish_reason],
            "stop_reason": self._end(generation).stop_reason,
            "token_ids": generation.token_ids.tolist(),
            "logprobs": None if content is None else {"content": content},
            "weight_versions": version_spans(generation.versions),
            "routed_experts": None,
            "sampling_mask": None,
        }

    def _logprobs(self, index: int, tokens: Tokens) -> dict[str, Any] | None:
        """Return the logprobs of a choice's next tokens in the shape of the route, if they were asked for."""
        if self._job.num_top is None:
            return None
        if self._job.kind == "chat":
            rows = self._each(tokens)
            return {"content": [self._named(i, p) | {"top_logprobs": [self._named(*top) for top in tops]} for i, p, tops in rows]}
        names = [self._name(token_id) for token_id in tokens.token_ids.tolist()]
        return {
            "tokens": names,
            "token_logprobs": tokens.logprobs.tolist(),
            "top_logprobs": [{self._name(i): p for i, p in [*tops, (token_id, logprob)]} for token_id, logprob, tops in self._each(tokens)],
            "text_offset": [self._text_offset(index, token_id) for token_id in tokens.token_ids.tolist()],
        }

    def _text_offset(self, index: int, token_id: int) -> int:
        """Return where in a choice's text its next token begins; the tokens of one character all begin where it does."""
        begin = self._num_chars[index]
        self._num_chars[index] += len(self._measures[index].push([token_id]))
        return begin

    def _each(self, tokens: Tokens) -> list[tuple[int, float, list[tuple[int, float]]]]:
        """Return id, logprob and alternatives of each token; an alternative that truncation left out is none."""
        ids, logprobs = tokens.token_ids.tolist(), tokens.logprobs.tolist()
        if tokens.top_ids is None or tokens.top_logprobs is None:
            return [(token_id, logprob, []) for token_id, logprob in zip(ids, logprobs, strict=True)]
        rows = zip(ids, logprobs, tokens.top_ids.tolist(), tokens.top_logprobs.tolist(), strict=True)
        return [(i, p, [(j, q) for j, q in zip(tops, values, strict=True) if math.isfinite(q)]) for i, p, tops, values in rows]

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._text(token_id)
        # A part of a character has bytes of its own, which the text of the token alone does not tell.
        return {"token": self._name(token_id), "logprob": logprob, "bytes": None if BROKEN in text else list(text.encode())}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._job.names_tokens_by_id else self._text(token_id)

    def _text(self, token_id: int) -> str:
        if token_id not in self._texts:
            self._texts[token_id] = self._renderer.decode([token_id])
        return self._texts[token_id]

    def _prompt_logprobs(self, token_ids: np.ndarray, scores: PromptScores) -> list[dict[str, Any] | None]:
        """Return for each prompt token, None for the first, its logprob and the likeliest tokens' by id."""
        ids, logprobs = token_ids.tolist(), scores.logprobs.tolist()
        ranks = [None] * len(ids) if scores.ranks is None else scores.ranks.tolist()
        empty = np.zeros((len(ids), 0))
        tops = (scores.top_ids if scores.top_ids is not None else empty.astype(np.int32)).tolist()
        values = (scores.top_logprobs if scores.top_logprobs is not None else empty).tolist()
        rows: list[dict[str, Any] | None] = [None]
        for t in range(1, len(ids)):
            entries = {
                str(j): {"logprob": q, "rank": rank, "decoded_token": self._text(j)}
                for rank, (j, q) in enumerate(zip(tops[t], values[t], strict=True), start=1)
            }
            entries[str(ids[t])] = {"logprob": logprobs[t], "rank": ranks[t], "decoded_token": self._text(ids[t])}
            rows.append(entries)
        return rows


def version_spans(versions: np.ndarray) -> list[dict[str, Any]]:
    """Return which policy version sampled which tokens, as spans.

    Example:
      >>> version_spans(np.array([3, 3, 4], np.int32))
      [{'version': '3', 'start': 0, 'end': 2}, {'version': '4', 'start': 2, 'end': 3}]
    """
    if not len(versions):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [{"version": str(versions[a]), "start": a, "end": b} for a, b in itertools.pairwise(cuts)]


def _rank(token_id: int, tops: list[tuple[int, float]]) -> int | None:
    """Return a token's place among the alternatives; None if it is not one of them."""
    return next((rank for rank, (i, _) in enumerate(tops, start=1) if i == token_id), None)
