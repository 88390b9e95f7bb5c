"""The knobs of loops that learn from their own attempts: advantages, the policy's loss, divergence, corrections.

Several sections have a `kind`. A knob that the kind does not have is refused, and one that is left out takes the kind's
own value, which the resolved recipe then shows; null stands for "this kind does not have it".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from strop.config.loops import LoopConfig
from strop.config.section import Fraction, NonNegative, Positive, Section

AboveZero = Annotated[float, Field(gt=0)]
AtLeastZero = Annotated[float, Field(ge=0)]


class KindSection(Section):
    """A section whose `kind` decides which of its other knobs there are."""

    KNOBS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The knobs of each kind with their values when they are left out; `...` where one must be given."""

    @model_validator(mode="before")
    @classmethod
    def _of_its_kind(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kind = values.get("kind", cls.model_fields["kind"].default)
        if kind not in cls.KNOBS:
            return values  # the field's own check names the kinds
        has = cls.KNOBS[kind]
        every = {knob for knobs in cls.KNOBS.values() for knob in knobs}
        foreign = [knob for knob in values if knob in every and knob not in has and values[knob] is not None]
        if foreign:
            raise ValueError(f"kind {kind} has no {' and no '.join(foreign)}; it has {', '.join(has) or 'no knobs'}")
        missing = [knob for knob, value in has.items() if value is ... and values.get(knob) is None]
        if missing:
            raise ValueError(f"kind {kind} needs {' and '.join(missing)}")
        own = {knob: value for knob, value in has.items() if values.get(knob) is None and value is not ...}
        return values | own


class AdvantageConfig(KindSection):
    """How much better each attempt was than could be expected."""

    KNOBS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "grpo": {"scale_by_std": False},
        "rloo": {},
        "remax": {},
        "opo": {},
        "gpg": {"scale_by_std": False},
        "gdpo": {"weights": ...},
        "leave_one_out_max": {"scale_by_std": True},
        "pass_at_k": {"k": ..., "solved_at": 1.0},
        "reinforce_plus_plus": {"discount": 1.0},
        "reinforce_plus_plus_baseline": {},
        "optimal_token_baseline": {},
    }

    kind: Literal[
        "grpo",
        "rloo",
        "remax",
        "opo",
        "gpg",
        "gdpo",
        "leave_one_out_max",
        "pass_at_k",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "optimal_token_baseline",
    ] = "grpo"
    """The baseline and its scale; docs/algorithms.md has the formulas. `remax` plays one greedy attempt more at each
    task."""
    scale_by_std: bool | None = None
    """`grpo`, `gpg`, `leave_one_out_max`: divide by the group's standard deviation, as GRPO was published; off is
    Dr. GRPO."""
    weights: dict[str, float] | None = None
    """`gdpo`: the named parts of the reward that are normalised one by one, and the weight of each in the sum."""
    k: Positive | None = None
    """`pass_at_k`: the best of any k attempts counts."""
    solved_at: float | None = None
    """`pass_at_k`: the reward from which on an attempt is right."""
    discount: Annotated[float, Field(gt=0, le=1)] | None = None
    """`reinforce_plus_plus`: what a reward loses with each token that lies before it."""

    @property
    def compares_within_groups(self) -> bool:
        """Whether a group whose attempts all scored alike has nothing to say."""
        return self.kind not in ("remax", "reinforce_plus_plus")


