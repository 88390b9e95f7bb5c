"""Each kernel of strop.ops, native beside plain torch, on one thread: python -m benchmarks.kernels

float32, CPU seconds of this process, the best of several rounds in which the two forms take turns. Products are given
in GFLOP/s of useful arithmetic (a query head meeting a key of C channels is 4 C; the backward pass 2.5 times that; what
causality hides counts as nothing), passes over memory in GB/s of tensors read and written once. Beside them stand the
limits of this machine, measured in the same run: torch's matrix product and its copy and sum of a large tensor.

The last line is ratio= the smallest speed-up of native over torch among all rows.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch loads

import torch
from torch import Tensor

from strop.ops import fused
from strop.ops.attention import packed_attention
from strop.ops.paged import PAGE, PagedKV
from strop.ops.select import Impl, native_status
from strop.types import Layout

TOKENS = 2048
EPS = 1e-6
HEADS = ((8, 4, 32), (8, 4, 64), (9, 3, 64))  # query heads, key-value heads, channels; the last is SmolLM2's
WIDTHS = ((256, 768), (512, 1536), (576, 1536))  # hidden size and inner size that go with them
ROWS, LEAST_CONTEXT, MOST_CONTEXT = 256, 40, 350
FORMS = (Impl.TORCH, Impl.NATIVE)
Pass = Callable[[Impl], object]


@dataclass
class Report:
    """Prints rows as they come and keeps the speed-ups."""

    rounds: int
    ratios: list[float] = field(default_factory=list)

    def row(self, name: str, work: float, unit: str, run: Pass) -> None:
        """Time both forms of one kernel; `work` is in units of 1e9, so that work / seconds reads as `unit`."""
        best = {impl: float("inf") for impl in FORMS}
        for impl in FORMS:
            run(impl)  # allocate, and fill the caches
        for _ in range(self.rounds):
            for impl in FORMS:
                best[impl] = min(best[impl], seconds(lambda impl=impl: run(impl)))
        native, plain = best[Impl.NATIVE], best[Impl.TORCH]
        self.ratios.append(plain / native)
        print(
            f"{name:34} native {native * 1e3:8.3f} ms {work / native:6.1f} {unit:8}"
            f"torch {plain * 1e3:8.3f} ms {work / plain:6.1f} {unit:8} x{plain / native:.2f}",
            flush=True,
        )


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def fastest(rounds: int, run: Callable[[], object]) -> float:
    run()
    return min(seconds(run) for _ in range(rounds))


def limits(rounds: int) -> None:
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    large = torch.randn(48 << 20)
    copy = torch.empty_like(large)
    print(f"matrix product  {2 * 1024**3 / fastest(rounds, lambda: a @ b) / 1e9:6.1f} GFLOP/s (1024 x 1024 x 1024)")
    print(
        f"copy            {2 * large.nbytes / fastest(3, lambda: copy.copy_(large)) / 1e9:6.1f} GB/s, both ways counted"
    )
    print(f"sum             {large.nbytes / fastest(3, large.sum) / 1e9:6.1f} GB/s\n", flush=True)


def both_ways(
    report: Report, name: str, op: Callable[..., object], inputs: Sequence[Tensor], gigabytes: tuple[float, float]
) -> None:
    """A row for the forward pass alone, and one for forward and backward together."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    forward, backward = gigabytes

    def learn(impl: Impl) -> None:
        out = op(*leaves, impl)
        outs = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]
        torch.autograd.grad(outs, leaves, [x.detach() for x in outs])

    report.row(f"{name} forward", forward, "GB/s", lambda impl: op(*inputs, impl))
    report.row(f"{name} forward+backward", forward + backward, "GB/s", learn)


def passes(report: Report, hidden: int, inner: int, heads: tuple[int, int, int]) -> None:
    """Norms, activation and rotary embedding at one model's sizes."""
    H, J, C = heads
    x, r, w = torch.randn(TOKENS, hidden), torch.randn(TOKENS, hidden), torch.randn(hidden)
    size = x.nbytes / 1e9
    both_ways(report, f"rms_norm {hidden}", lambda x, w, i: fused.rms_norm(x, w, EPS, i), [x, w], (2 * size, 3 * size))
    both_ways(
        report,
        f"add_rms_norm {hidden}",
        lambda x, r, w, i: fused.add_rms_norm(x, r, w, EPS, i),
        [x, r, w],
        (4 * size, 4 * size),
    )
    gate, up = torch.randn(TOKENS, inner), torch.randn(TOKENS, inner)
    size = gate.nbytes / 1e9
    both_ways(report, f"swiglu {inner}", fused.swiglu, [gate, up], (3 * size, 5 * size))
    q, k, cos, sin = (torch.randn(TOKENS, *s) for s in ((H, C), (J, C), (C,), (C,)))
    size = (q.nbytes + k.nbytes) / 1e9
    both_ways(
        report, f"rope {H}+{J} x {C}", lambda q, k, i: fused.rope(q, k, cos, sin, i), [q, k], (2 * size, 2 * size)
    )
    both_ways(
        report,
        f"norm_rope {H}+{J} x {C}",
        lambda q, k, a, b, i: fused.norm_rope(q, k, a, b, eps=EPS, cos_TC=cos, sin_TC=sin, impl=i),
        [q, k, torch.randn(C), torch.randn(C)],
        (2 * size, 3 * size),
    )


