"""What goes over the wire to an OpenAI-compatible server, and what is believed of what comes back.

In: our requests. Out: JSON bodies for `/inference/v1/generate` (tokens in, tokens out), for `/v1/completions` with a
prompt of token ids and for `/v1/chat/completions` (words in, words out); from the answers, `Generation`s, words and
scores. Every token id, length and number of an answer is checked, and nothing is guessed: where ids were asked for, text is
never turned into ids again. Pure functions; nothing here waits or sends.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from jaxrl.errors import ConfigError, EngineError
from jaxrl.inference.endpoint import (
    NO_VERSION,
    ChatReply,
    ChatRequest,
    FinishReason,
    GenerateRequest,
    Generation,
    TokenSampling,
)
from jaxrl.inference.rendering.messages import with_arguments_as_text
from jaxrl.inference.rendering.tool_calls.json_text import JsonError, read_object, skip_space
from jaxrl.types import ToolCall

TOKENS_PATH, COMPLETIONS_PATH = "/inference/v1/generate", "/v1/completions"
"""The two routes that generate and score, the preferred one first; paths below the server's root."""
TOKENIZE_PATH, DETOKENIZE_PATH = "/tokenize", "/detokenize"
"""What the server's tokenizer makes of a text, and of ids."""
CHAT_PATH = "/v1/chat/completions"
"""The route of messages and text, for a model of another vocabulary."""

EXTENSIONS = ("top_k", "min_p", "repetition_penalty")
"""Settings that vLLM and its like have beside those of OpenAI's API."""

_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.CANCELLED,
    "cancelled": FinishReason.CANCELLED,
}
_LEAST_LOGPROB = -9998.0
"""Below it stands what no model says: -9999 is what servers write for minus infinity, which JSON cannot."""
_TOKEN_MARK = "token_id:"
"""How `return_tokens_as_token_ids` spells a token."""


def generate_body(path: str, model: str, request: GenerateRequest) -> dict[str, Any]:
    """Return the JSON body that asks for a generation.

    Every setting is written out: what is left out would come from the server's copy of generation_config.json. The
    request's id is not sent: a second try may reach the server while it still works on the first.
    """
    body = _body(path, model, request.token_ids, request.sampling, {"logprobs": 0} if request.wants_logprobs else {})
    return body if request.cache_salt is None else {**body, "cache_salt": request.cache_salt}


def chat_body(model: str, request: ChatRequest, *, is_plain: bool = False) -> dict[str, Any]:
    """Return the JSON body that asks for the next message of a conversation.

    Every setting is written out, as in `generate_body`; `is_plain` leaves out those that OpenAI's own API does not have.
    """
    messages = [_sent(message) for message in with_arguments_as_text([dict(message) for message in request.messages])]
    offered = {"tools": [dict(tool) for tool in request.tools]} if request.tools else {}
    settings = {key: value for key, value in _settings(request.sampling).items() if not (is_plain and key in EXTENSIONS)}
    return {"model": model, "stream": False, "messages": messages, **offered, **settings}


def refuses_extensions(problem: str, request: ChatRequest) -> bool:
    """Say whether a server refused a request for a setting that OpenAI's own API does not have, and that changes nothing in it."""
    sampling = request.sampling
    return any(name in problem for name in EXTENSIONS) and sampling.top_k == 0 and sampling.min_p == 0


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """Return what is sent of a message; null stands for the text of one that has calls and none."""
    sent = {"role": message["role"], "content": message["content"]}
    sent |= {key: message[key] for key in ("name", "tool_call_id", "tool_calls") if message.get(key)}
    return sent | {"content": None} if sent.get("tool_calls") and not sent["content"] else sent


def score_body(path: str, model: str, token_ids: np.ndarray) -> dict[str, Any]:
    """Return the JSON body that asks for the logprobs of given tokens; the one token that it also samples is ignored.

    It carries no cache salt: a server that computes prompt logprobs takes no prefix from its cache.
    """
    return _body(path, model, token_ids, TokenSampling(max_tokens=1), {"prompt_logprobs": 0})


