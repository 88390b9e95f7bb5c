"""The knobs of loops that learn from preferences: which of two replies is better, or whether one is good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from strop.config.loops import LoopConfig, SFTScheduleConfig
from strop.config.policy import KindSection


class PreferenceLossConfig(KindSection):
    """How a better reply is told from a worse one; docs/algorithms.md has the formulas."""

    KNOBS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "dpo": {"beta": 0.1, "label_smoothing": 0.0, "per_token": False},
        "robust": {"beta": 0.1, "label_smoothing": ..., "per_token": False},
        "hinge": {"beta": 0.1, "per_token": False},
        "ipo": {"beta": 0.1, "per_token": True},
        "kto": {"beta": 0.1, "desirable": 1.0, "undesirable": 1.0},
        "simpo": {"beta": 2.0, "target_margin": 1.0},
        "orpo": {"beta": 0.1},
    }

    kind: Literal["dpo", "robust", "hinge", "ipo", "kto", "simpo", "orpo"] = "dpo"
    """`dpo`, `robust`, `hinge`, `ipo` and `kto` compare with a frozen copy of the start; `simpo` and `orpo` need none.
    `kto` also learns from single replies (tasks.label_key)."""
    beta: Annotated[float, Field(gt=0)] | None = None
    """What a difference of logprobs counts for; `orpo`: the weight of the preference beside imitation."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None = None
    """`dpo`, `robust`: the share of pairs whose replies may be the wrong way round."""
    per_token: bool | None = None
    """`dpo`, `robust`, `hinge`, `ipo`: divide a reply's log ratio by its number of tokens."""
    desirable: Annotated[float, Field(ge=0)] | None = None
    """`kto`: what a good reply counts for."""
    undesirable: Annotated[float, Field(ge=0)] | None = None
    """`kto`: what a bad reply counts for."""
    target_margin: Annotated[float, Field(ge=0)] | None = None
    """`simpo`: by how much the chosen reply's reward should exceed the other's."""

    @property
    def needs_reference(self) -> bool:
        return self.kind not in ("simpo", "orpo")


class DPOConfig(LoopConfig):
    """Learning from preferences without a reward model: DPO and its kin (`loops/dpo.py`)."""

    loss: PreferenceLossConfig = PreferenceLossConfig.model_validate({})
    """How a better reply is told from a worse one."""

    @property
    def attempts_per_task(self) -> int:
        return 2

    @property
    def needs_reference(self) -> bool:
        return self.loss.needs_reference

    @model_validator(mode="after")
    def _has_another_prompt(self) -> Self:
        if self.loss.kind == "kto" and self.tasks_per_step < 2:
            raise ValueError("kto needs tasks_per_step of 2 or more: its baseline is of replies to other prompts")
        return self


class RewardModelConfig(LoopConfig):
    """A reward model: a value head that scores the chosen reply of a pair higher (`loops/reward_model.py`)."""

    schedule: SFTScheduleConfig = SFTScheduleConfig()  # pyright: ignore[reportIncompatibleVariableOverride] - frozen
    """The learning rate over the loop's optimizer steps."""
    head: Literal["fresh", "loaded"] = "fresh"
    """`fresh` is a head of zeros, `loaded` the one in the model's folder: a classifier's with num_labels=1, or one that
    TRL's value-head wrapper saved."""
    center: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the square of a pair's summed scores, which keeps them near 0."""

    @property
    def attempts_per_task(self) -> int:
        return 2
