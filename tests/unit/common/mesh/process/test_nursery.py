"""A process that a nursery forks is what a fresh interpreter would be, and belongs to its owner."""

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
from tests.unit.common.mesh.process.modules import ended, module, python, written

Open = Callable[..., SystemChild]
KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2])

SHOWS = """
    import gc, json, logging, os, random, resource, signal, sys, threading
    import numpy
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
        "drawn": [random.random(), float(numpy.random.random())],
    }))
"""


async def shown(tmp_path: Path, **options: Any) -> dict[str, Any]:
    """What a process sees of itself."""
    env = module(tmp_path, "shows", SHOWS) | options.pop("env", {})
    log = tmp_path / "shown"
    log.unlink(missing_ok=True)
    child = SystemHost().spawn(python("shows", "--to", "me"), name="s", env=env, log=log, **options)
    assert await child.wait(scaled(20)) == 0, log.read_text()
    seen: dict[str, Any] = json.loads(log.read_text())
    return seen


async def test_it_is_what_a_fresh_interpreter_would_be(
    tmp_path: Path, open_nursery: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    nursery = open_nursery("numpy")
    monkeypatch.setenv("MESHRL_TEST", "changed")
    before = os.umask(0o002)
    try:
        seen = await shown(tmp_path, options=SpawnOptions(niceness=1), env={"MESHRL_OTHER": "1"})
        again = await shown(tmp_path)
    finally:
        os.umask(before)
    assert seen["parent"] == nursery.pid and seen["leads"]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert tuple(seen["files"]) == limits
    assert resource.prlimit(nursery.pid, resource.RLIMIT_NOFILE)[0] == limits[1]
    assert seen["argv"] == ["--to", "me"]
    assert seen["shown"] == ["-m", "shows", "--to"]
    assert seen["environment"]["MESHRL_TEST"] == "changed"
    assert {"MESHRL_TEST=changed", "MESHRL_OTHER=1"} <= set(seen["known"])
    assert seen["path"][:2] == [os.getcwd(), str(tmp_path)] and seen["cwd"] == os.getcwd()
    assert (seen["nice"], seen["umask"]) == (os.nice(0) + 1, 0o077)
    kinds = {name: target.partition(":")[0] for name, target in seen["descriptors"].items()}
    assert (kinds.pop("0"), kinds.pop("1"), kinds.pop("2")) == (
        os.devnull,
        str(tmp_path / "shown"),
        str(tmp_path / "shown"),
    )
    assert list(kinds.values()) == ["pipe"]  # its owner's death
    assert (seen["threads"], seen["handlers"], seen["blocked"]) == (1, 0, [])
    assert seen["child_signal"] and seen["interrupt"] and seen["collects"]
    assert not set(seen["drawn"]) & set(again["drawn"])


@pytest.mark.rotating(3)
async def test_threads_and_memory_are_as_the_environment_says(
    tmp_path: Path, open_nursery: Open
) -> None:
    code = """
        import ctypes, torch
        libc = ctypes.CDLL(None)
        libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
        before = libc.sbrk(0)
        place = libc.malloc(ctypes.c_size_t(64 << 20))
        print(torch.get_num_threads(), before < place + (64 << 20) <= libc.sbrk(0))
    """
    open_nursery("torch")
    env = module(tmp_path, "allocates", code) | {"OMP_NUM_THREADS": "3"}
    kept = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
    for more, said in ((kept, "3 True"), ({}, "3 False")):
        log = tmp_path / f"log-{said}"
        child = SystemHost().spawn(python("allocates"), name="a", env=env | more, log=log)
        assert await child.wait(scaled(30)) == 0
        assert log.read_text().strip() == said


async def test_no_descriptor_that_was_the_nursery_s_is_closed_once_more(
    tmp_path: Path, open_nursery: Open
) -> None:
    code = """
        import gc, os
        mine = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
        gc.collect()
        print(*(number for number in mine if not os.path.exists(f"/proc/self/fd/{number}")))
    """
    open_nursery()
    env = module(tmp_path, "collects", code)
    for number in range(2):  # the second one while the nursery knows of the first
        log = tmp_path / f"log-{number}"
        child = SystemHost().spawn(python("collects"), name="collects", env=env, log=log)
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
async def test_its_exit_status_reaches_the_owner(
    tmp_path: Path, open_nursery: Open, code: str, status: int
) -> None:
    open_nursery()
    env = module(tmp_path, "ends", code)
    log = tmp_path / "log"
    child = SystemHost().spawn(python("ends"), name="ends", env=env, log=log)
    assert await child.wait(scaled(20)) == status == child.poll()
    if "reason" in code:
        assert log.read_text() == "a reason\n"
    if "ValueError" in code:
        assert log.read_text().endswith("ValueError: no\n")


async def test_the_end_is_an_orderly_one(tmp_path: Path, open_nursery: Open) -> None:
    code = """
        import atexit, threading, time
        atexit.register(print, "exit function")
        thread = threading.Thread(target=lambda: (time.sleep(0.1), print("thread")))
        thread.start()
    """
    open_nursery()
    env, log = module(tmp_path, "ends", code), tmp_path / "log"
    child = SystemHost().spawn(python("ends"), name="ends", env=env, log=log)
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
async def test_it_dies_with_its_owner_and_not_with_the_nursery(
    tmp_path: Path, open_nursery: Open, state: str, owner_stopped: bool
) -> None:
    nursery = open_nursery()
    env = module(tmp_path, "owner", OWNER)
    module(tmp_path, "sleeps", WITH_THE_GIL if "lock" in state else "import time; time.sleep(60)")
    note = tmp_path / "pid"
    owner = SystemHost().spawn(python("owner", str(note), "sleeps"), name="owner", env=env)
    pid = int(await written(note))
    assert os.stat(f"/proc/{pid}")
    nursery.kill()
    assert await nursery.wait(scaled(5)) == -signal.SIGKILL
    await asyncio.sleep(0.05)
    assert read_start_time(pid)
    if state == "is stopped":
        os.kill(pid, signal.SIGSTOP)
    if owner_stopped:
        os.kill(owner.pid, signal.SIGSTOP)
    owner.kill()
    assert await ended(pid)


async def test_a_worker_outlives_its_owner(tmp_path: Path, open_nursery: Open) -> None:
    open_nursery()
    env = module(
        tmp_path,
        "owner",
        OWNER.replace('"child")', '"child", options=SpawnOptions(die_with_parent=False))'),
    )
    module(tmp_path, "sleeps", "import time; time.sleep(60)")
    note = tmp_path / "pid"
    owner = SystemHost().spawn(python("owner", str(note), "sleeps"), name="owner", env=env)
    pid = int(await written(note))
    began = read_start_time(pid)
    owner.kill()
    assert await owner.wait(scaled(5)) is not None
    await asyncio.sleep(0.05)
    adopted = SystemHost().adopt(pid, began, name="child")
    assert adopted is not None and await adopted.wait(0.05) is None
    adopted.kill()
    assert await adopted.wait(scaled(5)) is not None


async def test_the_status_is_true_though_the_nursery_has_ended(
    tmp_path: Path, open_nursery: Open
) -> None:
    nursery = open_nursery()
    code = """
        import pathlib, sys, time
        while not pathlib.Path(sys.argv[1]).exists():
            time.sleep(0.01)
        sys.exit(6)
    """
    env, go = module(tmp_path, "waits", code), tmp_path / "go"
    child = SystemHost().spawn(python("waits", str(go)), name="waits", env=env)
    nursery.kill()
    assert await nursery.wait(scaled(5)) == -signal.SIGKILL
    go.touch()
    assert await child.wait(scaled(20)) == (6 if KERNEL >= (6, 15) else UNKNOWN_EXIT_STATUS)
    log = tmp_path / "log"
    executed = SystemHost().spawn(python("waits", str(go)), name="waits", env=env, log=log)
    assert await executed.wait(scaled(20)) == 6


async def test_a_silent_nursery_costs_a_pause_and_starts_nothing_twice(
    tmp_path: Path, open_nursery: Open
) -> None:
    nursery = open_nursery()
    env = module(tmp_path, "notes", f"open('{tmp_path / 'n'}', 'a').write('x')")
    os.kill(nursery.pid, signal.SIGSTOP)
    host = SystemHost()
    children = [host.spawn(python("notes"), name="notes", env=env) for _ in range(2)]
    assert [await child.wait(scaled(20)) for child in children] == [0, 0]
    os.kill(nursery.pid, signal.SIGCONT)
    again = SystemHost().spawn(python("notes"), name="notes", env=env)
    assert await again.wait(scaled(20)) == 0
    assert (tmp_path / "n").read_text() == "xxx"


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "LD_LIBRARY_PATH", "OMP_PROC_BIND"])
async def test_what_only_a_fresh_interpreter_can_be_is_executed(
    tmp_path: Path, open_nursery: Open, name: str
) -> None:
    nursery = open_nursery("numpy")
    assert (await shown(tmp_path))["parent"] == nursery.pid
    seen = await shown(tmp_path, env={name: "1"})
    assert seen["parent"] == os.getpid() and seen["environment"][name] == "1"


