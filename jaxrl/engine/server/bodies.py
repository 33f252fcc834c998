"""Request bodies: JSON to a `Job`, or a 400 that names the field.

In: the bytes of a body. Out: prompts as token ids and one `TokenSampling`. The fields are those of OpenAI's API and of vLLM's
additions to it. A field that would change the text and is not built is refused by name unless it holds the value that
changes nothing; a field that changes nothing is accepted; any other is unknown. Pure functions, run in worker threads.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from jaxrl.engine.server.chats import Chats, ChatTurn
from jaxrl.errors import EnvError
from jaxrl.inference.chat.refusals import Refusal
from jaxrl.inference.endpoint import GenerateRequest, TokenSampling
from jaxrl.inference.rendering import Renderer

Kind = Literal["completion", "chat", "generate"]

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's completions route samples when `max_tokens` is left out."""
MAX_CHOICES = 128
MAX_NAME_CHARS = 100
"""How much of a name that nobody knows is looked at and repeated."""
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 256
"""The engine compares each sampled token with as many ids as the request of any slot has."""
CHARS_MARGIN = 4
"""A text longer than this many windows of the longest token is not even encoded: that takes seconds per megabyte."""
NO_LIMIT = 2**31 - 1
"""`max_tokens` of a request without one: the window ends it."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "output_mode": ("tokens",),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that are not built, and the values of each that change nothing; null always is one."""

HARMLESS = (
    "cache_salt",
    "detokenize",
    "metadata",
    "parallel_tool_calls",
    "priority",
    "prompt_cache_key",
    "routed_experts_prompt_start",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
    "store",
    "user",
)
"""Fields that are accepted whatever they hold: they say nothing about the text. There is no prefix cache to salt; the chat route, whose
memory of conversations is one, reads `cache_salt`."""

Count = Annotated[int, Meta(ge=1, le=NO_LIMIT)]
TopCount = Annotated[int, Meta(ge=0, le=NO_LIMIT)]
TokenIds = list[Annotated[int, Meta(ge=0, le=NO_LIMIT)]]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What every route takes; also `sampling_params` of the generate route."""

    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=NO_LIMIT)] = 0
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[TokenIds, Meta(max_length=MAX_STOP_IDS)] = []
    ignore_eos: bool = False
    prompt_logprobs: TopCount | None = None


class GenerateSampling(SamplingBody):
    """`sampling_params` of the generate route."""

    logprobs: TopCount | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How a stream ends."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class OpenAIBody(SamplingBody):
    """What both OpenAI routes take."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    request_id: str | None = None


class CompletionBody(OpenAIBody, kw_only=True):
    """`/v1/completions`."""

    prompt: Any
    logprobs: TopCount | None = None
    add_special_tokens: Literal[True] = True


class ChatBody(OpenAIBody, kw_only=True):
    """`/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: TopCount = 0
    add_special_tokens: Literal[False] = False
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    cache_salt: str = ""


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`/inference/v1/generate`."""

    token_ids: Any
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    request_id: str | None = None
    return_token_ids: bool = False
    stream: Literal[False] = False


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One valid request."""

    kind: Kind
    prompts: tuple[np.ndarray, ...]
    """[P] int32 each."""
    sampling: TokenSampling
    """`seed` is that of the first choice."""
    num_choices: int
    """Replies per prompt; choice i is sampled with seed + i."""
    num_top: int | None
    """Alternatives per sampled token; None if no logprobs were asked for."""
    prompt_top: int | None
    """Alternatives per prompt token; None if no prompt logprobs were asked for."""
    user_stop_ids: frozenset[int]
    """Stop ids that the request named and that would not end a reply by themselves."""
    is_stream: bool = False
    has_stream_usage: bool = False
    returns_token_ids: bool = False
    names_tokens_by_id: bool = False
    request_id: str | None = None
    """The client's own name for it."""
    chat: ChatTurn | None = None
    """The turn of a chat that it is; None on the other routes."""

    @property
    def num_sequences(self) -> int:
        """Places that it takes in the engine."""
        return len(self.prompts) * self.num_choices

    def requests(self, name: str) -> list[GenerateRequest]:
        """Return one request per choice, the choices of a prompt together; their ids start with `name`."""
        return [
            GenerateRequest(f"{name}-{p}-{i}", token_ids, self._sampling_of(i), num_top_logprobs=self.num_top or 0)
            for p, token_ids in enumerate(self.prompts)
            for i in range(self.num_choices)
        ]

    def _sampling_of(self, choice: int) -> TokenSampling:
        return dataclasses.replace(self.sampling, seed=(self.sampling.seed + choice) % 2**63)


