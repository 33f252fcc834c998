"""Chat messages to token ids and back, with the model's own chat template, exactly once.

In: a Hugging Face directory (tokenizer.json, a chat template, generation_config.json) and messages. Out: one run of
token ids per message, the ids of the generation prompt, the ids that end a reply, decoded text. A later turn continues
the very ids that the model saw; where the template rewrites history (it may strip earlier thinking) the turn is a fork,
rendered anew. Sampled ids are never encoded again, and nothing here parses tool calls.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.errors import EnvError, ModelLoadError
from jaxrl.inference.hub import resolve_model_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PINNED_DATE = "{% macro strftime_now(format) %}01 Jan 2025{% endmacro %}"
"""Put before a template that asks for today's date: with it in the prompts, a run resumed tomorrow would be another
run."""

_PROBE = "jaxrl"
"""Content of the assistant turn that shows how a template ends a turn."""


@dataclass(frozen=True, slots=True)
class RenderState:
    """A conversation as the model saw it, up to and including the policy's last reply."""

    messages: tuple[dict[str, Any], ...]
    text: str
    """The text of `token_ids`, without that of a final stop id."""
    stop_text: str
    """The text of the stop id that ended the reply; empty if none did."""
    token_ids: np.ndarray
    """[n] int32."""


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """One prompt for the policy."""

    messages: tuple[dict[str, Any], ...]
    """The whole conversation."""
    text: str
    """The text of `prompt_ids`."""
    prompt_ids: np.ndarray
    """[P] int32, the ids to send: those before this turn (unless it is a fork), the spans, the generation prompt."""
    spans: tuple[np.ndarray, ...]
    """One [n] int32 per message that this turn adds; on a fork, per message of the whole conversation. The scaffolding
    that closes the turn before belongs to the first of them."""
    generation_prompt: np.ndarray
    """[n] int32 after the last message, where the reply begins."""
    is_fork: bool
    """True if the template's text no longer starts with what the model saw, so that the prompt starts a new root."""

    @property
    def span_messages(self) -> tuple[dict[str, Any], ...]:
        """The message of each span."""
        return self.messages[len(self.messages) - len(self.spans) :]


