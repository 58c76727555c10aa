"""Registration of the plugins that run the tests; `conftest.py` calls both functions."""

from __future__ import annotations

import pytest

from tests.fork_server import TestForkServer
from tests.runner import costs, tiers, timeouts, workers

FORK_SERVER = pytest.StashKey[TestForkServer]()


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
        config.stash[FORK_SERVER] = TestForkServer()  # too slow to start for a single test
        config.stash[FORK_SERVER].start()


def unconfigure(config: pytest.Config) -> None:
    """Stop everything that `configure` has started."""
    if FORK_SERVER in config.stash:
        config.stash[FORK_SERVER].close()
