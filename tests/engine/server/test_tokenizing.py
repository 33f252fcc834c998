"""The two routes that show the tokenizer, in vLLM's shapes: ids of a text or a chat, the text of ids, and refusals that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxrl.engine.server.chats import Chats
from jaxrl.engine.server.tokenizing import MAX_DECODED_IDS, Tokenizing
from jaxrl.inference.chat.conversations import ConversationMemory
from jaxrl.inference.chat.refusals import Refusal
from jaxrl.inference.rendering import Renderer
from jaxrl.inference.rendering.known_models import load_renderer

RENDERER = Renderer.from_pretrained(Path(__file__).parents[2] / "golden" / "tokenizer")
TOKENIZING = Tokenizing(RENDERER, "small", vocab_size=RENDERER.num_ids + 8, window=32)


def tokenize(**body: Any) -> dict[str, Any]:
    return msgspec.json.decode(TOKENIZING.tokenize(json.dumps(body).encode()))


def detokenize(tokens: list[int]) -> str:
    return msgspec.json.decode(TOKENIZING.detokenize(json.dumps({"model": "small", "tokens": tokens}).encode()))["prompt"]


def test_a_text_becomes_the_ids_of_the_tokenizer() -> None:
    ids = RENDERER.encode("hi there").tolist()
    assert tokenize(prompt="hi there") == {"count": len(ids), "max_model_len": 32, "tokens": ids, "token_strs": None}
    told = tokenize(model="small", prompt="hi there", add_special_tokens=False, return_token_strs=True)
    assert told["tokens"] == ids and "".join(told["token_strs"]) == "hi there"


def test_a_chat_becomes_the_ids_of_its_prompt() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert tokenize(messages=messages, add_generation_prompt=True)["tokens"] == RENDERER.open_turn(None, messages).prompt_ids.tolist()


def test_a_chat_with_tools_becomes_the_ids_of_its_prompt() -> None:
    wide = Tokenizing(RENDERER, "small", vocab_size=RENDERER.num_ids, window=4096)
    messages, tools = [{"role": "user", "content": "hi"}], [{"type": "function", "function": {"name": "f"}}]
    told = msgspec.json.decode(wide.tokenize(json.dumps({"messages": messages, "tools": tools}).encode()))
    assert told["tokens"] == RENDERER.open_turn(None, messages, tools=tools).prompt_ids.tolist()
    with pytest.raises(Refusal, match="`tools` must be a list"):
        wide.tokenize(json.dumps({"messages": messages, "tools": 3}).encode())


def test_a_known_model_has_its_own_ids_here_and_in_a_chat_though_its_text_would_be_encoded_in_others() -> None:
    pytest.importorskip("renderers", reason="needs the `renderers` extra")
    known = load_renderer(str(Path(__file__).parents[2] / "golden" / "templates" / "qwen3"), renderer="qwen3")
    messages = [{"role": "user", "content": "\n\nhi"}, {"role": "assistant", "content": "\n \n"}, {"role": "user", "content": " \n?"}]
    ids = known.open_turn(None, messages).prompt_ids.tolist()
    raw = json.dumps({"messages": messages}).encode()
    assert msgspec.json.decode(Tokenizing(known, "small", vocab_size=known.num_ids, window=4096).tokenize(raw))["tokens"] == ids
    chats = Chats(known, ConversationMemory(8, 4096))
    turn = chats.open(messages, check=lambda text: known.encode(text, add_special_tokens=False))
    assert turn.rendered.prompt_ids.tolist() == ids
    chats.close(turn, {"role": "assistant", "content": "ok"}, np.asarray([*known.encode("ok"), known.turn_end_id], np.int32))
    later = chats.open([*messages, {"role": "assistant", "content": "ok"}, messages[0]], check=lambda text: known.encode(text))
    assert later.rendered.prompt_ids[: len(ids)].tolist() == ids and not later.rendered.is_fork


def test_ids_become_their_text_special_tokens_and_ids_without_a_token_included() -> None:
    assert detokenize([1, *RENDERER.encode("naïve").tolist(), 2]) == "<|im_start|>naïve<|im_end|>"
    assert detokenize([RENDERER.num_ids, RENDERER.num_ids + 7]) == "" == detokenize([])


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}, 400, "prompt"),
        ("tokenize", {"prompt": 5}, 400, "prompt"),
        ("tokenize", {"prompt": "x" * 10_000}, 400, "prompt"),
        ("tokenize", {"messages": [{"role": "user"}]}, 400, "messages"),
        ("tokenize", {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}, 400, "add_generation_prompt"),
        ("tokenize", {"prompt": "hi", "model": "other"}, 404, "model"),
        ("tokenize", {"prompt": "hi", "promt": "ho"}, 400, "promt"),
        ("detokenize", {}, 400, "tokens"),
        ("detokenize", {"tokens": [5, RENDERER.num_ids + 8]}, 400, "tokens"),
        ("detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("detokenize", {"tokens": [5] * (MAX_DECODED_IDS + 1)}, 400, "tokens"),
        ("detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
    ],
)
def test_a_bad_body_is_refused_by_the_name_of_its_field(route: str, body: dict[str, Any], status: int, param: str) -> None:
    with pytest.raises(Refusal) as refused:
        getattr(TOKENIZING, route)(json.dumps(body).encode())
    assert (refused.value.status, refused.value.param) == (status, param)