class JobReader:
    """Reads bodies for one served model."""

    def __init__(
        self, renderer: Renderer, chats: Chats, served_name: str, max_logprobs: int, vocab_size: int, window: int, max_sequences: int
    ) -> None:
        """Take what a body is checked against.

        Args:
          renderer: the model's tokenizer and chat template.
          chats: the model's conversations.
          served_name: what requests call the model.
          max_logprobs: the most alternatives per token.
          vocab_size: token ids are below it.
          window: prompt plus completion tokens of one sequence.
          max_sequences: the most sequences that one request may ask for.
        """
        self._renderer = renderer
        self._chats = chats
        self._served_name = served_name
        self._max_logprobs = max_logprobs
        self._vocab_size = vocab_size
        self._window = window
        self._max_sequences = max_sequences
        self._max_chars = longest_text(window, renderer)

    def completion(self, raw: bytes) -> Job:
        """Read a body of `/v1/completions`."""
        body = convert(known_fields(raw, CompletionBody), CompletionBody)
        prompts = self._prompts(body.prompt, body.n)
        max_tokens = body.max_tokens or DEFAULT_COMPLETION_TOKENS
        return self._openai_job("completion", body, prompts, max_tokens, body.logprobs, "logprobs")

    def chat(self, raw: bytes) -> Job:
        """Read a body of `/v1/chat/completions`."""
        body = convert(known_fields(raw, ChatBody), ChatBody)
        if body.top_logprobs and not body.logprobs:
            raise Refusal(400, "`top_logprobs` needs `logprobs`: true", param="top_logprobs")
        try:
            chat = self._chats.open(
                body.messages,
                tools=body.tools,
                tool_choice=body.tool_choice,
                is_parallel=body.parallel_tool_calls,
                salt=body.cache_salt,
                check=lambda text: self._encoded(text, "messages", add_special_tokens=False),
            )
        except EnvError as error:
            raise Refusal(400, str(error), param="messages") from error
        max_tokens = body.max_completion_tokens or body.max_tokens or NO_LIMIT
        num_top = body.top_logprobs if body.logprobs else None
        prompt = self._checked(chat.rendered.prompt_ids, "messages")
        return self._openai_job("chat", body, (prompt,), max_tokens, num_top, "top_logprobs", chat=chat)

    def generate(self, raw: bytes) -> Job:
        """Read a body of `/inference/v1/generate`."""
        body = convert(known_fields(raw, GenerateBody), GenerateBody)
        check_model(body.model, self._served_name)
        table = _supported(body.sampling_params, GenerateSampling, "sampling_params.")
        sampling = convert(table, GenerateSampling, "sampling_params.")
        prompt = self._token_ids(body.token_ids, "token_ids")
        return self._job(
            "generate",
            sampling,
            (prompt,),
            sampling.max_tokens or NO_LIMIT,
            sampling.logprobs,
            "sampling_params.logprobs",
            returns_token_ids=body.return_token_ids,
            request_id=body.request_id,
        )

    def _openai_job(
        self,
        kind: Kind,
        body: OpenAIBody,
        prompts: tuple[np.ndarray, ...],
        max_tokens: int,
        num_top: int | None,
        top_field: str,
        chat: ChatTurn | None = None,
    ) -> Job:
        check_model(body.model, self._served_name)
        if body.stream and body.prompt_logprobs is not None:
            raise Refusal(400, "`prompt_logprobs` cannot be streamed; set `stream` to false", param="prompt_logprobs")
        if body.stream_options is not None and not body.stream:
            raise Refusal(400, "`stream_options` needs `stream`: true", param="stream_options")
        return self._job(
            kind,
            body,
            prompts,
            max_tokens,
            num_top,
            top_field,
            is_stream=body.stream,
            has_stream_usage=body.stream_options is not None and body.stream_options.include_usage,
            returns_token_ids=body.return_token_ids,
            names_tokens_by_id=body.return_tokens_as_token_ids,
            request_id=body.request_id,
            chat=chat,
        )

    def _job(
        self,
        kind: Kind,
        body: SamplingBody,
        prompts: tuple[np.ndarray, ...],
        max_tokens: int,
        num_top: int | None,
        top_field: str,
        **shown: Any,
    ) -> Job:
        self._check_number(len(prompts) * body.n)
        for field, value in ((top_field, num_top), ("prompt_logprobs", body.prompt_logprobs)):
            if value is not None and value > self._max_logprobs:
                raise Refusal(400, f"`{field}`={value} is above this server's `server.max_logprobs`={self._max_logprobs}", param=field)
        if beyond := [i for i in body.stop_token_ids if i >= self._vocab_size]:
            raise Refusal(
                400, f"`stop_token_ids`: token id {beyond[0]} is out of a vocabulary of {self._vocab_size}", param="stop_token_ids"
            )
        own = () if body.ignore_eos else self._renderer.stop_ids
        sampling = TokenSampling(
            max_tokens=max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(body.top_k, 0),
            min_p=body.min_p,
            seed=int.from_bytes(os.urandom(8), "little") >> 1 if body.seed is None else body.seed,
            stop_ids=tuple(dict.fromkeys((*own, *body.stop_token_ids))),
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        )
        user_stop_ids = frozenset(body.stop_token_ids).difference(own)
        return Job(kind, prompts, sampling, body.n, num_top, body.prompt_logprobs, user_stop_ids, **shown)

    def _check_number(self, num: int) -> None:
        if num > self._max_sequences:
            raise Refusal(
                400,
                f"the request asks for {num} sequences (prompts times `n`), and this server holds {self._max_sequences} at most, running "
                "(`inference.num_slots`) and waiting (`server.max_queue`); split it",
                param="n",
            )

    def _prompts(self, prompt: Any, num_choices: int) -> tuple[np.ndarray, ...]:
        """Return the prompts of a completion: a text, token ids, or a list of either."""
        if isinstance(prompt, str):
            return (self._encoded(prompt, "prompt"),)
        if not isinstance(prompt, list) or not prompt:
            raise Refusal(400, "`prompt` must be a text, token ids, or a list of either, not empty", param="prompt")
        if isinstance(prompt[0], str | list):
            self._check_number(len(prompt) * num_choices)  # before the work, which is for each
        if all(isinstance(part, str) for part in prompt):
            return tuple(self._encoded(text, f"prompt[{i}]") for i, text in enumerate(prompt))
        if isinstance(prompt[0], list):
            return tuple(self._token_ids(part, f"prompt[{i}]") for i, part in enumerate(prompt))
        return (self._token_ids(prompt, "prompt"),)

    def _token_ids(self, value: Any, field: str) -> np.ndarray:
        try:
            ids = msgspec.convert(value, TokenIds)
        except msgspec.ValidationError as error:
            raise Refusal(400, f"`{field}` must be a list of token ids: {error}", param=_top(field)) from error
        token_ids = np.asarray(ids, np.int32)
        if len(token_ids) and int(token_ids.max()) >= self._vocab_size:
            place = int(np.argmax(token_ids >= self._vocab_size))
            raise Refusal(
                400,
                f"`{field}`: token id {token_ids[place]} at {place} is out of the model's vocabulary of {self._vocab_size}; the ids are "
                "another tokenizer's",
                param=_top(field),
            )
        return self._checked(token_ids, field)

    def _encoded(self, text: str, field: str, *, add_special_tokens: bool = True) -> np.ndarray:
        check_length(text, self._max_chars, self._window, _top(field))
        return self._checked(self._renderer.encode(text, add_special_tokens=add_special_tokens), field)

    def _checked(self, token_ids: np.ndarray, field: str) -> np.ndarray:
        if not len(token_ids):
            raise Refusal(400, f"`{field}` holds no token; a prompt needs at least one", param=_top(field))
        if len(token_ids) >= self._window:
            raise Refusal(
                400,
                f"the prompt has {len(token_ids)} tokens, which leaves no room for a reply in a window of {self._window} "
                f"(`inference.max_model_len`); shorten it to {self._window - 1} tokens",
                param=_top(field),
                code="context_length_exceeded",
            )
        return token_ids


