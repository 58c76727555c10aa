"""Processes from the fork server: equal to fresh interpreters, and tied to their owner."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.mesh.process.child_handle import (
    UNKNOWN_EXIT_STATUS,
    SystemChild,
    read_start_time,
)
from meshrl.common.mesh.process.forking.fork_client import FORK_SERVER_ENV
from meshrl.common.mesh.process.forking.fork_server import open_listener
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.spawning import SpawnOptions
from tests.fork_server import wait_until_listening
from tests.load import scaled
from tests.unit.common.mesh.process.modules import (
    python_argv,
    wait_for_line,
    wait_until_ended,
    write_module,
)

Open = Callable[..., SystemChild]
KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2])

SHOWS = """
    import gc, json, logging, os, random, resource, signal, sys, threading
    numpy = sys.modules.get("numpy")  # if the fork server has imported it
    print(json.dumps({
        "parent": os.getppid(),
        "leads": os.getsid(0) == os.getpid(),
        "argv": sys.argv[1:],
        "shown": open("/proc/self/cmdline").read().split(chr(0))[1:4],
        "environment": dict(os.environ),
        "known": open("/proc/self/environ").read().split(chr(0)),
        "path": sys.path,
        "cwd": os.getcwd(),
        "nice": os.nice(0),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "umask": os.umask(0),
        "descriptors": {
            n: os.readlink(f"/proc/self/fd/{n}")
            for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")
        },
        "threads": len(os.listdir("/proc/self/task")),
        "handlers": len(logging.root.handlers),
        "child_signal": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "collects": gc.isenabled(),
        "drawn": [random.random(), float(numpy.random.random()) if numpy else None],
    }))
