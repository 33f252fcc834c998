"""The names of the metrics, and what each one means.

A metric name is a path; its unit is in the last segments (`_s` seconds, `_frac` 0 to 1, `_tokens`). The asyncio arm and
the views spell a name through the constants here, so that the terminal and the plot read what the pipeline writes. The
array arm, which knows no monitor, spells its own names. `MEANINGS` has them all. Nothing here computes a metric.
"""

from __future__ import annotations

REWARD_MEAN = "rollout/reward/mean"
REWARD_TRAINED_MEAN = "rollout/reward/trained_mean"
COMPLETION_TOKENS_MEAN = "rollout/completion_tokens/mean"
STALE_COMPLETION_TOKENS_MEAN = "rollout/completion_tokens/stale_mean"
NUM_TURNS_MEAN = "rollout/num_turns/mean"
ERROR_FRAC = "rollout/error_frac"
TRUNCATED_FRAC = "rollout/truncated_frac"
ZERO_SIGNAL_FRAC = "group/zero_signal_frac"
PARTIAL_FRAC = "group/partial_frac"
POLICY_VERSION = "policy/version"
STALENESS_MEAN = "policy/staleness_steps/mean"
STALENESS_MAX = "policy/staleness_steps/max"
MISMATCH_KL = "mismatch/kl/mean"
CE_NLL_MEAN = "ce/nll/mean"
REF_LOG_RATIO_MEAN = "ref_kl/log_ratio/mean"
ADVANTAGE_MEAN = "advantage/mean"
ADVANTAGE_MIN = "advantage/min"
ADVANTAGE_MAX = "advantage/max"
ADVANTAGE_ZERO_FRAC = "advantage/zero_frac"
LOOP_LAG_P99 = "loop/lag_s/p99"
OVERLONG_SAMPLES = "pack/overlong_samples"
PACK_S = "time/pack_s"
STEP_S = "time/step_s"
GENERATE_S = "time/generate_s"
WAIT_FOR_POLICY_S = "time/wait_for_policy_s"
TRAIN_TOKENS_PER_S = "throughput/train_tokens_per_s"
GENERATED_TOKENS_PER_S = "throughput/generated_tokens_per_s"

