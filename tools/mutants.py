"""Break the algorithms on purpose, one small change at a time, and count the changes that no test notices.

    python tools/mutants.py [--workers 2]

mutmut writes the changed functions ("mutants") of strop/algos and strop/data/packing.py, imports everything once, forks
for each mutant and runs the tests that reach its function up to the first that fails; `[tool.mutmut]` in pyproject.toml
says which. Verdicts stay in mutants/, by the hash of the function: a call that was stopped goes on where it was, and a
later one tests what is new. When a test changed, the survivors are tried again. Delete mutants/ to begin afresh.

It prints a table with a row for each file and writes mutants/survivors.txt: what each survivor changed, and why no test
can see it if tools/equivalent_mutants.toml says so. A survivor with a reason is a survivor in every figure. The last
line is the share that was killed; exit status 1 means less than 90 %.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

REQUIRED = 0.9
TESTS = Path("tests")
WORK = Path("mutants")
DIGEST = WORK / "tests.sha256"  # of the tests that the survivors survived
SURVIVORS = WORK / "survivors.txt"
EQUIVALENT = Path("tools/equivalent_mutants.toml")
KILLED = {"killed", "timeout", "segfault", "caught by type check"}


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str  # mutmut's, such as strop.algos.kl.x__k3__mutmut_2
    verdict: str

    @property
    def killed(self) -> bool:
        return self.verdict in KILLED

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def function(self) -> str:
        """As the source calls it: strop.algos.kl._k3, strop.algos.losses.SAPO.surrogate."""
        mangled = self.name.rpartition(".")[2].rpartition("__mutmut_")[0]
        return f"{self.module}.{'.'.join(mangled.split('ǁ')[1:]) or mangled.removeprefix('x_')}"


def parse(lines: Iterable[str]) -> list[Mutant]:
    """The output of `mutmut results`: a name, a colon and a verdict on each line."""
    pairs = (line.strip().rpartition(": ") for line in lines if "__mutmut_" in line)
    return [Mutant(name, verdict) for name, _, verdict in pairs]


def changed_lines(diff: str) -> str:
    """What a unified diff puts in, on one line; what it takes out when it puts in nothing, with a minus in front."""
    lines = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    put_in = [line[1:].strip() for line in lines if line[0] == "+"]
    return " ".join(put_in) if put_in else "- " + " ".join(line[1:].strip() for line in lines)


def reasons(text: str) -> dict[tuple[str, str], str]:
    """(function, changed lines) -> why it changes nothing. In the file: reason -> function -> lines."""
    return {
        (function, line): reason
        for reason, functions in tomllib.loads(text).items()
        for function, lines in functions.items()
        for line in lines
    }


def table(mutants: list[Mutant], explained: set[str]) -> list[str]:
    """A row for each file: mutants, killed, survivors with a reason and without one."""
    rows = [f"{'file':<40}{'mutants':>8}{'killed':>8}{'share':>8}{'explained':>11}{'to look at':>12}"]
    modules = [*sorted({m.module for m in mutants}), ""]
    for module in modules:
        here = [m for m in mutants if module in ("", m.module)]
        killed = sum(m.killed for m in here)
        known = sum(m.name in explained for m in here)
        rows.append(
            f"{module.replace('.', '/') + '.py' if module else 'all':<40}{len(here):>8}{killed:>8}"
            f"{killed / max(len(here), 1):>8.1%}{known:>11}{len(here) - killed - known:>12}"
        )
    return rows


def mutmut(*arguments: str, quiet: bool = False) -> str:
    """Run mutmut in this environment; what it printed, if `quiet`. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "mutmut", *arguments]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE if quiet else None).stdout or ""


def results() -> list[Mutant]:
    return parse(mutmut("results", "--all", "true", quiet=True).splitlines())


def tests_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(TESTS.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run(workers: int) -> list[Mutant]:
    """Every mutant with a verdict: new ones tried once, survivors again when a test changed since."""
    digest = tests_digest()
    before = DIGEST.read_text() if DIGEST.exists() else digest
    mutmut("run", "--max-children", str(workers))
    mutants = results()
    survivors = [m.name for m in mutants if not m.killed]
    if digest != before and survivors:
        mutmut("run", "--max-children", str(workers), *survivors)
        mutants = results()
    DIGEST.write_text(digest)
    return mutants


def explain(mutants: list[Mutant]) -> tuple[set[str], list[str]]:
    """Write SURVIVORS. Returns the survivors that have a reason, and the reasons that have no survivor."""
    known = reasons(EQUIVALENT.read_text())
    explained: set[str] = set()
    used: set[tuple[str, str]] = set()
    with SURVIVORS.open("w") as out:
        for mutant in mutants:
            if mutant.killed:
                continue
            diff = mutmut("show", mutant.name, quiet=True)
            key = (mutant.function, changed_lines(diff))
            if key in known:
                explained.add(mutant.name)
                used.add(key)
            out.write(f"{mutant.name}: {mutant.verdict}\n{known.get(key, 'no reason is known')}\n{diff}\n")
    return explained, [f"{function}: {line}" for function, line in sorted(known.keys() - used)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the small faults in the algorithms that no test notices.")
    parser.add_argument("--workers", type=int, default=2, help="processes at once (2)")
    mutants = run(parser.parse_args().workers)
    explained, stale = explain(mutants)
    print("\n".join(table(mutants, explained)))
    for verdict, count in sorted(Counter(m.verdict for m in mutants).items()):
        print(f"{verdict}: {count}")
    for entry in stale:
        print(f"{EQUIVALENT} has a reason for what is no survivor: {entry}")
    share = sum(m.killed for m in mutants) / max(len(mutants), 1)
    print(f"survivors are in {SURVIVORS}")
    print(f"killed={share:.4f}")
    return 0 if share >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
