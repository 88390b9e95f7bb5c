"""Run every short recipe on this machine, check that each one learned, and write what came of it.

    python tools/recipes.py [NAME ...] [--out FOLDER] [--write] [--list]

Each is one `strop train` of one thread. A run has learned when its last held-out accuracy exceeds its first by the
margin that stands here; if one has not, or fails, the others still run and the exit code is 1. `--write` puts the rows
between the markers in docs/results.md. All of them take about forty minutes of CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- recipes: begin -->", "<!-- recipes: end -->"
STEPS_OF_A_VARIANT = 200


@dataclass(frozen=True, kw_only=True)
class Short:
    """One run: a recipe, what goes over it, and what it must come to."""

    name: str
    recipe: str
    stage: str  # the loop whose first and last evaluation are compared
    margin: float  # how much its last number must exceed its first
    over: tuple[str, ...] = ()  # further arguments of `strop train`; {out} is the folder of all runs
    needs: tuple[str, ...] = ()  # runs whose exported model it takes


def variant(file: Path) -> Short:
    """A published variant of GRPO, laid over the scratch recipe, for fewer steps."""
    over = (str(file), f"grpo.steps={STEPS_OF_A_VARIANT}")
    return Short(name=f"grpo: {file.stem}", recipe="scratch.yaml", stage="grpo", margin=0.15, over=over)


RUNS = (
    Short(name="scratch", recipe="scratch.yaml", stage="grpo", margin=0.5),
    Short(name="dpo", recipe="dpo.yaml", stage="dpo", margin=0.1),
    Short(name="reward_model", recipe="reward_model.yaml", stage="reward_model", margin=0.3),
    Short(
        name="distill",
        recipe="distill.yaml",
        stage="distill",
        margin=0.5,
        over=("distill.teachers=[{model: {path: {out}/scratch/export}}]",),
        needs=("scratch",),
    ),
    Short(name="ppo", recipe="ppo.yaml", stage="ppo", margin=0.25),
    Short(name="moe", recipe="moe_grpo.yaml", stage="grpo", margin=0.05),
    Short(name="best_of_n", recipe="best_of_n.yaml", stage="best_of_n", margin=0.3),
    Short(
        name="async_grpo",
        recipe="scratch.yaml",
        stage="async_grpo",
        margin=0.15,
        over=(str(ROOT / "recipes" / "async.yaml"), f"async_grpo.steps={STEPS_OF_A_VARIANT}"),
    ),
    *map(variant, sorted((ROOT / "recipes" / "variants").glob("*.yaml"))),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to; `error` says what went wrong, and is empty for a run that learned."""

    short: Short
    before: float | None
    after: float | None
    steps: int
    cpu_s: float
    error: str

    def row(self) -> str:
        numbers = " | ".join("" if value is None else f"{value:.1%}" for value in (self.before, self.after))
        minutes, verdict = f"{self.cpu_s / 60:.1f}", self.error or "learned"
        return f"| {self.short.name} | `{self.short.recipe}` | {self.steps} | {numbers} | {minutes} | {verdict} |"


HEADER = """\
| run | recipe | steps | before | after | CPU minutes | |
|---|---|---|---|---|---|---|"""


def run(short: Short, out: Path) -> Result:
    """Train in a process of its own, and read what it recorded."""
    folder = out / short.name.replace(": ", "-")
    over = [argument.replace("{out}", str(out)) for argument in short.over]
    command = [sys.executable, "-c", "import sys; from strop.cli import main; sys.exit(main())", "train"]
    command += [str(ROOT / "recipes" / short.recipe), *over, f"run.folder={folder}", "run.live=false"]
    used = _cpu_of_children()
    out.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".log"), "wb") as log:
        code = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT
        ).returncode
    cpu_s = _cpu_of_children() - used
    seen = [row for row in _rows(folder / "evaluations.jsonl") if row["stage"] == short.stage]
    before, after = (
        (float(seen[0]["sampled_accuracy"]), float(seen[-1]["sampled_accuracy"])) if len(seen) > 1 else (None, None)
    )
    error = f"failed, see {folder.with_suffix('.log')}" if code else ""
    if not error and (before is None or after is None or after - before < short.margin):
        error = f"did not learn: it must gain {short.margin:.0%}"
    steps = int(seen[-1]["step"]) if seen else 0
    return Result(short=short, before=before, after=after, steps=steps, cpu_s=cpu_s, error=error)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def chosen(names: Sequence[str]) -> list[Short]:
    """The runs of these names and those that they need, in order; all without names. Exits for an unknown name."""
    by_name = {short.name: short for short in RUNS}
    if unknown := [name for name in names if name not in by_name]:
        sys.exit(f"there is no run {unknown[0]!r}; there are: {', '.join(by_name)}")
    wanted = set(names or by_name)
    wanted |= {needed for name in wanted for needed in by_name[name].needs}
    return [short for short in RUNS if short.name in wanted]


def write(results: Sequence[Result]) -> None:
    """Put these rows between the markers of the results page, in the order of RUNS; other runs keep theirs."""
    head, rest = RESULTS.read_text("utf-8").split(BEGIN)
    table, tail = rest.split(END)
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    rows |= {result.short.name: result.row() for result in results}
    lines = [HEADER, *(rows[short.name] for short in RUNS if short.name in rows)]
    RESULTS.write_text("\n".join([f"{head}{BEGIN}", *lines, f"{END}{tail}"]), "utf-8")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python tools/recipes.py", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs, as --list names them; all by default")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "recipes", help="where the run folders go")
    parser.add_argument("--write", action="store_true", help="write the table into docs/results.md")
    parser.add_argument("--list", action="store_true", help="name the runs, and run nothing")
    options = parser.parse_args(arguments)
    shorts = chosen(options.names)
    if options.list:
        print(*(short.name for short in shorts), sep="\n")
        return 0
    print(HEADER, flush=True)
    results: list[Result] = []
    for short in shorts:
        results.append(run(short, options.out.absolute()))
        print(results[-1].row(), flush=True)
    if options.write:
        write(results)
    return 1 if any(result.error for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
