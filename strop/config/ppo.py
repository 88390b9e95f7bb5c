"""The knobs of PPO beside those that all loops share which learn from their own attempts."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from strop.config.loops import ScheduleConfig
from strop.config.model import ModelConfig
from strop.config.policy import PolicyLoopConfig
from strop.config.section import Fraction, NonNegative, Positive, Section


class CriticScheduleConfig(ScheduleConfig):
    """The critic's learning rate over its optimizer steps, those of the warm-up included."""

    lr: Annotated[float, Field(ge=0)] = 1e-5
    """Peak learning rate."""


class CriticConfig(Section):
    """The value model that PPO trains beside the policy, with an engine of its own."""

    model: ModelConfig | None = None
    """A model of its own, with the policy's tokens; null takes a copy of the policy as the loop begins."""
    head: Literal["fresh", "loaded"] = "fresh"
    """`fresh` is a head of zeros, `loaded` the one in the model's folder: a classifier's with num_labels=1, or one that
    TRL's value-head wrapper saved."""
    schedule: CriticScheduleConfig = CriticScheduleConfig()
    """The critic's learning rate over its optimizer steps, those of the warm-up included."""
    warmup_steps: NonNegative = 0
    """Steps in which only the critic learns, before the policy does too."""
    clip: Annotated[float, Field(gt=0)] | None = 0.2
    """A value that has moved further than this from where it was before the step's updates gains nothing by moving on;
    null lets it."""

    @model_validator(mode="after")
    def _head_has_a_folder(self) -> Self:
        if self.head == "loaded" and (self.model is None or self.model.fresh is not None):
            raise ValueError("head loaded needs critic.model with a path or a package: the policy's copy has no head")
        return self


class PPOConfig(PolicyLoopConfig):
    """Proximal policy optimisation: a critic says what could be expected of each token (`loops/ppo.py`)."""

    group_size: Positive = 1
    """G: attempts at each task."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What a reward loses with each token that lies before it."""
    trace: Fraction = 0.95
    """How far advantages look ahead before they trust the critic: 0 is one token, 1 the whole attempt (lambda of GAE).
    """
    whiten: bool = True
    """Give the step's advantages mean 0 and variance 1, over all its tokens."""
    bootstrap_truncated: bool = False
    """An attempt that was cut short is worth what the critic expects of the rest; off, nothing comes after it."""
    critic: CriticConfig = CriticConfig()
    """The value model that PPO trains beside the policy, with an engine of its own."""

    @model_validator(mode="after")
    def _policy_learns(self) -> Self:
        if self.critic.warmup_steps >= self.steps:
            raise ValueError(f"critic.warmup_steps {self.critic.warmup_steps} leaves none of {self.steps} steps")
        return self
