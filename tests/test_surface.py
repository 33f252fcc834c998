"""The names that outside scripts rely on: every Python entry point under its name, with its parameters, and every metric name."""

import importlib
import inspect

import pytest
from pydantic import TypeAdapter

from jaxrl.monitors.metrics import MEANINGS
from tests.fakes import ScriptedPool

POSITIONAL, KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY

NAMES = {
    "jaxrl.losses": ("count_members", "compute_loss"),
    "jaxrl.orchestrator.algo": ("Algorithm", "ALGORITHM_CLASSES", "build_algorithm"),
    "jaxrl.orchestrator.algo.advantage": (
        *("group_mean_advantages", "max_rl_advantages", "leave_one_out_advantages", "efficiency_advantages", "baseline_advantages"),
        *("decayed_baseline", "rewards_are_equal"),
    ),
    "jaxrl.types": ("Task", "Rollout", "TrainingSample", "MicroBatch", "TrainBatch", "StepReport"),
    "jaxrl.batching": ("rollout_to_samples", "pack", "STREAM_FILL"),
    "jaxrl.tasks": ("TaskSampler", "SequentialSampler", "UniformSampler", "CurriculumSampler"),
    "jaxrl.evals": ("EnvEvalHarness", "EvalConfig", "EvalResult", "EvalSchedule", "compare", "score_rows"),
    "jaxrl.engine": ("Engine",),
    "jaxrl.models": ("load_pretrained", "save_pretrained"),
    "jaxrl.config.trainer": ("DefaultLossConfig", "IPOLossConfig"),
}

ALGORITHMS = {
    **dict.fromkeys(("grpo", "echo", "max_rl", "rloo", "reinforce", "rae"), "rl"),
    **dict.fromkeys(("opd", "opsd"), "ref_kl"),
    "sft": "ce",
}
"""Every `algo.type` and the loss component that its sampled tokens feed."""

METRICS = (
    *("rollout/reward/mean", "rollout/reward/mean/<env>", "rollout/completion_tokens/mean", "rollout/error_frac", "rollout/truncated_frac"),
    *("rollout/num_turns/mean", "rollout/num_turns/mean/<env>"),
    *("group/zero_signal_frac", "ledger/<bucket>", "policy/version", "policy/staleness_steps/mean", "policy/staleness_steps/max"),
    *("loss/total", "loss/rl", "loss/ce", "loss/ref_kl", "tokens/rl", "tokens/ce", "tokens/ref_kl"),
    *("mismatch/kl/mean", "mismatch/ratio/max", "entropy/mean"),
    *("advantage/mean", "advantage/min", "advantage/max", "advantage/zero_frac", "filters/<name>/frac", "loop/lag_s/p99"),
    *("optim/grad_norm", "optim/lr", "optim/skipped_steps", "pack/real_token_frac", "compile/count"),
    *("time/step_s", "time/generate_s", "time/train_s", "time/wait_for_policy_s"),
    *("throughput/train_tokens_per_s", "throughput/generated_tokens_per_s", "throughput/mfu_frac"),
)
"""Names of single metrics; `tests/e2e/test_run.py` finds them in the rows of a real run."""


