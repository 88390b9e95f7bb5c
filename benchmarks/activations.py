"""Where an engine's activations wait: python -m benchmarks.activations

One forward_backward of an 8-layer model on one full pack, float32, one thread, plain torch kernels, with activations
kept on the device, computed again (checkpointing), waiting in host memory (offload), and both. The four take turns.

device MiB  the peak of all storages that the step makes, gradients included, host buffers left out: what a GPU would
            hold beside the weights. A CPU is its own host, so there offload saves nothing and only costs its copies.
host MiB    the peak of the host buffers in use.
seconds     of CPU time of this process, the best round; they include what another program on the core costs.

Gradients are compared to the bit. The last line is ratio= the device peak of keeping everything over that of both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch loads

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from strop.algos.losses import CrossEntropy
from strop.config.activations import ActivationsConfig
from strop.config.model import Kernels, ModelConfig
from strop.config.recipe import EngineConfig
from strop.data.packing import Batch
from strop.engines.fsdp2.engine import Fsdp2Engine
from strop.engines.fsdp2.host import HostBuffers, storage_key
from strop.models.loading import load_model
from strop.types import Layout

MIB = 2**20
LAYERS, VOCABULARY, LENGTH = 8, 512, 128
WAYS = {
    "none": ActivationsConfig(),
    "checkpointing": ActivationsConfig(checkpoint_every=1),
    "offload": ActivationsConfig(offload=True),
    "both": ActivationsConfig(checkpoint_every=1, offload=True),
}


class DevicePeak(TorchDispatchMode):
    """The peak of live storages that operations make in this context, those of `host` left out."""

    def __init__(self, host: HostBuffers | None) -> None:
        super().__init__()
        self._host = host
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._live[storage_key(storage)] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        buffers = 0 if self._host is None else self._host.in_use + self._host.idle
        self.peak = max(self.peak, sum(size for _, size in self._live.values()) - buffers)
        return out


@dataclass
class Measured:
    device: int = 0
    host: int = 0
    seconds: list[float] = field(default_factory=list[float])
    gradients: list[Tensor] = field(default_factory=list[Tensor])


def config_of(hidden: int) -> ModelConfig:
    fresh = {
        "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": LAYERS,
        "num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64, "head_dim": 32,
        "max_position_embeddings": LENGTH,
    }  # fmt: skip
    return ModelConfig(fresh=fresh, kernels=Kernels.TORCH)


def pack(tokens: int) -> Batch[None]:
    tokens_T = torch.randint(3, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(0))
    mask_T = torch.ones(tokens, dtype=torch.bool)
    mask_T[LENGTH - 1 :: LENGTH] = False
    return Batch(
        tokens_T=tokens_T,
        targets_T=torch.where(mask_T, tokens_T.roll(-1), -1),
        mask_T=mask_T,
        weights_T=mask_T / mask_T.sum(),
        layout=Layout((LENGTH,) * (tokens // LENGTH)),
        inputs=None,
    )


def engine_of(way: ActivationsConfig, model: ModelConfig) -> Fsdp2Engine:
    return Fsdp2Engine(load_model(model, vocab_size=VOCABULARY, seed=0), EngineConfig(activations=way))


def step(engine: Fsdp2Engine, batch: Batch[None]) -> float:
    """CPU seconds of one forward_backward; what it leaves are the gradients of this step alone."""
    asyncio.run(engine.zero_grad())
    start = time.process_time()
    asyncio.run(engine.forward_backward([batch], CrossEntropy()))
    return time.process_time() - start


def memory(engine: Fsdp2Engine, batch: Batch[None]) -> Measured:
    """A step's peaks and gradients; counting costs time, so its seconds are not kept."""
    host = engine.activation_buffers
    with DevicePeak(host) as counted:
        step(engine, batch)
    grads = [parameter.grad.clone() for parameter in engine.model.module.parameters() if parameter.grad is not None]
    return Measured(counted.peak, 0 if host is None else host.peak, [], grads)


def rate() -> float:
    """This machine's matrix products in FLOP/s, in this run."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        torch.mm(a, b)
        best = min(best, time.process_time() - start)
    return 2 * 1024**3 / best


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the pack, a multiple of 128")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size, a multiple of 64")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way; the best counts")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    batch, model = pack(given.tokens), config_of(given.hidden)
    engines = {name: engine_of(way, model) for name, way in WAYS.items()}
    found = {name: memory(engine, batch) for name, engine in engines.items()}
    for _ in range(given.rounds):
        for name, engine in engines.items():
            found[name].seconds.append(step(engine, batch))
    parameters = sum(parameter.numel() for parameter in engines["none"].model.module.parameters())
    inputs = LAYERS * given.tokens * given.hidden * 4 / MIB
    print(
        f"{parameters / 1e6:.1f} M parameters in {LAYERS} layers, {given.tokens} tokens; gradients "
        f"{4 * parameters / MIB:.0f} MiB, the layers' inputs {inputs:.0f} MiB; the arithmetic alone "
        f"{6 * parameters * given.tokens / rate():.2f} s"
    )
    none = found["none"]
    for name, way in found.items():
        equal = all(torch.equal(a, b) for a, b in zip(none.gradients, way.gradients, strict=True))
        print(
            f"{name:14} device {way.device / MIB:7.1f} MiB ({none.device / way.device:5.2f}x less)   host "
            f"{way.host / MIB:7.1f} MiB   {min(way.seconds):6.2f} s ({min(way.seconds) / min(none.seconds):4.2f}x)   "
            f"gradients {'equal to the bit' if equal else 'DIFFER'}",
            flush=True,
        )
        if not equal:
            raise SystemExit(f"{name} changes the gradient")
    print(f"ratio={none.device / found['both'].device:.2f}")


if __name__ == "__main__":
    main()