def _body(path: str, model: str, token_ids: np.ndarray, sampling: TokenSampling, wanted: dict[str, int]) -> dict[str, Any]:
    """Return a body; `wanted` counts the alternatives to report beside the logprobs of the tokens themselves."""
    settings = {**_settings(sampling), "stop_token_ids": list(sampling.stop_ids), **wanted}
    ids = [int(token) for token in token_ids]
    shared = {"model": model, "stream": False, "return_token_ids": True}
    if path == TOKENS_PATH:
        return {**shared, "token_ids": ids, "sampling_params": settings}
    return {**shared, "prompt": ids, "return_tokens_as_token_ids": True, **settings}


def _settings(sampling: TokenSampling) -> dict[str, Any]:
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "seed": sampling.seed,
        "n": 1,
        "stop": list(sampling.stop),
    }


def read_generation(content: bytes, path: str, request: GenerateRequest) -> Generation:
    """Return the generation in an answer.

    Args:
      content: the body of the answer.
      path: the route that gave it.
      request: what was asked.

    Raises:
      EngineError: the answer is no JSON, belongs to another prompt, holds text without ids, or a token without a finite
        logprob that was wanted.
    """
    answer, choice = _open(content)
    _check_prompt(answer, choice, request.token_ids)
    ids = choice.get("token_ids")
    if ids is None:
        raise EngineError(
            "the server returned text and no token ids, and text is never tokenised again; use a server that answers `return_token_ids`"
        )
    token_ids = _ids(ids, "`token_ids`")
    if len(token_ids) > request.sampling.max_tokens:
        raise EngineError(f"the server returned {len(token_ids)} tokens, asked for at most {request.sampling.max_tokens}")
    return Generation(
        token_ids=np.asarray(token_ids, np.int32),
        logprobs=_read_logprobs(choice, path, token_ids) if request.wants_logprobs else np.full(len(token_ids), np.nan, np.float32),
        versions=np.full(len(token_ids), NO_VERSION, np.int32),
        finish_reason=_finish_reason(choice),
    )


def read_chat(content: bytes, request: ChatRequest) -> ChatReply:
    """Return the reply in an answer to `chat_body`.

    `text` is the `content` alone. What a server sets apart (`reasoning_content`) is no part of it: serve the model without a reasoning
    parser to learn from its thinking too.

    Raises:
      EngineError: the answer is no JSON, holds no text and no call of a tool that was offered, or the reply did not end by itself or by
        the token limit.
    """
    answer, choice = _open(content)
    message = choice.get("message")
    table = message if isinstance(message, dict) else {}
    calls = _read_calls(table.get("tool_calls")) if request.tools else ()
    reason = FinishReason.STOP if calls and choice.get("finish_reason") == "tool_calls" else _finish_reason(choice)
    text = table.get("content")
    if text is None and calls:
        text = ""
    if not isinstance(text, str):
        raise EngineError(f"the server answered with the message {_shown(message)}, expected one with a text as `content`")
    if reason is FinishReason.CANCELLED:
        raise EngineError("the server gave the reply up before its end")
    is_stopped = reason is FinishReason.STOP
    ended_by = choice.get("stop_reason") if is_stopped else None
    stop_string = ended_by if isinstance(ended_by, str) and ended_by in request.sampling.stop else ""
    thought = table.get("reasoning_content") or table.get("reasoning")
    num_tokens, num_prompt = _read_usage(answer.get("usage"))
    return ChatReply(
        text=text + stop_string,
        is_stopped=is_stopped,
        stop_string=stop_string,
        reasoning=thought if isinstance(thought, str) else "",
        tool_calls=calls,
        num_tokens=num_tokens,
        num_prompt_tokens=num_prompt or 0,
    )


def _read_usage(usage: Any) -> tuple[int | None, int | None]:
    """Return the tokens of the reply and of its prompt; None where the server does not say."""
    counts = usage if isinstance(usage, dict) else {}
    num_tokens, num_prompt = (counts.get(key) for key in ("completion_tokens", "prompt_tokens"))
    return num_tokens if _is_int(num_tokens) else None, num_prompt if _is_int(num_prompt) else None


def _read_calls(calls: Any) -> tuple[ToolCall, ...]:
    """Return the calls of a reply; one whose arguments are no JSON object is malformed, which is the model's doing."""
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise EngineError(f"the server answered `tool_calls`={_shown(calls)}, expected a list of calls")
    return tuple(_read_call(call) for call in calls)


