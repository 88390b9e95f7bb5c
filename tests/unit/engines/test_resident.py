"""Away to host memory and back: the device's memory is really given up, and every tensor is what it was. (I04)"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from strop.config.recipe import EngineConfig
from strop.engines.base import OptimParams
from strop.engines.fsdp2.engine import Fsdp2Engine
from strop.engines.fsdp2.resident import Away
from tests.tiny_models import tiny_model
from tests.unit.engines.test_fsdp2 import Likelihood, batch

CPU = torch.device("cpu")


def held(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_nothing_is_left_on_the_device_and_all_comes_back(optimizer: str) -> None:
    engine = Fsdp2Engine(tiny_model("llama"), EngineConfig.model_validate({"optimizer": optimizer}))
    asyncio.run(engine.forward_backward([batch()], Likelihood()))
    asyncio.run(engine.optim_step(OptimParams(lr=1e-2)))
    asyncio.run(engine.forward_backward([batch()], Likelihood()))
    tensors = list(engine._tensors())
    values = [tensor.detach().clone() for tensor in tensors]
    grads = [p.grad for p in engine.model.module.parameters() if p.grad is not None]
    size = held(tensors)
    assert size > 3 * held(grads) > 0
    asyncio.run(engine.resident(on_device=False))
    assert held(tensors) == 0
    asyncio.run(engine.resident(on_device=True))
    assert held(tensors) == size
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, values, strict=True))
    assert all(a is b for a, b in zip(engine._tensors(), tensors, strict=True))
    assert engine.model.head.weight is engine.model.module.get_input_embeddings().weight


def test_views_transposes_and_slices_keep_looking_at_the_same_memory() -> None:
    base = torch.arange(12.0)
    views = [base, base[2:6], base.view(3, 4).t(), base[:1].expand(5), base.view(torch.int32)[3:]]
    values = [view.clone() for view in views]
    away = Away.move(views, CPU)
    assert held(views) == 0 and len(away.held) == 1
    away.back()
    assert all(torch.equal(view, value) for view, value in zip(views, values, strict=True))
    views[1].fill_(-1.0)
    assert base[2:6].eq(-1.0).all() and views[2][2, 0] == -1.0


def test_weights_of_a_mapped_file_go_too(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0), "b": torch.ones(3)}, tmp_path / "w.safetensors")
    mapped = torch.from_file(str(tmp_path / "w.safetensors"), shared=False, size=16, dtype=torch.uint8)
    loaded = torch.nn.Parameter(load_file(tmp_path / "w.safetensors")["a"])
    view = mapped[2:]
    values = [t.detach().clone() for t in (mapped, view, loaded)]
    assert not mapped.untyped_storage().resizable()
    away = Away.move([mapped, view, loaded], CPU)
    assert held([mapped, view, loaded]) == 0
    away.back()
    assert all(torch.equal(t, value) for t, value in zip((mapped, view, loaded), values, strict=True))
    assert view.untyped_storage()._cdata == mapped.untyped_storage()._cdata


def test_a_tensor_on_another_device_stays_there() -> None:
    away = Away.move([torch.empty(0), torch.empty(3, device="meta")], CPU)
    away.back()
    assert [storage.device for storage, _ in away.held] == [CPU]


def test_shards_go_and_come_back(tmp_path: Path) -> None:
    """FSDP2 keeps each shard as a view of memory of its own: that memory goes too, and training continues."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        ends: list[list[Tensor]] = []
        for away in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            for part in (*model, model):
                fully_shard(part)
            for _ in range(2):
                model(torch.ones(3, 8)).sum().backward()
                tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
                if away:
                    moved = Away.move(tensors, CPU)
                    assert held([t.to_local() for t in tensors]) == 0  # pyright: ignore
                    moved.back()
            ends.append([p.grad.full_tensor() for p in model.parameters()])  # pyright: ignore
        assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True)) and any(bool(t.any()) for t in ends[0])
    finally:
        dist.destroy_process_group()
