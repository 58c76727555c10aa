"""Workers that run the tests: forks of one process that has collected them.

Usage:

    --workers N    run the tests in N processes; without it in this one

A worker requests a unit of tests (a group, or neighbours in a file), runs it, reports, and requests
the next. All processes that it starts, also by its fork server, are charged to its own account
(`groups.py`). If a worker dies, its running test fails and another worker replaces it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import logging
import multiprocessing.connection
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.reports import TestReport

from meshrl.common.mesh.process.entry.child import tie_to_parent
from tests import ends
from tests.fork_server import TestForkServer
from tests.load import scaled
from tests.runner import WORKER_ENV
from tests.runner.costs import Costs
from tests.runner.groups import Account, Tree, open_account

# Maximum of a file's tests that a worker takes at once, unless they share a fixture or a group.
UNIT = 8
END_S = 60.0  # limit of threads and exit functions of a worker after its last test
PRELOADED = ("renderers",)  # modules that tests of many files load as they run
MANY = 1000  # number of tests from which loading these first pays
LONG_S = 180.0  # tests with such a time-out start first


@dataclass
class Worker:
    """The controller's side of a worker."""

    number: int
    pid: int
    pidfd: int
    connection: Connection
    account: Account
    unit: deque[int]  # remaining tests, the running one first
    running: bool = False
    counted_s: float = 0.0  # CPU seconds that are assigned to tests


class Workers:
    """Plugin that replaces pytest's loop over tests by workers."""

    def __init__(self, config: pytest.Config, costs: Costs) -> None:
        self._config, self._costs = config, costs
        self._count: int = config.option.workers
        self._controller = open_account("controller")
        self._controller.add(os.getpid())
        self._workers: list[Worker] = []
        self._units: deque[list[int]] = deque()
        self._started = 0
        self._items: list[pytest.Item] = []
        config.pluginmanager.register(self, "workers")
        self._base: Path | None = None
        self._stop_at: float | None = None
        self._left = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> object:
        """Run all tests in workers."""
        if session.config.option.collectonly:
            return None
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            errors = session.testsfailed
            raise session.Interrupted(f"{errors} error{'s' * (errors > 1)} during collection")
        self._items = session.items
        self._units = deque(make_units(self._items))
        self._base = self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        if len(self._items) > MANY:
            for name in PRELOADED:
                importlib.import_module(name)
        require_one_thread()
        if (seconds := self._config.option.stop_after) is not None:
            self._stop_at = time.monotonic() + seconds
        gc.freeze()  # no garbage collection of a worker copies the pages of the collected tests
        try:
            for _ in range(min(self._count, len(self._units))):
                self._start()
            while self._workers:
                self._serve()
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for worker in list(self._workers):
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
                self._close(worker)
            # The controller's process tree includes its workers.
            tree = isinstance(self._controller, Tree)
            self._costs.overhead_s += time.process_time() if tree else self._controller.cpu_s()
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print how many tests did not run for lack of time."""
        if self._left:
            terminalreporter.write_line(f"{self._left} tests were not begun: --stop-after")

    def pytest_unconfigure(self) -> None:
        """Release the controller's account."""
        self._controller.close()

    def _start(self) -> None:
        """Fork a worker."""
        number, self._started = self._started, self._started + 1
        account = open_account(f"worker{number}")
        ours, theirs = multiprocessing.connection.Pipe()
        controller = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for other in self._workers:
                other.connection.close()
            run_worker(self._config, self._items, number, theirs, account, controller, self._base)
        theirs.close()
        self._workers.append(Worker(number, pid, os.pidfd_open(pid), ours, account, deque()))

    def _serve(self) -> None:
        """Wait for messages and exits of workers, and process them."""
        by_source: dict[Any, Worker] = {w.connection: w for w in self._workers}
        by_source |= {w.pidfd: w for w in self._workers}
        for source in multiprocessing.connection.wait(list(by_source)):
            worker = by_source[source]
            if worker not in self._workers:
                continue
            if source is worker.connection:
                try:
                    self._receive(worker)
                    continue
                except (EOFError, ConnectionError):
                    pass  # it is about to exit
            self._replace_dead_worker(worker)

    def _receive(self, worker: Worker) -> None:
        """Process one message of a worker; EOFError or ConnectionError if it has exited."""
        kind, content = worker.connection.recv()
        hook = self._config.hook
        if kind == "unit":
            if self._stop_at is not None and time.monotonic() > self._stop_at:
                self._left = sum(map(len, self._units))
                self._units.clear()
            unit = self._units.popleft() if self._units else []
            worker.unit.extend(unit)
            worker.connection.send(unit)
        elif kind == "begin":
            worker.running = True
            item = self._items[content]
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=self._config, data=content)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "end":
            index, cpu_s, wall_s = content
            item = self._items[index]
            worker.running = False
            worker.unit.popleft()
            worker.counted_s += cpu_s
            self._costs.add(item.nodeid, cpu_s, wall_s)
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        elif kind == "warning":
            text, place, nodeid = content
            message = warnings.WarningMessage(UserWarning(text), UserWarning, *place)
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            if terminal is not None:  # the hook would repeat it for each later worker
                terminal.pytest_warning_recorded(warning_message=message, nodeid=nodeid)

    def _replace_dead_worker(self, worker: Worker) -> None:
        """Fail the running test of a dead worker and requeue the rest of its unit."""
        _, status = os.waitpid(worker.pid, 0)
        with contextlib.suppress(EOFError, ConnectionError):
            while worker.connection.poll():  # messages from before its exit
                self._receive(worker)
        self._close(worker)
        code = os.waitstatus_to_exitcode(status)
        how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
        if worker.running:
            item = self._items[worker.unit.popleft()]
            self._report_death(item, f"worker {worker.number} ended {how}")
        elif code != 0:
            raise RuntimeError(f"worker {worker.number} ended {how} between tests")
        if worker.unit:
            self._units.appendleft(list(worker.unit))
        if code != 0 and self._units:
            self._start()

    def _report_death(self, item: pytest.Item, how: str) -> None:
        """Report a test as failed because its worker ended."""
        report = TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"{how} while it ran {item.nodeid}",
            when="call",
        )
        self._config.hook.pytest_runtest_logreport(report=report)

    def _close(self, worker: Worker) -> None:
        """Free the controller's resources of a worker that has exited."""
        self._workers.remove(worker)
        self._costs.overhead_s += max(0.0, worker.account.cpu_s() - worker.counted_s)
        worker.account.close()
        worker.connection.close()
        os.close(worker.pidfd)


