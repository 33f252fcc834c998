"""OPSD: what the policy reads before it judges its own rollout, exactly which numbers are kept, and what a missing demonstration does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from jaxrl.batching import rollout_to_samples
from jaxrl.config.algorithm import OPSDConfig
from jaxrl.errors import ConfigError, EngineError, PromptTooLongError, RunFailedError, SampleError
from jaxrl.inference.rendering import Renderer
from jaxrl.orchestrator.algo import OPSD, AlgorithmContext
from jaxrl.types import Boundary, Rollout, Task
from tests.builders import make_node, make_rollout
from tests.fakes import ScriptedPool, ToyEnv
from tests.orchestrator.wiring import TOKENIZER, make_env, make_run, renderer

BEGIN, USER_TURN = "<|endoftext|>", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
TURNS = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
DROPS_SYSTEM = "{% if messages[0]['role'] == 'system' %}{% set messages = messages[1:] %}{% endif %}"
HINT = "An expert: {demonstration}"


class SelfScoring(ScriptedPool):
    """A policy whose logprob of a token is minus its id plus what stands before it, in hundredths."""

    def __init__(self, version: int = 3) -> None:
        super().__init__(version=version)
        self.scored: list[list[int]] = []

    async def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        assert temperature == 1.0
        self.scored.append(token_ids.tolist())
        return self_score(token_ids)


def self_score(token_ids: np.ndarray) -> np.ndarray:
    sums = np.cumsum(token_ids)
    return np.where(np.arange(len(token_ids)) == 0, 0.0, -(token_ids + np.concatenate([[0], sums[:-1]])) / 100).astype(np.float32)


@functools.cache
def rendered_by(template: str) -> Renderer:
    return Renderer(PreTrainedTokenizerFast.from_pretrained(TOKENIZER), template, (2,))


def opsd(pool: ScriptedPool, template: str | None = None, *, demonstration: Any = lambda spec: None, window: int | None = None,
         **settings: Any) -> OPSD:  # fmt: skip
    context = AlgorithmContext(
        env_name="toy", renderer=rendered_by(template) if template else renderer(), window=window, demonstration=demonstration
    )
    return OPSD(OPSDConfig(**({"template": HINT} | settings)), pool, context)


def rollout_of(text: str, *replies: list[int], info: dict | None = None, spec: dict | None = None) -> Rollout:
    """Return a rollout of one prompt with a branch for each of its replies."""
    rollout = make_rollout(1.0, with_samples=False)
    rollout.task = Task("toy", "sum-7", {"id": "sum-7", **(spec or {})})
    rollout.nodes = [make_node(None, renderer().encode(text, add_special_tokens=False).tolist())]
    rollout.nodes += [make_node(0, reply, num_sampled=len(reply)) for reply in replies]
    rollout.samples = rollout_to_samples(rollout)
    rollout.info = info if info is not None else {"demonstration": "yes"}
    return rollout


async def test_the_policy_scores_the_hint_and_then_the_very_ids_of_every_branch_and_the_hint_is_cut_off() -> None:
    pool, rollout = SelfScoring(), rollout_of(USER_TURN, [70, 71, 2], [72, 2])
    algorithm = opsd(pool)
    await algorithm.setup()
    await algorithm.finalize_rollout(rollout)
    await algorithm.finalize_group([rollout])
    hint = renderer().encode("<|im_start|>system\nAn expert: yes<|im_end|>\n", add_special_tokens=False)
    prompt = renderer().encode(USER_TURN, add_special_tokens=False)
    # ChatML's turn mark begins hint and rollout alike and is no bos: the rollout keeps its own.
    assert hint[0] == prompt[0] == 1
    assert pool.scored == [[*hint, *prompt, 70, 71, 2], [*hint, *prompt, 72, 2]]
    for sample, scored in zip(rollout.samples, pool.scored, strict=True):
        np.testing.assert_array_equal(sample.ref_logprobs, self_score(np.array(scored))[len(hint) :])
        assert len(sample.ref_logprobs) == len(sample) and sample.ref_logprobs[0] < 0 and sample.advantages is None
        assert sample.ref_kl_weights.tolist() == sample.loss_mask.astype(float).tolist()
    assert rollout.metrics["ref_version"] == 3.0


async def test_a_token_that_begins_a_conversation_once_stands_once_in_what_is_scored() -> None:
    template = BEGIN + TURNS + ASKED
    pool, rollout = SelfScoring(), rollout_of(BEGIN + USER_TURN, [70, 2])
    await opsd(pool, template).score_rollout(rollout)
    hint = renderer().encode(BEGIN + "<|im_start|>system\nAn expert: yes<|im_end|>\n", add_special_tokens=False).tolist()
    ids = rollout.samples[0].token_ids.tolist()
    assert ids[0] == hint[0] == 0 and rendered_by(template).bos_id == 0
    assert pool.scored == [[*hint, *ids[1:]]] and pool.scored[0].count(0) == 1
    expected = [0.0, *self_score(np.array(pool.scored[0]))[len(hint) :]]
    np.testing.assert_array_equal(rollout.samples[0].ref_logprobs, np.float32(expected))


async def test_a_default_system_prompt_of_the_template_stays_in_the_rollout_and_is_not_in_the_hint() -> None:
    template = DEFAULT_SYSTEM + TURNS + ASKED
    using = rendered_by(template)
    prompt = using.prompt_text([{"role": "user", "content": "hi"}])
    pool, rollout = SelfScoring(), rollout_of(prompt, [70, 2])
    await opsd(pool, template).score_rollout(rollout)
    shown = using.decode(pool.scored[0])
    assert shown.startswith("<|im_start|>system\nAn expert: yes<|im_end|>\n<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\nhi")
    assert shown.count("Be good.") == 1


@pytest.mark.parametrize(
    ("info", "spec", "settings", "expected"),
    [
        pytest.param({"demonstration": "told"}, {"demonstration": "task"}, {}, "told", id="what the environment told"),
        pytest.param({}, {"demonstration": "task"}, {}, "task", id="what the task holds"),
        pytest.param({}, {"demonstration": ["first", "then"]}, {}, "first\n\nthen", id="the replies of several turns"),
        pytest.param({}, {}, {}, "own of sum-7", id="the environment's own"),
        pytest.param({"worked": "told"}, {}, {"demo_key": "worked"}, "told", id="under another key"),
    ],
)
def test_where_the_demonstration_is_looked_for(info: dict, spec: dict, settings: dict, expected: str) -> None:
    algorithm = opsd(SelfScoring(), demonstration=lambda spec: f"own of {spec['id']}", **settings)
    rollout = rollout_of(USER_TURN, [70], info=info, spec=spec)
    assert algorithm.demonstration_of(rollout) == expected
    shown = renderer().decode(algorithm.hint_ids(expected))
    assert shown == f"<|im_start|>system\nAn expert: {expected}<|im_end|>\n"


@pytest.mark.parametrize(
    ("info", "settings", "message"),
    [
        pytest.param({}, {"demo_key": "worked"}, "no demonstration under 'worked'", id="no fallback for another key"),
        pytest.param({"demonstration": 7}, {}, "under 'demonstration' .* must be a text .* got 7", id="no text"),
        pytest.param({"demonstration": "  "}, {}, "must be a text that is not empty", id="empty"),
        pytest.param({"demonstration": ["a", 7]}, {}, r"or a list of texts, got \['a', 7\]", id="no texts"),
    ],
)
def test_a_demonstration_that_will_not_do_is_named_with_key_environment_and_task(info: dict, settings: dict, message: str) -> None:
    algorithm = opsd(SelfScoring(), demonstration=lambda spec: "own", **settings)
    with pytest.raises(SampleError, match=rf"env 'toy', task 'sum-7': .*{message}"):
        algorithm.demonstration_of(rollout_of(USER_TURN, [70], info=info))


async def test_a_missing_demonstration_is_a_rollout_error_and_ends_the_run_when_the_budget_is_spent() -> None:
    def envs(pool: ScriptedPool) -> list:
        has_one = make_env(pool, ToyEnv("shown"), algorithm=opsd(pool, demonstration=lambda spec: "own"))
        return [has_one, make_env(pool, ToyEnv("toy", num_tasks=2), algorithm=opsd(pool))]

    run = make_run(pool=SelfScoring(0), envs=envs, async_level=1, max_steps=2)
    await run.play()  # every group of the one env fails, and the run goes on with those of the other
    assert run.bucket_total("errored") > 0 and len(run.batches) == 2
    failures = [r.failure for rollouts in run.monitors.rollouts.values() for r in rollouts if r.failure is not None]
    assert {(failure.boundary, failure.type) for failure in failures} == {(Boundary.ALGORITHM, "SampleError")}
    assert "env 'toy', task 'toy-" in failures[0].message and "no demonstration under 'demonstration'" in failures[0].message

    run = make_run(pool=SelfScoring(0), envs=lambda pool: [make_env(pool, algorithm=opsd(pool))], max_consecutive_failures=5)
    with pytest.raises(RunFailedError, match=r"5 rollouts in a row failed; .* at boundary 'algorithm': SampleError: env 'toy', task 'toy-"):
        await run.play()


async def test_a_hint_that_leaves_no_room_for_the_rollout_is_an_error_with_the_lengths() -> None:
    pool, rollout = SelfScoring(), rollout_of(USER_TURN, [70, 2])
    length = len(opsd(pool).hint_ids("yes")) + len(rollout.samples[0])
    await opsd(pool, window=length).score_rollout(rollout)
    message = rf"are {length} together, more than the window of {length - 1} .*`inference.max_model_len`"
    with pytest.raises(PromptTooLongError, match=message):
        await opsd(pool, window=length - 1).score_rollout(rollout_of(USER_TURN, [70, 2]))
    assert len(pool.scored) == 1


async def test_a_template_that_fills_the_window_is_found_before_the_first_rollout() -> None:
    length = len(opsd(SelfScoring()).hint_ids("jaxrl"))
    await opsd(SelfScoring(), window=length + 1).setup()
    with pytest.raises(ConfigError, match=rf"env 'toy': `algo.template` .* {length} tokens, .* window of {length}; widen it"):
        await opsd(SelfScoring(), window=length).setup()


@pytest.mark.parametrize(
    ("bend", "message"),
    [
        pytest.param(lambda scores: scores[:-1], r"gave \[\d+\] logprobs for \d+ tokens", id="one too few"),
        pytest.param(lambda scores: scores * np.float32(np.nan), "position 0 is nan, not a finite number", id="NaN"),
    ],
)
async def test_numbers_of_the_policy_itself_are_checked_too(bend: Any, message: str) -> None:
    class Broken(SelfScoring):
        async def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
            return bend(await super().score(token_ids, temperature))

    with pytest.raises(EngineError, match=message):
        await opsd(Broken()).score_rollout(rollout_of(USER_TURN, [70, 2]))


@pytest.mark.parametrize(
    ("template", "message"),
    [(NO_SYSTEM + TURNS, "System role not supported"), (DROPS_SYSTEM + TURNS, "it leaves the message out and writes ''")],
    ids=["refuses", "leaves out"],
)
async def test_a_template_that_takes_no_system_message_is_found_before_the_first_rollout(template: str, message: str) -> None:
    run = make_run(pool=SelfScoring(0), envs=lambda pool: [make_env(pool, algorithm=opsd(pool, template))])
    with pytest.raises(ConfigError, match=rf"env 'toy': `algo.type`='opsd' .*{message}"):
        await run.play()
    assert run.pool.endpoint.requests == []


def test_the_small_start_model_can_be_shown_a_demonstration() -> None:
    small = Renderer.from_pretrained(Path(__file__).parents[3] / "configs" / "quickstart" / "start_model")
    assert small.bos_id is None and "ab" in small.decode(small.message_ids([{"role": "system", "content": "ab"}]))
