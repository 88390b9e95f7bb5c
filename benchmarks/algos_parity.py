"""strop's algorithms beside verl's and TRL's own functions, on random batches:

    python -m benchmarks.algos_parity [--verl-python PATH] [--trl-python PATH] [--batches 3]

Each library runs in an environment of its own (benchmarks/peers/verl_algos.py, trl_algos.py) and says what its
functions give, in float64: values, and for losses the gradient by the logprobs. A batch has twelve replies of up to
nine tokens, with tool tokens inside, one reply of nothing but a tool's, and groups of four, four, three and one.

For each function one line: `equal`; or `documented`, and what differs, where the two definitions differ on purpose:
then the numbers must differ, and be equal as soon as that difference is put into strop's; or `DIFFERENT`. The last line
is the share of functions that are equal or documented; exit status 1 if that is not all of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.parity_batch import Case, draw
from benchmarks.parity_trl import trl_cases
from benchmarks.parity_verl import verl_cases

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 2e-6  # of the largest number; some of verl's functions compute in float32


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all batches together say about one function."""

    name: str
    equal: bool
    documented: bool
    difference: str

    def __str__(self) -> str:
        word = "equal" if self.equal else "documented" if self.documented else "DIFFERENT"
        return f"{self.name:<50}{word}{': ' + self.difference if self.difference else ''}"


def close(ours: NDArray[np.float64] | float, theirs: NDArray[np.float64] | float) -> bool:
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    size = max(float(np.abs(b).max(initial=0.0)), 1.0)
    return a.shape == b.shape and bool(np.isfinite(b).all()) and bool((np.abs(a - b) <= TOLERANCE * size).all())


def judge(name: str, cases: list[Case], theirs: list[dict[str, Any]]) -> Verdict:
    """Equal on every batch; or, with a difference that is named, unlike on one and equal on all once it is put in."""
    plain: list[bool] = []
    explained: list[bool] = []
    for case, found in zip(cases, theirs, strict=True):
        value = np.where(case.counted, np.asarray(found["value"]), 0.0)
        plain.append(close(np.where(case.counted, case.value, 0.0), value))
        explained.append(close(np.where(case.counted, case.explained_value, 0.0), value))
        if case.gradient is not None:
            plain[-1] &= close(case.gradient, found["gradient"])
        if case.explained_gradient is not None:
            explained[-1] &= close(case.explained_gradient, found["gradient"])
    differs = bool(cases[0].difference)
    return Verdict(
        name=name,
        equal=all(plain) and not differs,
        documented=differs and all(explained) and not all(plain),
        difference=cases[0].difference or cases[0].note,
    )


def ask(python: Path, module: str, batches: Path) -> list[dict[str, Any]]:
    """What a library's functions give on every batch. Raises CalledProcessError when its side fails."""
    results = batches.with_suffix(".results.json")
    subprocess.run([str(python), "-m", module, str(batches), str(results)], cwd=ROOT, check=True)
    return json.loads(results.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare strop's algorithms with verl's and TRL's own functions.")
    parser.add_argument("--verl-python", type=Path, help="a Python with verl==0.9.1")
    parser.add_argument("--trl-python", type=Path, help="a Python with trl==1.16.0")
    parser.add_argument("--batches", type=int, default=3, help="random batches (3)")
    arguments = parser.parse_args()
    batches = [draw(seed) for seed in range(arguments.batches)]
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batches.json"
        path.write_text(json.dumps([batch.as_json() for batch in batches]))
        for python, module, make in (
            (arguments.verl_python, "benchmarks.peers.verl_algos", verl_cases),
            (arguments.trl_python, "benchmarks.peers.trl_algos", trl_cases),
        ):
            if python is None:
                continue
            theirs = ask(python, module, path)
            ours = [make(batch) for batch in batches]
            missing = ours[0].keys() ^ theirs[0].keys()
            if missing:
                raise SystemExit(f"only one side has these functions: {sorted(missing)}")
            print(f"\n{module.rpartition('.')[2].removesuffix('_algos')}")
            for name in ours[0]:
                verdicts.append(judge(name, [cases[name] for cases in ours], [found[name] for found in theirs]))
                print(verdicts[-1], flush=True)
    if not verdicts:
        raise SystemExit("nothing to compare with: give --verl-python or --trl-python")
    good = sum(v.equal or v.documented for v in verdicts)
    print(f"\nequal {sum(v.equal for v in verdicts)}, documented {sum(v.documented for v in verdicts)}")
    print(f"ratio={good / len(verdicts):.4f} ({good} of {len(verdicts)} functions equal or documented)")
    return 0 if good == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
