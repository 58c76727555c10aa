"""Configuration of tests that share one real SGLang server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sglang import served


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/sglang/" in item.nodeid:
            item.add_marker(pytest.mark.needs("sglang"))
            item.add_marker(pytest.mark.group("sglang"))
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(autouse=True)
def idle_server() -> Iterator[None]:
    """Check that the shared server is idle after each test."""
    yield
    served.release()
