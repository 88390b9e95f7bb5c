"""Peak memory and CPU time of the head, beside other systems' functions: python -m benchmarks.head_memory

Logprobs and entropies of T tokens under a vocabulary of V, PPO's clipped loss with an entropy bonus, and all gradients,
in float32 and bfloat16 on one thread. Each form runs in a process of its own, in turns; medians over the rounds. All
must agree on the loss and on the norms of both gradients. Memory is what a pass needs beside inputs and gradients.

Below each table stands the limit: the bytes of inputs, outputs and gradients, and the time of the three matrix products
that no form can leave out, at the best rate of products measured in the same run: of float32 ones, and of bfloat16 ones
where that is what goes in.

The last line is ratio= the peak of `plain` over that of strop's fastest form that needs at most a fifteenth of it
(the smaller of the two number formats), and that form's time over plain's (the larger).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.head_problem import BONUS

ROOT = Path(__file__).resolve().parents[1]
OURS, PEERS = ("plain", "chunked", "fused"), ("trl", "verl", "verl_fused", "liger")
ASKED = 15  # times less memory than plain
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # of losses and norms, relative to the chunked form's

# The best of several products at the shapes of a tile.
GEMM = """
import sys, time, torch
torch.set_num_threads(1)
dtype = getattr(torch, sys.argv[1])
a, b = torch.randn(512, 1024).to(dtype), torch.randn(2048, 1024).to(dtype).t()
out, best = torch.empty(512, 2048, dtype=dtype), float("inf")
for _ in range(12):
    start = time.process_time()
    for _ in range(4):
        torch.mm(a, b, out=out)
    best = min(best, (time.process_time() - start) / 4)
print(2 * 512 * 1024 * 2048 / best)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    tokens: int
    hidden: int
    vocabulary: int

    @property
    def flop(self) -> float:
        """Of the logits and of both gradients."""
        return 6.0 * self.tokens * self.hidden * self.vocabulary

    def resident_mib(self, dtype: str) -> float:
        """Hidden states, weight and their gradients; targets, logprobs and entropies."""
        numbers = 2 * (self.tokens + self.vocabulary) * self.hidden
        return (numbers * {"float32": 4, "bfloat16": 2}[dtype] + self.tokens * (8 + 4 + 4)) / 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    cpu_s: float
    peak_mib: float
    loss: float
    hidden_grad: float
    weight_grad: float


def run_form(python: str, form: str, dtype: str, size: Size) -> Measured:
    module = "benchmarks.strop_head_side" if form in OURS else "benchmarks.peers.head_peers"
    command = [python, "-m", module, form, "--dtype", dtype, "--tokens", str(size.tokens)]
    command += ["--hidden", str(size.hidden), "--vocabulary", str(size.vocabulary)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr[-4000:]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1].removeprefix("RUN ")))


def measure_rate(dtype: str) -> float:
    """FLOP/s of one thread, with such factors or wider ones."""
    rates = (
        float(subprocess.run([sys.executable, "-c", GEMM, each], check=True, capture_output=True, text=True).stdout)
        for each in dict.fromkeys(("float32", dtype))
    )
    return max(rates)


def check_agreement(found: dict[str, list[Measured]], dtype: str, size: Size) -> None:
    """Stop when a form computes something else. bfloat16 logits round the peers' numbers, not strop's. The loss is a
    small difference of larger terms, of which the entropy bonus is one: errors are measured by that."""
    right, bonus = found["chunked"][0], BONUS * math.log(size.vocabulary)
    for form, runs in found.items():
        for name in ("loss", "hidden_grad", "weight_grad"):
            one, other = vars_of(runs[0])[name], vars_of(right)[name]
            if abs(one - other) > TOLERANCE[dtype] * (bonus if name == "loss" else abs(other)):
                raise SystemExit(f"{dtype} {form}: {name} is {one}, and {other} in the chunked form")


def vars_of(run: Measured) -> dict[str, float]:
    return {"loss": run.loss, "hidden_grad": run.hidden_grad, "weight_grad": run.weight_grad}


def report(found: dict[str, list[Measured]], dtype: str, size: Size, flop_per_s: float) -> tuple[float, float]:
    """Print one table. Returns (times less memory than plain, time over plain's) of strop's best form."""
    time = {form: statistics.median(r.cpu_s for r in runs) for form, runs in found.items()}
    peak = {form: statistics.median(r.peak_mib for r in runs) for form, runs in found.items()}
    print(f"\n{dtype:>12}{'CPU s':>9}{'peak MiB':>11}{'time / plain':>14}{'plain / peak':>14}{'GFLOP/s':>9}")
    for form in found:
        print(
            f"{form:>12}{time[form]:9.2f}{peak[form]:11.0f}{time[form] / time['plain']:14.2f}"
            f"{peak['plain'] / peak[form]:14.1f}{size.flop / time[form] / 1e9:9.0f}"
        )
    least = size.flop / flop_per_s
    print(
        f"{'limit':>12}{least:9.2f}{0:11.0f}{least / time['plain']:14.2f}{'':>14}{flop_per_s / 1e9:9.0f}  "
        f"beside {size.resident_mib(dtype):,.0f} MiB of inputs, outputs and gradients"
    )
    own = [form for form in OURS[1:] if peak["plain"] >= ASKED * peak[form]] or [min(OURS[1:], key=peak.__getitem__)]
    best = min(own, key=time.__getitem__)
    for form in (form for form in found if form not in OURS):
        print(
            f"{best} beside {form}: {peak[form] / peak[best]:.1f}x less memory, {time[form] / time[best]:.2f}x faster"
        )
    return peak["plain"] / peak[best], time[best] / time["plain"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="python of an environment with trl; without it TRL is left out")
    parser.add_argument("--verl-python", help="python of an environment with verl; without it verl is left out")
    parser.add_argument("--liger-python", help="python of an environment with liger-kernel; likewise")
    parser.add_argument("--dtypes", nargs="+", choices=TOLERANCE, default=list(TOLERANCE))
    parser.add_argument("--rounds", type=int, default=1, help="medians are over these")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    arguments = parser.parse_args()
    size = Size(tokens=arguments.tokens, hidden=arguments.hidden, vocabulary=arguments.vocabulary)
    named = {"trl": arguments.trl_python, "verl": arguments.verl_python, "verl_fused": arguments.verl_python}
    pythons = dict.fromkeys(OURS, sys.executable) | {**named, "liger": arguments.liger_python}
    forms = [form for form in (*OURS, *PEERS) if pythons[form]]
    best: list[tuple[float, float]] = []
    for dtype in arguments.dtypes:
        found: dict[str, list[Measured]] = {form: [] for form in forms}
        for number in range(1, arguments.rounds + 1):
            for form in forms:
                run = run_form(pythons[form], form, dtype, size)
                found[form].append(run)
                print(
                    f"round {number} {dtype} {form}: {run.cpu_s:.2f} CPU s, {run.peak_mib:.0f} MiB, "
                    f"loss {run.loss:.6f} (load {os.getloadavg()[0]:.1f})",
                    flush=True,
                )
        check_agreement(found, dtype, size)
        best.append(report(found, dtype, size, measure_rate(dtype)))
    print(f"\nratio={min(less for less, _ in best):.1f} time={max(time for _, time in best):.2f}")


if __name__ == "__main__":
    main()
