"""From the flags of `jaxrl eval` to what is asked: the environment, who is measured, how tokens are sampled, where it is written.

In: flags and overrides, and the configuration of a run where one is named. Out: an `EvalRequest`, or an error in the words of the command
line. Nothing is played, and no server is asked.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from jaxrl.config.checkpoints import RunCheckpoint, newest_step_name, run_checkpoint
from jaxrl.config.dump import redact
from jaxrl.config.env import EnvBase, SamplingConfig, env_name
from jaxrl.config.eval_command import EvalCommandConfig, config_spec, dataset_of, env_section, env_tables, with_split
from jaxrl.config.evals import EvalParameters, EvalSectionConfig
from jaxrl.config.load import load_config_aloud
from jaxrl.config.model import FrozenModelConfig
from jaxrl.config.run import RunConfig
from jaxrl.errors import ConfigError
from jaxrl.evals.result import EvalResult
from jaxrl.inference.frozen import api_key
from jaxrl.launch.evaluating import SERVED_CONCURRENCY, CheckpointModel, EvalRequest

Warn = Callable[[str], None]


def read_request(flags: argparse.Namespace, overrides: Sequence[str], warn: Warn) -> EvalRequest:
    """Return what a command line asks for.

    Args:
      flags: of `build_eval_parser`.
      overrides: `--env.KEY=VALUE` and `--inference.KEY=VALUE`.
      warn: told of what does not stop the command.

    Raises:
      ConfigError: something in it is wrong, or does not go together.
    """
    _check_together(flags)
    of_run, run_of_env = _env_of_run(flags, warn)
    source = EvalSectionConfig() if run_of_env is None else run_of_env.orchestrator.eval
    tables: dict[str, Any] = {"env": _env_table(flags, of_run)}
    model, run = _model(flags, warn)
    if (sized_by := run or run_of_env) is not None:  # a model beside a run gets the run's window, as its base policy had it
        tables["inference"] = sized_by.engine.model_dump()
    engine = {"num_slots": flags.num_slots, "max_model_len": flags.max_model_len, "dtype": flags.dtype}
    engine_flags = [f"--inference.{key}={value}" for key, value in engine.items() if value is not None]
    if isinstance(model, FrozenModelConfig) and (engine_flags or any(o.startswith("--inference") for o in overrides)):
        raise ConfigError(
            "the flags of an engine (--num-slots, --max-model-len, --dtype, --inference.KEY) are for `--checkpoint`; leave them out"
        )
    command = load_config_aloud(tables, [*engine_flags, *overrides], warn, EvalCommandConfig)
    label = flags.model or (model.name if isinstance(model, FrozenModelConfig) else flags.checkpoint)
    parameters = _parameters(flags, command, source, label)
    return EvalRequest(
        dataset=redact(flags.spec) if of_run is None else dataset_of(command.env),
        command=command,
        parameters=parameters,
        model=model,
        output_dir=flags.output_dir or Path("evals") / _folder_name(command.env, flags.spec, model, label),
        # A run's own `num_tasks` are the first ones, as the run measures them.
        is_in_turns=flags.limit is not None and flags.limit != source.num_tasks,
        num_asked=flags.limit or _num_generated(command.env, overrides),
        run_seed=flags.run_seed if flags.run_seed is not None else 0 if run_of_env is None else run_of_env.run.seed,
        concurrency=flags.concurrency,
        should_resume=flags.resume,
        should_probe_policy=flags.probe_policy,
        before=None if flags.compare is None else EvalResult.from_json(flags.compare),
        is_forced=flags.force,
    )


def _check_together(flags: argparse.Namespace) -> None:
    if flags.spec.rstrip(":") == "openenv" and flags.base_url:
        flags.spec = f"openenv:{flags.base_url}"
    elif flags.base_url is not None and flags.spec != f"openenv:{flags.base_url}":
        raise ConfigError(
            f"`--base-url` {flags.base_url} is the address of an OpenEnv server; give it with ENV_SPEC `openenv`, or leave it out"
        )
    if (flags.llm_endpoint is None) == (flags.checkpoint is None):
        raise ConfigError("say who is measured: `--llm-endpoint URL --model NAME` for a server, or `--checkpoint DIR`, one of the two")
    if flags.llm_endpoint is not None and not flags.model:
        raise ConfigError("`--llm-endpoint` needs `--model NAME`, the name under which the server lists the model (GET /v1/models)")
    if flags.llm_endpoint is None and flags.api_key_var is not None:
        raise ConfigError("`--api-key-var` is for `--llm-endpoint`; leave it out")
    needing_compare = {
        "--fail-on-regression": flags.fail_on_regression,
        "--regression-p": flags.regression_p is not None,
        "--force": flags.force,
    }
    for flag, is_given in needing_compare.items():
        if is_given and flags.compare is None:
            raise ConfigError(f"`{flag}` needs `--compare RESULT.json`, an earlier result")


def _env_of_run(flags: argparse.Namespace, warn: Warn) -> tuple[EnvBase, RunConfig] | tuple[None, None]:
    """Return the environment that `config:FILE#NAME` or `config:RUN_DIR#NAME` names, and its run; None for another ENV_SPEC."""
    found = config_spec(flags.spec)
    if found is None:
        return None, None
    path, name = found
    run = load_config_aloud(Path(path) / "config.toml" if Path(path).is_dir() else path, [], warn)
    orchestrator = run.orchestrator
    # A training environment is measured with the sampling of evaluation, not with its own.
    train = [env.model_copy(update={"sampling": None}) for env in orchestrator.train.env]
    envs = {env_name(env): env for env in (*train, *orchestrator.eval.env)}  # of equal names, that of evaluation
    names = [name] if name else [env_name(env) for env in orchestrator.eval.env] or list(envs)
    if len(names) != 1 or names[0] not in envs:
        what = f"no environment {name!r}" if name else f"{len(names)} environments"
        raise ConfigError(f"ENV_SPEC={flags.spec!r}: {path} has {what}; name one: " + ", ".join(f"config:{path}#{known}" for known in envs))
    return envs[names[0]], run


def _env_table(flags: argparse.Namespace, of_run: EnvBase | None) -> dict[str, Any]:
    """Return the environment's table: the spec's, or a run's, with what flags say."""
    if of_run is not None:
        table: dict[str, Any] = {**of_run.model_dump(exclude_unset=True), "type": of_run.type}
        if flags.split is not None:
            table = with_split(table, flags.split)
    else:
        table = with_split(env_tables(flags.spec), flags.split)
    fields = env_section(table["type"]).model_fields
    if flags.system_prompt is not None:
        table["system_prompt"] = flags.system_prompt
    if flags.env_name is not None:
        table["server_env" if "server_env" in fields else "name"] = flags.env_name
    if flags.deadline is not None:
        table["rollout_deadline_s"] = flags.deadline
    if flags.max_turns is not None:
        if "budget" not in fields:
            raise ConfigError(
                f"`--max-turns` {flags.max_turns}: an episode of an environment of type {table['type']!r} has one turn; leave it out"
            )
        table["budget"] = {**table.get("budget", {}), "max_turns": flags.max_turns}
    return table


