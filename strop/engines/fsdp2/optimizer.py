"""The optimizers of an engine: which tensor goes to which, and one step with hyper-parameters that come by value.

AdamW is arXiv:1711.05101. Muon (arXiv:2502.16982) orthogonalises the momentum of hidden matrices and scales it to
AdamW's typical update, so that one learning rate serves both; embeddings, output heads, norms and biases stay with
AdamW.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.config.recipe import EngineConfig, ParamGroupConfig
from strop.engines.base import OptimOutcome, OptimParams, SkipReason
from strop.engines.fsdp2.spread import total_norm
from strop.engines.hyper import Standing
from strop.errors import ConfigError, EngineError
from strop.models.loading import LanguageModel
from strop.models.patterns import chosen
from strop.models.shards import share_of


@dataclass(slots=True)
class Optimizers:
    """AdamW, and Muon beside it when the recipe asks for it, over the trainable parameters of one model."""

    adamw: torch.optim.AdamW | None  # None: Muon takes everything
    muon: torch.optim.Muon | None
    names: Mapping[Tensor, str]  # every trainable parameter's Hugging Face name
    standing: Standing

    def all(self) -> list[torch.optim.Optimizer]:
        return [optimizer for optimizer in (self.adamw, self.muon) if optimizer is not None]

    def zero_grad(self) -> None:
        for parameter in self.names:
            parameter.grad = None

    @contextmanager
    def all_or_nothing(self) -> Generator[None]:
        """Gradients of the block add to what had accumulated when it ends, and are dropped when it raises.

        What had accumulated waits aside: a block after the first one needs the gradients' memory twice.
        """
        before = {parameter: parameter.grad for parameter in self.names}
        self.zero_grad()
        done = False
        try:
            yield
            done = True
        finally:
            for parameter, grad in before.items():
                if done and grad is not None and parameter.grad is not None:
                    grad.add_(parameter.grad)
                if grad is not None or not done:
                    parameter.grad = grad

    def step(self, params: OptimParams) -> OptimOutcome:
        """Clip to the global norm, step, zero; skip when the norm is not finite or nothing was accumulated."""
        resolved = self.standing.resolve(params)
        grads = [p.grad for p in self.names if p.grad is not None]
        if not grads:
            return OptimOutcome(grad_norm=0.0, skipped=True, reason=SkipReason.NO_GRADIENT)
        norm = total_norm(grads)
        if not bool(torch.isfinite(norm)):
            self.zero_grad()
            return OptimOutcome(grad_norm=float(norm), skipped=True, reason=SkipReason.NON_FINITE_GRADIENT)
        if float(norm) > resolved.max_grad_norm:
            for grad in grads:
                grad.mul_(resolved.max_grad_norm / norm)
        for optimizer in self.all():
            for group in optimizer.param_groups:
                group.update(resolved.groups[group["name"]])
            optimizer.step()
        self.zero_grad()
        return OptimOutcome(grad_norm=float(norm), applied=resolved.applied())

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Moments and step counts as `parameter|slot`, for a checkpoint without pickle."""
        for optimizer in self.all():
            for parameter, slots in optimizer.state.items():
                for slot, tensor in slots.items():
                    yield f"{self.names[parameter]}|{slot}", tensor

    def load_state(self, saved: dict[str, Tensor], standing: str) -> None:
        """Restore what `state` and `standing.state` gave. EngineError when a slot belongs to no trainable parameter or
        has another shape."""
        parameters = {name: parameter for parameter, name in self.names.items()}
        owner = {p: optimizer for optimizer in self.all() for group in optimizer.param_groups for p in group["params"]}
        restored: dict[Tensor, dict[str, Tensor]] = {}
        for key, tensor in saved.items():
            name, slot = key.rsplit("|", 1)
            parameter = parameters.get(name)
            if parameter is None or (tensor.ndim and tensor.shape != parameter.shape):
                shape = "no such parameter" if parameter is None else f"{tuple(parameter.shape)} here"
                raise EngineError(f"optimizer state {key} {tuple(tensor.shape)} does not fit this model: {shape}")
            restored.setdefault(parameter, {})[slot] = share_of(tensor, parameter) if tensor.ndim else tensor.clone()
        self.standing.load_state(standing)
        for optimizer in self.all():
            optimizer.state.clear()
        for parameter, slots in restored.items():
            owner[parameter].state[parameter] = slots


@dataclass(frozen=True, slots=True)
class ParameterGroups:
    """The trainable parameters, sorted into groups `optimizer/group`: matrices decay, vectors do not; Muon takes
    matrices outside the embedding and the head."""

    names: dict[Tensor, str]  # every trainable parameter's Hugging Face name
    members: dict[str, list[Tensor]]  # AdamW's groups first
    free: frozenset[str]  # groups that decay does not reach

    def standing(self) -> Standing:
        return Standing.of(list(self.members), self.free)


def parameter_groups(
    model: LanguageModel, config: EngineConfig, adapter: Mapping[str, Tensor] | None = None
) -> ParameterGroups:
    """How `config` sorts the parameters of a model, or of an adapter of it; on a model without weights too.

    Groups of `param_groups` take what their patterns match first: group `router` is `muon/router` where Muon takes its
    matrices. ConfigError when a pattern matches no parameter, or two groups want the same one.
    """
    module = model.module
    names: dict[Tensor, str] = {p: name for name, p in module.named_parameters() if p.requires_grad}
    if adapter is not None:
        names = {parameter: name for name, parameter in adapter.items()}
    declared = _declared_groups(list(names.values()), config.param_groups)
    outside: set[Tensor] = {model.head.weight, *module.get_input_embeddings().parameters()}
    if model.value_head is not None:
        outside.update(model.value_head.parameters())
    members: dict[str, list[Tensor]] = {}
    free: set[str] = set()
    for parameter, name in names.items():
        muon = config.optimizer == "muon" and parameter.ndim == 2 and parameter not in outside
        usual = "hidden" if muon else "decay" if parameter.ndim >= 2 else "no_decay"
        group = declared.get(name, usual)
        full = f"{'muon' if muon else 'adamw'}/{group}"
        members.setdefault(full, []).append(parameter)
        if not (config.param_groups[group].decay if name in declared else parameter.ndim >= 2):
            free.add(full)
    order = sorted(members, key=lambda name: (name.startswith("muon/"), name))
    return ParameterGroups(names, {name: members[name] for name in order}, frozenset(free))


def _declared_groups(names: list[str], declared: Mapping[str, ParamGroupConfig]) -> dict[str, str]:
    """The declared group of each parameter that is in one, both by name."""
    group_of: dict[str, str] = {}
    for group, config in declared.items():
        for name in chosen(config.match, names, f"engine.param_groups.{group}.match"):
            if name in group_of:
                raise ConfigError(
                    f"engine.param_groups: {group_of[name]} and {group} both match {name}: a parameter has one group"
                )
            group_of[name] = group
    return group_of


def build_optimizers(groups: ParameterGroups) -> Optimizers:
    """The optimizers over these groups."""
    parts = [{"params": members, "name": name} for name, members in groups.members.items()]
    adamw, muon = ([part for part in parts if str(part["name"]).startswith(kind)] for kind in ("adamw/", "muon/"))
    return Optimizers(
        adamw=torch.optim.AdamW(adamw, lr=0.0, fused=True) if adamw else None,
        muon=torch.optim.Muon(muon, lr=0.0, adjust_lr_fn="match_rms_adamw") if muon else None,
        names=groups.names,
        standing=groups.standing(),
    )
