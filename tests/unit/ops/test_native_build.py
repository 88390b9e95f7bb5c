"""Building and loading the kernels: the cache, what goes wrong, and the arithmetic that everything else rests on."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from strop.environment import cache_folder
from strop.ops.native import build
from strop.ops.native.build import NativeUnavailable, kernel

INF, NAN = float("inf"), float("nan")


def exponentials(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """e^x and 2^x as the kernels compute them."""
    x = np.ascontiguousarray(x, np.float32)
    e, two = np.empty_like(x), np.empty_like(x)
    kernel("exp")(x.ctypes.data, e.ctypes.data, two.ctypes.data, len(x))
    return e, two


def ulps(got: np.ndarray, true: np.ndarray) -> float:
    return float(np.max(np.abs(got - true) / np.spacing(true.astype(np.float32)).astype(np.float64)))


def test_exponentials_are_right_to_two_units_in_the_last_place() -> None:
    x = np.concatenate((np.linspace(-87.3, 88.7, 400_001), np.linspace(-1, 1, 100_001))).astype(np.float32)
    e, _ = exponentials(x)
    assert ulps(e, np.exp(x.astype(np.float64))) <= 2.0
    y = np.concatenate((np.linspace(-125.9, 0, 400_001), np.linspace(-1, 0, 100_001))).astype(np.float32)
    _, two = exponentials(y)
    assert ulps(two, np.exp2(y.astype(np.float64))) <= 2.0


def test_exponentials_at_the_ends() -> None:
    x = np.array([0.0, -INF, INF, NAN, -88.0, -1e30, 89.0, 1e30, -87.33, 88.72])
    e, two = exponentials(x)
    assert e[:7].tolist()[:3] == [1.0, 0.0, INF]
    assert np.isnan(e[3]) and e[4] == 0 and e[5] == 0 and e[6] == INF and e[7] == INF
    assert 0 < e[8] < 2e-38 and 3e38 < e[9] < INF
    assert two[0] == 1.0 and two[1] == 0.0 and np.isnan(two[3]) and two[5] == 0.0


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that passes for a compiler: it notes each run and writes what it was given as its output file."""
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    program = tmp_path / "fake-c++"
    program.write_text(f'#!/bin/sh\necho run >> {tmp_path}/runs\nfor last; do :; done\necho built > "$last"\n')
    program.chmod(0o700)
    return program


def runs(compiler: Path) -> int:
    record = compiler.parent / "runs"
    return len(record.read_text().splitlines()) if record.exists() else 0


def test_a_build_is_kept_and_found_again(compiler: Path) -> None:
    first = build.build(str(compiler), "one 1.0", ("-O3",))
    assert first.read_text() == "built\n"
    assert build.build(str(compiler), "one 1.0", ("-O3",)) == first
    assert runs(compiler) == 1
    assert [path.name for path in first.parent.iterdir()] == [first.name], "nothing half-made is left behind"
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700


def test_everything_that_shapes_the_library_names_it(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {
        build.build(str(compiler), "one 1.0", ("-O3",)),
        build.build(str(compiler), "one 1.1", ("-O3",)),
        build.build(str(compiler), "one 1.0", ("-O2",)),
    }
    monkeypatch.setattr(build, "_processor", lambda: "another")
    paths.add(build.build(str(compiler), "one 1.0", ("-O3",)))
    assert len(paths) == 4 and runs(compiler) == 4


def test_a_failing_compiler_is_quoted(compiler: Path) -> None:
    compiler.write_text("#!/bin/sh\necho 'note: a' >&2\necho 'kernels.cpp:3: error: no such thing' >&2\nexit 1\n")
    with pytest.raises(NativeUnavailable, match=r"kernels\.cpp:3: error: no such thing"):
        build.build(str(compiler), "one 1.0", ())


def test_a_cache_folder_that_cannot_be_is_named(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(compiler))  # a file, not a folder
    with pytest.raises(NativeUnavailable, match="set STROP_CACHE to another"):
        build.build(str(compiler), "one 1.0", ())


def test_a_cache_folder_of_another_user_is_refused(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: -5)
    with pytest.raises(NativeUnavailable, match="belongs to another user"):
        build.build(str(compiler), "one 1.0", ())


def test_what_is_no_library_is_not_loaded(compiler: Path) -> None:
    path = build.build(str(compiler), "one 1.0", ())
    with pytest.raises(NativeUnavailable, match="cannot load"):
        build.load(path, "one 1.0")


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler among c\+\+, g\+\+, clang\+\+"):
        build._compiler()


def test_where_the_cache_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STROP_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "strop"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "strop"
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