def _model(flags: argparse.Namespace, warn: Warn) -> tuple[FrozenModelConfig | CheckpointModel, RunConfig | None]:
    """Return who is measured, and the configuration of the run whose checkpoint that is."""
    if flags.llm_endpoint is not None:
        url = flags.llm_endpoint.rstrip("/")
        url = url if urlsplit(url).path else f"{url}/v1"
        try:
            model = FrozenModelConfig(
                name=flags.model,
                base_url=[url],
                api_key_var=flags.api_key_var,
                timeout_s=flags.deadline or 300.0,
                max_concurrency=flags.concurrency or SERVED_CONCURRENCY,
            )
        except ValidationError as error:
            raise ConfigError("; ".join(f"{_flag_of(e['loc'])}: {_words(e)}" for e in error.errors())) from None
        api_key(model.api_key_var, os.environ, "--api-key-var")
        return model, None
    found: RunCheckpoint | None = run_checkpoint(flags.checkpoint)
    if found is None:
        return CheckpointModel(flags.checkpoint), None
    run = load_config_aloud(found.run_dir / "config.toml", [], warn)
    settings = run.orchestrator.model
    return CheckpointModel(settings.name, settings.renderer, settings.tool_format, found, run), run


def _parameters(flags: argparse.Namespace, command: EvalCommandConfig, source: EvalSectionConfig, label: str) -> EvalParameters:
    env = command.env
    given = {"temperature": flags.temperature, "top_p": flags.top_p, "max_tokens": flags.max_tokens}
    sampling = source.sampling_of(env).model_dump() | {key: value for key, value in given.items() if value is not None}
    threshold = source.success_threshold_of(env) if flags.success_threshold is None else flags.success_threshold
    seeds = None if source.seeds is None else tuple(source.seeds)
    budget = getattr(env, "budget", None)
    try:
        return EvalParameters(
            split=getattr(env, "split", None),
            limit=flags.limit or source.num_tasks,
            seeds=flags.seeds or seeds,
            samples_per_task=flags.samples_per_task or source.samples_per_task,
            sampling=SamplingConfig(**sampling),
            max_turns=None if budget is None else budget.max_turns,
            success_threshold=threshold,
            model=label,
            system_prompt=env.system_prompt,
        )
    except ValidationError as error:
        raise ConfigError("; ".join(f"{_flag_of(e['loc'])}: {_words(e)}".removeprefix(": ") for e in error.errors())) from None


def _num_generated(env: EnvBase, overrides: Sequence[str]) -> int | None:
    """Return how many tasks `--env.num_tasks` asks for, in all tiers together; None without it."""
    asked = getattr(env, "num_tasks", None)
    if asked is None or not any(override.startswith("--env.num_tasks=") for override in overrides):
        return None
    return asked * max(1, len(getattr(env, "tiers", ())))


def _folder_name(env: EnvBase, spec: str, model: FrozenModelConfig | CheckpointModel, label: str) -> str:
    """Return a name for the folder of an evaluation: what is played, and who is measured, a run's newest checkpoint with its step."""
    world = env.name or spec.partition(":")[2].partition("://")[2] or spec.partition(":")[2]
    who = Path(label).name
    if isinstance(model, CheckpointModel) and model.checkpoint is not None:
        step = model.checkpoint.step
        name = newest_step_name(model.checkpoint.run_dir) if step is None else f"step_{step:06d}"
        who = f"{model.checkpoint.run_dir.name}-{name}"
    return re.sub(r"[^\w.@-]+", "-", f"{world}-{who}").strip("-.")


def _flag_of(path: tuple[Any, ...]) -> str:
    flags = {"base_url": "--llm-endpoint", "name": "--model"}
    return f"`{flags.get(str(path[0]), '--' + str(path[0]).replace('_', '-'))}`" if path else ""


def _words(error: Any) -> str:
    return str(error["ctx"]["error"]) if "error" in error.get("ctx", {}) else f"{error['msg']}, got {error['input']!r}"
