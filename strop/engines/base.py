"""The Engine protocol: what a training backend is, and its written contract.

Batches go in; per-token outputs, merged metrics and accumulated gradients come out. A critic, a reference model, a
teacher are other Engines, not roles. `tests/conformance/test_engine.py` holds every backend to what is written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from strop.config.adapter import AdapterConfig
from strop.data.packing import Batch
from strop.models.experts import Form
from strop.types import Layout, Metrics, Outputs, Want

InputsT = TypeVar("InputsT", contravariant=True)


class Loss(Protocol[InputsT]):
    """What is minimised: per-token values that the batch's weights then sum. A loss never reduces across sequences."""

    @property
    def want(self) -> Want: ...

    def __call__(self, outputs: Outputs, inputs: InputsT, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        """Returns (loss_T, metrics); loss_T is finite wherever `mask_T` is set, and ignored elsewhere."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Values for the groups that a scope names. None leaves the value that stands."""

    lr: float | Tensor | None = None  # a one-element tensor is read when the optimizer reads it (CUDA graphs)
    weight_decay: float | None = None  # decoupled
    betas: Sequence[float] | None = None  # AdamW: two numbers
    eps: float | None = None  # AdamW
    momentum: float | None = None  # Muon


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimParams(Overrides):
    """Hyper-parameters of one optimizer step, each optional. They come by value: schedules live in the loop.

    The plain fields speak to every group of parameters, `scoped` to those of one optimizer ("muon") or to one group
    ("adamw/no_decay"); the nearest scope wins. What nobody gives is as it stands: at first betas (0.9, 0.95), eps
    1e-8, weight_decay 0, momentum 0.95, max_grad_norm 1, and no learning rate at all.

    A value lasts for this step, or until further notice with `keep`, also when the step is skipped. Everything is
    checked before anything changes; a ConfigError names each mistake:

    * a value of another type or range. Whole numbers and lists are taken; texts, booleans and NaN are not.
    * a key that no optimizer in its scope has, or that only one of two has: scope it to that one.
    * a scope that is neither an optimizer nor a group.

    Decay never reaches groups that are declared free of it (biases, norm weights), unless scoped to them by name.
    """

    max_grad_norm: float | None = None  # of the global 2-norm; math.inf: no clipping
    scoped: Mapping[str, Overrides] = field(default_factory=dict[str, Overrides])
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What one group of parameters was stepped with; None where its optimizer has no such value."""

    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float] | None = None
    eps: float | None = None
    momentum: float | None = None


class SkipReason(StrEnum):
    NON_FINITE_GRADIENT = "non_finite_gradient"
    NO_GRADIENT = "no_gradient"  # nothing has been accumulated since the last step


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimOutcome:
    """What `optim_step` did. When `skipped`, parameters and moments are unchanged to the bit and gradients are
    cleared."""

    grad_norm: float  # global 2-norm before clipping
    applied: Mapping[str, Applied] = field(default_factory=dict[str, Applied])  # by optimizer/group; empty when skipped
    skipped: bool = False
    reason: SkipReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do; `strop plan` checks a run's needs against it."""

    lora: bool = False
    value_head: bool = False
    router_replay: bool = False
    expert_parallel: bool = False
    shared_prefix: bool = False

    def missing(self, needs: Capabilities) -> list[str]:
        """Names of what `needs` asks for and this backend lacks."""
        has = asdict(self)
        return [name for name, needed in asdict(needs).items() if needed and not has[name]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """Outputs, one per batch and in order (detached), and the loss's metrics merged over all batches and ranks."""

    outputs: list[Outputs]
    metrics: Metrics


class Engine(Protocol):
    """A model being trained. Callers see one policy; how many devices hold it is the backend's business."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def data_parallel(self) -> int:
        """Into how many equal lists of balanced batches the packer should cut a step."""
        ...

    async def forward(self, batches: list[Batch[InputsT]], want: Want = Want()) -> list[Outputs]:  # noqa: B008
        """Score every batch without gradients; accumulated gradients stay as they are."""
        ...

    async def forward_backward(
        self,
        batches: list[Batch[InputsT]],
        loss: Loss[InputsT],
        want: Want = Want(),  # noqa: B008
    ) -> ForwardBackward:
        """Add the gradient of sum(weights * loss) over all tokens of all batches to what has accumulated.

        The weights already hold the normalisation: a backend sums over its ranks and never divides. Calling it twice
        with halves equals calling it once with the whole. A call that raises adds nothing: what had accumulated before
        it is there, unchanged to the bit.
        """
        ...

    async def zero_grad(self) -> None: ...

    async def optim_step(self, params: OptimParams) -> OptimOutcome:
        """Clip, step, zero. A non-finite gradient is a typed outcome, not an exception; a mistake in `params` is a
        ConfigError, after which everything is as before, the gradients too."""
        ...

    def weights(self, form: Form = Form.SAVED) -> Iterator[tuple[str, Tensor]]:
        """Full tensors, one at a time, each a tensor of its own that training does not write to.

        Their names are those of a folder that `save_pretrained` writes, or what else the receiver takes.
        """
        ...

    def lend_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's own tensors under its own names (`Form.PACKED`), to be read at once: they hold only until the
        engine is asked for something else."""
        ...

    async def save(self, folder: Path) -> None:
        """Write weights and optimizer state into an existing, empty folder."""
        ...

    async def load(self, folder: Path) -> None:
        """Restore what `save` wrote, kept hyper-parameters too: the next step is bitwise the step that would have
        been."""
        ...

    async def resident(self, on_device: bool) -> None:
        """Move parameters, gradients and optimizer state to the device, or to host memory. Values never change.

        While they are away, everything that needs them is an EngineError.
        """
        ...

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """An adapter's matrices alone, for a sampler that has the base. EngineError when this is no adapter."""
        ...

    def adapter(self, name: str, config: AdapterConfig, *, trainable: bool = True) -> Engine:
        """An Engine that trains a new low-rank adapter over this one's frozen weights, beside any others.

        It has its own optimizer, accumulated gradients and checkpoints, and is to the bit what it would be alone; its
        `weights()` have the adapter merged in, and this engine stays the base without any. EngineError without `lora`,
        over an engine that trains, or for a name that is taken.
        """
        ...
