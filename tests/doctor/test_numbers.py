"""Checks that count memory or play with a model, each on a run that is well and on ones that are not."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from jaxrl import launch, models
from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Level
from jaxrl.doctor.memory import check_memory, free_host_bytes
from jaxrl.doctor.parity import Sampled, check_logprobs, check_parity, judge_logprobs
from jaxrl.doctor.resume import check_resume, differing_memories
from jaxrl.doctor.seeds import check_seeds, judge_seeds, play_twice
from jaxrl.inference.endpoint import FinishReason, GenerateRequest, Generation, TokenSampling
from jaxrl.models.transformer import Params
from jaxrl.tasks import UniformSampler
from tests.doctor.patients import config, examine
from tests.fakes import ScriptedEndpoint


def test_what_does_not_fit_into_memory_is_found_before_anything_is_loaded_or_compiled() -> None:
    with Examination(config("--inference.num_slots=100_000_000", "--orchestrator.max_async_level=2")) as exam:
        finding = check_memory(exam)
        assert not finding.is_good
        assert "4 policy versions" in finding.text and "lower `inference.num_slots`" in finding.text
        assert not exam.programs._compiled


def test_free_memory_is_what_the_system_can_give_away(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:   40 kB\n")
    assert free_host_bytes(meminfo) == 40 * 1024
    assert free_host_bytes(tmp_path / "none") is None


def perturbed(params: Params) -> Params:
    """Return a copy with one weight of one kernel changed."""
    kernel = params["layers"]["mlp"]["down_proj"]["kernel"].at[1, 7, 3].add(5.0)
    return {**params, "layers": {**params["layers"], "mlp": {**params["layers"]["mlp"], "down_proj": {"kernel": kernel}}}}


def test_checks_that_play_are_good_on_a_sound_run_and_one_changed_weight_is_found() -> None:
    # Building an array arm takes seconds: all checks look at this one.
    with Examination(config()) as exam:
        arm = exam.arm
        memory = check_memory(exam)
        temporary = arm.programs.program("grad_step").memory_analysis().temp_size_in_bytes
        parity, logprobs, seeds = check_parity(exam), check_logprobs(exam), check_seeds(exam)
        arm.device.run(arm.store.publish, 1, perturbed(arm.state.params), kind="publish")
        arm.engine.load(arm.store.get(1), version=1)
        broken, unknown = check_parity(exam), check_logprobs(exam)
    # 656,448 parameters: 16 bytes each to train and 4 for each version; 32 slots of 64 columns, 3 layers of 2 heads of 32, keys and values.
    counted = "training 10.0 MiB + 3 policy versions of 2.5 MiB + key-value cache 3.0 MiB + activations and logits of a step"
    assert memory.is_good and memory.text.startswith(f"{counted} {temporary / 2**20:,.1f} MiB")
    assert temporary > 384 * 512 * 4  # a chunk of logits at least
    assert parity.level is Level.GOOD, parity.text
    assert logprobs.level is Level.GOOD and "after temperature, as sampled" in logprobs.text, logprobs.text
    assert seeds.level is Level.GOOD, seeds.text
    # The environment and its evaluation, 64 draws, 8 members, 4 turns.
    assert seeds.text.startswith("4096 different seeds for 4096 turns; ")
    assert not broken.is_good and "engine and trainer disagree" in broken.text
    assert not unknown.is_good and "neither after nor before temperature" in unknown.text


def test_an_arm_that_cannot_be_built_fails_every_check_that_needs_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_built = 0

    @contextlib.contextmanager
    def array_arm(*_: object):  # type: ignore[no-untyped-def]
        nonlocal num_built
        num_built += 1
        raise models.hf.ModelLoadError("cut short")
        yield

    monkeypatch.setattr(launch, "array_arm", array_arm)
    with Examination(config()) as exam:
        for check in (check_parity, check_logprobs, check_seeds):
            with pytest.raises(models.hf.ModelLoadError, match="cut short"):
                check(exam)
    assert num_built == 1


def test_logprobs_are_told_apart_by_temperature() -> None:
    raw = np.array([-1.0, -2.0], np.float32)
    tempered = np.array([-0.5, -2.5], np.float32)
    at_one = Sampled(raw, raw, raw)
    assert judge_logprobs({1.0: at_one, 0.5: Sampled(tempered, tempered, raw)}, 1e-3).level is Level.GOOD
    before = judge_logprobs({1.0: at_one, 0.5: Sampled(raw, tempered, raw)}, 1e-3)
    assert before.level is Level.BAD and "reports logprobs before temperature" in before.text
    neither = judge_logprobs({1.0: at_one, 0.5: Sampled(raw - 1, tempered, raw)}, 1e-3)
    assert neither.level is Level.BAD and "neither" in neither.text
    broken = np.array([np.nan, np.nan], np.float32)
    assert judge_logprobs({0.5: Sampled(tempered, broken, broken)}, 1e-3).level is Level.BAD
    certain = np.array([-1e-6, -1e-6], np.float32)
    assert judge_logprobs({0.5: Sampled(certain, certain, certain)}, 1e-3).level is Level.WARNING


def reply(*token_ids: int) -> Generation:
    zeros = np.zeros(len(token_ids), np.float32)
    return Generation(np.asarray(token_ids, np.int32), zeros, zeros.astype(np.int32), FinishReason.STOP)


def test_seeds_are_judged_by_whether_replies_differ_and_stay() -> None:
    assert judge_seeds(reply(1, 2), [reply(1, 2), reply(1, 3)], 0).level is Level.GOOD
    same = judge_seeds(reply(1, 2), [reply(1, 2), reply(1, 2)], 0)
    assert same.level is Level.WARNING and "1 different replies of 2 members" in same.text
    changed = judge_seeds(reply(1, 2), [reply(1, 4), reply(1, 3)], 0)
    assert changed.level is Level.BAD and "changed from token 1 on" in changed.text
    assert judge_seeds(reply(1, 2), [reply(1, 4), reply(1, 3)], 2).level is Level.WARNING


async def test_the_first_request_is_played_alone_and_then_in_company() -> None:
    def crowd_dependent(request: GenerateRequest, _: int) -> list[int]:
        return [endpoint.num_running, request.sampling.seed]

    endpoint = ScriptedEndpoint(crowd_dependent, latency=lambda _: 0.001)
    requests = [GenerateRequest(f"{i}", np.array([1], np.int32), TokenSampling(max_tokens=4, seed=i)) for i in range(3)]
    alone, together = await play_twice(endpoint, requests)
    assert alone.token_ids.tolist() == [1, 0] and together[0].token_ids.tolist() == [3, 0]
    assert [generation.token_ids[1] for generation in together] == [0, 1, 2]
    assert judge_seeds(alone, together, 0).level is Level.BAD


@pytest.mark.parametrize(
    ("override", "said"),
    [("--orchestrator.max_async_level=1", "synchronous runs only"), ("--run.max_steps=3", "needs at least 4 steps")],
)
def test_a_run_that_cannot_be_compared_is_said_at_once(override: str, said: str) -> None:
    finding = examine(check_resume, "--trainer.optimizer.schedule.warmup_steps=1", override)
    assert not finding.is_good
    assert said in finding.text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_conversations_with_tools_of_which_observations_are_learned_resume_exactly() -> None:
    tools = ("type=tools", "system_prompt=Tool: calc(expr)", "calculator_name=calc", "calculator_argument=expr", "describe=false")
    lengths = ("--inference.max_model_len=160", "--trainer.row_length=160", "--trainer.head_chunk_tokens=640")
    overrides = [f"--orchestrator.train.env.0.{setting}" for setting in (*tools, "budget.max_turns=2")]
    finding = examine(check_resume, "--run.max_steps=4", "--orchestrator.algo.type=echo", *lengths, *overrides)
    assert finding.is_good, finding.text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_curriculum_with_a_gate_resumes_exactly() -> None:
    tiers = ", ".join(f"{{name = '{n}', parameters = {{min_terms = {n}, max_terms = {n}}}}}" for n in (2, 3, 4))
    tasks = "{type = 'curriculum', gates = [{type = 'advantage_range'}]}"
    overrides = (f"--orchestrator.train.env.0.tiers=[{tiers}]", f"--orchestrator.train.env.0.tasks={tasks}")
    finding = examine(check_resume, "--run.max_steps=4", *overrides)
    assert finding.is_good, finding.text


def test_what_an_orchestrator_remembers_is_told_apart_by_what_it_is_of() -> None:
    def state(cursor: int = 1, num_draws: int = 2, baseline: float = 0.5) -> dict:
        envs = {name: {"tasks": {"cursor": cursor if name == "sums" else 0}} for name in ("sums", "words")}
        return {"step": 4, "source": {"num_draws": num_draws, "envs": envs}, "algorithms": {"sums": {"baseline": baseline}}}

    assert differing_memories(state(), state()) == []
    assert differing_memories(state(), state(cursor=3, num_draws=5)) == ["the task sampler of environment 'sums'"]
    assert differing_memories(state(), state(num_draws=5, baseline=0.25)) == ["the draws", "the orchestrator's algorithms"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_exact_resume_is_good_and_one_that_forgets_where_the_tasks_were_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    good = examine(check_resume, "--run.max_steps=4")
    assert good.is_good, good.text
    monkeypatch.setattr(UniformSampler, "load_state_dict", lambda self, state: None)
    bad = examine(check_resume, "--run.max_steps=4")
    assert not bad.is_good
    assert "the rollouts of step 3" in bad.text and "params." in bad.text