MEANINGS: dict[str, str] = {
    REWARD_MEAN: "mean reward of every scored rollout of the step, before any filter and whoever played it",
    f"{REWARD_MEAN}/<env>": "the same for one environment",
    REWARD_TRAINED_MEAN: "mean reward of the rollouts that were trained on; compare with the mean over all of them",
    COMPLETION_TOKENS_MEAN: "sampled tokens per rollout, whoever played it",
    f"{COMPLETION_TOKENS_MEAN}/<env>": "the same for one environment",
    STALE_COMPLETION_TOKENS_MEAN: "sampled tokens per rollout, of those that were dropped as stale",
    NUM_TURNS_MEAN: "replies of the policy per rollout, those of its forks included",
    f"{NUM_TURNS_MEAN}/<env>": "the same for one environment",
    ERROR_FRAC: "share of rollouts that failed; they have no reward and are in no mean",
    TRUNCATED_FRAC: "share of rollouts that a token or turn limit cut",
    ZERO_SIGNAL_FRAC: "share of the groups with rl credit whose advantages are all exactly 0 and that no other component trains on",
    PARTIAL_FRAC: "share of groups that were credited without some of their rollouts, which failed, have no reward "
    "or were dropped as truncated",
    "ledger/<bucket>": "rollouts of the run so far that ended in this bucket, or are `pending`; the buckets add up to `ledger/dispatched`",
    "ledger/dispatched": "rollouts of the run so far that were dispatched",
    "ledger/truncated": "rollouts of the run so far that a token or turn limit cut; each is in its bucket too",
    POLICY_VERSION: "the policy version after the step",
    STALENESS_MEAN: "mean staleness of the rollouts that the step trains on, in steps",
    STALENESS_MAX: "largest staleness of the rollouts that the step trains on, in steps",
    "loss/total": "sum of the three components, each divided by its own member count",
    "loss/rl": "policy-gradient component",
    "loss/ce": "cross-entropy component",
    "loss/ref_kl": "component towards a reference policy",
    "tokens/rl": "member tokens of the rl component",
    "tokens/ce": "member tokens of the ce component",
    "tokens/ref_kl": "member tokens of the ref_kl component",
    "tokens/<component>/<env>": "those of them that come from one environment; left out where there are none",
    MISMATCH_KL: "divergence of the engine's and the trainer's logprobs: a bug meter, about 0 in a synchronous run",
    "mismatch/kl/kept/mean": "the same for tokens inside the trust region",
    "mismatch/kl/dropped/mean": "the same for tokens outside the trust region",
    "mismatch/ratio/max": "largest importance ratio of a trained token",
    "trust_region/rl/dropped_frac": "share of rl members that the trust region drops",
    "trust_region/rl/dropped_high_frac": "share of rl members dropped because their probability rose too far",
    "trust_region/rl/dropped_low_frac": "share of rl members dropped because their probability fell too far",
    "trust_region/ref_kl/dropped_frac": "share of ref_kl members that the trust region drops",
    CE_NLL_MEAN: "mean negative logprob of ce members at temperature 1, in nats, whatever they weigh: of replies under `sft`, "
    "of observations under `echo`; left out where there are none",
    REF_LOG_RATIO_MEAN: "mean of reference minus trainer logprob over ref_kl members; left out where there are none",
    "entropy/mean": "mean entropy of the tempered policy on tokens of the loss mask, in nats",
    ADVANTAGE_MEAN: "mean over rollouts of their mean advantage",
    ADVANTAGE_MIN: "smallest of the rollouts' mean advantages",
    ADVANTAGE_MAX: "largest of the rollouts' mean advantages",
    ADVANTAGE_ZERO_FRAC: "share of rollouts whose mean advantage is 0, of those that were given credit",
    "filters/<name>/frac": "share of the rollouts that the filter saw and matched, whether it dropped them or not; `truncated`: of an "
    "environment's scored rollouts, where its `truncated` is not `train`",
    LOOP_LAG_P99: "99th percentile of how late the event loop runs what is due, over the last 100 s",
    "optim/grad_norm": "global norm of the gradient before clipping",
    "optim/lr": "learning rate of the step",
    "optim/skipped_steps": "steps so far whose gradient was not finite",
    "optim/empty_steps": "steps so far without a member token; nothing was learned from them",
    "pack/real_token_frac": "share of the step's positions that are not padding",
    OVERLONG_SAMPLES: "samples of the step that were longer than a row",
    "compile/count": "programs made by the process so far, compiled or read from the compile cache; flat after warm-up",
    "compile/cache_hits": "those of them that were read from the compile cache",
    "memory/host_rss_gib": "memory that the process holds, in GiB",
    "memory/host_peak_gib": "most memory that the process has held so far, in GiB",
    "memory/device_in_use_gib": "memory in use on the fullest device, in GiB; absent where devices do not count it, as on the CPU",
    "memory/device_peak_gib": "most memory that was in use on the fullest device so far, in GiB; absent likewise",
    STEP_S: "wall time of the step",
    GENERATE_S: "time in which groups could be dispatched while the step was collected; in a synchronous run, the time of generation",
    "time/train_s": "time of the trainer's own work in the step",
    WAIT_FOR_POLICY_S: "time in which generation was held for a new policy version",
    PACK_S: "time of packing the step's batch",
    "time/publish_s": "time of publishing the new weights",
    "time/checkpoint_s": "time of committing a checkpoint",
    "time/wait_for_batch_s": "time in which the trainer waited for a batch",
    "checkpoint/failed": "checkpoints so far that could not be written",
    TRAIN_TOKENS_PER_S: "real tokens of the step's batch per second of `time/train_s`",
    GENERATED_TOKENS_PER_S: "tokens that the policy wrote in the step's decided rollouts per second of `time/generate_s`",
    "throughput/mfu_frac": "share of the devices' peak arithmetic that the model's own work used",
    "tasks/<env>/groups": "groups that the environment's task sampler has learnt from so far, before gates and filters; stale and "
    "cancelled ones are no result of a task",
    "tasks/<env>/signal_groups": "those of them whose rewards were not all equal",
    "tasks/<env>/unscored_groups": "those of them without a single reward",
    "tasks/<env>/episodes": "rollouts of those groups",
    "tasks/<env>/scored_episodes": "those of them with a reward",
    "tasks/<env>/missing_rewards": "those of them without one, which counts as nothing and never as 0",
    "tasks/<env>/cost": "what those rollouts cost, in the unit of the environment's `tasks.cost`; counted, and no part of any draw",
    "tasks/<env>/missing_costs": "rollouts of the step that did not report their cost, which counts as 0, so `cost` is a lower bound; "
    "only with a `tasks.cost` that the environment reports",
    "tasks/<env>/zero_signal_fraction": "share of the groups so far without a signal",
    "tasks/<env>/signal_groups_per_episode": "groups with a signal per rollout played for tasks so far",
    "tasks/<env>/signal_groups_per_cost": "groups with a signal per unit of cost so far",
    "tasks/<env>/<counter>": "whatever else the environment's task sampler reports",
    "tasks/<env>/key/<key>/p_hat": "with a curriculum: estimated probability that a rollout of a task of this key succeeds",
    "tasks/<env>/key/<key>/signal": "with a curriculum: what the key weighs without the floor, from 0 to 1",
    "tasks/<env>/key/<key>/prob": "with a curriculum: probability that the next task is of this key",
    "tasks/<env>/key/<key>/episodes": "with a curriculum: rollouts of tasks of this key so far",
    "tasks/<env>/key/<key>/cost": "with a curriculum: what they cost",
    "tasks/<env>/pool/<pool>/tasks": "with pools: tasks that are in this pool now; `unseen` and `failing` are pools too",
    "tasks/<env>/pool/<pool>/prob": "with pools: probability that the next task is of this pool",
    "tasks/<env>/admission_frac": "share of the step's groups that all gates let in, of those with a scored rollout; only with gates",
    "tasks/<env>/gate/<name>/frac": "share of the same groups that this gate let in; every gate is asked about each",
    "env/<env>/<metric>": "mean of a number that the environment, the session or the algorithm reports of a rollout, such as `forks` or "
    "`tools/calls`, over the step's rollouts that have it and did not fail",
    "eval/<env>/<score>": "a score of an evaluation; step 0 is the base policy",
    "eval/<env>/training_episodes": "rollouts that training had played by the step, over all its environments: the sum of "
    "`tasks/<env>/episodes`",
    "eval/<env>/training_cost": "what those rollouts cost, the sum of `tasks/<env>/cost`; absent if environments count in different units",
    "eval/<env>/reproducible": "1 if tasks that were begun twice began alike both times, 0 if one did not; absent if that could not be "
    "told",
    "eval/<env>/different_tasks": "1 if tasks that are not the same began differently, 0 if all began alike, as in an environment that "
    "ignores which task it is given; absent if that could not be told",
    "eval/<env>/<metric>": "mean of a number that the environment or the session reports of a rollout, such as `tools/calls`, over the "
    "rollouts of the evaluation that have it and did not fail",
}
"""Every metric that a run may report, with its meaning; `<...>` stands for a name."""


