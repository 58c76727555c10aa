"""Time-outs of tests, multiplied by how busy the machine is when a test begins."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_timeout

from tests.load import scaled


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> object:
    """Set the timer of `pytest-timeout` to a deadline for this machine as it is now."""
    longer = settings._replace(timeout=scaled(settings.timeout))
    return pytest_timeout.pytest_timeout_set_timer(item, longer)
