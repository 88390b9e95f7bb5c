"""The C++ kernels, compiled once on the machine that runs them: source files go in, a loaded library comes out.

The library is kept in the cache folder under a hash of everything that shapes it (source, flags, compiler, processor).
It gets there by an atomic rename, so processes that build at the same time cannot hurt each other. It links no OpenMP:
it starts its loops through the runtime that torch's library is linked to, so one pool of threads serves both.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from strop.environment import cache_folder

COMPILERS = ("c++", "g++", "clang++")
# Not -ffast-math: it would drop NaN and inf, reorder sums, and, linked in, flush the whole process's denormals to zero.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-exceptions",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wno-psabi",
)
COMPILE_TIMEOUT_S = 300


class NativeUnavailable(Exception):
    """The kernels cannot be built or loaded here; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded kernels: the functions of kernels.cpp by name, typed. A call releases Python's lock."""

    path: Path
    compiler: str
    width: int  # floats in one vector
    functions: Mapping[str, Callable[..., Any]]


@cache
def library() -> Library:
    """The kernels, built on the first call in the cache folder and loaded. Raises NativeUnavailable."""
    compiler, version = _compiler()
    flags = (*FLAGS, "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native")
    path = build(compiler, version, flags)
    return load(path, version)


def kernel(name: str) -> Callable[..., Any]:
    """A function of kernels.cpp, its name without `strop_`."""
    return library().functions[name]


def build(compiler: str, version: str, flags: tuple[str, ...]) -> Path:
    """The library's path; compiles it unless the cache has it. Raises NativeUnavailable."""
    sources = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h"))
    key = hashlib.sha256()
    for part in (version, *flags, _processor(), *(path.read_text() for path in sources)):
        key.update(part.encode() + b"\0")
    folder = cache_folder() / "native"
    target = folder / f"kernels-{key.hexdigest()[:20]}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise NativeUnavailable(f"{folder} belongs to another user, who could replace what is loaded from it")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / target.name
            command = [compiler, *flags, str(Path(__file__).with_name("kernels.cpp")), "-o", str(fresh)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
            if done.returncode != 0:
                raise NativeUnavailable(f"`{' '.join(command)}` failed: {_first_error(done.stderr)}")
            fresh.replace(target)
    except OSError as error:
        raise NativeUnavailable(
            f"cannot write to the cache folder {folder} ({error}): set STROP_CACHE to another"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{compiler} took more than {COMPILE_TIMEOUT_S} s") from error
    return target


def load(path: Path, version: str) -> Library:
    """Load a built library, type its functions and give it torch's threads. Raises NativeUnavailable."""
    try:
        calls = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"cannot load {path}: {error}") from error
    functions: dict[str, Callable[..., Any]] = {}
    for name, result, arguments in SIGNATURES:
        function = calls[f"strop_{name}"]
        function.restype = result
        function.argtypes = arguments
        functions[name] = function
    functions["use"](_torch_parallel())
    return Library(path=path, compiler=version, width=functions["width"](), functions=functions)


def _compiler() -> tuple[str, str]:
    """The first C++ compiler on the path, and the first line of what it says it is."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0 and done.stdout:
            return path, done.stdout.splitlines()[0]
    raise NativeUnavailable(f"no C++ compiler among {', '.join(COMPILERS)}: install one, such as the package g++")


def _processor() -> str:
    """Model and instruction sets of this processor: a cache folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip(" :") in wanted}))


def _first_error(stderr: str) -> str:
    lines = stderr.splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")


def _torch_parallel() -> ctypes.c_void_p:
    """GOMP_parallel of the OpenMP runtime that torch's library is linked to (gcc's, LLVM's and Intel's all have it)."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / name).exists():
            torch_library = ctypes.CDLL(str(folder / name))
            try:
                return ctypes.cast(torch_library.GOMP_parallel, ctypes.c_void_p)
            except AttributeError as error:
                raise NativeUnavailable(
                    "torch's OpenMP runtime has no GOMP_parallel: install another torch build"
                ) from error
    raise NativeUnavailable(f"there is no libtorch_cpu in {folder}: install torch from a wheel")


_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
# In kernels.cpp's order. `_P, _N` together are a matrix and its stride.
SIGNATURES: tuple[tuple[str, type | None, tuple[type, ...]], ...] = (
    ("use", None, (_P,)),
    ("width", _I, ()),
    ("exp", None, (_P, _P, _P, _N)),
    ("rms_norm", None, (_P, _N, _P, _N, _P, _P, _P, _P, _N, _N, _F, _I)),
    ("rms_norm_backward", None, (_P, _N, _P, _N, _P, _P, _P, _N, _P, _P, _N, _N, _I)),
    ("swiglu", None, (_P, _N, _P, _N, _P, _N, _N, _I)),
    ("swiglu_backward", None, (_P, _N, _P, _N, _P, _N, _P, _P, _N, _N, _I)),
    ("heads", None, (_P, _N, _P, _F, _P, _P, _P, _P, _N, _N, _N, _I)),
    ("heads_backward", None, (_P, _N, _P, _N, _P, _P, _P, _P, _P, _P, _N, _N, _N, _I)),
    ("attention", None, (_P, _N) * 3 + (_P,) * 3 + (_N, _F, _P, _P) + (_N,) * 4 + (_I,)),
    ("attention_backward", None, (_P, _N) * 3 + (_P,) * 3 + (_N, _F) + (_P,) * 6 + (_N,) * 4 + (_I,)),
    ("paged_attention", _N, (_P, _N) + (_P,) * 3 + (_N, _N, _P, _P, _N, _N, _F, _P) + (_N,) * 4 + (_I,)),
    ("paged_write", _N, (_P, _N, _P, _N, _P, _N, _N, _P, _P, _N, _N, _N)),
    ("checksum", None, (_P, _P, _N, _N, _P, _P)),
    ("has_tiles", _I, ()),
    ("half_product", _I, (_P, _N, _N, _I, _P, _N, _N, _P, _N, _I, _N, _N, _N, _I, _I)),
)