class PolicyLossConfig(KindSection):
    """What is minimised at each token."""

    KNOBS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
        "importance_sampling": {},
        "policy_gradient": {},
        "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None},
        "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None},
        "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
        "cispo": {"ratio_min": 0.0, "ratio_max": 5.0},
        "sapo": {"temperature_good": 1.0, "temperature_bad": 1.05},
        "dro": {"beta": 0.05},
        "dppo_tv": {"low": 0.15, "high": 0.15, "ratio_max": 20.0},
        "dppo_kl": {"low": 0.05, "high": 0.05, "ratio_max": 20.0},
        "clip_cov": {
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dual_clip": None,
            "fraction": 2e-4,
            "covariance_low": 1.0,
            "covariance_high": 5.0,
        },
        "kl_cov": {"coefficient": 1.0, "fraction": 2e-4},
    }

    kind: Literal[
        "clip",
        "importance_sampling",
        "policy_gradient",
        "gspo",
        "gspo_token",
        "gmpo",
        "cispo",
        "sapo",
        "dro",
        "dppo_tv",
        "dppo_kl",
        "clip_cov",
        "kl_cov",
    ] = "clip"
    """PPO's clipped ratio, or another surrogate; docs/algorithms.md has the formulas."""
    clip_low: Annotated[float, Field(ge=0, le=1)] | None = None
    """A ratio below 1 - clip_low stops counting when it would go lower still; `gmpo`: of the log ratio."""
    clip_high: AtLeastZero | None = None
    """A ratio above 1 + clip_high stops counting when it would go higher still; an upper bound above the lower one is
    DAPO's."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """The most that a bad token's ratio counts; null leaves it unbounded."""
    ratio_min: Fraction | None = None
    """`cispo`: the least weight of a token."""
    ratio_max: Annotated[float, Field(ge=1)] | None = None
    """`cispo`, `dppo_tv`, `dppo_kl`: the largest weight of a token."""
    temperature_good: AboveZero | None = None
    """`sapo`: how soon a good token's ratio stops counting."""
    temperature_bad: AboveZero | None = None
    """`sapo`: how soon a bad token's ratio stops counting."""
    beta: AtLeastZero | None = None
    """`dro`: the cost of the squared log ratio."""
    low: AtLeastZero | None = None
    """`dppo_tv`, `dppo_kl`: how far a bad token may have moved."""
    high: AtLeastZero | None = None
    """`dppo_tv`, `dppo_kl`: how far a good token may have moved."""
    fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """`clip_cov`, `kl_cov`: the part of all tokens that is treated differently."""
    covariance_low: float | None = None
    """`clip_cov`: chosen are tokens with a covariance above this."""
    covariance_high: float | None = None
    """`clip_cov`: and below this."""
    coefficient: AtLeastZero | None = None
    """`kl_cov`: what the chosen tokens' distance from the old policy costs."""

    @property
    def selects(self) -> bool:
        """Whether tokens are chosen over the whole update before it, from the trainer's own logprobs."""
        return self.kind in ("clip_cov", "kl_cov")


class KLConfig(Section):
    """What it costs to leave the model that the loop began from. Above 0 a frozen copy of that is kept."""

    coefficient: AtLeastZero = 0.0
    """The cost of one nat of divergence at one token."""
    place: Literal["loss", "reward"] = "loss"
    """In the loss, or taken from the reward before advantages are."""
    estimator: Literal[
        "k1", "k2", "k3", "abs", "k1_straight_through", "k3_straight_through", "abs_straight_through"
    ] = "k3"
    """How a token's divergence is estimated; straight-through forms have one estimator's value and k2's gradient."""
    target: AboveZero | None = None
    """Lead the coefficient so that the mean divergence of a token becomes this; null keeps it fixed."""
    horizon: AboveZero = 10_000.0
    """Attempts over which the coefficient may change by a fifth, with a target."""


class CorrectionConfig(Section):
    """Weights that make attempts of another policy (older, or a sampler's other arithmetic) count as the trainer's."""

    level: Literal["none", "token", "sequence_sum", "sequence_mean"] = "none"
    """Whose ratio of trainer to sampler is the weight: the token's, its sequence's, or their geometric mean's."""
    low: AtLeastZero = 0.0
    """The smallest weight."""
    high: AboveZero = 2.0
    """The largest weight."""
    outside: Literal["clamp", "zero"] = "clamp"
    """A weight beyond its bounds becomes the nearer one (truncated), or nothing (masked)."""


