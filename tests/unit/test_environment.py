"""What strop sets in its process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from strop import environment

PROBE = """
import resource
from strop.environment import keep_memory
import numpy as np
{first}
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(64 << 20, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
pages()
print(pages())
"""


def new_pages(first: str) -> int:
    """Pages that a process was given for memory that it had, and freed, just before."""
    done = subprocess.run([sys.executable, "-c", PROBE.format(first=first)], check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no such setting")
def test_a_process_that_keeps_its_memory_is_given_none_twice() -> None:
    assert new_pages("") > 16, "64 MiB are 32 pages of 2 MiB or 16,384 of 4 KiB"
    assert new_pages("keep_memory()") <= 16


def test_where_the_allocator_is_another_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.platform, "libc_ver", lambda: ("", ""))
    loaded: list[object] = []
    monkeypatch.setattr(environment.ctypes, "CDLL", loaded.append)
    environment.keep_memory()
    assert loaded == []