async def test_a_debugged_process_starts_others_itself(tmp_path: Path, open_nursery: Open) -> None:
    open_nursery("numpy")
    traced = sys.gettrace()
    sys.settrace(lambda *what: None)
    try:
        seen = await shown(tmp_path)
    finally:
        sys.settrace(traced)
    assert seen["parent"] == os.getpid()


async def test_a_nursery_that_is_not_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORK_SERVER_ENV, str(tmp_path / "nothing" / "here"))
    assert (await shown(tmp_path))["parent"] == os.getpid()


async def test_the_path_of_a_nursery_may_be_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ("a" * 100) / ("b" * 100)
    place.mkdir(parents=True)
    nursery = SystemHost().spawn(
        python("meshrl.common.mesh.process.forking.fork_server", str(place / "socket")),
        name="nursery",
        options=SpawnOptions(own_session=True),
    )
    monkeypatch.setenv(FORK_SERVER_ENV, str(place / "socket"))
    wait_until_listening(nursery, place / "socket")
    assert (await shown(tmp_path))["parent"] == nursery.pid
    assert (place / "socket").stat().st_mode & 0o077 == 0
    nursery.kill()


def test_a_socket_that_is_found_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nursery"
    path.touch()  # of an earlier one

    class Listener(socket.socket):
        def listen(self, backlog: int = 0, /) -> None:
            assert path.is_file(), "it is in its place before it listens"
            super().listen(backlog)

    monkeypatch.setattr(socket, "socket", Listener)
    with open_listener(path), Listener(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert list(tmp_path.iterdir()) == [path]


async def test_garbage_is_refused_and_the_next_order_served(
    tmp_path: Path, open_nursery: Open
) -> None:
    nursery = open_nursery("numpy")
    for message in (b"garbage", b"[]", b'{"module": 1}', b"\xff" * 1000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(scaled(5))
            connection.connect(os.environ[FORK_SERVER_ENV])
            connection.send(message)
            assert b"refused" in connection.recv(1000)
    assert (await shown(tmp_path))["parent"] == nursery.pid


async def test_what_a_child_leaves_in_its_session_ends_with_it(
    tmp_path: Path, open_nursery: Open
) -> None:
    code = """
        import subprocess, sys
        left = subprocess.Popen(["sleep", "60"])
        open(sys.argv[1], "w").write(f"{left.pid}\\n")
    """
    open_nursery()
    env, note = module(tmp_path, "leaves", code), tmp_path / "pid"
    child = SystemHost().spawn(python("leaves", str(note)), name="leaves", env=env)
    assert await child.wait(scaled(20)) == 0
    assert await ended(int(await written(note)))


async def test_an_owner_that_ends_before_it_says_go_has_started_nothing(
    tmp_path: Path, open_nursery: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshrl.common.mesh.process.forking.fork_client import ForkedProcess

    nursery = open_nursery()
    monkeypatch.setattr(ForkedProcess, "start", lambda process: process.close())
    note = tmp_path / "note"
    env = module(tmp_path, "notes", f"open({str(note)!r}, 'w').write('x')")
    child = SystemHost().spawn(python("notes"), name="notes", env=env)
    assert await ended(child.pid)
    assert not note.exists() and nursery.poll() is None


async def test_threads_of_an_import_are_refused(tmp_path: Path) -> None:
    env = module(
        tmp_path,
        "threaded",
        "import threading, time; threading.Thread(target=time.sleep, args=(9,)).start()",
    )
    log = tmp_path / "log"
    nursery = SystemHost().spawn(
        python(
            "meshrl.common.mesh.process.forking.fork_server", str(tmp_path / "socket"), "threaded"
        ),
        name="nursery",
        env=env,
        log=log,
    )
    assert await nursery.wait(scaled(20)) == 1
    assert "2 threads" in log.read_text()
    assert not (tmp_path / "socket").exists()
