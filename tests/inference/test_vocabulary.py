"""Whether a served vocabulary is the policy's: found out over real sockets, token by token where it is not."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from jaxrl.errors import DeadlineError, EngineError
from jaxrl.inference.frozen import FrozenPool
from jaxrl.inference.http import HttpEndpoint
from jaxrl.inference.rendering import Renderer
from jaxrl.inference.vocabulary import PROBE_TEXT, vocabulary_difference
from tests.inference.wire_server import MODEL, Answer, FakeModel, Script, WireServer

RENDERER = Renderer.from_pretrained("tests/golden/tokenizer")
NUM_IDS = RENDERER.num_ids


class Served:
    """The policy's tokenizer as another server may have it."""

    def __init__(self, token: Callable[[int], str] | None = None, text: Callable[[str], str] = str, encode: Any = RENDERER.encode) -> None:
        self.token, self.text, self.encode = token, text, encode

    def decode(self, token_ids: list[int]) -> str:
        return self.text(RENDERER.decode(token_ids) if self.token is None else "".join(map(self.token, token_ids)))


def one(token_id: int) -> str:
    return RENDERER.decode([token_id])


TEXTS = {token_id: one(token_id) for token_id in range(NUM_IDS + 1)}


def other_ids(text: str, *, add_special_tokens: bool) -> np.ndarray:
    return RENDERER.encode(text, add_special_tokens=add_special_tokens)[::-1]


@asynccontextmanager
async def pool_of(*scripts: Script, timeout_s: float = 5.0) -> AsyncIterator[FrozenPool]:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(WireServer(script).running()) for script in scripts]
        urls = [server.base_url for server in servers]
        pool = FrozenPool(MODEL, {url: HttpEndpoint(url, MODEL, timeout_s=timeout_s, max_attempts=1) for url in urls})
        stack.push_async_callback(pool.close)
        yield pool


