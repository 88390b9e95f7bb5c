"""A pytest plugin for runs that end at the first failure, as those of `make mutants` do: it makes them end sooner.

Tests of single cases go before those that draw many, and a failing example is not made smaller. No verdict changes.
"""

from __future__ import annotations

import hypothesis
import pytest


def pytest_configure() -> None:
    """After conftest.py has chosen its profile, and before the tests that take theirs from it are imported."""
    kept = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("first_failure", hypothesis.settings(), phases=kept)
    hypothesis.settings.load_profile("first_failure")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: isinstance(item, pytest.Function) and hypothesis.is_hypothesis_test(item.obj))
