"""The check of external servers, against one that runs in another thread."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from jaxrl.doctor.endpoint import check_endpoint
from jaxrl.doctor.finding import Finding, Level
from jaxrl.errors import ConfigError
from jaxrl.inference.rendering import Renderer
from tests.doctor.patients import MODEL, examine
from tests.inference.wire_server import FakeModel, WireServer


@contextmanager
def running(model: FakeModel) -> Iterator[WireServer]:
    """Run a server in a loop of its own: the check has one too."""
    server, loop, ready, done = WireServer(model), asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with server.running():
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
        loop.close()


@pytest.mark.filterwarnings("ignore:`orchestrator.model.client` is not used:UserWarning")
def look(url: str, *more: str) -> Finding:
    return examine(check_endpoint, f"--orchestrator.model.client.base_url.0={url}", *more)


@pytest.mark.filterwarnings("ignore:`orchestrator.model.client` is not used:UserWarning")
def test_a_server_that_serves_the_model_is_good_and_one_that_serves_another_or_nothing_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(FakeModel(models=(str(MODEL),), key="sesame")) as server:
        monkeypatch.setenv("SERVER_KEY", "sesame")
        key = "--orchestrator.model.client.api_key_var=SERVER_KEY"
        good = look(server.base_url, key)
        assert good.level is Level.GOOD and "1 of 1 are well and serve" in good.text and "window 64" in good.text
        assert "wants a key" in look(server.base_url).text
        monkeypatch.delenv("SERVER_KEY")
        with pytest.raises(ConfigError, match="SERVER_KEY"):
            look(server.base_url, key)
    with running(FakeModel(models=("another",))) as server:
        other = look(server.base_url)
        assert other.level is Level.BAD and "it serves 'another'" in other.text
    gone = look(server.base_url)
    assert gone.level is Level.BAD and "cannot be reached" in gone.text and "start the server" in gone.text


@functools.cache
def renderer() -> Renderer:
    return Renderer.from_pretrained(MODEL)


class ShiftedTokenizer:
    """A vocabulary in which every id of the policy's stands one later."""

    def encode(self, text: str, *, add_special_tokens: bool) -> np.ndarray:
        return renderer().encode(text, add_special_tokens=add_special_tokens) + 1

    def decode(self, token_ids: list[int]) -> str:
        return renderer().decode([max(0, token_id - 1) for token_id in token_ids])


def look_at(settings: str, *, model: FakeModel, window: int = 60) -> Finding:
    """Let the check ask `model` as what `settings` name; `URL` in them stands for its address."""
    with running(model) as server:
        overrides = settings.replace("URL", server.base_url).split()
        return examine(check_endpoint, f"--inference.max_model_len={window}", "--orchestrator.sampling.max_tokens=30", *overrides)


TEACHER = "--orchestrator.algo.type=opd --orchestrator.algo.teacher.name=toy --orchestrator.algo.teacher.base_url.0=URL"
OWN_TEACHER = TEACHER.replace("orchestrator.algo", "orchestrator.train.env.0.algo")
SOURCE = (
    "--orchestrator.algo.type=sft --orchestrator.algo.sampling.source.name=toy --orchestrator.algo.sampling.source.base_url.0=URL "
    "--orchestrator.sampling.temperature=0"
)


def test_a_teacher_that_scores_the_policys_ids_is_good_under_the_key_that_names_it() -> None:
    model = FakeModel(tokenizer=renderer())
    inherited = look_at(TEACHER, model=model)
    assert inherited.level is Level.GOOD, inherited.text
    assert inherited.text.startswith("`orchestrator.algo.teacher`: 1 of 1 are well and serve 'toy', window 64")
    assert "`orchestrator.algo.teacher` scores" in inherited.text and "given ids, alike to 0 when asked again" in inherited.text
    own = look_at(OWN_TEACHER, model=model)
    assert own.level is Level.GOOD and own.text.startswith("`orchestrator.train.env.0.algo.teacher`: 1 of 1")


def one_too_few(answer: dict[str, Any]) -> None:
    answer["prompt_logprobs"].pop()


def another_token(answer: dict[str, Any]) -> None:
    answer["prompt_logprobs"][-1] = {"3": {"logprob": -1.0, "rank": 1}}


def drifting() -> Callable[[dict[str, Any]], None]:
    num_asked = 0

    def change(answer: dict[str, Any]) -> None:
        nonlocal num_asked
        num_asked += 1
        for entry in answer["prompt_logprobs"][1:]:
            for alternative in entry.values():
                alternative["logprob"] -= 0.1 * num_asked

    return change


@pytest.mark.parametrize(
    ("model", "change", "window", "level", "said"),
    [
        (FakeModel(tokenizer=ShiftedTokenizer()), None, 60, Level.BAD, "'toy' has another vocabulary than the policy"),
        (FakeModel(tokenizer=renderer()), None, 64, Level.BAD, "holds sequences of 64 tokens, and some may have 65"),
        (FakeModel(tokenizer=renderer()), one_too_few, 60, Level.BAD, "env 'chain_sum': `algo.teacher`: "),
        (FakeModel(tokenizer=renderer()), another_token, 60, Level.BAD, "env 'chain_sum': `algo.teacher`: "),
        (FakeModel(), None, 60, Level.WARNING, "does not tell the text of token ids (/detokenize)"),
        (FakeModel(tokenizer=renderer()), drifting(), 60, Level.WARNING, "look at the server's precision and its prefix cache"),
    ],
    ids=["another vocabulary", "short window", "a score too few", "another token", "no tokenizer route", "drifting scores"],
)
def test_a_teacher_that_cannot_be_learned_from_is_found(
    model: FakeModel, change: Callable[[dict[str, Any]], None] | None, window: int, level: Level, said: str
) -> None:
    if change is not None:
        model.change = change
    finding = look_at(TEACHER, model=model, window=window)
    assert finding.level is level, finding.text
    assert said in finding.text and "`orchestrator.algo.teacher`" in finding.text


def test_a_source_of_rollouts_is_looked_at_for_its_vocabulary_and_its_room() -> None:
    same = look_at(SOURCE, model=FakeModel(tokenizer=renderer()))
    assert same.level is Level.GOOD and "`orchestrator.algo.sampling.source` has the policy's vocabulary" in same.text, same.text
    other = look_at(SOURCE, model=FakeModel(tokenizer=ShiftedTokenizer()))
    assert other.level is Level.WARNING
    assert "is asked in words, and its replies will be encoded with the policy's tokenizer: http://127" in other.text
    short = look_at(SOURCE, model=FakeModel(tokenizer=renderer()), window=80)
    assert short.level is Level.WARNING and "is served with a window of 64, and rollouts of 80 tokens could be trained on" in short.text
    crowded = look_at(f"{SOURCE} --orchestrator.sampling.max_tokens=64", model=FakeModel(tokenizer=renderer()), window=80)
    assert crowded.level is Level.BAD and "leaves no room for a prompt" in crowded.text


def test_a_frozen_model_that_is_not_there_is_named_and_asked_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = look_at(TEACHER, model=FakeModel(models=("another",), tokenizer=renderer()))
    assert wrong.level is Level.BAD and "it serves 'another'" in wrong.text and "scores" not in wrong.text
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"`orchestrator\.algo\.teacher\.api_key_var`='TEACHER_KEY'"):
        look_at(f"{TEACHER} --orchestrator.algo.teacher.api_key_var=TEACHER_KEY", model=FakeModel(key="sesame"))
