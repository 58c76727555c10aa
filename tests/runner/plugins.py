"""Registers the plugins that run the tests; `conftest.py` calls both functions."""

from __future__ import annotations

import pytest

from tests.nursery import TestNursery
from tests.runner import costs, tiers, timeouts, workers

NURSERY = pytest.StashKey[TestNursery]()


def add_options(parser: pytest.Parser) -> None:
    """Add the options of all plugins."""
    for plugin in (costs, tiers, workers):
        plugin.add_options(parser)


def configure(config: pytest.Config) -> None:
    """Register the plugins; start the shared processes of a run of several workers."""
    chosen = tiers.Tiers(config)
    config.stash[tiers.Tiers.KEY] = chosen
    config.pluginmanager.register(chosen, "tiers")
    config.pluginmanager.register(timeouts, "timeouts")
    if config.option.workers:
        counted = costs.Costs(config)
        config.pluginmanager.register(counted, "costs")
        workers.Workers(config, counted)
        config.stash[NURSERY] = TestNursery()  # too slow to start for a single test
        config.stash[NURSERY].start()


def unconfigure(config: pytest.Config) -> None:
    """Stop everything that `configure` has started."""
    if NURSERY in config.stash:
        config.stash[NURSERY].close()
