"""Where rows come from: JSONL and Parquet files, a folder of Hugging Face datasets, reasoning-gym, a user's function.

Every reader yields rows in a fixed order, each with an id that no other row has and the words that find it again. A row
that cannot even be read is yielded as the sentence that says why, so that all bad rows are reported together.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from strop.config.recipe import TasksConfig
from strop.data.user_code import load_object
from strop.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Row:
    """One task as its source gives it."""

    id: str  # unique among all sources: the source's path and the row's place in it
    where: str  # the same for people: file and line
    fields: Mapping[str, Any]


def read_rows(config: TasksConfig, base: Path) -> Iterator[Row | str]:
    """The source's rows, or a sentence for each that is not one. ConfigError when there is no such source."""
    match config.source:
        case "jsonl":
            return _from_files(config.path, base, ".jsonl", _jsonl)
        case "parquet":
            return _from_files(config.path, base, ".parquet", _parquet)
        case "datasets":
            return _datasets(config.path, base / config.path)
        case "reasoning_gym":
            return _reasoning_gym(config.path, config.arguments, config.limit)
        case "python":
            return _python(config.path, config.arguments, base)


def _from_files(
    path: str, base: Path, ending: str, reader: Callable[[str, Path], Iterator[Row | str]]
) -> Iterator[Row | str]:
    """The rows of a file, or of all files of a folder with this ending, in the order of their names."""
    place = base / path
    if place.is_file():
        return reader(path, place)
    if not place.is_dir():
        raise ConfigError(f"tasks.path: there is no file or folder {place}")
    files = sorted(file for file in place.iterdir() if file.suffix == ending and file.is_file())
    if not files:
        raise ConfigError(f"tasks.path: the folder {place} has no *{ending} files")
    return (row for file in files for row in reader(f"{path.rstrip('/')}/{file.name}", file))


def _jsonl(name: str, file: Path) -> Iterator[Row | str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{name}, line {number}"
            try:
                fields: object = json.loads(line)
            except json.JSONDecodeError as error:
                yield f"{where}: not JSON ({error.msg} at column {error.colno}); each line is one object"
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                yield f"{where}: not UTF-8 (byte {error.start} is {byte:#04x}); save the file as UTF-8"
            else:
                yield _row(f"{name}:{number}", where, fields)


def _row(row_id: str, where: str, fields: object) -> Row | str:
    if not isinstance(fields, Mapping):
        return f"{where}: a row must be an object with named fields, and this is {shown(fields)}"
    return Row(row_id, where, cast("Mapping[str, Any]", fields))


def _parquet(name: str, file: Path) -> Iterator[Row | str]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{name} is not a Parquet file: {error}") from error
    number = 0
    for batch in table.iter_batches():
        for fields in batch.to_pylist():
            number += 1
            yield Row(f"{name}:{number}", f"{name}, row {number}", fields)


def _datasets(name: str, folder: Path) -> Iterator[Row | str]:
    import datasets

    if not folder.is_dir():
        raise ConfigError(f"tasks.path: there is no folder {folder}")
    try:
        loaded = datasets.load_from_disk(folder)
    except FileNotFoundError as error:
        raise ConfigError(f"tasks.path: {folder} was not saved by Dataset.save_to_disk: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        splits = ", ".join(str(split) for split in loaded)
        first = next(iter(loaded))
        raise ConfigError(f"tasks.path: {folder} holds the splits {splits}; name one of them, like {name}/{first}")
    return (
        Row(f"{name}:{number}", f"{name}, row {number}", cast("Mapping[str, Any]", fields))
        for number, fields in enumerate(loaded, 1)
    )


def _reasoning_gym(name: str, arguments: Mapping[str, Any], limit: int | None) -> Iterator[Row | str]:
    """Entries of a generator, whole: its own scorer takes them back. Their fields are question, answer and metadata.

    `size` defaults to `limit`, or to the package's own default; `seed` to 0, where the package would draw one.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"tasks.path: reasoning-gym has no generator {name!r}; {hint}")
    given = {"seed": 0} | ({} if limit is None else {"size": limit}) | dict(arguments)
    try:
        entries = reasoning_gym.create_dataset(name, **given)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"tasks.arguments: the generator {name} does not take {given}: {error}") from error
    return (
        Row(f"reasoning_gym/{name}:{number}", f"reasoning_gym {name}, entry {number}", entries[number])
        for number in range(len(entries))
    )


def _python(reference: str, arguments: Mapping[str, Any], base: Path) -> Iterator[Row | str]:
    """What the user's function returns, row by row. Its own errors are not touched: they name its line."""
    function = load_object(reference, base)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"tasks.arguments: {reference} takes {inspect.signature(function)} and not {dict(arguments)}: {error}"
        ) from error
    rows: object = function(**arguments)
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise ConfigError(f"tasks.path: {reference} must return a list of rows, and returned {shown(rows)}")
    return (
        _row(f"{reference}:{number}", f"{reference}, row {number}", fields)
        for number, fields in enumerate(cast("Iterable[object]", rows), 1)
    )


def shown(value: object) -> str:
    """A value for an error message: its beginning, and what it is."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