"""


async def run_and_inspect(tmp_path: Path, **options: Any) -> dict[str, Any]:
    """Run a process and return the properties that it reports of itself."""
    env = write_module(tmp_path, "shows", SHOWS) | options.pop("env", {})
    log = tmp_path / "shown"
    log.unlink(missing_ok=True)
    child = SystemHost().spawn(
        python_argv("shows", "--to", "me"), name="s", env=env, log=log, **options
    )
    assert await child.wait(scaled(20)) == 0, log.read_text()
    properties: dict[str, Any] = json.loads(log.read_text())
    return properties


async def test_forked_process_equals_a_fresh_interpreter(
    tmp_path: Path, open_fork_server: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_server = open_fork_server("numpy")
    monkeypatch.setenv("MESHRL_TEST", "changed")
    before = os.umask(0o002)
    try:
        properties = await run_and_inspect(
            tmp_path, options=SpawnOptions(niceness=1), env={"MESHRL_OTHER": "1"}
        )
        second = await run_and_inspect(tmp_path)
    finally:
        os.umask(before)
    assert properties["parent"] == fork_server.pid and properties["leads"]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert tuple(properties["files"]) == limits
    assert resource.prlimit(fork_server.pid, resource.RLIMIT_NOFILE)[0] == limits[1]
    assert properties["argv"] == ["--to", "me"]
    assert properties["shown"] == ["-m", "shows", "--to"]
    assert properties["environment"]["MESHRL_TEST"] == "changed"
    assert {"MESHRL_TEST=changed", "MESHRL_OTHER=1"} <= set(properties["known"])
    assert (
        properties["path"][:2] == [os.getcwd(), str(tmp_path)] and properties["cwd"] == os.getcwd()
    )
    assert (properties["nice"], properties["umask"]) == (os.nice(0) + 1, 0o077)
    kinds = {name: target.partition(":")[0] for name, target in properties["descriptors"].items()}
    assert (kinds.pop("0"), kinds.pop("1"), kinds.pop("2")) == (
        os.devnull,
        str(tmp_path / "shown"),
        str(tmp_path / "shown"),
    )
    assert list(kinds.values()) == ["pipe"]  # closes when its owner exits
    assert (properties["threads"], properties["handlers"], properties["blocked"]) == (1, 0, [])
    assert properties["child_signal"] and properties["interrupt"] and properties["collects"]
    drawn = [*properties["drawn"], *second["drawn"]]
    assert None not in drawn and len(set(drawn)) == len(drawn)


@pytest.mark.rotating(3)
async def test_thread_count_and_malloc_follow_the_environment(
    tmp_path: Path, open_fork_server: Open
) -> None:
    code = """
        import ctypes, torch
        libc = ctypes.CDLL(None)
        libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
        before = libc.sbrk(0)
        place = libc.malloc(ctypes.c_size_t(64 << 20))
        print(torch.get_num_threads(), before < place + (64 << 20) <= libc.sbrk(0))
    """
    open_fork_server("torch")
    env = write_module(tmp_path, "allocates", code) | {"OMP_NUM_THREADS": "3"}
    malloc_settings = {
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    }
    for more, expected in ((malloc_settings, "3 True"), ({}, "3 False")):
        log = tmp_path / f"log-{expected}"
        child = SystemHost().spawn(python_argv("allocates"), name="a", env=env | more, log=log)
        assert await child.wait(scaled(30)) == 0
        assert log.read_text().strip() == expected


async def test_descriptors_of_the_fork_server_are_not_closed_twice(
    tmp_path: Path, open_fork_server: Open
) -> None:
    code = """
        import gc, os
        mine = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
        gc.collect()
        print(*(number for number in mine if not os.path.exists(f"/proc/self/fd/{number}")))
    """
    open_fork_server()
    env = write_module(tmp_path, "collects", code)
    for number in range(2):  # the second one while the fork server knows the first
        log = tmp_path / f"log-{number}"
        child = SystemHost().spawn(python_argv("collects"), name="collects", env=env, log=log)
        assert await child.wait(scaled(20)) == 0
        assert log.read_text() == "\n"


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(300)", 300 & 0xFF),
        ("import sys; sys.exit('a reason')", 1),
        ("raise ValueError('no')", 1),
        ("import os; os._exit(9)", 9),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("import os; os.kill(os.getpid(), 11)", -signal.SIGSEGV),
    ],
)
async def test_exit_status_reaches_the_owner(
    tmp_path: Path, open_fork_server: Open, code: str, status: int
) -> None:
    open_fork_server()
    env = write_module(tmp_path, "ends", code)
    log = tmp_path / "log"
    child = SystemHost().spawn(python_argv("ends"), name="ends", env=env, log=log)
    assert await child.wait(scaled(20)) == status == child.poll()
    if "reason" in code:
        assert log.read_text() == "a reason\n"
    if "ValueError" in code:
        assert log.read_text().endswith("ValueError: no\n")


async def test_exit_joins_threads_and_runs_exit_functions(
    tmp_path: Path, open_fork_server: Open
) -> None:
    code = """
        import atexit, threading, time
        atexit.register(print, "exit function")
        thread = threading.Thread(target=lambda: (time.sleep(0.1), print("thread")))
        thread.start()
    """
    open_fork_server()
    env, log = write_module(tmp_path, "ends", code), tmp_path / "log"
    child = SystemHost().spawn(python_argv("ends"), name="ends", env=env, log=log)
    assert await child.wait(scaled(20)) == 0
    assert log.read_text().split("\n") == ["thread", "exit function", ""]


OWNER = """
    import sys, time
    from pathlib import Path
    from meshrl.common.mesh.process.host import SystemHost
    from meshrl.common.mesh.process.spawning import SpawnOptions
    child = SystemHost().spawn([sys.executable, "-m", sys.argv[2]], name="child")
    Path(sys.argv[1]).write_text(f"{child.pid}\\n")
    time.sleep(60)
