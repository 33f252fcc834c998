"""The names of the metrics, and what each one means.

A metric name is a path; its unit is in the last segments (`_s` seconds, `_frac` 0 to 1, `_tokens`). Producers and views spell a name
through the constants here, so that a dashboard, the terminal and the plot read one thing. Nothing here computes a metric.
"""

from __future__ import annotations

REWARD_MEAN = "rollout/reward/mean"
COMPLETION_TOKENS_MEAN = "rollout/completion_tokens/mean"
ERROR_FRAC = "rollout/error_frac"
TRUNCATED_FRAC = "rollout/truncated_frac"
ZERO_SIGNAL_FRAC = "group/zero_signal_frac"
POLICY_VERSION = "policy/version"
STALENESS_MEAN = "policy/staleness_steps/mean"
STALENESS_MAX = "policy/staleness_steps/max"
LOSS_TOTAL = "loss/total"
LOSS_RL = "loss/rl"
LOSS_CE = "loss/ce"
LOSS_REF_KL = "loss/ref_kl"
TOKENS_RL = "tokens/rl"
TOKENS_CE = "tokens/ce"
TOKENS_REF_KL = "tokens/ref_kl"
MISMATCH_KL = "mismatch/kl/mean"
MISMATCH_RATIO_MAX = "mismatch/ratio/max"
ENTROPY_MEAN = "entropy/mean"
ADVANTAGE_MEAN = "advantage/mean"
ADVANTAGE_MIN = "advantage/min"
ADVANTAGE_MAX = "advantage/max"
ADVANTAGE_ZERO_FRAC = "advantage/zero_frac"
LOOP_LAG_P99 = "loop/lag_s/p99"
GRAD_NORM = "optim/grad_norm"
LEARNING_RATE = "optim/lr"
SKIPPED_STEPS = "optim/skipped_steps"
REAL_TOKEN_FRAC = "pack/real_token_frac"
COMPILE_COUNT = "compile/count"
STEP_S = "time/step_s"
GENERATE_S = "time/generate_s"
TRAIN_S = "time/train_s"
WAIT_FOR_POLICY_S = "time/wait_for_policy_s"
TRAIN_TOKENS_PER_S = "throughput/train_tokens_per_s"
GENERATED_TOKENS_PER_S = "throughput/generated_tokens_per_s"
MFU_FRAC = "throughput/mfu_frac"

MEANINGS: dict[str, str] = {
    REWARD_MEAN: "mean reward of every scored rollout of the step, before any filter",
    f"{REWARD_MEAN}/<env>": "the same for one environment",
    "rollout/reward/trained_mean": "mean reward of the rollouts that were trained on; compare with the mean over all of them",
    COMPLETION_TOKENS_MEAN: "tokens that the policy wrote per rollout",
    "rollout/completion_tokens/stale_mean": "the same for rollouts that were dropped as stale",
    ERROR_FRAC: "share of rollouts that failed; they have no reward and are in no mean",
    TRUNCATED_FRAC: "share of rollouts that a token or turn limit cut",
    ZERO_SIGNAL_FRAC: "share of groups whose advantages are all exactly 0",
    "ledger/<bucket>": "rollouts of the step that ended in this bucket; the buckets add up to what was dispatched",
    POLICY_VERSION: "the policy version after the step",
    STALENESS_MEAN: "mean staleness of the step's samples, in steps",
    STALENESS_MAX: "largest staleness of the step's samples, in steps",
    LOSS_TOTAL: "sum of the three components, each divided by its own member count",
    LOSS_RL: "policy-gradient component",
    LOSS_CE: "cross-entropy component",
    LOSS_REF_KL: "component towards a reference policy",
    TOKENS_RL: "member tokens of the rl component",
    TOKENS_CE: "member tokens of the ce component",
    TOKENS_REF_KL: "member tokens of the ref_kl component",
    MISMATCH_KL: "divergence of the engine's and the trainer's logprobs: a bug meter, about 0 in a synchronous run",
    "mismatch/kl/kept/mean": "the same for tokens inside the trust region",
    "mismatch/kl/dropped/mean": "the same for tokens outside the trust region",
    MISMATCH_RATIO_MAX: "largest importance ratio of a trained token",
    "trust_region/rl/dropped_frac": "share of rl members that the trust region drops",
    "trust_region/rl/dropped_high_frac": "share of rl members dropped because their probability rose too far",
    "trust_region/rl/dropped_low_frac": "share of rl members dropped because their probability fell too far",
    "trust_region/ref_kl/dropped_frac": "share of ref_kl members that the trust region drops",
    "ce/nll/mean": "mean negative logprob of ce members at temperature 1, in nats",
    "ref_kl/log_ratio/mean": "mean of reference minus trainer logprob over ref_kl members",
    ENTROPY_MEAN: "mean entropy of the tempered policy on trained tokens, in nats",
    ADVANTAGE_MEAN: "mean over rollouts of their mean advantage",
    ADVANTAGE_MIN: "smallest of the rollouts' mean advantages",
    ADVANTAGE_MAX: "largest of the rollouts' mean advantages",
    ADVANTAGE_ZERO_FRAC: "share of rollouts whose mean advantage is 0",
    "filters/<name>/frac": "share of rollouts that the filter matched",
    LOOP_LAG_P99: "99th percentile of the event loop's lag, in seconds",
    GRAD_NORM: "global norm of the gradient before clipping",
    LEARNING_RATE: "learning rate of the step",
    SKIPPED_STEPS: "steps so far whose gradient was not finite",
    "optim/empty_steps": "steps so far without a member token; nothing was learned from them",
    REAL_TOKEN_FRAC: "share of the step's positions that are not padding",
    "pack/overlong_samples": "samples of the step that were longer than a row",
    COMPILE_COUNT: "programs compiled so far; flat after warm-up",
    STEP_S: "wall time of the step",
    GENERATE_S: "time in which the engine generated during the step",
    TRAIN_S: "time of the trainer's own work in the step",
    WAIT_FOR_POLICY_S: "time in which generation was held for a new policy version",
    "time/pack_s": "time of packing the step's batch",
    "time/publish_s": "time of publishing the new weights",
    "time/checkpoint_s": "time of committing a checkpoint",
    "time/wait_for_batch_s": "time in which the trainer waited for a batch",
    "checkpoint/failed": "checkpoints so far that could not be written",
    TRAIN_TOKENS_PER_S: "trained real tokens per second of training time",
    GENERATED_TOKENS_PER_S: "sampled tokens per second of generation time",
    MFU_FRAC: "share of the devices' peak arithmetic that the model's own work used",
    "tasks/<env>/<counter>": "what the environment's task sampler reports",
    "eval/<env>/<score>": "a score of an evaluation; step 0 is the base policy",
}
"""Every metric that a run may report, with its meaning; `<...>` stands for a name."""


def reward_mean(env_name: str) -> str:
    """Return the name of one environment's mean reward."""
    return f"{REWARD_MEAN}/{env_name}"


def ledger_count(bucket: str) -> str:
    """Return the name of a ledger bucket's count."""
    return f"ledger/{bucket}"


def filter_frac(name: str) -> str:
    """Return the name of a filter's share of matched rollouts."""
    return f"filters/{name}/frac"


def task_metric(env_name: str, counter: str) -> str:
    """Return the name of a task sampler's counter."""
    return f"tasks/{env_name}/{counter}"


def eval_score(env_name: str, score: str) -> str:
    """Return the name of an evaluation score.

    Example:
      >>> eval_score("heldout", "success_rate")
      'eval/heldout/success_rate'
    """
    return f"eval/{env_name}/{score}"