def make_units(items: list[pytest.Item]) -> Iterator[list[int]]:
    """Yield units of tests, by index: groups, and neighbours in a file; long ones first."""
    units: dict[object, list[int]] = {}
    sharing = {item.path for item in items if has_shared_fixture(item)}
    for index, item in enumerate(items):
        group = item.get_closest_marker("group")
        if group is not None:
            key: object = group.args[0]
        else:
            key = (item.path, 0 if item.path in sharing else index // UNIT)
        units.setdefault(key, []).append(index)
    long = {key: max(get_timeout_s(items[index]) for index in unit) for key, unit in units.items()}
    ordered = sorted(units, key=lambda key: (-max(long[key], LONG_S - 1), isinstance(key, tuple)))
    for key in ordered:
        yield units[key]


def has_shared_fixture(item: pytest.Item) -> bool:
    """Return True if a test has a fixture of its module, which each worker would make again."""
    information = getattr(item, "_fixtureinfo", None)
    definitions = information.name2fixturedefs.values() if information is not None else ()
    return any(found[-1].scope == "module" for found in definitions)


def get_timeout_s(item: pytest.Item) -> float:
    """Return the time-out in seconds that a test declares; 0 if it declares none."""
    marker = item.get_closest_marker("timeout")
    if marker is None:
        return 0.0
    return float(marker.args[0] if marker.args else marker.kwargs["timeout"])


def require_one_thread() -> None:
    """Raise UsageError if a module that was collected has started a thread.

    A fork would not have the thread, but would have the locks that it holds.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        names = [thread.name for thread in threading.enumerate()]
        raise pytest.UsageError(f"tests may not start threads when they are imported: {names}")


class Reporter:
    """Plugin of a worker that sends its reports to the controller."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection
        self.listens = False  # pytest repeats earlier warnings to a plugin that is registered

    def send(self, kind: str, content: object = None) -> None:
        """Send a message."""
        self._connection.send((kind, content))

    def request_unit(self) -> list[int]:
        """Return the next tests, by index; nothing when all are given out."""
        self.send("unit")
        unit: list[int] = self._connection.recv()
        return unit

    def pytest_runtest_logreport(self, report: TestReport) -> None:
        """Send the outcome of a phase of a test."""
        hook = self._config.hook
        self.send("report", hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, nodeid: str
    ) -> None:
        """Send a warning, unless it is from before the fork."""
        if not self.listens:
            return
        place = (warning_message.filename, warning_message.lineno)
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        self.send("warning", (text, place, nodeid))


def run_worker(
    config: pytest.Config,
    items: list[pytest.Item],
    number: int,
    connection: Connection,
    account: Account,
    controller: int,
    base: Path | None,
) -> NoReturn:
    """Run units of tests in this process, a fork of the controller, until none is left."""
    code = 1
    try:
        tie_to_parent(controller)
        account.add(os.getpid())
        reset_process_state(config, number, base)
        reporter = Reporter(config, connection)
        config.pluginmanager.register(reporter)
        reporter.listens = True
        fork_server = TestForkServer()
        account.add(fork_server.start_of_own())
        run_units(config, items, reporter, account)
        fork_server.close()
        code = 0
    except BaseException:
        ends.report(traceback.format_exc())
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(scaled(END_S)))  # a running process would block the controller permanently
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
        atexit._run_exitfuncs()
        os._exit(code)