def attention(report: Report, name: str, layout: Layout, heads: tuple[int, int, int]) -> None:
    H, J, C = heads
    q, k, v = (torch.randn(layout.num_tokens, n, C) for n in (H, J, J))
    pairs = int((layout.positions_T + 1).sum())
    flops = 4 * C * H * pairs / 1e9

    def op(q: Tensor, k: Tensor, v: Tensor, impl: Impl) -> Tensor:
        return packed_attention(q, k, v, layout, scale=C**-0.5, impl=impl)

    leaves = q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_()
    seed = torch.randn(layout.num_tokens, H, C)
    label = f"attention {H}/{J}/{C} {name}"
    report.row(f"{label} forward", flops, "GFLOP/s", lambda impl: op(q, k, v, impl))
    report.row(
        f"{label} fwd+bwd",
        3.5 * flops,
        "GFLOP/s",
        lambda impl: torch.autograd.grad(op(leaves[0], leaves[1], leaves[2], impl), leaves, seed),
    )


def decode(report: Report, heads: tuple[int, int, int], shared_pages: int) -> None:
    """One token for each of 256 requests; groups of 8 read the same first pages."""
    H, J, C = heads
    rng = random.Random(0)
    contexts = [rng.randint(LEAST_CONTEXT, MOST_CONTEXT) for _ in range(ROWS)]
    width = -(-MOST_CONTEXT // PAGE)
    tables_RB = torch.arange(ROWS * width, dtype=torch.int32).reshape(ROWS, width)
    tables_RB[:, :shared_pages] = (
        tables_RB[:, :shared_pages].reshape(ROWS // 8, 8, -1)[:, :1].repeat(1, 8, 1).flatten(0, 1)
    )
    row_T, context_T = torch.arange(ROWS), torch.tensor(contexts)
    q = torch.randn(ROWS, H, C)
    caches: dict[Impl, PagedKV] = {}
    for impl in FORMS:
        caches[impl] = PagedKV(
            num_layers=1,
            num_pages=ROWS * width,
            num_kv_heads=J,
            key_channels=C,
            value_channels=C,
            dtype=torch.float32,
            device=q.device,
            impl=impl,
        )
        keys = torch.randn(ROWS * width * PAGE, J, C)
        caches[impl].write(0, keys, keys, torch.arange(len(keys)))
    pages = {int(page) for row, n in enumerate(contexts) for page in tables_RB[row, : -(-n // PAGE)]}
    megabytes = len(pages) * PAGE * J * C * 8 / 1e6
    report.row(
        f"decode {H}/{J}/{C} shared {shared_pages}, {megabytes:.0f} MB",
        4 * C * H * sum(contexts) / 1e9,
        "GFLOP/s",
        lambda impl: caches[impl].attend(0, q, tables_RB, row_T, context_T, scale=C**-0.5),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each form; the best counts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ready, sentence = native_status()
    if not ready:
        raise SystemExit(sentence)
    print(sentence)
    limits(arguments.rounds)
    report = Report(arguments.rounds)
    for (hidden, inner), heads in zip(WIDTHS, HEADS, strict=True):
        passes(report, hidden, inner, heads)
    rng = random.Random(0)
    for heads in HEADS:
        texts: list[int] = []
        while sum(texts) < TOKENS:
            texts.append(rng.randint(64, 128))
        attention(report, "64-128", Layout(tuple(texts)), heads)
        for prefix in (40, 220):
            lengths = (prefix, *(rng.randint(60, 110) for _ in range(8))) * 2
            attention(report, f"{prefix}+8x85", Layout(lengths, (-1, *[0] * 8, -1, *[9] * 8)), heads)
    for heads in HEADS:
        for shared_pages in (0, 8):
            decode(report, heads, shared_pages)
    print(f"ratio={min(report.ratios):.2f}")


if __name__ == "__main__":
    main()
