"""Matrices that two ranks share: values and gradients by hand, on gloo."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from strop.engines.fsdp2.tensor_parallel import split_heads


class Pair(nn.Module):
    """x -> two channels of x / 2 -> their sum and a bias: 1 -> 1.5."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1, 2, bias=False), nn.Linear(2, 1)
        self._tp_plan = {"up": "colwise", "down": "rowwise"}
        with torch.no_grad():
            self.up.weight.fill_(0.5)
            self.down.weight.fill_(1.0)
            self.down.bias.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def found(module: Pair) -> dict[str, list[float]]:
    """The value at 1, and the gradients, whole."""
    y = module(torch.ones(1, 1))
    y.sum().backward()
    told = {"y": y.flatten().tolist()}
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        assert grad is not None
        told[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).flatten().tolist()
    return told


def _rank(rank: int, folder: str) -> None:
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=limit)
    module = Pair()
    model: Any = SimpleNamespace(module=module, cache_shape=SimpleNamespace(num_kv_heads=2))
    assert split_heads(model, init_device_mesh("cpu", (2,))) == []
    assert isinstance(module.up.weight, DTensor) and module.up.weight.to_local().shape == (1, 1)
    Path(folder, f"{rank}.json").write_text(json.dumps(found(module)))
    dist.destroy_process_group()


def test_a_bias_is_added_once_and_gradients_are_those_of_one_rank(tmp_path: Path) -> None:
    """H10: x 1, bias 0.5, two ranks: 1.5, not 2.0."""
    mp.spawn(_rank, (str(tmp_path),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    expected = found(Pair())
    assert expected["y"] == [1.5]
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told.keys() == expected.keys()
        assert all(told[name] == pytest.approx(expected[name]) for name in expected)
