"""The core schema of YAML 1.2, nothing more and nothing less."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config.yaml12 import dump, inline, is_plain, parse
from strop.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),  # C02
        (".5e3", 500.0),
        ("1.", 1.0),
        ("-.inf", -math.inf),
        ("012", 12),
        ("0o14", 12),
        ("0x1F", 31),
        ("no", "no"),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("~", None),
        ("null", None),
        ("", None),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("=", "="),
        ("'1'", "1"),
        ("!!str 5", "5"),
        ("!!float 5", 5.0),
        ("{<<: {a: 1}}", {"<<": {"a": 1}}),
        ("[1, 1.0, '1', true]", [1, 1.0, "1", True]),
    ],
)
def test_core_schema(text: str, value: object) -> None:
    """C02: one parser, and `1e-6` is a float in it."""
    parsed = parse(text, "here")
    assert parsed == value
    assert type(parsed) is type(value)


def test_a_directive_for_the_old_version_changes_nothing() -> None:
    assert parse("%YAML 1.1\n---\na: no\nb: 012\n", "here") == {"a": "no", "b": 12}


def test_every_fault_is_found_at_once_with_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("a: 1\nb:\n  c: 1\n  c: 2\na: 2\nd: !!python/none x\n[e]: 1\n", "r.yaml")
    assert caught.value.problems == (
        "r.yaml line 4: key 'c' is given twice: keep one of them",
        "r.yaml line 5: key 'a' is given twice: keep one of them",
        "r.yaml line 6: tag tag:yaml.org,2002:python/none is not supported: recipes hold plain values only",
        "r.yaml line 7: a key must be a plain value, not a list or a section",
    )


@pytest.mark.parametrize("text", ["a: b: c", "a: [1", "\ta: 1", "a: *x", "--- 1\n--- 2", "a\x00b", "a: !!int x"])
def test_what_is_not_yaml_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^r\.yaml.*") as caught:
        parse(text, "r.yaml")
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)


def test_an_alias_to_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="contains itself"):
        parse("a: &x [*x]", "r.yaml")
    assert parse("a: &x [1]\nb: *x", "r.yaml") == {"a": [1], "b": [1]}


Values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return a == b


@settings(max_examples=100, deadline=None)
@given(Values)
def test_values_survive_the_round_trip(value: object) -> None:
    assert is_plain(value)
    assert same(parse(dump(value), "here"), value)
    assert same(parse(inline(value), "here"), value)
    assert "\n" not in inline(value)


@pytest.mark.parametrize(
    "text", ["no", "012", "1e3", ".5e3", "null", "~", "", "a: b", "a #b", "- a", "é", "\x85", " a "]
)
def test_texts_that_look_like_something_else_stay_texts(text: str) -> None:
    assert parse(f"key: {inline(text)}", "here") == {"key": text}
    assert inline(text).startswith('"')


def test_dump_refuses_what_cannot_come_back() -> None:
    assert not is_plain((1, 2))
    assert not is_plain({"a": {1: 2}})
    with pytest.raises(TypeError, match="is a object"):
        dump({"a": object()})