"""
WITH_THE_GIL = "import ctypes; ctypes.PyDLL(None).sleep(60)"


@pytest.mark.rotating(3)
@pytest.mark.parametrize("state", ["runs", "is stopped", "holds the interpreter's lock"])
@pytest.mark.parametrize("owner_stopped", [False, True])
async def test_forked_process_dies_with_its_owner_not_with_the_fork_server(
    tmp_path: Path, open_fork_server: Open, state: str, owner_stopped: bool
) -> None:
    fork_server = open_fork_server()
    env = write_module(tmp_path, "owner", OWNER)
    write_module(
        tmp_path, "sleeps", WITH_THE_GIL if "lock" in state else "import time; time.sleep(60)"
    )
    pid_file = tmp_path / "pid"
    owner = SystemHost().spawn(python_argv("owner", str(pid_file), "sleeps"), name="owner", env=env)
    pid = int(await wait_for_line(pid_file))
    assert os.stat(f"/proc/{pid}")
    fork_server.kill()
    assert await fork_server.wait(scaled(5)) == -signal.SIGKILL
    await asyncio.sleep(0.05)
    assert read_start_time(pid)
    if state == "is stopped":
        os.kill(pid, signal.SIGSTOP)
    if owner_stopped:
        os.kill(owner.pid, signal.SIGSTOP)
    owner.kill()
    assert await wait_until_ended(pid)


async def test_process_without_die_with_parent_outlives_its_owner(
    tmp_path: Path, open_fork_server: Open
) -> None:
    open_fork_server()
    env = write_module(
        tmp_path,
        "owner",
        OWNER.replace('"child")', '"child", options=SpawnOptions(die_with_parent=False))'),
    )
    write_module(tmp_path, "sleeps", "import time; time.sleep(60)")
    pid_file = tmp_path / "pid"
    owner = SystemHost().spawn(python_argv("owner", str(pid_file), "sleeps"), name="owner", env=env)
    pid = int(await wait_for_line(pid_file))
    start_time = read_start_time(pid)
    owner.kill()
    assert await owner.wait(scaled(5)) is not None
    await asyncio.sleep(0.05)
    adopted = SystemHost().adopt(pid, start_time, name="child")
    assert adopted is not None and await adopted.wait(0.05) is None
    adopted.kill()
    assert await adopted.wait(scaled(5)) is not None


async def test_exit_status_is_correct_after_the_fork_server_ended(
    tmp_path: Path, open_fork_server: Open
) -> None:
    fork_server = open_fork_server()
    code = """
        import pathlib, sys, time
        while not pathlib.Path(sys.argv[1]).exists():
            time.sleep(0.01)
        sys.exit(6)
    """
    env, may_exit = write_module(tmp_path, "waits", code), tmp_path / "go"
    child = SystemHost().spawn(python_argv("waits", str(may_exit)), name="waits", env=env)
    fork_server.kill()
    assert await fork_server.wait(scaled(5)) == -signal.SIGKILL
    may_exit.touch()
    assert await child.wait(scaled(20)) == (6 if KERNEL >= (6, 15) else UNKNOWN_EXIT_STATUS)
    log = tmp_path / "log"
    executed = SystemHost().spawn(
        python_argv("waits", str(may_exit)), name="waits", env=env, log=log
    )
    assert await executed.wait(scaled(20)) == 6


async def test_unresponsive_fork_server_causes_no_duplicate_process(
    tmp_path: Path, open_fork_server: Open
) -> None:
    fork_server = open_fork_server()
    env = write_module(tmp_path, "notes", f"open('{tmp_path / 'n'}', 'a').write('x')")
    os.kill(fork_server.pid, signal.SIGSTOP)
    host = SystemHost()
    children = [host.spawn(python_argv("notes"), name="notes", env=env) for _ in range(2)]
    assert [await child.wait(scaled(20)) for child in children] == [0, 0]
    os.kill(fork_server.pid, signal.SIGCONT)
    again = SystemHost().spawn(python_argv("notes"), name="notes", env=env)
    assert await again.wait(scaled(20)) == 0
    assert (tmp_path / "n").read_text() == "xxx"


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "LD_LIBRARY_PATH", "OMP_PROC_BIND"])
async def test_startup_only_variables_cause_a_fresh_interpreter(
    tmp_path: Path, open_fork_server: Open, name: str
) -> None:
    fork_server = open_fork_server()
    assert (await run_and_inspect(tmp_path))["parent"] == fork_server.pid
    properties = await run_and_inspect(tmp_path, env={name: "1"})
    assert properties["parent"] == os.getpid() and properties["environment"][name] == "1"


async def test_traced_process_does_not_use_the_fork_server(
    tmp_path: Path, open_fork_server: Open
) -> None:
    open_fork_server()
    trace_function = sys.gettrace()
    sys.settrace(lambda *what: None)
    try:
        properties = await run_and_inspect(tmp_path)
    finally:
        sys.settrace(trace_function)
    assert properties["parent"] == os.getpid()


async def test_missing_fork_server_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORK_SERVER_ENV, str(tmp_path / "nothing" / "here"))
    assert (await run_and_inspect(tmp_path))["parent"] == os.getpid()


async def test_fork_server_path_may_be_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / ("a" * 100) / ("b" * 100)
    directory.mkdir(parents=True)
    fork_server = SystemHost().spawn(
        python_argv("meshrl.common.mesh.process.forking.fork_server", str(directory / "socket")),
        name="fork-server",
        options=SpawnOptions(own_session=True),
    )
    monkeypatch.setenv(FORK_SERVER_ENV, str(directory / "socket"))
    wait_until_listening(fork_server, directory / "socket")
    assert (await run_and_inspect(tmp_path))["parent"] == fork_server.pid
    assert (directory / "socket").stat().st_mode & 0o077 == 0
    fork_server.kill()


def test_socket_appears_at_its_path_only_once_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fork-server"
    path.touch()  # left by an earlier server

    class Listener(socket.socket):
        def listen(self, backlog: int = 0, /) -> None:
            assert path.is_file(), "it is in its place before it listens"
            super().listen(backlog)

    monkeypatch.setattr(socket, "socket", Listener)
    with open_listener(path), Listener(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert list(tmp_path.iterdir()) == [path]


async def test_malformed_fork_requests_are_rejected_and_the_next_is_served(
    tmp_path: Path, open_fork_server: Open
) -> None:
    fork_server = open_fork_server()
    for message in (b"garbage", b"[]", b'{"module": 1}', b"\xff" * 1000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(scaled(5))
            connection.connect(os.environ[FORK_SERVER_ENV])
            connection.send(message)
            assert b"refused" in connection.recv(1000)
    assert (await run_and_inspect(tmp_path))["parent"] == fork_server.pid


async def test_processes_left_in_a_childs_session_end_with_it(
    tmp_path: Path, open_fork_server: Open
) -> None:
    code = """
        import subprocess, sys
        left = subprocess.Popen(["sleep", "60"])
        open(sys.argv[1], "w").write(f"{left.pid}\\n")
    """
    open_fork_server()
    env, pid_file = write_module(tmp_path, "leaves", code), tmp_path / "pid"
    child = SystemHost().spawn(python_argv("leaves", str(pid_file)), name="leaves", env=env)
    assert await child.wait(scaled(20)) == 0
    assert await wait_until_ended(int(await wait_for_line(pid_file)))


async def test_owner_that_exits_before_the_start_signal_starts_nothing(
    tmp_path: Path, open_fork_server: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshrl.common.mesh.process.forking.fork_client import ForkedProcess

    fork_server = open_fork_server()
    monkeypatch.setattr(ForkedProcess, "start", lambda process: process.close())
    note = tmp_path / "note"
    env = write_module(tmp_path, "notes", f"open({str(note)!r}, 'w').write('x')")
    child = SystemHost().spawn(python_argv("notes"), name="notes", env=env)
    assert await wait_until_ended(child.pid)
    assert not note.exists() and fork_server.poll() is None


async def test_fork_server_rejects_imports_that_start_threads(tmp_path: Path) -> None:
    env = write_module(
        tmp_path,
        "threaded",
        "import threading, time; threading.Thread(target=time.sleep, args=(9,)).start()",
    )
    log = tmp_path / "log"
    fork_server = SystemHost().spawn(
        python_argv(
            "meshrl.common.mesh.process.forking.fork_server", str(tmp_path / "socket"), "threaded"
        ),
        name="fork-server",
        env=env,
        log=log,
    )
    assert await fork_server.wait(scaled(20)) == 1
    assert "2 threads" in log.read_text()
    assert not (tmp_path / "socket").exists()
