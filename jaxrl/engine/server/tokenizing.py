"""The routes that show the tokenizer: a text or a chat to token ids, and ids to text.

In: the bytes of a body. Out: the bytes of the reply, in vLLM's shapes, or a 400 that names the field. Pure functions of
their arguments, run in worker threads; the engine is not asked.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from jaxrl.engine.server.bodies import NO_LIMIT, check_length, check_model, convert, known_fields, longest_text
from jaxrl.engine.server.chats import read_chat
from jaxrl.errors import EnvError
from jaxrl.inference.chat.refusals import Refusal
from jaxrl.inference.rendering import Renderer

MAX_DECODED_IDS = 2**17
"""The ids of one text; more would hold a worker thread for longer than a second or two."""


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`/tokenize`: a `prompt`, or `messages` with the tools that go with them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    tools: Any = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`/detokenize`."""

    tokens: Annotated[list[Annotated[int, Meta(ge=0, le=NO_LIMIT)]], Meta(max_length=MAX_DECODED_IDS)]
    model: str | None = None


class Tokenizing:
    """Answers both routes for one served model."""

    def __init__(self, renderer: Renderer, served_name: str, vocab_size: int, window: int) -> None:
        """Take what a body is checked against.

        Args:
          renderer: the model's tokenizer and chat template.
          served_name: what requests call the model.
          vocab_size: token ids are below it.
          window: prompt plus completion tokens of one sequence.
        """
        self._renderer = renderer
        self._served_name = served_name
        self._vocab_size = vocab_size
        self._window = window
        self._max_chars = longest_text(window, renderer)

    def tokenize(self, raw: bytes) -> bytes:
        """Answer a body of `/tokenize`."""
        body = convert(known_fields(raw, TokenizeBody), TokenizeBody)
        check_model(body.model, self._served_name)
        if (body.prompt is None) == (body.messages is None):
            raise Refusal(400, "expected either `prompt` (a text) or `messages`", param="prompt")
        # A chat template writes the special tokens itself.
        text, adds_special = (body.prompt, True) if body.prompt is not None else (self._chat(body.messages or [], body.tools), False)
        if body.add_special_tokens is not None:
            adds_special = body.add_special_tokens
        check_length(text, self._max_chars, self._window, "prompt" if body.messages is None else "messages")
        if self._renderer.knows_model and body.messages is not None and not adds_special:
            conversation, schemas = read_chat(body.messages, body.tools)
            ids = self._renderer.open_turn(None, conversation, tools=schemas).prompt_ids.tolist()
        else:
            ids = self._renderer.encode(text, add_special_tokens=adds_special).tolist()
        names = [self._renderer.decode([token_id]) for token_id in ids] if body.return_token_strs else None
        return msgspec.json.encode({"count": len(ids), "max_model_len": self._window, "tokens": ids, "token_strs": names})

    def detokenize(self, raw: bytes) -> bytes:
        """Answer a body of `/detokenize`; an id that the model has and the tokenizer does not is no text."""
        body = convert(known_fields(raw, DetokenizeBody), DetokenizeBody)
        check_model(body.model, self._served_name)
        token_ids = np.asarray(body.tokens, np.int64)
        if beyond := token_ids[token_ids >= self._vocab_size].tolist():
            raise Refusal(
                400, f"`tokens`: token id {beyond[0]} is out of the model's vocabulary of {self._vocab_size}; it is another tokenizer's",
                param="tokens",
            )  # fmt: skip
        return msgspec.json.encode({"prompt": self._renderer.decode(token_ids)})

    def _chat(self, messages: list[dict[str, Any]], tools: Any) -> str:
        conversation, schemas = read_chat(messages, tools)
        try:
            return self._renderer.prompt_text(conversation, schemas)
        except EnvError as error:
            raise Refusal(400, str(error), param="messages") from error
