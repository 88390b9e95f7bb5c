"""The optimizers of an engine: which tensor goes to which, and one step with hyper-parameters that come by value.

AdamW is arXiv:1711.05101. Muon (arXiv:2502.16982) orthogonalises the momentum of hidden matrices and scales it to
AdamW's typical update, so that one learning rate serves both; embeddings, output heads, norms and biases stay with
AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from strop.engines.base import OptimOutcome, OptimParams, SkipReason
from strop.errors import EngineError


@dataclass(slots=True)
class Optimizers:
    """AdamW, and Muon beside it when the recipe asks for it, over the trainable parameters of one model."""

    adamw: torch.optim.AdamW
    muon: torch.optim.Muon | None
    names: Mapping[Tensor, str]  # every trainable parameter's Hugging Face name

    def all(self) -> list[torch.optim.Optimizer]:
        return [self.adamw] if self.muon is None else [self.adamw, self.muon]

    def zero_grad(self) -> None:
        for parameter in self.names:
            parameter.grad = None

    def step(self, params: OptimParams) -> OptimOutcome:
        """Clip to the global norm, step, zero; skip when the norm is not finite or nothing was accumulated."""
        grads = [p.grad for p in self.names if p.grad is not None]
        if not grads:
            return OptimOutcome(grad_norm=0.0, applied=None, skipped=True, reason=SkipReason.NO_GRADIENT)
        norm = torch.nn.utils.get_total_norm(grads)
        if not bool(torch.isfinite(norm)):
            self.zero_grad()
            return OptimOutcome(
                grad_norm=float(norm), applied=None, skipped=True, reason=SkipReason.NON_FINITE_GRADIENT
            )
        if params.max_grad_norm is not None and float(norm) > params.max_grad_norm:
            for grad in grads:
                grad.mul_(params.max_grad_norm / norm)
        for group in self.adamw.param_groups:
            group["lr"], group["betas"], group["eps"] = params.lr, params.betas, params.eps
            group["weight_decay"] = params.weight_decay if group["decay"] else 0.0
        if self.muon is not None:
            for group in self.muon.param_groups:
                group["lr"], group["weight_decay"] = params.lr, params.weight_decay
        for optimizer in self.all():
            optimizer.step()
        self.zero_grad()
        return OptimOutcome(grad_norm=float(norm), applied=params)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Moments and step counts as `parameter|slot`, for a checkpoint without pickle."""
        for optimizer in self.all():
            for parameter, slots in optimizer.state.items():
                for slot, tensor in slots.items():
                    yield f"{self.names[parameter]}|{slot}", tensor

    def load_state(self, saved: dict[str, Tensor]) -> None:
        """Restore what `state` gave. EngineError when a slot belongs to no trainable parameter or has another shape."""
        parameters = {name: parameter for parameter, name in self.names.items()}
        owner = {p: optimizer for optimizer in self.all() for group in optimizer.param_groups for p in group["params"]}
        restored: dict[Tensor, dict[str, Tensor]] = {}
        for key, tensor in saved.items():
            name, slot = key.rsplit("|", 1)
            parameter = parameters.get(name)
            if parameter is None or (tensor.ndim and tensor.shape != parameter.shape):
                shape = "no such parameter" if parameter is None else f"{tuple(parameter.shape)} here"
                raise EngineError(f"optimizer state {key} {tuple(tensor.shape)} does not fit this model: {shape}")
            restored.setdefault(parameter, {})[slot] = tensor.clone()
        for optimizer in self.all():
            optimizer.state.clear()
        for parameter, slots in restored.items():
            owner[parameter].state[parameter] = slots


def build_optimizers(kind: str, module: nn.Module, excluded: set[Tensor]) -> Optimizers:
    """Sort trainable parameters: matrices decay, vectors do not; Muon takes matrices outside `excluded` (embedding,
    head)."""
    names: dict[Tensor, str] = {p: name for name, p in module.named_parameters() if p.requires_grad}
    matrices = [p for p in names if p.ndim >= 2]
    hidden = [p for p in matrices if p.ndim == 2 and p not in excluded] if kind == "muon" else []
    taken = set(hidden)
    groups = [
        {"params": [p for p in matrices if p not in taken], "decay": True},
        {"params": [p for p in names if p.ndim < 2], "decay": False},
    ]
    adamw = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, fused=True)
    muon = torch.optim.Muon(hidden, lr=0.0, adjust_lr_fn="match_rms_adamw") if hidden else None
    return Optimizers(adamw, muon, names)
