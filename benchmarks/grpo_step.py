"""One GRPO step of strop beside TRL's GRPOTrainer: python -m benchmarks.grpo_step --trl-python PATH

Both do the workloads of benchmarks/peers/common.py in float32 on one thread, each in a process and an environment of
its own, in turns, so that a busy machine slows both. What is compared is CPU seconds and peak resident memory; medians
over the rounds are printed, the last line holds the ratios. Beside them stands the floor: the arithmetic that no system
can leave out, at the matrix-product rate measured in the same run.

A side is a program, `python -m MODULE WORKLOAD --steps N --assets DIR`, run from the repository's root. For each step
it prints `STEP {json}` with rollout, learn and step in CPU seconds of its process, wall in seconds, and
completion_tokens; at the end `RESULT {json}` with peak_rss_mb and base_rss_mb (`report_step` and `report_result` in
common.py do it). The last step counts: those before it warm up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import common

ROOT = Path(__file__).resolve().parent.parent
MODULES = {"trl": "benchmarks.peers.trl_grpo", "strop": "benchmarks.strop_grpo_side"}

# The best of several products of a packed batch with the widest matrix of the model, as a process of its own.
GEMM = """
import sys, time, torch
torch.set_num_threads(1)
rows, inner, columns = map(int, sys.argv[1:])
a, b = torch.randn(rows, inner), torch.randn(columns, inner).t()
out, best = torch.empty(rows, columns), float("inf")
for _ in range(12):
    start = time.process_time()
    for _ in range(4):
        torch.mm(a, b, out=out)
    best = min(best, (time.process_time() - start) / 4)
print(2 * rows * inner * columns / best)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The last step of one run of one side: CPU seconds, and MiB of the whole run."""

    rollout: float
    learn: float
    step: float
    wall: float
    completion_tokens: int
    peak_rss_mb: int
    base_rss_mb: int


def single_threaded() -> dict[str, str]:
    """The environment of every side: one thread, and the repository's root to import from."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def gemm_rate(python: str, workload: common.Workload) -> float:
    """Floating-point operations per CPU second of one thread, at this workload's matrix shapes."""
    model = common.MODELS[workload.model]
    shape = [str(size) for size in (2048, model.hidden, model.feed_forward)]
    command = [python, "-c", GEMM, *shape]
    return float(subprocess.run(command, env=single_threaded(), check=True, capture_output=True, text=True).stdout)