class Renderer:
    """One tokenizer with its chat template. Immutable after construction, so worker threads may share it.

    Note: the text of a special token inside a message becomes that token, as in every chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, chat_template: str, stop_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # Invariant: nothing cuts or pads an encoding; both settings may be stored in tokenizer.json.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._chat_template = (_PINNED_DATE if "strftime_now" in chat_template else "") + chat_template
        self.stop_ids = tuple(sorted(set(stop_ids)))
        """Ids that end a reply: the generation config's and the tokenizer's eos, and the template's end of turn."""

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Renderer:
        r"""Load the tokenizer, chat template and stop ids of a model directory.

        Args:
          directory: a Hugging Face directory on this machine with tokenizer.json and a chat template, or a name on the
            hub (`org/name`, `org/name@revision`), from which no weights are fetched; generation_config.json and
            config.json are read where they exist.

        Raises:
          ModelLoadError: a file, the chat template or a special token is missing, or the template ends an assistant
            turn with text that is no stop id, so that a policy that writes it would never stop.

        Example:
          >>> renderer = Renderer.from_pretrained("tests/golden/tokenizer")
          >>> renderer.open_turn(None, [{"role": "user", "content": "hi"}]).text
          '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'
        """
        path = resolve_model_directory(directory, "tokenizer")
        tokenizer = _load_tokenizer(path)
        try:
            chat_template = tokenizer.get_chat_template()
        except ValueError as error:
            raise ModelLoadError(
                f"{path}: the tokenizer has no chat template, so messages cannot be turned into tokens; "
                "add `chat_template` to tokenizer_config.json or a chat_template.jinja file"
            ) from error
        _check_vocabulary(path, tokenizer)
        eos_ids = _eos_ids(path, tokenizer)
        try:
            turn_end_id = cls(tokenizer, chat_template, eos_ids).turn_end_id
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error}") from error.__cause__
        return cls(tokenizer, chat_template, eos_ids | {turn_end_id})

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows, special tokens included."""
        return len(self._tokenizer)

    @functools.cached_property
    def num_ids(self) -> int:
        """The highest id that the tokenizer knows, plus 1; more than `vocab_size` where ids are left out."""
        return 1 + max(self._tokenizer.get_vocab().values())

    @functools.cached_property
    def bos_id(self) -> int | None:
        """The special token that the template puts before a conversation, once; None if it puts none.

        A token that begins every message is none, even if the tokenizer calls it bos, as ChatML's `<|im_start|>` often is.
        """
        turn = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
        ids = self.message_ids([*turn, turn[0]]).tolist()
        is_special = bool(ids) and ids[0] in self._backend.get_added_tokens_decoder()
        return ids[0] if is_special and ids.count(ids[0]) == 1 else None

    def longest_token(self) -> int:
        """Return the characters of the longest token in the vocabulary."""
        return max(map(len, self._tokenizer.get_vocab()))

    def open_turn(self, prior: RenderState | None, messages: Sequence[Mapping[str, Any]]) -> RenderedTurn:
        """Render the prompt of the next reply.

        With `prior`, the prompt is its ids followed by the ids of the template's text after it, encoded on their own.
        If the template's text does not start with what the model saw, the turn is a fork: the whole conversation is
        rendered and encoded anew.

        Args:
          prior: what `close_turn` returned after the last reply; None in the first turn.
          messages: the new messages, at least one; `content` is a string or a list of text parts, which are joined.

        Raises:
          EnvError: no message, a message without role or text, or a conversation that the template refuses.
        """
        new = _text_messages(messages)
        history = prior.messages if prior else ()
        conversation = history + new
        text = self._render(conversation, add_generation_prompt=True)
        is_fork = prior is not None and not text.startswith(prior.text)
        if prior is None or is_fork:
            seen, first, start = np.zeros(0, np.int32), 0, 0
        else:
            seen, first, start = prior.token_ids, len(history), len(prior.text)
            # The sampled stop id already is the template's end of turn. One of another text stays, and the template's
            # follows it.
            start += len(prior.stop_text) if text.startswith(prior.stop_text, start) else 0
        *spans, generation_prompt = self._encode_by_message(conversation, first, text, start)
        return RenderedTurn(
            messages=conversation,
            text=text,
            prompt_ids=np.concatenate([seen, *spans, generation_prompt]),
            spans=tuple(spans),
            generation_prompt=generation_prompt,
            is_fork=is_fork,
        )

    def close_turn(self, turn: RenderedTurn, sampled_ids: np.ndarray) -> RenderState:
        """Return the conversation after the policy's reply; the reply's ids are kept as they are.

        Args:
          turn: the prompt that was answered.
          sampled_ids: [N] int32, N >= 0, a sampled stop id included.
        """
        content = self.reply_text(sampled_ids)
        is_stopped = len(sampled_ids) > 0 and int(sampled_ids[-1]) in self.stop_ids
        return RenderState(
            messages=(*turn.messages, {"role": "assistant", "content": content}),
            text=turn.text + content,
            stop_text=self.decode(sampled_ids[-1:]) if is_stopped else "",
            token_ids=np.concatenate([turn.prompt_ids, np.asarray(sampled_ids, np.int32)]),
        )

    def reply_text(self, sampled_ids: np.ndarray) -> str:
        """Return the text of a reply without its final stop id. For people and scorers: the truth is in the ids."""
        is_stopped = len(sampled_ids) > 0 and int(sampled_ids[-1]) in self.stop_ids
        return self.decode(sampled_ids[:-1] if is_stopped else sampled_ids)

    def prompt_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of `open_turn(None, messages)`, in time that is linear in the number of messages; raises alike.

        Its ids are `encode(text, add_special_tokens=False)`.
        """
        return self._render(_text_messages(messages), add_generation_prompt=True)

    def message_ids(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return [n] int32 ids of a conversation that nobody is asked to continue: no generation prompt follows it.

        Raises:
          EnvError: no message, a message without role or text, or a conversation that the template refuses.
        """
        return self.encode(self._render(_text_messages(messages), add_generation_prompt=False), add_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """Return [n] int32 ids of a text, by default with the tokens that the tokenizer puts around a bare one (such as bos)."""
        return np.asarray(self._backend.encode(text, add_special_tokens=add_special_tokens).ids, np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of token ids, special tokens included; bytes that are no UTF-8 read as U+FFFD."""
        return self._backend.decode([int(token) for token in token_ids], skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token as it reads inside a text: at the beginning of one, some tokenizers leave out its space."""
        before = [self.stop_ids[0]]
        return self.decode([*before, token_id])[len(self.decode(before)) :]

    def _render(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    chat_template=self._chat_template,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except Exception as error:  # a template is a program of whoever made the model: it may raise anything
            roles = [message["role"] for message in messages]
            raise EnvError(f"the chat template refused messages with the roles {roles}: {error}") from error

    def _encode_by_message(self, messages: tuple[dict[str, Any], ...], first: int, text: str, start: int) -> list[np.ndarray]:
        """Encode `text[start:]` in one go and cut the ids at the ends of `messages[first:]`; the rest comes last.

        A message whose end cannot be told from the template's text gets no ids: they go to the next one whose end is
        known.
        """
        ends: list[int] = []
        for count in range(first + 1, len(messages) + 1):
            end = ends[-1] if ends else start
            try:
                upto = self._render(messages[:count], add_generation_prompt=False)
            except EnvError:  # a template may refuse a conversation that stops here
                upto = ""
            if upto and text.startswith(upto):
                end = max(end, len(upto))
            elif count == len(messages):
                end = len(text)
            ends.append(end)
        encoding = self._backend.encode(text[start:], add_special_tokens=False)
        token_ids = np.asarray(encoding.ids, np.int32)
        # A token belongs where its first character lies; `accumulate` keeps the pieces in order whatever a normalizer
        # does to offsets.
        begins = np.maximum.accumulate(np.asarray([start + begin for begin, _ in encoding.offsets], np.int64))
        return np.split(token_ids, np.searchsorted(begins, ends, side="left"))

    @functools.cached_property
    def turn_end_id(self) -> int:
        """The id that ends a reply: the first added token that the template puts after an assistant's text.

        Raises:
          ModelLoadError: the template puts none there, or cannot render an answer.
        """
        probe = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self._render(probe, add_generation_prompt=False)
        except EnvError as error:
            raise ModelLoadError(f"the chat template cannot render a question and an answer: {error}") from error
        tail = text[text.rfind(_PROBE) + len(_PROBE) :]
        added = self._backend.get_added_tokens_decoder()
        for token_id in self._backend.encode(tail, add_special_tokens=False).ids:
            if token_id in added:
                return token_id
        raise ModelLoadError(
            f"the chat template ends an assistant turn with {tail!r}, which holds no special token of the tokenizer, "
            f"so a reply would never stop there (stop tokens known: {[self._backend.id_to_token(i) for i in self.stop_ids]}); "
            "add the token to tokenizer.json"
        )


def _load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    if not (path / "tokenizer.json").is_file():
        raise ModelLoadError(f"{path}: expected a Hugging Face directory with a tokenizer.json, found none; pass the model's directory")
    # Without torch, importing transformers logs that no model is available: true, and no concern of someone who wants a
    # tokenizer.
    logging.getLogger("transformers").addFilter(_is_of_concern)
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(path)
    except Exception as error:  # the Rust library raises bare `Exception` for a damaged file
        raise ModelLoadError(f"{path}: the tokenizer cannot be loaded: {type(error).__name__}: {error}") from error


def _is_of_concern(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("PyTorch was not found")


def _eos_ids(path: Path, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Return the eos ids that generation_config.json and the tokenizer name, where they do; what can be no id is left out."""
    eos = _read_json(path / "generation_config.json").get("eos_token_id")
    named = [*eos] if isinstance(eos, list) else [eos]
    return {token_id for token_id in (*named, tokenizer.eos_token_id) if type(token_id) is int and 0 <= token_id < 2**31}


def _check_vocabulary(path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Refuse a tokenizer with more ids than the model has rows: some token has no embedding."""
    num_rows = _read_json(path / "config.json").get("vocab_size")
    if isinstance(num_rows, int) and len(tokenizer) > num_rows:
        beyond = sorted(token for token, token_id in tokenizer.get_vocab().items() if token_id >= num_rows)
        raise ModelLoadError(
            f"{path}: the tokenizer has {len(tokenizer)} ids but config.json says `vocab_size`={num_rows}; the model has no embedding for "
            f"{beyond[:5]}: take the tokenizer and the weights from one model, or correct the special tokens in tokenizer_config.json"
        )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def _text_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    if not messages:
        raise EnvError("`ask` got no message; pass at least one")
    return tuple(_text_message(message) for message in messages)


def _text_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message whose content is one string."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list | tuple):
        texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) > 0 else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise EnvError(
            f"a message needs a `role` and a `content` of text or of text parts, got role={role!r} and content={message.get('content')!r}"
        )
    return {**message, "content": content}
