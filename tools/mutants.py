"""Break the algorithms on purpose, one small change at a time, and count the changes that no test notices.

    python tools/mutants.py [--head] [--workers 2]

mutmut writes the changed functions ("mutants") of strop/algos and strop/data/packing.py, or with --head of the output
head in strop/ops; imports everything once, forks for each mutant and runs the tests that reach its function up to the
first that fails; `[tool.mutmut]` and `[tool.mutmut-head]` in pyproject.toml say which. Verdicts stay in mutants/ (with
--head in mutants/head/), by the hash of the function: a call that was stopped goes on where it was, and a later one
tests what is new. When a test changed, the survivors are tried again. Delete the folder to begin afresh.

It prints a table with a row for each file and writes survivors.txt: what each survivor changed, and why no test can see
it if tools/equivalent_mutants.toml says so. A survivor with a reason is a survivor in every figure. The last line is
the share that was killed; exit status 1 means less than 90 %, or 95 % of the head.
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

TESTS = Path("tests")
EQUIVALENT = Path("tools/equivalent_mutants.toml")
KILLED = {"killed", "timeout", "segfault", "caught by type check"}


@dataclass(frozen=True, slots=True)
class Suite:
    """What is mutated, and tests for it: a table of pyproject.toml, as mutmut finds it in `folder`."""

    table: str
    folder: Path
    required: float  # share of mutants that are killed

    @property
    def digest(self) -> Path:
        """Of the tests that the survivors survived."""
        return self.folder / "mutants" / "tests.sha256"

    @property
    def survivors(self) -> Path:
        return self.folder / "mutants" / "survivors.txt"

    def lay_out(self) -> None:
        """mutmut reads one table of the folder where it runs: another one needs another folder, of links."""
        if self.folder == Path():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("strop", "tests", "tools", "recipes"):
            if not (self.folder / name).exists():
                (self.folder / name).symlink_to(Path(name).resolve())
        text = Path("pyproject.toml").read_text()
        text = text.replace("[tool.mutmut]", "[tool.mutmut-others]")
        text = text.replace(f"[tool.{self.table}]", "[tool.mutmut]")
        (self.folder / "pyproject.toml").write_text(text)

    def mutmut(self, *arguments: str, quiet: bool = False) -> str:
        """Run mutmut in this environment; what it printed, if `quiet`. Raises CalledProcessError when it fails."""
        command = [sys.executable, "-m", "mutmut", *arguments]
        stdout = subprocess.PIPE if quiet else None
        return subprocess.run(command, check=True, text=True, stdout=stdout, cwd=self.folder).stdout or ""

    def results(self) -> list[Mutant]:
        return parse(self.mutmut("results", "--all", "true", quiet=True).splitlines())


ALGORITHMS = Suite("mutmut", Path(), 0.9)
HEAD = Suite("mutmut-head", Path("mutants/head"), 0.95)


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


def tests_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(TESTS.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run(suite: Suite, workers: int) -> list[Mutant]:
    """Every mutant with a verdict: new ones tried once, survivors again when a test changed since."""
    digest = tests_digest()
    before = suite.digest.read_text() if suite.digest.exists() else digest
    suite.mutmut("run", "--max-children", str(workers))
    mutants = suite.results()
    survivors = [m.name for m in mutants if not m.killed]
    if digest != before and survivors:
        suite.mutmut("run", "--max-children", str(workers), *survivors)
        mutants = suite.results()
    suite.digest.write_text(digest)
    return mutants


def explain(suite: Suite, mutants: list[Mutant]) -> tuple[set[str], list[str]]:
    """Write `suite.survivors`. Returns the survivors that have a reason, and the reasons that have no survivor."""
    modules = tuple({f"{mutant.module}." for mutant in mutants})
    known = {key: reason for key, reason in reasons(EQUIVALENT.read_text()).items() if key[0].startswith(modules)}
    explained: set[str] = set()
    used: set[tuple[str, str]] = set()
    with suite.survivors.open("w") as out:
        for mutant in mutants:
            if mutant.killed:
                continue
            diff = suite.mutmut("show", mutant.name, quiet=True)
            key = (mutant.function, changed_lines(diff))
            if key in known:
                explained.add(mutant.name)
                used.add(key)
            out.write(f"{mutant.name}: {mutant.verdict}\n{known.get(key, 'no reason is known')}\n{diff}\n")
    return explained, [f"{function}: {line}" for function, line in sorted(known.keys() - used)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the small faults that no test notices.")
    parser.add_argument("--head", action="store_true", help="in the output head, instead of in the algorithms")
    parser.add_argument("--workers", type=int, default=2, help="processes at once (2)")
    arguments = parser.parse_args()
    suite = HEAD if arguments.head else ALGORITHMS
    suite.lay_out()
    mutants = run(suite, arguments.workers)
    explained, stale = explain(suite, mutants)
    print("\n".join(table(mutants, explained)))
    for verdict, count in sorted(Counter(m.verdict for m in mutants).items()):
        print(f"{verdict}: {count}")
    for entry in stale:
        print(f"{EQUIVALENT} has a reason for what is no survivor: {entry}")
    share = sum(m.killed for m in mutants) / max(len(mutants), 1)
    print(f"survivors are in {suite.survivors}")
    print(f"killed={share:.4f}")
    return 0 if share >= suite.required else 1


if __name__ == "__main__":
    sys.exit(main())
