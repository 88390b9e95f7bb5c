"""The loops of a recipe and their knobs: how often, how many at once, and by which algorithm.

Each field says what it means; a knob that a choice does not use is refused with that choice. The formulas are in
docs/algorithms.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from strop.config.section import Decay, Fraction, NonNegative, Positive, Section


class GroupScheduleConfig(Section):
    """What differs for one optimizer or one group of parameters."""

    lr_scale: Annotated[float, Field(ge=0)] = 1.0
    """Times the schedule's learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Instead of the schedule's; null leaves that."""


class ScheduleConfig(Section):
    """The learning rate over optimizer steps."""

    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate."""
    warmup_steps: NonNegative = 0
    """Rise linearly from lr / warmup_steps over this many steps."""
    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """What follows the warm-up: stay, or fall to `final_fraction` of the peak by the last step; `wsd` (warm-up, stable,
    decay) stays, and falls in a line over the last `decay_fraction` of the steps."""
    decay_fraction: Fraction = 0.1
    """Part of all steps over which `wsd` falls."""
    final_fraction: Fraction = 0.0
    """Part of the peak that is left at the last step, for `linear`, `cosine` and `wsd`."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Keeps AdamW's division finite."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay; never reaches biases and norm weights."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Scale gradients down to this global norm; null turns it off."""
    groups: dict[str, GroupScheduleConfig] = {}
    """What differs for an optimizer (`muon`) or a group of parameters (`adamw/no_decay`), each {lr_scale:,
    weight_decay:}."""


class SFTScheduleConfig(ScheduleConfig):
    """The learning rate over optimizer steps."""

    lr: Annotated[float, Field(ge=0)] = 1e-5
    """Peak learning rate."""


class LoopConfig(Section):
    """What every loop has."""

    steps: Positive = 100
    """Times that tasks are taken and learned from."""
    tasks_per_step: Positive = 32
    """P: tasks in one step."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over the loop's optimizer steps."""

    @property
    def attempts_per_task(self) -> int:
        """Texts at each task that one step trains on, at the most."""
        return 1

    @property
    def updates_each_step(self) -> int:
        """Optimizer steps in one step."""
        return 1

    @property
    def plays(self) -> bool:
        """Whether the loop draws attempts from the sampler, besides evaluation."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the model that the loop begins from is kept beside it."""
        return False

    @property
    def needs_routers(self) -> bool:
        """Whether the model must be a mixture of experts."""
        return False

    @property
    def needs_sampled_routes(self) -> bool:
        """Whether the sampler must tell which experts each token took."""
        return False


class SFTConfig(LoopConfig):
    """Supervised fine-tuning on the tasks' own answers (`loops/sft.py`)."""

    schedule: SFTScheduleConfig = SFTScheduleConfig()  # pyright: ignore[reportIncompatibleVariableOverride] - frozen
    """The learning rate over the loop's optimizer steps."""
    stop_at_accuracy: Fraction | None = None
    """End as soon as held-out sampled accuracy reaches this; needs evaluate.every."""