def _read_call(call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    name, raw = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(raw, str | None) or not isinstance(call.get("id"), str):
        raise EngineError(f"the server answered with the call {_shown(call)}, expected an `id`, a name and the JSON text of arguments")
    raw = raw or "{}"
    try:
        members, end = read_object(raw, skip_space(raw, 0))
        if skip_space(raw, end) < len(raw):
            raise JsonError(f"something follows the object at character {end}")
    except JsonError as error:
        return ToolCall(call["id"], name, None, raw=raw, error=f"the arguments of {name!r} are no JSON object: {error}")
    return ToolCall(call["id"], name, {key: member.value for key, member in members.items()}, raw=raw)


def read_scores(content: bytes, token_ids: np.ndarray) -> np.ndarray:
    """Return [L] float32 logprobs of the [L] tokens that were scored, each given those before it; 0.0 for the first.

    Raises:
      EngineError: the answer is no JSON, or at some position holds no entry for the token's id, or no finite number.
    """
    answer, choice = _open(content)
    _check_prompt(answer, choice, token_ids)
    entries = answer.get("prompt_logprobs")
    if entries is None:
        entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list):
        raise EngineError(f"the server gave no `prompt_logprobs` (got {_shown(entries)}), so it cannot score; use one that does")
    if len(entries) != len(token_ids):
        raise EngineError(f"the server gave `prompt_logprobs` for {len(entries)} tokens, expected {len(token_ids)}")
    scores = np.zeros(len(token_ids), np.float32)
    for position in range(1, len(token_ids)):
        entry, token_id = entries[position], str(int(token_ids[position]))
        if not isinstance(entry, dict):
            raise EngineError(f"`prompt_logprobs` at position {position} is {_shown(entry)}, expected an object of logprobs by token id")
        if token_id not in entry:
            raise EngineError(
                f"`prompt_logprobs` at position {position} is for the ids {', '.join(sorted(entry)):.120}, the token there is {token_id}: "
                "the server scored another sequence"
            )
        found = entry[token_id]
        logprob = found.get("logprob") if isinstance(found, dict) else found
        _check_logprob(logprob, f"token {token_id} at position {position}")
        scores[position] = logprob
    return scores


def read_tokenized(content: bytes) -> np.ndarray:
    """Return [n] int32, the ids in an answer of `TOKENIZE_PATH`.

    Raises:
      EngineError: the answer holds no list of token ids.
    """
    return np.asarray(_ids(_json(content).get("tokens"), "`tokens`"), np.int32)


def read_detokenized(content: bytes) -> str:
    """Return the text in an answer of `DETOKENIZE_PATH`.

    Raises:
      EngineError: the answer holds no text.
    """
    text = _json(content).get("prompt")
    if not isinstance(text, str):
        raise EngineError(f"the server answered `prompt`={_shown(text)}, expected the text of the ids")
    return text


def check_key(key: str, source: str) -> None:
    """Refuse a key that no HTTP header can carry, before some library's message about it shows the key.

    Raises:
      ConfigError: naming `source`, where the key is from.
    """
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"the API key {source} holds a character that no HTTP header can carry: a key is printable ASCII on one line; "
            "see whether a line break or a typographic character was copied along"
        )


def read_models(content: bytes) -> dict[str, int | None]:
    """Return the models that a server lists under `/v1/models`, each with its context window where it says so.

    Raises:
      EngineError: the answer is no such list.
    """
    listed = _json(content).get("data")
    if not isinstance(listed, list) or not all(isinstance(model, dict) and isinstance(model.get("id"), str) for model in listed):
        raise EngineError(f"`/v1/models` answered {_shown(listed)}, expected a list of models; it is no OpenAI-compatible server")
    windows = [model.get("max_model_len") for model in listed]
    return {model["id"]: window if _is_int(window) else None for model, window in zip(listed, windows, strict=True)}


def read_problem(content: bytes) -> str:
    """Return what an error answer says is wrong, in one line of at most 500 characters."""
    text = content.decode("utf-8", errors="replace")
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    line = " ".join((found if isinstance(found, str) else json.dumps(found)).split())
    line = line if len(line) <= 500 else line[:500] + "..."
    return line.encode(errors="replace").decode()  # JSON may spell half a surrogate pair, which no terminal or file takes