@pytest.mark.parametrize("run_length", [4096, 7])
async def test_the_same_tokenizer_has_no_difference_however_its_ids_are_asked_for(
    run_length: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jaxrl.inference.vocabulary.RUN_LENGTH", run_length)
    asked: list[int] = []

    class Counting(Served):
        def decode(self, token_ids: list[int]) -> str:
            asked.extend(token_ids)
            return super().decode(token_ids)

    async with pool_of(FakeModel(tokenizer=Counting())) as pool:
        assert await vocabulary_difference(pool, RENDERER) is None
        assert caplog.records == []
    assert asked == [*range(NUM_IDS), NUM_IDS]  # every id once, special ones too, and the one after the last


@pytest.mark.parametrize("differing", [0, 1, 211, NUM_IDS - 1])
async def test_one_token_that_differs_is_found_and_shown_from_both_sides(differing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrl.inference.vocabulary.RUN_LENGTH", 100)
    served = Served(token=lambda i: "<other>" if i == differing else TEXTS[i])
    # Joined one by one on both sides: parts of a character stay apart.
    monkeypatch.setattr(RENDERER, "decode", lambda ids: "".join(TEXTS[int(i)] for i in ids))
    async with pool_of(FakeModel(tokenizer=Served()), FakeModel(tokenizer=served)) as pool:
        second = list(pool.endpoints)[1]
        expected = f"{second}: id {differing} is {TEXTS[differing]!r} to the policy and '<other>' to the server"
        assert await vocabulary_difference(pool, RENDERER) == expected


async def test_a_vocabulary_that_goes_on_is_another_one_for_a_model_that_writes_but_not_for_one_that_scores() -> None:
    served = Served(text=lambda text: text or "<tool>")
    async with pool_of(FakeModel(tokenizer=served)) as pool:
        found = await vocabulary_difference(pool, RENDERER)
        assert found is not None and found.endswith(f"id {NUM_IDS} is '' to the policy and '<tool>' to the server")
        assert await vocabulary_difference(pool, RENDERER, may_be_larger=True) is None


async def test_a_shorter_vocabulary_is_found_by_its_missing_text() -> None:
    class Shorter(Served):
        def decode(self, token_ids: list[int]) -> str:
            return super().decode([token_id for token_id in token_ids if token_id < NUM_IDS - 2])

    async with pool_of(FakeModel(tokenizer=Shorter())) as pool:
        found = await vocabulary_difference(pool, RENDERER)
    assert found is not None and f"id {NUM_IDS - 2} is {one(NUM_IDS - 2)!r} to the policy and '' to the server" in found


async def test_text_that_a_server_tidies_up_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    untidy = " . ? ! , ' n't 'm 's 've 're well"
    monkeypatch.setattr(RENDERER, "decode", lambda ids: untidy.join(TEXTS[int(token_id)] for token_id in ids))
    tidied = Served(text=functools.partial(PreTrainedTokenizerFast.clean_up_tokenization, None))
    assert tidied.decode([70, 71]) not in (RENDERER.decode([70, 71]), RENDERER.decode([70, 71]).replace(" ", ""))
    async with pool_of(FakeModel(tokenizer=tidied)) as pool:
        assert await vocabulary_difference(pool, RENDERER) is None


async def test_a_text_that_is_split_in_another_way_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async with pool_of(FakeModel(tokenizer=Served(encode=other_ids))) as pool:
        assert await vocabulary_difference(pool, RENDERER) is None
    assert "its tokenizer splits texts in another way" in caplog.text


@pytest.mark.parametrize("status", [403, 404, 501])
async def test_a_server_that_tells_nothing_is_named_in_a_warning(status: int, caplog: pytest.LogCaptureFixture) -> None:
    async with pool_of(lambda call: Answer(status, {}) if "tokenize" in call.path else FakeModel()(call)) as pool:
        assert await vocabulary_difference(pool, RENDERER) is None
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert next(iter(pool.endpoints)) in record.getMessage() and "not compared with the policy's" in record.getMessage()


@pytest.mark.parametrize("is_alike", [True, False])
async def test_a_server_that_only_tokenizes_is_compared_by_one_text(is_alike: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = FakeModel(tokenizer=Served(encode=RENDERER.encode if is_alike else other_ids))
    async with pool_of(lambda call: Answer(404, {}) if call.path == "/detokenize" else model(call)) as pool:
        found = await vocabulary_difference(pool, RENDERER)
    if is_alike:
        assert found is None and "compared by the ids of one text only" in caplog.text
    else:
        ids = RENDERER.encode(PROBE_TEXT, add_special_tokens=False).tolist()
        assert found is not None and f"becomes the ids {ids[::-1]} there and {ids} with the policy's tokenizer" in found


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(200, {"prompt": 5}), "`prompt`=5, expected the text of the ids"),
        (Answer(500, {"error": {"message": "broken"}}), "status 500: broken"),
        (Answer(401, {}), "the server wants a key"),
    ],
)
async def test_an_answer_that_cannot_be_used_is_an_error_and_no_verdict(answer: Answer, message: str) -> None:
    async with pool_of(lambda call: answer if call.path == "/detokenize" else FakeModel()(call)) as pool:
        with pytest.raises(EngineError, match=message):
            await vocabulary_difference(pool, RENDERER)


async def test_a_server_that_refuses_the_key_everywhere_is_an_error_and_not_one_that_tells_nothing() -> None:
    async with pool_of(lambda call: Answer(403, {})) as pool:
        with pytest.raises(EngineError, match="the list of models: the server wants a key"):
            await vocabulary_difference(pool, RENDERER)


async def test_a_comparison_has_a_deadline_of_its_own() -> None:
    async with pool_of(lambda call: Answer(200, {"prompt": ""}, wait_s=5)) as pool:
        with pytest.raises(DeadlineError, match=r"'toy'.*could not be compared with the policy's within 0.05 s"):
            await vocabulary_difference(pool, RENDERER, deadline_s=0.05)
