"""A user's own function or class, from a file that a recipe names: a reward, an environment, a source of tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from difflib import get_close_matches
from hashlib import blake2b
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from strop.errors import ConfigError

_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What running a file can raise that is its author's to repair."""


def load_object(reference: str, base: Path) -> Callable[..., Any]:
    """What `reference`, a file.py:name, names; a relative file is looked for in `base`.

    A file is run once in a process, however often it is named, and may import the modules beside it. Raises ConfigError
    when there is no such file or name, when the file itself fails (with its line), or when the name is nothing to call.
    """
    file, _, name = reference.rpartition(":")
    if not file or not name.isidentifier():
        raise ConfigError(f"{reference!r} does not name an object in a file: write it as file.py:name")
    path = (base / file).resolve()
    if not path.is_file():
        raise ConfigError(f"{reference}: there is no file {path}")
    module = _module(path, reference)
    names = vars(module)
    if name not in names:
        own = [n for n, value in names.items() if callable(value) and not n.startswith("_")]
        near = get_close_matches(name, own, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(own) or 'nothing to call'}"
        raise ConfigError(f"{reference}: {path.name} has no {name}; {hint}")
    if not callable(names[name]):
        raise ConfigError(f"{reference} is a {type(names[name]).__name__}, and must be a function or a class")
    return names[name]


def _module(path: Path, reference: str) -> ModuleType:
    name = f"strop_user_{path.stem}_{blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{reference}: {path.name} is not a Python file; its name must end in .py")
    return _run(spec, path, reference)


def _run(spec: ModuleSpec, path: Path, reference: str) -> ModuleType:
    module = module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that a user's file never hides an installed package
    sys.modules[spec.name] = module  # before it runs: dataclasses look their module up
    done = False
    try:
        assert spec.loader is not None
        spec.loader.exec_module(module)
        done = True
    except _FAULTS as error:
        raise ConfigError(
            f"{reference}: {path.name} fails at line {_line(error, path)}: {type(error).__name__}: {error}"
        ) from error
    finally:
        if not done:
            del sys.modules[spec.name]
    return module


def _line(error: BaseException, path: Path) -> int | None:
    """The last line of the file that the error passed through."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)]
    return lines[-1] if lines else None