def reward_mean(env_name: str) -> str:
    """Return the name of one environment's mean reward."""
    return f"{REWARD_MEAN}/{env_name}"


def completion_tokens_mean(env_name: str) -> str:
    """Return the name of one environment's mean number of sampled tokens."""
    return f"{COMPLETION_TOKENS_MEAN}/{env_name}"


def num_turns_mean(env_name: str) -> str:
    """Return the name of one environment's mean number of replies."""
    return f"{NUM_TURNS_MEAN}/{env_name}"


def member_tokens(component: str, env_name: str) -> str:
    """Return the name of one environment's member tokens in a loss component."""
    return f"tokens/{component}/{env_name}"


def ledger_count(bucket: str) -> str:
    """Return the name of a ledger bucket's count."""
    return f"ledger/{bucket}"


def filter_frac(name: str) -> str:
    """Return the name of a filter's share of matched rollouts."""
    return f"filters/{name}/frac"


def task_metric(env_name: str, counter: str) -> str:
    """Return the name of a task sampler's counter."""
    return f"tasks/{env_name}/{counter}"


def missing_costs(env_name: str) -> str:
    """Return the name of the number of rollouts that did not report their cost."""
    return task_metric(env_name, "missing_costs")


def admission_frac(env_name: str) -> str:
    """Return the name of the share of groups that all gates let in."""
    return task_metric(env_name, "admission_frac")


def gate_frac(env_name: str, gate: str) -> str:
    """Return the name of the share of groups that a gate let in."""
    return task_metric(env_name, f"gate/{gate}/frac")


def env_metric(env_name: str, metric: str) -> str:
    """Return the name of the mean of what rollouts of an environment report.

    Example:
      >>> env_metric("chain_sum", "tools/calls")
      'env/chain_sum/tools/calls'
    """
    return f"env/{env_name}/{metric}"


def eval_score(env_name: str, score: str) -> str:
    """Return the name of an evaluation score.

    Example:
      >>> eval_score("heldout", "success_rate")
      'eval/heldout/success_rate'
    """
    return f"eval/{env_name}/{score}"