class RejectConfig(Section):
    """Leave out what the sampler drew too differently from the trainer."""

    divergence: Literal["none", "ratio", "k2", "k3"] = "none"
    """What is looked at: the ratio of trainer to sampler, or an estimate of their divergence."""
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    """Of the token, or of its sequence, which then stays or goes as one."""
    low: Fraction = 0.0
    """`ratio`: the least that is accepted."""
    high: AboveZero = 2.0
    """The most that is accepted."""
    stay_counted: bool = True
    """Rejected tokens stay in the denominators of means."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.divergence == "ratio" and self.high < 1:
            raise ValueError(f"high is {self.high}: a ratio's bounds hold 1 between them")
        if self.divergence == "ratio" and self.level == "sequence_max":
            raise ValueError("a sequence has no largest ratio: take divergence k2 or k3 with level sequence_max")
        if self.divergence in ("k2", "k3") and self.low:
            raise ValueError(f"low is {self.low}: {self.divergence} has an upper bound alone")
        return self


class LengthConfig(Section):
    """What a long reply costs."""

    overlong_buffer: NonNegative = 0
    """DAPO's soft punishment: over the last so many of an attempt's possible tokens the reward falls in a line; 0 turns
    it off."""
    overlong_penalty: AtLeastZero = 1.0
    """What the longest reply loses by it."""
    prefer_short: AtLeastZero = 0.0
    """Kimi's length reward within each group, times this: short right answers gain, long ones lose; 0 is off."""
    solved_at: float = 1.0
    """`prefer_short`: the reward from which on an answer is right."""


class RouterConfig(Section):
    """How evenly a mixture of experts uses its experts."""

    balance_coefficient: AtLeastZero = 0.0
    """The cost of uneven load: at each trained token, the experts' shares of its scores times their shares of the whole
    update's choices; 1 is even."""
    z_coefficient: AtLeastZero = 0.0
    """The cost of large router scores: the square of their logsumexp at each trained token."""
    measure_every: NonNegative = 0
    """Every so many steps, one more pass of the trainer measures the load and what replay changes; 0 is never."""


class PolicyLoopConfig(LoopConfig):
    """What loops that learn from their own attempts share."""

    group_size: Positive = 8
    """G: attempts at each task."""
    updates_per_step: Positive = 1
    """Optimizer steps on each step's attempts, on disjoint parts of its groups."""
    epochs: Positive = 1
    """Times that each step's attempts are learned from."""
    loss: PolicyLossConfig = PolicyLossConfig.model_validate({})
    """What is minimised at each token."""
    weighting: Literal[
        "token_mean", "token_sum", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_horizon"
    ] = "token_mean"
    """What one token's loss counts for; `constant_horizon` divides by draw.max_tokens (Dr. GRPO)."""
    entropy_coefficient: float = 0.0
    """Times the policy's entropy at each token, taken from the loss: a bonus for staying uncertain."""
    kl: KLConfig = KLConfig()
    """What it costs to leave the model that the loop began from."""
    length: LengthConfig = LengthConfig()
    """What a long reply costs."""
    ratio_to: Literal["sampler", "trainer"] = "sampler"
    """Whose logprobs ratios are taken to: the sampler's own, or the trainer's, computed before the step's updates
    (decoupled)."""
    correction: CorrectionConfig = CorrectionConfig()
    """Importance weights of trainer to sampler; needs ratio_to trainer."""
    reject: RejectConfig = RejectConfig()
    """Leave out what the sampler drew too differently from the trainer."""
    top_entropy: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Train only on this part of the update's tokens, those where the policy was least certain; 1 trains on all."""
    router_replay: Literal["off", "recompute", "rollout"] = "off"
    """Mixtures of experts: whose choice of experts the updates take. `off` lets every pass choose anew, `recompute`
    keeps that of the trainer's scoring pass before them, `rollout` the sampler's."""
    router: RouterConfig = RouterConfig()
    """Mixtures of experts: what uneven use of the experts costs, and how often it is measured."""
    max_failures: NonNegative = 0
    """Episodes in one step that may fail with an error and be left out; one more stops the run."""

    @property
    def attempts_per_task(self) -> int:
        return self.group_size

    @property
    def updates_each_step(self) -> int:
        return self.updates_per_step * self.epochs

    @property
    def plays(self) -> bool:
        return True

    @property
    def needs_reference(self) -> bool:
        return self.kl.coefficient > 0

    @property
    def needs_square_sums(self) -> bool:
        """Whether the trainer also says how certain it was of each token: the sum of squared probabilities."""
        return False

    @property
    def needs_scores(self) -> bool:
        """Whether the trainer scores the attempts before it learns from them."""
        return (
            self.ratio_to == "trainer"
            or self.correction.level != "none"
            or self.reject.divergence != "none"
            or self.top_entropy < 1
            or self.loss.selects
            or self.router.balance_coefficient > 0
        )

    @property
    def needs_routers(self) -> bool:
        """Whether the model must be a mixture of experts."""
        router = self.router
        return self.router_replay != "off" or bool(
            router.balance_coefficient or router.z_coefficient or router.measure_every
        )

    @property
    def needs_sampled_routes(self) -> bool:
        return self.router_replay == "rollout"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.updates_per_step > self.tasks_per_step:
            raise ValueError(
                f"updates_per_step {self.updates_per_step} is more than tasks_per_step {self.tasks_per_step}: "
                "every update needs at least one group"
            )
        if self.correction.level != "none" and self.ratio_to == "sampler":
            raise ValueError(
                "correction.level needs ratio_to trainer: a ratio to the sampler holds the correction already"
            )
        if self.router_replay == "recompute" and not self.needs_scores:
            raise ValueError(
                "router_replay recompute keeps the choices of the trainer's scoring pass, and nothing here asks for "
                "that pass: set ratio_to trainer, or router_replay rollout"
            )
        if self.kl.target is not None and not self.kl.coefficient:
            raise ValueError("kl.target leads kl.coefficient, which is 0: give it a value to begin with")
        if self.kl.place == "reward" and self.kl.estimator.endswith("straight_through"):
            raise ValueError(f"kl.estimator {self.kl.estimator} differs in its gradient alone, and a reward has none")
        return self


