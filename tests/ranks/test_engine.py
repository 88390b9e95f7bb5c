"""The whole Engine suite, over ranks: `make ranks`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from strop.config.recipe import EngineConfig
from strop.engines.base import Engine
from strop.errors import ConfigError
from strop.runtime.remote_engine import RemoteEngine
from tests.conformance.test_engine import *  # noqa: F403 - its tests, run with the factory below
from tests.conformance.test_engine import Factory
from tests.ranks.shapes import SHAPES, over

UNPLANNED = ("gpt2", "gpt_oss", "minimax_m2", "phi3")


@pytest.fixture(params=SHAPES.values(), ids=list(SHAPES))
def factory(request: pytest.FixtureRequest) -> Iterator[Factory]:
    """Engines over ranks, which end with the test."""
    made: list[RemoteEngine] = []

    def make(family: str, dtype: torch.dtype, config: EngineConfig) -> Engine:
        if request.param.tensor > 1 and family in UNPLANNED:
            with pytest.raises(ConfigError, match="has no plan for it"):
                over(request.param, family, dtype, config)
            pytest.skip(f"{family} is refused: transformers has no plan for tensor ranks of it that strop can follow")
        made.append(over(request.param, family, dtype, config))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