def longest_text(window: int, renderer: Renderer) -> int:
    """Return how many characters a text may have to be worth encoding."""
    return CHARS_MARGIN * window * renderer.longest_token()


def check_length(text: str, max_chars: int, window: int, param: str) -> None:
    """Refuse a text that is longer than `longest_text`."""
    if len(text) > max_chars:
        raise Refusal(
            400,
            f"the prompt has {len(text)} characters, more than fit into a window of {window} tokens (`inference.max_model_len`); "
            "shorten it",
            param=param,
            code="context_length_exceeded",
        )


def check_model(name: str | None, served_name: str) -> None:
    """Refuse a request for another model; one that names none is for this one."""
    if name is not None and name != served_name:
        raise no_such_model(name, served_name)


def no_such_model(name: str, served_name: str) -> Refusal:
    """Return the refusal of a request for another model."""
    return Refusal(404, f"there is no model {name!r:.200} here; this server has {served_name!r}", param="model", code="model_not_found")


B = TypeVar("B", bound=msgspec.Struct)


def known_fields(raw: bytes, body: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields of a body that are set, unchecked; refuse what is not JSON, not built, or unknown."""
    try:
        table = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(table, dict):
        raise Refusal(400, f"the body must be a JSON object, got {type(table).__name__}", code="invalid_json")
    return _supported(table, body)


def _supported(table: dict[str, Any], body: type[msgspec.Struct], prefix: str = "") -> dict[str, Any]:
    """Return the fields of `body` that are set; refuse what is not built and what nobody knows."""
    rest = {}
    for name, value in table.items():
        if name in body.__struct_fields__:
            if value is not None:
                rest[name] = value
        elif name in NEUTRAL:
            if value is not None and value not in NEUTRAL[name]:
                raise Refusal(
                    400,
                    f"`{prefix}{name}` is not supported by this server and would change the reply; leave it out"
                    + (f" or set it to {NEUTRAL[name][0]!r}" if NEUTRAL[name] else ""),
                    param=prefix + name,
                    code="unsupported_parameter",
                )
        elif name not in HARMLESS:
            name = name[:MAX_NAME_CHARS]
            hint = _near(name, body.__struct_fields__)
            raise Refusal(400, f"unknown parameter `{prefix}{name}`{hint}", param=prefix + name, code="unknown_parameter")
    return rest


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean `{near[0]}`?" if near else ""


def convert(table: dict[str, Any], body: type[B], prefix: str = "") -> B:
    """Return a checked body; refuse what has the wrong type or is out of range."""
    try:
        return msgspec.convert(table, body)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`") or what.rpartition("field ")[2].strip("`")  # without a place, a required field is missing
        name = _top(field)
        if name == "stream" and body is GenerateBody:
            what = "this route answers at once; stream from /v1/completions or /v1/chat/completions"
        elif ", got " not in what and isinstance(table.get(name), int | float | str):
            what = f"{what}, got {table[name]!r:.100}"
        raise Refusal(400, f"`{prefix}{field}`: {what[0].lower()}{what[1:]}", param=prefix + name) from error


def _top(field: str) -> str:
    """Return a field's name without indices and sub-fields."""
    return field.split("[")[0].split(".")[0]