class GRPOConfig(PolicyLoopConfig):
    """Group-relative policy optimisation and its variants (`loops/grpo.py`)."""

    advantage: AdvantageConfig = AdvantageConfig.model_validate({})
    """How much better each attempt was than could be expected."""
    drop_uniform_groups: bool = True
    """Leave out groups whose attempts all scored alike: they carry no signal."""
    refills: NonNegative = 0
    """New tasks that a step may play to replace groups that were dropped, in multiples of tasks_per_step (DAPO's
    dynamic sampling)."""

    @property
    def needs_scores(self) -> bool:
        return super().needs_scores or self.needs_square_sums

    @property
    def needs_square_sums(self) -> bool:
        return self.advantage.kind == "optimal_token_baseline"

    @model_validator(mode="after")
    def _advantage_fits(self) -> Self:
        kind = self.advantage.kind
        if self.group_size < 2 and self.advantage.compares_within_groups:
            raise ValueError(f"group_size is {self.group_size}: advantage {kind} compares two attempts or more")
        if self.advantage.k is not None and self.advantage.k > self.group_size:
            raise ValueError(f"advantage.k is {self.advantage.k}, more than the {self.group_size} attempts of a group")
        if self.drop_uniform_groups and not self.advantage.compares_within_groups:
            raise ValueError(f"advantage {kind} learns from uniform groups too: set drop_uniform_groups to false")
        if self.refills and not self.drop_uniform_groups:
            raise ValueError(f"refills is {self.refills}, but no group is dropped: set drop_uniform_groups to true")
        if (
            self.kl.place == "reward"
            and self.kl.coefficient
            and kind in ("gdpo", "pass_at_k", "optimal_token_baseline")
        ):
            raise ValueError(f"advantage {kind} has no place for a divergence in the reward: set kl.place to loss")
        return self


class AsyncGRPOConfig(GRPOConfig):
    """GRPO with attempts drawn ahead of the step that learns from them (`loops/async_grpo.py`)."""

    max_lag: NonNegative = 1
    """Versions that a token may be behind when it is learned from: attempts of so many further steps are in the making.
    0 is `grpo`."""
    window: Positive = 1
    """A step takes those that end first of so many times P oldest tasks; 1 keeps their order. At most max_lag + 1."""
    oversample: NonNegative = 0
    """Tasks that are begun beyond what steps need: those that end last are given up. It favours short attempts."""

    @model_validator(mode="after")
    def _window_in_slots(self) -> Self:
        if self.window > self.max_lag + 1:
            raise ValueError(
                f"window is {self.window}: with max_lag {self.max_lag} there are {self.max_lag + 1} steps' tasks"
            )
        return self
