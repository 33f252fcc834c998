"""Replies as JSON: where tokens lie in the text, and what is said of a token that is no text by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl.engine.server.bodies import Job, Kind
from jaxrl.engine.server.chats import Chats
from jaxrl.engine.server.replies import ReplyWriter
from jaxrl.engine.slots import SampledTokens
from jaxrl.inference.chat.conversations import ConversationMemory
from jaxrl.inference.endpoint import FinishReason, Generation, TokenSampling
from jaxrl.inference.rendering import Renderer

RENDERER = Renderer.from_pretrained(Path(__file__).parents[2] / "golden" / "tokenizer")
TEXT = "a\u20acb"
IDS = RENDERER.encode(TEXT)
"""Five bytes, five tokens: a, three of one character, b."""
CHATS = Chats(RENDERER, ConversationMemory(10, 1000))


def job(kind: Kind, **fields: Any) -> Job:
    if kind == "chat":
        fields["chat"] = CHATS.open([{"role": "user", "content": "hi"}], check=RENDERER.encode)
    return Job(kind, (np.array([5], np.int32),), TokenSampling(max_tokens=9), 1, 0, None, frozenset(), **fields)


def sampled(token_ids: np.ndarray) -> dict[str, Any]:
    num = len(token_ids)
    return {"token_ids": token_ids, "logprobs": np.full(num, -0.5, np.float32), "versions": np.zeros(num, np.int32)}


def reply(job: Job) -> dict[str, Any]:
    body = ReplyWriter(job, "id", "tiny", 0, RENDERER, CHATS).whole([Generation(**sampled(IDS), finish_reason=FinishReason.LENGTH)], [])
    return json.loads(body)["choices"][0]


@pytest.mark.parametrize("by_id", [False, True])
def test_text_offsets_are_places_in_the_text_whatever_tokens_are_called(by_id: bool) -> None:
    assert len(IDS) == 5
    choice = reply(job("completion", names_tokens_by_id=by_id))
    assert choice["text"] == TEXT
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]
    assert choice["logprobs"]["tokens"][0] == (f"token_id:{IDS[0]}" if by_id else "a")


def test_text_offsets_go_on_from_event_to_event() -> None:
    writer = ReplyWriter(job("completion", is_stream=True), "id", "tiny", 0, RENDERER, CHATS)
    offsets: list[int] = []
    for part in (IDS[:2], IDS[2:3], IDS[3:]):
        event = writer.chunk(0, SampledTokens(**sampled(part), top_ids=None, top_logprobs=None))
        offsets += json.loads(event.removeprefix(b"data: "))["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 1, 2]


@pytest.mark.parametrize("by_id", [False, True])
def test_the_bytes_of_a_token_are_those_of_its_text_and_null_where_it_has_none(by_id: bool) -> None:
    content = reply(job("chat", names_tokens_by_id=by_id))["logprobs"]["content"]
    assert [row["bytes"] for row in content] == [[97], None, None, None, [98]]


def test_the_generate_route_names_each_token_by_its_id_as_training_clients_demand() -> None:
    choice = reply(job("generate"))
    assert [row["token"] for row in choice["logprobs"]["content"]] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert choice["token_ids"] == IDS.tolist()
