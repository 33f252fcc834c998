"""What one optimizer step is: mesh, micro-batch shape, loss, optimizer, schedule and checkpoints.

Also the home of the mesh axis names: every PartitionSpec and psum in the package spells an axis through these
constants. Nothing here knows the model or the devices; whether a mesh fits them is `models.mesh`' question.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxrl.config.base import Section

DATA_AXIS = "data"
"""Replicas of the model; rows of a micro-batch are split over it."""
FSDP_AXIS = "fsdp"
"""Rows are split over it, and so are parameters and optimizer state."""
TENSOR_AXIS = "tensor"
"""Heads, feed-forward columns and the vocabulary are split over it."""
CONTEXT_AXIS = "context"
"""Positions of a row are split over it."""
EXPERT_AXIS = "expert"
"""Experts are split over it."""
MESH_AXES = (DATA_AXIS, FSDP_AXIS, TENSOR_AXIS)
"""Axis names of every mesh, outermost first: tensor neighbours are the closest devices."""
BATCH_AXES = (DATA_AXIS, FSDP_AXIS)
"""The axes that the rows of a micro-batch are split over."""
COUNT_AXES = (DATA_AXIS, FSDP_AXIS, CONTEXT_AXIS)
"""The axes that member counts are summed over; never tensor."""

Dtype = Literal["float32", "bfloat16"]


class MeshConfig(Section):
    """How many devices each mesh axis spans; the product must equal the trainer's device count."""

    data: int = Field(default=1, ge=1)
    """Model replicas; rows of a micro-batch are split over them."""
    fsdp: int = Field(default=1, ge=1)
    """Devices that share one copy of the parameters; rows are split over them too."""
    tensor: int = Field(default=1, ge=1)
    """Devices that split heads, feed-forward columns and the vocabulary."""

    @property
    def shape(self) -> dict[str, int]:
        """Devices by axis name, as a mesh of JAX has it."""
        return {DATA_AXIS: self.data, FSDP_AXIS: self.fsdp, TENSOR_AXIS: self.tensor}

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return self.data * self.fsdp * self.tensor

    @property
    def row_shards(self) -> int:
        """Shards that the rows of a micro-batch are split over."""
        return self.data * self.fsdp


class DefaultLossConfig(Section):
    """The rl loss with a one-sided probability-gap trust region (DPPO) and a squared log-ratio regulariser."""

    type: Literal["default"] = "default"
    """Which rl loss: `default` or `ipo`."""
    dppo_mask_low: float = Field(default=0.2, ge=0)
    """A token with advantage <= 0 is dropped when its probability fell by more than this."""
    dppo_mask_high: float = Field(default=0.2, ge=0)
    """A token with advantage > 0 is dropped when its probability rose by more than this."""
    adv_tau: float = Field(default=1.0, ge=0)
    """Scale of the policy-gradient term."""
    kl_tau: float = Field(default=1e-3, ge=0)
    """Scale of the squared log-ratio term."""


class IPOLossConfig(Section):
    """The rl loss with a two-sided probability-gap trust region."""

    type: Literal["ipo"] = "ipo"
    """Which rl loss: `default` or `ipo`."""
    ipo_threshold: float = Field(default=0.1, ge=0)
    """A token is dropped when its probability moved by more than this, in either direction."""
    adv_tau: float = Field(default=1.0, ge=0)
    """Scale of the policy-gradient term."""
    kl_tau: float = Field(default=1e-3, ge=0)
    """Scale of the squared log-ratio term."""


LossConfig = Annotated[DefaultLossConfig | IPOLossConfig, Field(discriminator="type")]


class ConstantScheduleConfig(Section):
    """A learning rate that does not change after an optional warm-up."""

    type: Literal["constant"] = "constant"
    """Which schedule: `constant`, `linear` or `cosine`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up: step k (1-based) of the warm-up uses lr * k / warmup_steps."""


class LinearScheduleConfig(Section):
    """Warm-up, stable, linear decay; the last step uses exactly `min_lr` (or 1e-8 of the peak when that is 0)."""

    type: Literal["linear"] = "linear"
    """Which schedule: `constant`, `linear` or `cosine`."""
    warmup_steps: int = Field(default=10, ge=0)
    """Steps of linear warm-up from `min_lr` (or 1e-8 of the peak when that is 0)."""
    decay_steps: int = Field(default=10, ge=0)
    """Steps of linear decay at the end of the run."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at both ends."""


class CosineScheduleConfig(Section):
    """Warm-up, then cosine decay towards `min_lr` at `run.max_steps`."""

    type: Literal["cosine"] = "cosine"
    """Which schedule: `constant`, `linear` or `cosine`."""
    warmup_steps: int = Field(default=10, ge=0)
    """Steps of linear warm-up from `min_lr` (or 1e-8 of the peak when that is 0)."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate that the cosine approaches."""


ScheduleConfig = Annotated[
    ConstantScheduleConfig | LinearScheduleConfig | CosineScheduleConfig, Field(discriminator="type")
]


class OptimizerConfig(Section):
    """AdamW with global-norm clipping."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay, on parameters of two or more dimensions per layer."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    schedule: ScheduleConfig = ConstantScheduleConfig()
    """How the learning rate changes over the run."""


class CheckpointConfig(Section):
    """When the whole run state is committed to disk, and how many commits are kept."""

    every_n_steps: int | None = Field(default=None, ge=1)
    """Commit after every n-th step; null commits only at the end of the run or on Ctrl-C."""
    keep_last: int = Field(default=2, ge=1)
    """How many of the newest complete checkpoints to keep."""


class TrainerConfig(Section):
    """The trainer: shapes, precision, mesh, loss, optimizer, checkpoints."""

    row_length: int = Field(default=512, ge=2)
    """Positions in one row of a micro-batch; the longest sample that is not overlong."""
    rows: int = Field(default=8, ge=1)
    """Rows of a micro-batch on each data shard."""
    max_segments: int = Field(default=32, ge=1)
    """Samples packed into one row at most."""
    overlong: Literal["drop", "truncate"] = "drop"
    """What happens to a sample longer than a row: dropped and counted, or cut on the right and counted."""
    param_dtype: Dtype = "float32"
    """Precision of the master parameters; gradients and optimizer state are float32. bfloat16 masters lose updates below
    1/512 of a weight."""
    compute_dtype: Dtype = "float32"
    """Precision of activations and of the weights inside a step."""
    remat: Literal["none", "layer"] = "none"
    """`layer` recomputes each layer's activations in the backward pass: less memory, some more time."""
    head_chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at one time on each device; the rest of the head is computed chunk by chunk."""
    max_skipped_steps: int = Field(default=5, ge=1)
    """The run stops after this many consecutive steps whose gradient was not finite."""
    mesh: MeshConfig = MeshConfig()
    """Devices per mesh axis."""
    loss: LossConfig = DefaultLossConfig()
    """The rl loss; ce and ref_kl are fixed."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to commit the run state."""

    @model_validator(mode="after")
    def _segments_fit(self) -> TrainerConfig:
        if self.max_segments > self.row_length:
            raise ValueError(
                f"`trainer.max_segments`={self.max_segments} exceeds `trainer.row_length`={self.row_length}; "
                "a row cannot hold more samples than positions"
            )
        return self
