"""Small heads with every feature, and what each of their rows must give, in NumPy and from the definitions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.ops import head_tiles
from strop.ops.logprobs import Entropy, Head, HeadImpl, LowRank, Scored, learn_targets, score_targets

ROWS, COLUMNS = 8, 5  # of a tile in these tests: several tiles each way, the last ones not full
TRITON = pytest.param(
    "triton",
    marks=[
        pytest.mark.interpreted,
        pytest.mark.skipif(find_spec("triton") is None, reason="triton has no wheel for this system"),
    ],
)
STREAMS = ["chunked", TRITON, "learned"]  # `learned` is what `fused` does with a loss
FORMS = ["plain", *STREAMS]


def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way, in plain torch and in kernels."""
    monkeypatch.setattr(head_tiles, "COLUMNS", COLUMNS)
    if find_spec("triton") is not None:
        from strop.ops import head_triton

        for name, value in {"BLOCK_N": 16, "BLOCK_V": 16, "BLOCK_D": 16, "SPAN": 2}.items():
            monkeypatch.setattr(head_triton, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 0.7
    softcap: float | None = None
    temperature: Tensor | float | None = None
    ids: Tensor | None = None

    def head(self) -> Head:
        adapter = None
        if self.a is not None and self.b is not None:
            adapter = LowRank(a_RD=self.a, b_VR=self.b, scale=self.scale)
        return Head(weight_VD=self.weight, bias_V=self.bias, softcap=self.softcap, low_rank=adapter)

    def leaves(self) -> dict[str, Tensor]:
        b = None if self.a is None else self.b
        named = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias, "a": self.a, "b": b}
        return {name: t for name, t in named.items() if t is not None}

    def live(self) -> Case:
        """The same with leaves that collect gradients."""
        return replace(self, **{name: t.detach().clone().requires_grad_() for name, t in self.leaves().items()})


def case(n: int = 19, d: int = 3, v: int = 13, *, full: bool = False, seed: int = 0, **more: Any) -> Case:
    """`full` has bias, adapter, softcap, a temperature for each row, and ids that repeat and hold the target."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    targets = torch.randint(0, v, (n,), generator=g)
    made = Case(hidden=normal(n, d), weight=normal(v, d), targets=targets)
    if full:
        ids = torch.randint(0, v, (n, 4), generator=g)
        ids[:, 1], ids[:, 2] = ids[:, 0], targets
        temperature = torch.rand(n, generator=g, dtype=torch.float64) + 0.5
        made = replace(
            made, bias=normal(v), a=normal(2, d), b=normal(v, 2), softcap=1.5, temperature=temperature, ids=ids
        )
    return replace(made, **more)


def expected(of: Case) -> NDArray[np.float64]:
    """Logprobs [N, V], row by row."""
    rows = []
    for n in range(len(of.hidden)):
        h = of.hidden[n].detach().double().numpy()
        z = of.weight.detach().double().numpy() @ h
        if of.a is not None and of.b is not None:
            z = z + of.scale * (of.b.detach().double().numpy() @ (of.a.detach().double().numpy() @ h))
        if of.bias is not None:
            z = z + of.bias.detach().double().numpy()
        if of.softcap is not None:
            z = of.softcap * np.tanh(z / of.softcap)
        if of.temperature is not None:
            z = z / (float(of.temperature[n]) if isinstance(of.temperature, Tensor) else of.temperature)
        z = z - z.max()
        rows.append(z - np.log(np.exp(z).sum()))
    return np.array(rows)


def mixed(rows: Tensor, at: Scored, seed: int = 3) -> Tensor:
    """A sum of everything that has a gradient, with a weight of its own for each number."""
    g = torch.Generator().manual_seed(seed)
    total = at.logprobs_N.new_zeros(())
    for part in (at.logprobs_N, at.entropy_N, at.ids_logprobs_NK):
        if part is not None:
            weights = torch.randn((1000, *part.shape[1:]), generator=g, dtype=torch.float64)[rows]
            total = total + (part * weights.to(part.dtype)).sum()
    return total


def run(
    form: str, of: Case, *, rows: int = ROWS, entropy: Entropy = Entropy.GRADIENT, **asked: Any
) -> tuple[Scored, Tensor]:
    """What a form gives for a case, and the sum of `mixed`, with gradients behind it."""
    every = torch.arange(len(of.targets))
    named: dict[str, Any] = {"temperature_N": of.temperature, "entropy": entropy, "ids_NK": of.ids, "rows": rows}
    named |= asked
    if form == "learned":
        return learn_targets(of.hidden, of.head(), of.targets, mixed, **named)
    scored = score_targets(of.hidden, of.head(), of.targets, impl=HeadImpl(form), **named)
    return scored, mixed(every, scored)


def gradients(form: str, of: Case, **asked: Any) -> dict[str, Tensor | None]:
    """Of the sum, by every leaf."""
    live = of.live()
    run(form, live, **asked)[1].backward()
    return {name: t.grad for name, t in live.leaves().items()}
