"""Hyper-parameters by value: what stands and what a step says in, what every group of parameters is stepped with out.

OptimParams -> checked against what the groups have -> values by group, or a ConfigError and nothing changed
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from torch import Tensor

from strop.engines.base import Applied, OptimParams, Overrides
from strop.errors import ConfigError, EngineError

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"lr": None, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8},
    "muon": {"lr": None, "weight_decay": 0.0, "momentum": 0.95},
}
"""What each optimizer can be told, and what stands until somebody does. There is no default learning rate."""

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Resolved:
    """The values of one step, by optimizer/group."""

    groups: dict[str, Values]
    max_grad_norm: float

    def applied(self) -> dict[str, Applied]:
        """The same as plain numbers."""
        plain: dict[str, Values] = {n: values | {"lr": float(values["lr"])} for n, values in self.groups.items()}
        return {name: Applied(**values) for name, values in plain.items()}


@dataclass(slots=True)
class Standing:
    """The values that hold for groups `optimizer/group` when a step says nothing. `free` ones are spared decay."""

    free: frozenset[str]
    groups: dict[str, Values]
    max_grad_norm: float = 1.0
    _problems: list[str] = field(default_factory=list[str], init=False)

    @classmethod
    def of(cls, names: Sequence[str], free: frozenset[str]) -> Standing:
        return cls(free, {name: dict(DEFAULTS[_optimizer(name)]) for name in names})

    def resolve(self, params: OptimParams) -> Resolved:
        """What `params` makes of them; with `params.keep` it stands from now on. ConfigError, with every mistake."""
        self._problems = []
        groups = {name: dict(values) for name, values in self.groups.items()}
        optimizers = list(dict.fromkeys(["adamw", *map(_optimizer, groups)]))  # AdamW takes what is left, if anything
        for wrong in (scope for scope in params.scoped if scope not in (*optimizers, *groups)):
            self._problems.append(
                f"scoped[{wrong!r}] is neither an optimizer nor a group: there are {', '.join([*optimizers, *groups])}"
            )
        if any(isinstance(overrides, OptimParams) for overrides in params.scoped.values()):
            self._problems.append("scoped holds an OptimParams: give Overrides, one step has one norm and one `keep`")
        scopes = [("", params), *((s, params.scoped[s]) for s in (*optimizers, *groups) if s in params.scoped)]
        for scope, overrides in scopes:
            for key, value in _given(overrides):
                where = f"scoped[{scope!r}].{key}" if scope else key
                if self._fits(where, key, value) and self._in(scope) and self._belongs(where, key, scope):
                    for name in self._reached(key, scope):
                        groups[name][key] = value if isinstance(value, Tensor) else _plain(value)
        max_grad_norm = self.max_grad_norm if params.max_grad_norm is None else params.max_grad_norm
        self._fits("max_grad_norm", "max_grad_norm", max_grad_norm)
        for name, values in groups.items():
            if values["lr"] is None and not self._problems:
                self._problems.append(f"{name} has no learning rate: give lr, or give it once with keep=True")
        if self._problems:
            raise ConfigError(*self._problems)
        if params.keep:
            self.groups, self.max_grad_norm = {n: dict(v) for n, v in groups.items()}, float(max_grad_norm)
        return Resolved(groups, float(max_grad_norm))

    def state(self) -> str:
        """As text, for a checkpoint."""
        plain = {
            name: {key: float(value) if isinstance(value, Tensor) else value for key, value in values.items()}
            for name, values in self.groups.items()
        }
        return json.dumps({"max_grad_norm": self.max_grad_norm, "groups": plain})

    def load_state(self, text: str) -> None:
        """Take back what `state` gave. EngineError when it is of other groups."""
        saved = json.loads(text)
        if saved["groups"].keys() != self.groups.keys():
            raise EngineError(
                f"this optimizer state is of the groups {', '.join(saved['groups'])}, and this engine has "
                f"{', '.join(self.groups)}: engine.optimizer or engine.param_groups has changed"
            )
        for name, values in saved["groups"].items():
            self.groups[name] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        self.max_grad_norm = saved["max_grad_norm"]

    def _fits(self, where: str, key: str, value: object) -> bool:
        """Whether a value is one for `key`; a sentence about it when not."""
        expected = _expected(key, value)
        if expected is not None:
            self._problems.append(f"{where} is {value!r}: it must be {expected}")
        return expected is None

    def _belongs(self, where: str, key: str, scope: str) -> bool:
        """Whether every optimizer in the scope has `key`."""
        addressed = list(dict.fromkeys(_optimizer(name) for name in self._in(scope)))
        having = [optimizer for optimizer in addressed if key in DEFAULTS[optimizer]]
        if not having:
            keys = "; ".join(f"{optimizer} has {', '.join(DEFAULTS[optimizer])}" for optimizer in addressed)
            self._problems.append(f"{where}: no group here has it; {keys}")
        elif having != addressed:
            others = ", ".join(optimizer for optimizer in addressed if optimizer not in having)
            self._problems.append(
                f"{where}: {having[0]} has it and {others} has not; say whom you mean, with "
                f"scoped={{{having[0]!r}: Overrides({key}=...)}}"
            )
        return having == addressed

    def _in(self, scope: str) -> list[str]:
        return [name for name in self.groups if scope in ("", name, _optimizer(name))]

    def _reached(self, key: str, scope: str) -> list[str]:
        return [n for n in self._in(scope) if key != "weight_decay" or n not in self.free or n == scope]


def _optimizer(group: str) -> str:
    return group.partition("/")[0]


def _given(overrides: Overrides) -> Iterator[tuple[str, Any]]:
    values = {
        "lr": overrides.lr,
        "weight_decay": overrides.weight_decay,
        "betas": overrides.betas,
        "eps": overrides.eps,
        "momentum": overrides.momentum,
    }
    return ((key, value) for key, value in values.items() if value is not None)


def _plain(value: Any) -> float | tuple[float, ...]:
    return tuple(float(part) for part in value) if isinstance(value, Sequence) else float(value)


def _expected(key: str, value: Any) -> str | None:
    """None when the value will do; otherwise what would."""
    if key == "lr" and isinstance(value, Tensor):
        good = value.numel() == 1 and value.is_floating_point() and 0 <= float(value) < math.inf
        return None if good else "a finite number of at least 0, or a tensor of one such number"
    if key == "betas":
        pair = isinstance(value, (list, tuple)) and len(value) == 2
        good = pair and all(_number(part) and 0 <= part < 1 for part in value)
        return None if good else "two numbers of at least 0 and below 1"
    if key == "momentum":
        return None if _number(value) and 0 <= value < 1 else "a number of at least 0 and below 1"
    if key == "max_grad_norm":
        return None if _number(value) and value > 0 else "a number above 0; math.inf turns clipping off"
    return None if _number(value) and 0 <= value < math.inf else "a finite number of at least 0"


def _number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and not math.isnan(value)
