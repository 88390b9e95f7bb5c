"""YAML 1.2 text to plain values and back, by the core schema and nothing else.

`1e-6` is a float, `no` a string, `012` twelve, `1_000` and `2024-01-01` are strings; there are no merge keys and no
tags of other languages. Values are None, bool, int, float, str, list and dict; what `dump` writes, `parse` reads back
equal and of the same types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from strop.errors import ConfigError

_PREFIX = "tag:yaml.org,2002:"
_CORE_SCHEMA = {  # YAML 1.2.2, section 10.3.2
    "null": r"(?:null|Null|NULL|~|)\Z",
    "bool": r"(?:true|True|TRUE|false|False|FALSE)\Z",
    "int": r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z",
    "float": r"[-+]?(?:(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))\Z|\.(?:nan|NaN|NAN)\Z",
}
_PLAIN = re.compile(r"(?:[A-Za-z_/]|\.{1,2}/)[\w./+-]*(?:[ :][\w./+-]+)*\Z", re.ASCII)

_OLD_BOOLEANS = ("y", "n", "yes", "no", "on", "off")  # quoted, for readers that still follow YAML 1.1


class _CoreResolver(VersionedResolver):
    """Gives plain scalars the tags of the core schema, whatever version a document claims."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is ScalarNode:
            return _tag(_kind_of(value) if implicit[0] else "str")
        return _tag("seq" if kind is SequenceNode else "map")

    @property
    def processing_version(self) -> Any:
        return (1, 2)


def _kind_of(text: str) -> str:
    return next((kind for kind, pattern in _CORE_SCHEMA.items() if re.match(pattern, text)), "str")


def _tag(kind: str) -> Tag:
    return Tag(suffix=_PREFIX + kind)


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _CoreResolver
    yaml.default_flow_style = False
    yaml.allow_unicode = True
    yaml.width = 1_000_000  # never fold a line
    return yaml


def parse(text: str, where: str) -> Any:
    """The value that `text` holds. Raises ConfigError with every duplicate key and unknown tag, or the syntax error.

    `where` says what the text is, in messages: a file's name, or an override.
    """
    try:
        node = _yaml().compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{where}{line} is not YAML: {error.problem or error.context}") from error
    except YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {str(error).splitlines()[0]}") from error
    if node is None:
        return None
    reader = _Reader(where)
    value = reader.value(node)
    if reader.problems:
        raise ConfigError(*reader.problems)
    return value


class _Reader:
    """Turns composed nodes into values and collects what is wrong on the way."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.problems: list[str] = []
        self._open: list[Node] = []

    def value(self, node: Node) -> Any:
        if any(node is outer for outer in self._open):
            self._problem(node, "an alias contains itself: write the value out")
            return None
        self._open.append(node)
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node)
            if isinstance(node, SequenceNode):
                return [self.value(item) for item in node.value]
            return self._scalar(node, str(node.tag).removeprefix(_PREFIX), str(node.value))
        finally:
            self._open.pop()

    def _mapping(self, node: MappingNode) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.value(key_node)
            value = self.value(value_node)
            if isinstance(key, (dict, list)):
                self._problem(key_node, "a key must be a plain value, not a list or a section")
            elif key in result:
                self._problem(key_node, f"key {key!r} is given twice: keep one of them")
            else:
                result[key] = value
        return result

    def _scalar(self, node: Node, tag: str, text: str) -> Any:
        if tag == "str":
            return text
        if tag not in _CORE_SCHEMA:
            self._problem(node, f"tag {node.tag} is not supported: recipes hold plain values only")
            return None
        if not re.match(_CORE_SCHEMA[tag], text):
            self._problem(node, f"{text!r} is tagged as {tag} but is none")
            return None
        if tag == "null":
            return None
        if tag == "bool":
            return text.lower() == "true"
        if tag == "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))

    def _problem(self, node: Node, sentence: str) -> None:
        self.problems.append(f"{self.where} line {node.start_mark.line + 1}: {sentence}")


def dump(value: Any) -> str:
    """Block-style YAML 1.2 of plain values; `parse(dump(v)) == v`, types included. TypeError for anything else."""
    stream = StringIO()
    _yaml().serialize(_node(value), stream)
    return stream.getvalue().removesuffix("...\n")


def inline(value: Any) -> str:
    """The same on one line, as it stands behind a key or in an override."""
    node = _node(value)
    if isinstance(node, (MappingNode, SequenceNode)):
        node.flow_style = True
    stream = StringIO()
    _yaml().serialize(node, stream)
    return stream.getvalue().removesuffix("\n").removesuffix("\n...")


def is_plain(value: object) -> bool:
    """Whether YAML can hold `value` and give it back unchanged."""
    if isinstance(value, dict):
        return all(type(k) is str and is_plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(is_plain(v) for v in value)
    return value is None or type(value) in (bool, int, float, str)


def _node(value: Any) -> Node:
    if value is None:
        return _scalar_node("null", "null")
    if isinstance(value, bool):
        return _scalar_node("bool", "true" if value else "false")
    if isinstance(value, str):
        return _text_node(str(value))
    if isinstance(value, int):
        return _scalar_node("int", str(value))
    if isinstance(value, float):
        return _scalar_node("float", repr(value).replace("inf", ".inf").replace("nan", ".nan"))
    if isinstance(value, Mapping):
        pairs = [(_node(k), _node(v)) for k, v in value.items()]
        return MappingNode(_tag("map"), pairs, flow_style=not pairs)
    if isinstance(value, Sequence):
        items = [_node(item) for item in value]
        return SequenceNode(_tag("seq"), items, flow_style=all(isinstance(i, ScalarNode) for i in items))
    raise TypeError(f"{value!r} is a {type(value).__name__}: YAML holds None, bool, int, float, str, list and dict")


def _scalar_node(kind: str, text: str) -> ScalarNode:
    return ScalarNode(_tag(kind), text)


def _text_node(text: str) -> ScalarNode:
    looks_plain = _PLAIN.match(text) and _kind_of(text) == "str" and text.lower() not in _OLD_BOOLEANS
    return ScalarNode(_tag("str"), text, style=None if looks_plain else '"')