def _open(content: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the answer and its only choice."""
    answer = _json(content)
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise EngineError(f"the server answered `choices`={_shown(choices)}, expected a list of one choice")
    return answer, choices[0]


def _json(content: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        raise EngineError(f"the server's answer is not JSON: {_shown(content.decode('utf-8', errors='replace'))}") from None
    if not isinstance(answer, dict):
        raise EngineError(f"the server answered a JSON {type(answer).__name__}, expected an object")
    return answer


def _check_prompt(answer: dict[str, Any], choice: dict[str, Any], sent: np.ndarray) -> None:
    """Refuse an answer to another prompt, where the server says what the prompt was."""
    came = answer.get("prompt_token_ids")
    if came is None:
        came = choice.get("prompt_token_ids")
    if came is None:
        return
    ids, wanted = _ids(came, "`prompt_token_ids`"), [int(token) for token in sent]
    if ids != wanted:
        same = next((i for i, (a, b) in enumerate(zip(ids, wanted, strict=False)) if a != b), min(len(ids), len(wanted)))
        raise EngineError(
            f"the server says that the prompt was {len(ids)} tokens, {len(wanted)} were sent, and they differ from position {same} on: "
            "it changes prompts"
        )


def _finish_reason(choice: dict[str, Any]) -> FinishReason:
    reason = choice.get("finish_reason")
    if not isinstance(reason, str) or reason not in _FINISH_REASONS:
        raise EngineError(f"the server ended the reply with `finish_reason`={_shown(reason)}, expected one of {', '.join(_FINISH_REASONS)}")
    return _FINISH_REASONS[reason]


def _read_logprobs(choice: dict[str, Any], path: str, token_ids: list[int]) -> np.ndarray:
    """Return [N] float32 logprobs of the [N] sampled tokens, each checked to be of its token."""
    logprobs = choice.get("logprobs")
    values = _logprobs_by_token(logprobs) if path == TOKENS_PATH else _logprobs_by_list(logprobs)
    if len(values) != len(token_ids):
        raise EngineError(f"the server returned {len(token_ids)} tokens and {len(values)} logprobs")
    for position, (token_id, (named, logprob)) in enumerate(zip(token_ids, values, strict=True)):
        if named is not None and named != token_id:
            raise EngineError(f"the logprob of sampled token {position} is for id {named!r}, and the token's id is {token_id}")
        _check_logprob(logprob, f"sampled token {position}")
    return np.asarray([logprob for _, logprob in values], np.float32)


def _logprobs_by_token(logprobs: Any) -> list[tuple[int | None, Any]]:
    """Read `{"content": [{"token_id": id, "logprob": x}, ...]}`."""
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise EngineError(f"the server gave no logprobs of the sampled tokens (got {_shown(logprobs)})")
    return [(entry.get("token_id"), entry.get("logprob")) for entry in entries]


def _logprobs_by_list(logprobs: Any) -> list[tuple[int | None, Any]]:
    """Read `{"token_logprobs": [...], "tokens": ["token_id:7", ...]}`."""
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(values, list):
        raise EngineError(f"the server gave no logprobs of the sampled tokens (got {_shown(logprobs)})")
    tokens = logprobs.get("tokens")
    if not isinstance(tokens, list) or len(tokens) != len(values):
        tokens = [None] * len(values)
    marked = [token.removeprefix(_TOKEN_MARK) if isinstance(token, str) and token.startswith(_TOKEN_MARK) else None for token in tokens]
    return [(int(mark) if mark is not None and mark.isdecimal() else None, value) for mark, value in zip(marked, values, strict=True)]


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list):
        raise EngineError(f"the server answered {name}={_shown(value)}, expected a list of token ids")
    for position, token_id in enumerate(value):
        if not _is_int(token_id) or not 0 <= token_id < 2**31:
            raise EngineError(f"{name} holds {_shown(token_id)} at position {position}, expected a token id")
    return value


def _check_logprob(value: Any, where: str) -> None:
    # Rounding may leave the logprob of a certain token a little above 0.
    if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST_LOGPROB <= value <= 1e-3:
        stands_in = " (-9999 stands for minus infinity)" if value == -9999 else ""
        raise EngineError(f"the logprob of {where} is {_shown(value)}{stands_in}, expected a finite number of at most 0")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "..."