def parse(output: str) -> Measured:
    """Read a side's output. Raises ValueError when it has no step or no result."""
    steps = [json.loads(line[5:]) for line in output.splitlines() if line.startswith("STEP ")]
    results = [json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT ")]
    if not steps or len(results) != 1:
        raise ValueError(f"{len(steps)} STEP lines and {len(results)} RESULT lines in:\n{output[-2000:]}")
    last, result = steps[-1], results[0]
    return Measured(
        rollout=last["rollout"],
        learn=last["learn"],
        step=last["step"],
        wall=last["wall"],
        completion_tokens=last["completion_tokens"],
        peak_rss_mb=result["peak_rss_mb"],
        base_rss_mb=result["base_rss_mb"],
    )


def run_side(python: str, module: str, workload: str, steps: int, assets: Path) -> Measured:
    command = [python, "-m", module, workload, "--steps", str(steps), "--assets", str(assets)]
    done = subprocess.run(command, cwd=ROOT, env=single_threaded(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr[-4000:]}")
    return parse(done.stdout)


def middle(runs: list[Measured]) -> Measured:
    """The median of every figure by itself."""

    def median(values: list[float]) -> float:
        return statistics.median(values)

    return Measured(
        rollout=median([run.rollout for run in runs]),
        learn=median([run.learn for run in runs]),
        step=median([run.step for run in runs]),
        wall=median([run.wall for run in runs]),
        completion_tokens=round(median([run.completion_tokens for run in runs])),
        peak_rss_mb=round(median([run.peak_rss_mb for run in runs])),
        base_rss_mb=round(median([run.base_rss_mb for run in runs])),
    )


def print_table(sides: dict[str, dict[str, list[Measured]]], rates: dict[str, float]) -> None:
    """One block a workload: each side's medians, the spread of its steps, and the floor."""
    times, sizes = f"{'rollout':>9}{'learn':>9}{'step':>9}{'(min-max)':>16}{'wall':>9}", "   tokens  peak MB  base MB"
    print(" " * 14 + times + sizes)
    for workload, by_side in sides.items():
        tokens = 0
        for side, runs in by_side.items():
            m, steps = middle(runs), sorted(run.step for run in runs)
            tokens = m.completion_tokens
            spread = f"({steps[0]:.1f}-{steps[-1]:.1f})"
            print(
                f"{workload + ' ' + side:>14}{m.rollout:9.2f}{m.learn:9.2f}{m.step:9.2f}{spread:>16}{m.wall:9.2f}"
                f"{m.completion_tokens:9d}{m.peak_rss_mb:9d}{m.base_rss_mb:9d}"
            )
        flop = common.WORKLOADS[workload].floor_flop(tokens)
        rate = f"{flop / 1e12:.3f} TFLOP at {rates[workload] / 1e9:.0f} GFLOP/s"
        print(f"{workload + ' floor':>14}{'':>18}{flop / rates[workload]:9.2f}  {rate}")


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU seconds and memory of one GRPO step, strop and TRL in turns.")
    parser.add_argument("--trl-python", required=True, help="python of an environment with trl==1.16.0")
    parser.add_argument("--strop-python", default=sys.executable, help="default: this one")
    parser.add_argument("--workloads", default="ABC", help="which, for example AB")
    parser.add_argument("--sides", nargs="+", choices=sorted(MODULES), default=["trl", "strop"])
    parser.add_argument("--rounds", type=int, default=3, help="medians are over these")
    parser.add_argument("--steps", type=int, default=2, help="steps in each run; the last counts")
    parser.add_argument("--assets", type=Path, help="folder for models and tokenizers; default: a temporary one")
    arguments = parser.parse_args()
    pythons = {"trl": arguments.trl_python, "strop": arguments.strop_python}
    with tempfile.TemporaryDirectory() as temporary:
        assets = arguments.assets or Path(temporary)
        build = [arguments.strop_python, "-m", "benchmarks.peers.common", "--assets", str(assets)]
        subprocess.run(build, cwd=ROOT, env=single_threaded(), check=True, capture_output=True)
        rates = dict.fromkeys(arguments.workloads, 0.0)
        sides: dict[str, dict[str, list[Measured]]] = {
            name: {side: [] for side in arguments.sides} for name in arguments.workloads
        }
        for round_number in range(1, arguments.rounds + 1):
            for name in arguments.workloads:
                rates[name] = max(rates[name], gemm_rate(arguments.strop_python, common.WORKLOADS[name]))
                for side in arguments.sides:
                    measured = run_side(pythons[side], MODULES[side], name, arguments.steps, assets)
                    sides[name][side].append(measured)
                    seconds = f"{measured.step:.2f} CPU-s (load {os.getloadavg()[0]:.1f})"
                    print(f"round {round_number} {name} {side}: {seconds}", flush=True)
    print_table(sides, rates)
    if len(arguments.sides) == 2:
        both = {name: (middle(by_side["trl"]), middle(by_side["strop"])) for name, by_side in sides.items()}
        speed = " ".join(f"{name}:{trl.step / strop.step:.2f}" for name, (trl, strop) in both.items())
        memory = " ".join(f"{name}:{strop.peak_rss_mb / trl.peak_rss_mb:.2f}" for name, (trl, strop) in both.items())
        print(f"ratio={speed} memory={memory}")


if __name__ == "__main__":
    main()
