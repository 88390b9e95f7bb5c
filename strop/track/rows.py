"""The run folder's JSON-lines files: one row a line, appended whole, cut back on resume, read as a stream.

A row of metrics.jsonl holds `stage`, `step` and numbers. Its keys that depend on the machine and the moment begin with
`time/` or `memory/`; every other key is the same for a run that was killed and resumed:

    time/step           wall seconds of the whole step
    time/<span>         wall seconds of one phase; phases never overlap, and sum to at most time/step
    time/cpu/<span>     CPU seconds of this process, all its threads, in that phase
    time/tokens_per_s   tokens sampled (without sampling: trained on) per wall second, `save` and `evaluate` left out
    memory/rss_mb, memory/peak_rss_mb   resident memory of this process in MiB, now and at its highest
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from strop.errors import CheckpointError

Row = dict[str, Any]

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
EVALUATIONS = "evaluations.jsonl"
EXPERTS = "experts.jsonl"
SESSIONS = "sessions.jsonl"
RECIPE = "recipe.yaml"

REWARD = "reward/mean"
LOSS = "loss/nll"
GAP = "sampler/gap_max"
STEP_TIME = "time/step"
RATE = "time/tokens_per_s"
RSS = "memory/rss_mb"
PEAK_RSS = "memory/peak_rss_mb"
ASIDE = ("time/save", "time/evaluate")  # phases that most steps do not have
RESERVED_SPANS = frozenset({"step", "tokens_per_s", "cpu"})


def phase_seconds(row: Mapping[str, Any]) -> dict[str, float]:
    """Wall seconds of each phase in a row of metrics.jsonl, and the rest of its step as `other`."""
    phases = {
        key.removeprefix("time/"): float(value)
        for key, value in row.items()
        if key.startswith("time/") and key not in (STEP_TIME, RATE) and not key.startswith("time/cpu/")
    }
    rest = float(row.get(STEP_TIME, 0.0)) - sum(phases.values())
    return phases | ({"other": rest} if rest > 1e-9 else {})


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """The values that JSON can hold: a number that is not finite is left out."""
    return {key: value for key, value in values.items() if math.isfinite(value)}


class RowFile:
    """Appends rows to one file, each in one write: a kill leaves whole lines and at most one torn last line."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - stays open for the whole run

    def append(self, row: Mapping[str, Any]) -> None:
        line = memoryview(json.dumps(row, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        while line:
            line = line[self._file.write(line) :]

    def sync(self) -> None:
        """Put everything appended so far on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> Iterator[Row]:
    """Rows in order; none when the file does not exist. A torn last line is left out.

    CheckpointError names any other line that is not a JSON object.
    """
    if not path.exists():
        return
    bad: int | None = None
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if bad is not None:
                raise CheckpointError(f"{path} line {bad} is not a JSON object: repair or delete that line")
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict) and line.endswith(b"\n"):
                yield row
            else:
                bad = number


def keep_rows(path: Path, keep: Callable[[Row], bool]) -> None:
    """Leave only the rows that `keep` wants; the file is replaced in one step, whole."""
    if not path.exists():
        return
    partial = path.with_name(f".partial-{path.name}")
    partial.unlink(missing_ok=True)
    file = RowFile(partial)
    try:
        for row in read_rows(path):
            if keep(row):
                file.append(row)
        file.sync()
    finally:
        file.close()
    os.replace(partial, path)
