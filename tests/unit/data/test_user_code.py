"""A user's own file: loaded once, from the right folder, and its mistakes told in a sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from strop.data.user_code import load_object
from strop.errors import ConfigError


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader puts a file's folder on the module path; it goes again with the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder


def test_functions_and_classes_of_one_file_are_of_one_module(tmp_path: Path) -> None:
    """The class that a function makes is the class that the recipe names: the file runs once."""
    write(tmp_path, "mine.py", "class Env: ...\n\ndef make():\n    return Env()\n")
    env, make = load_object("mine.py:Env", tmp_path), load_object("mine.py:make", tmp_path)
    assert type(make()) is env
    assert load_object(f"{tmp_path}/mine.py:Env", Path("elsewhere")) is env


def test_dataclasses_and_neighbours_work(tmp_path: Path) -> None:
    write(tmp_path, "strop_test_neighbour.py", "LIMIT = 7\n")
    header = "from dataclasses import dataclass\nimport strop_test_neighbour as near\n"
    source = header + "@dataclass\nclass Row:\n    x: int\n\ndef make() -> Row:\n    return Row(near.LIMIT)\n"
    write(tmp_path, "uses.py", source)
    assert load_object("uses.py:make", tmp_path)().x == 7


def test_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "reward.py", f"def score():\n    return {name!r}\n")
    assert [load_object(f"{name}/reward.py:score", tmp_path)() for name in ("a", "b")] == ["a", "b"]


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("mine.py", "write it as file.py:name"),
        ("mine.py:", "write it as file.py:name"),
        (":make", "write it as file.py:name"),
        ("mine.py:make it", "write it as file.py:name"),
        ("other.py:make", "there is no file"),
        (".:make", "there is no file"),
        ("mine.py:mak", "has no mak; did you mean make?"),
        ("mine.py:zzz", "has no zzz; it has make"),
        ("mine.py:SIZE", "is a int, and must be a function or a class"),
        ("notes.txt:make", "must end in .py"),
        ("broken.py:make", r"broken.py fails at line 2: SyntaxError"),
        ("raises.py:make", r"raises.py fails at line 4: ZeroDivisionError"),
        ("needs.py:make", r"needs.py fails at line 1: ModuleNotFoundError: No module named 'strop_no_such_thing'"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, reference: str, says: str) -> None:
    write(tmp_path, "mine.py", "SIZE = 3\n\ndef make():\n    return SIZE\n")
    write(tmp_path, "notes.txt", "hello")
    write(tmp_path, "broken.py", "x = 1\ndef make(:\n")
    write(tmp_path, "raises.py", "def make():\n    return 1\n\nx = 1 / 0\n")
    write(tmp_path, "needs.py", "import strop_no_such_thing\n")
    with pytest.raises(ConfigError, match=says):
        load_object(reference, tmp_path)


def test_a_file_that_failed_can_be_repaired(tmp_path: Path) -> None:
    write(tmp_path, "late.py", "x = 1 / 0\n")
    with pytest.raises(ConfigError, match="line 1"):
        load_object("late.py:make", tmp_path)
    write(tmp_path, "late.py", "def make():\n    return 'well now'\n")
    assert load_object("late.py:make", tmp_path)() == "well now"