def parameters(function) -> dict[str, inspect._ParameterKind]:
    return {name: parameter.kind for name, parameter in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_every_name_is_where_it_is_promised(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_the_loss_takes_a_dict_of_arrays_denominators_and_a_config() -> None:
    from jaxrl.losses import compute_loss, count_members

    assert parameters(count_members) == {"arrays": POSITIONAL}
    assert parameters(compute_loss) == dict.fromkeys(("arrays", "denominators", "config"), POSITIONAL)


def test_loss_configs_are_made_of_their_thresholds_and_scales() -> None:
    from jaxrl.config.trainer import DefaultLossConfig, IPOLossConfig

    assert set(DefaultLossConfig.model_fields) == {"type", "dppo_mask_low", "dppo_mask_high", "adv_tau", "kl_tau"}
    assert set(IPOLossConfig.model_fields) == {"type", "ipo_threshold", "adv_tau", "kl_tau"}
    defaults = DefaultLossConfig()
    assert (defaults.dppo_mask_low, defaults.dppo_mask_high, defaults.adv_tau, defaults.kl_tau) == (0.2, 0.2, 1.0, 1e-3)


def test_samples_are_packed_with_shapes_by_keyword() -> None:
    from jaxrl.batching import pack, rollout_to_samples

    assert parameters(rollout_to_samples) == {"rollout": POSITIONAL}
    kinds = parameters(pack)
    assert kinds["samples"] == POSITIONAL
    assert all(kinds[name] == KEYWORD for name in ("row_length", "rows", "shards"))


def test_an_algorithm_has_a_loss_type_two_hooks_and_two_drivers() -> None:
    from jaxrl.orchestrator.algo import ALGORITHM_CLASSES, Algorithm, build_algorithm

    config, pool, *rest = inspect.signature(build_algorithm).parameters.values()
    assert [(p.name, p.kind) for p in (config, pool)] == [("config", POSITIONAL), ("policy_pool", POSITIONAL)]
    assert all(p.default is not p.empty for p in rest), "two arguments are enough, whatever else may be given"
    assert "ClassVar" in Algorithm.__annotations__["action_loss_type"]
    for hook in ("setup", "score_rollout", "score_group", "finalize_rollout", "finalize_group"):
        assert inspect.iscoroutinefunction(getattr(Algorithm, hook)), hook
    assert callable(Algorithm.connect)
    assert {name: cls.action_loss_type for name, cls in ALGORITHM_CLASSES.items()} == ALGORITHMS


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("opd", "sft")])
def test_an_algorithm_without_a_frozen_model_is_built_from_its_type_and_a_pool(name: str) -> None:
    from jaxrl.config.algorithm import AlgorithmConfig
    from jaxrl.orchestrator.algo import ALGORITHM_CLASSES, build_algorithm

    config = TypeAdapter(AlgorithmConfig).validate_python({"type": name})
    assert isinstance(build_algorithm(config, ScriptedPool()), ALGORITHM_CLASSES[name])


def test_advantages_are_functions_of_the_rewards_of_a_group() -> None:
    from jaxrl.orchestrator.algo import advantage

    relative = ("group_mean_advantages", "max_rl_advantages", "leave_one_out_advantages")
    assert all(parameters(getattr(advantage, name)) == {"rewards_G": POSITIONAL} for name in relative)
    assert parameters(advantage.efficiency_advantages) == {"rewards_G": POSITIONAL, "costs_G": POSITIONAL}
    assert parameters(advantage.baseline_advantages) == {"rewards_G": POSITIONAL, "baseline": POSITIONAL}


@pytest.mark.parametrize("name", ["SequentialSampler", "UniformSampler"])
def test_a_task_sampler_draws_learns_and_saves_itself(name: str) -> None:
    from jaxrl import tasks

    sampler = getattr(tasks, name)([{"id": "a"}, {"id": "b"}])
    assert isinstance(sampler, tasks.TaskSampler)
    assert parameters(sampler.sample) == {"n": POSITIONAL}
    assert parameters(sampler.update) == dict.fromkeys(("task", "rewards", "costs"), POSITIONAL)
    task = next(iter(sampler))
    assert task["id"] in ("a", "b")
    sampler.update(task, [1.0, 0.0], [3.0, 4.0])
    sampler.load_state_dict(sampler.state_dict())
    counters = {"groups", "signal_groups", "unscored_groups", "episodes", "scored_episodes", "missing_rewards", "cost"}
    assert counters <= sampler.metrics().keys()


def test_model_directories_are_loaded_and_saved_by_path() -> None:
    from jaxrl.models import load_pretrained, save_pretrained

    assert next(iter(parameters(load_pretrained).values())) == POSITIONAL
    assert list(parameters(save_pretrained))[:3] == ["model", "params", "directory"]


@pytest.mark.parametrize("name", METRICS)
def test_every_promised_metric_is_defined(name: str) -> None:
    assert name in MEANINGS