def run_units(
    config: pytest.Config, items: list[pytest.Item], reporter: Reporter, account: Account
) -> None:
    """Run one unit after the other.

    The next unit is requested before the last test of one, because a test's teardown depends on the
    test that follows.
    """
    unit = reporter.request_unit()
    counted_s = account.cpu_s()
    while unit:
        following: list[int] = []
        for index, upcoming in zip(unit, [*unit[1:], None], strict=True):
            reporter.send("begin", index)
            if upcoming is None:
                following = reporter.request_unit()
                upcoming = following[0] if following else None
            started_s = time.monotonic()
            config.hook.pytest_runtest_protocol(
                item=items[index], nextitem=None if upcoming is None else items[upcoming]
            )
            before_s, counted_s = counted_s, account.cpu_s()
            reporter.send("end", (index, counted_s - before_s, time.monotonic() - started_s))
        unit = following


def reset_process_state(config: pytest.Config, number: int, base: Path | None) -> None:
    """Replace the state that a fork must not share with the controller.

    That is its output, directory for files, random numbers, and exit handlers.
    """
    os.environ[WORKER_ENV] = str(number)
    plugins = config.pluginmanager
    for name in ("workers", "costs", "terminalreporter"):
        plugin = plugins.get_plugin(name)
        if plugin is not None:
            plugins.unregister(plugin)
    capture = plugins.get_plugin("capturemanager")
    if capture is not None and capture.is_globally_capturing():  # a file shared with others
        capture.stop_global_capturing()
        capture.start_global_capturing()
    for logger in logging.Logger.manager.loggerDict.values():  # otherwise pytest attaches to each
        if isinstance(logger, logging.Logger):  # fifty loggers of torch, at three phases of a test
            logger.propagate = True
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    assert base is not None
    own = base / f"worker{number}"
    own.mkdir(mode=0o700)
    config._tmp_path_factory._basetemp = own  # type: ignore[attr-defined]
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # the controller's own
    atexit._clear()
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def add_options(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    parser.addoption("--workers", type=int, default=0, metavar="N", help="processes for tests")
    parser.addoption(
        "--stop-after", type=float, metavar="SECONDS", help="begin no test later than that"
    )
