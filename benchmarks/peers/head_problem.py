"""The problem of benchmarks/head_memory.py, and how one pass over it is measured. Needs torch and nothing else.

T tokens, a head of V words by D channels, and PPO's clipped loss with an entropy bonus: forward and backward. Hidden
states, weights and both gradients exist before, as in any but the first micro-batch of a step; what a pass needs beside
them is its memory. Peaks are the kernel's own high-water mark of the process, reset before the pass.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

Policy = tuple[Tensor, Tensor]  # logprobs [T] and entropies [T], live
CLIP, BONUS = 0.2, 0.01


@dataclass(frozen=True)
class Problem:
    hidden: Tensor  # [T, D], a leaf whose gradient exists
    weight: Tensor  # [V, D], likewise
    targets: Tensor
    advantages: Tensor
    old_logprobs: Tensor

    def loss(self, rows: Tensor | slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """The summed loss of some rows, of a mean over all."""
        ratio = (logprobs.float() - self.old_logprobs[rows]).exp()
        advantages = self.advantages[rows]
        clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
        return (clipped - BONUS * entropy.float()).sum() / len(self.targets)


def make(tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    weight = torch.empty(vocabulary, hidden, dtype=dtype).normal_(std=0.02).requires_grad_()
    for leaf in (states, weight):
        leaf.grad = torch.empty_like(leaf).fill_(0.0)  # written, so that its memory is there
    old = torch.full((tokens,), -12.1) + 0.1 * torch.randn(tokens)
    return Problem(states, weight, torch.randint(0, vocabulary, (tokens,)), torch.randn(tokens), old)


def memory_mib(field: str) -> float:
    """Of this process: `VmRSS` is now, `VmHWM` the most since it was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark reads memory on Linux only")


def by_autograd(forward: Callable[[Problem], Policy]) -> Callable[[Problem], Tensor]:
    """A whole pass from a forward pass. Returns the loss."""

    def run(problem: Problem) -> Tensor:
        loss = problem.loss(slice(None), *forward(problem))
        loss.backward()
        return loss

    return run


def measure(forms: dict[str, Callable[[Problem], Tensor]]) -> None:
    """Read the command line, run one form once (after a small one, which loads what must be loaded), and print RUN."""
    parser = argparse.ArgumentParser()
    parser.add_argument("form", choices=forms)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    for size in ("tokens", "hidden", "vocabulary"):
        parser.add_argument(f"--{size}", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[arguments.dtype]
    run = forms[arguments.form]
    run(make(16, arguments.hidden, 512, dtype))
    problem = make(arguments.tokens, arguments.hidden, arguments.vocabulary, dtype)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    before, start = memory_mib("VmRSS"), time.process_time()
    loss = run(problem)
    cpu_s, peak = time.process_time() - start, memory_mib("VmHWM") - before
    assert problem.hidden.grad is not None and problem.weight.grad is not None
    found = {
        "cpu_s": cpu_s,
        "peak_mib": peak,
        "loss": loss.item(),
        "hidden_grad": problem.hidden.grad.float().norm().item(),
        "weight_grad": problem.weight.grad.float().norm().item(),
    }
    print("RUN", json.dumps(found), flush=True)
