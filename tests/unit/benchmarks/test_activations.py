"""The benchmark of activation memory runs at a small size and compares what it says it compares."""

from __future__ import annotations

import re

import pytest

from benchmarks import activations


def test_it_prints_four_ways_and_a_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    activations.main(["--tokens", "256", "--hidden", "64", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines if line.split()[0] in activations.WAYS}
    assert list(rows) == ["none", "checkpointing", "offload", "both"]
    assert all("equal to the bit" in row for row in rows.values())
    device = {name: float(re.findall(r"device +([\d.]+) MiB", row)[0]) for name, row in rows.items()}
    host = {name: float(re.findall(r"host +([\d.]+) MiB", row)[0]) for name, row in rows.items()}
    assert device["none"] > 1.5 * max(device["checkpointing"], device["offload"], device["both"])
    assert host["none"] == host["checkpointing"] == 0.0 < host["both"] < host["offload"] / 4
    assert lines[-1].startswith("ratio=") and float(lines[-1][6:]) > 1.5
