"""Dotted names chosen by patterns, part by part; what matches nothing is an error."""

from __future__ import annotations

import pytest

from strop.errors import ConfigError
from strop.models.patterns import chosen

NAMES = ["embed", "layers", "layers.0", "layers.0.mlp", "layers.0.mlp.up", "layers.1", "layers.10", "layers.1.mlp"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("embed", ["embed"]),
        ("layers.*", ["layers.0", "layers.1", "layers.10"]),
        ("layers.[0-1]", ["layers.0", "layers.1"]),
        ("layers.?.mlp", ["layers.0.mlp", "layers.1.mlp"]),
        ("**.mlp", ["layers.0.mlp", "layers.1.mlp"]),
        ("**.mlp.**", ["layers.0.mlp", "layers.0.mlp.up", "layers.1.mlp"]),
        ("layers.**.up", ["layers.0.mlp.up"]),
        ("**", NAMES),
    ],
)
def test_a_pattern_speaks_of_whole_parts(pattern: str, expected: list[str]) -> None:
    assert chosen([pattern], NAMES, "key") == expected


def test_names_keep_their_order_and_come_once() -> None:
    assert chosen(["layers.1", "**.0", "layers.[01]"], NAMES, "key") == ["layers.0", "layers.1"]


def test_every_pattern_must_match() -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(["embed", "layer.0", "mlp"], NAMES, "engine.x")
    assert [problem.partition(" matches")[0] for problem in caught.value.problems] == [
        "engine.x: 'layer.0'",
        "engine.x: 'mlp'",
    ]
    assert "the nearest names are layers.0" in caught.value.problems[0]
