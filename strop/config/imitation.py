"""The knobs of loops that learn to say what somebody else would: a teacher, or the best of their own attempts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from strop.config.loops import LoopConfig, SFTScheduleConfig
from strop.config.model import ModelConfig
from strop.config.policy import KindSection
from strop.config.section import NonNegative, Plain, Positive, Section

Weighting = Literal[
    "token_mean", "token_sum", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_horizon"
]


class TeacherConfig(Section):
    """A frozen model that the student learns from. It has the student's tokenizer."""

    model: ModelConfig
    """The teacher, like the section `model`."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """What it counts for beside the other teachers of the same task; their weights are scaled to sum to 1."""
    teaches: Plain = {}
    """The tasks that it teaches: those whose row has these values, like {subject: algebra}. Empty is every task."""


class ObjectiveConfig(KindSection):
    """What brings the student to its teachers, at every token of its own attempts."""

    KNOBS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "forward_kl": {"top_k": 0, "tail": "bucket"},
        "reverse_kl": {"top_k": 0, "tail": "bucket"},
        "jensen_shannon": {"top_k": 0, "tail": "bucket", "beta": 0.5},
        "reward": {"discount": 0.0},
    }

    kind: Literal["forward_kl", "reverse_kl", "jensen_shannon", "reward"] = "forward_kl"
    """A divergence of the two distributions at each token: KL(teacher, student), KL(student, teacher), or the
    generalised Jensen-Shannon divergence between them; or a `reward`, minus the reverse KL at the sampled tokens, by
    policy gradient."""
    top_k: NonNegative | None = None
    """Compare at the teacher's k likeliest tokens; 0 takes the whole vocabulary, with 12 bytes for each of its tokens
    at each token of a pack."""
    tail: Literal["bucket", "renormalised", "dropped"] | None = None
    """With top_k, the other tokens: one outcome with all their probability; both distributions scaled to 1 over the k;
    or left out."""
    beta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """`jensen_shannon`: the teacher's part of the mixture; near 0 it is like forward KL, near 1 like reverse KL."""
    discount: Annotated[float, Field(ge=0, le=1)] | None = None
    """`reward`: what a token gets of the next one's reward, and so on; 0 gives each token its own."""


class DistillConfig(LoopConfig):
    """On-policy distillation: the student plays, its teachers score what it said (`loops/distill.py`)."""

    schedule: SFTScheduleConfig = SFTScheduleConfig()  # pyright: ignore[reportIncompatibleVariableOverride] - frozen
    """The learning rate over the loop's optimizer steps."""
    teachers: Annotated[tuple[TeacherConfig, ...], Field(strict=False, min_length=1)]
    """Who teaches, each {model:, weight:, teaches:}. A task with several teachers learns from the weighted sum of their
    objectives."""
    objective: ObjectiveConfig = ObjectiveConfig.model_validate({})
    """What brings the student to its teachers."""
    group_size: Positive = 1
    """G: attempts at each task."""
    weighting: Weighting = "token_mean"
    """What one token's loss counts for; `constant_horizon` divides by draw.max_tokens."""
    max_failures: NonNegative = 0
    """Episodes in one step that may fail with an error and be left out; one more stops the run."""

    @property
    def attempts_per_task(self) -> int:
        return self.group_size

    @property
    def plays(self) -> bool:
        return True


class BestOfNConfig(LoopConfig):
    """Best-of-n fine-tuning, or rejection sampling: imitate one's own best attempts (`loops/best_of_n.py`)."""

    schedule: SFTScheduleConfig = SFTScheduleConfig()  # pyright: ignore[reportIncompatibleVariableOverride] - frozen
    """The learning rate over the loop's optimizer steps."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """n: attempts at each task."""
    keep: Positive = 1
    """Learn from so many attempts at each task, the best ones."""
    min_reward: float = 1.0
    """Learn from no attempt with a smaller reward."""
    weighting: Weighting = "token_mean"
    """What one token's loss counts for; `constant_horizon` divides by draw.max_tokens."""
    max_failures: NonNegative = 0
    """Episodes in one step that may fail with an error and be left out; one more stops the run."""

    @property
    def attempts_per_task(self) -> int:
        return self.group_size

    @property
    def plays(self) -> bool:
        return True

    @model_validator(mode="after")
    def _keeps_some(self) -> Self:
        if self.keep >= self.group_size:
            raise ValueError(f"keep {self.keep} must be less than the group_size {self.group_size} to choose among")
        return self
