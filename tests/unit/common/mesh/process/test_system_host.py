"""Promises of a Host about processes, threads, files and ports, with real ones."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from ipaddress import ip_address
from pathlib import Path

import pytest

from meshrl.common.base.errors import BadMessage, DeadlineExceeded, PeerLost
from meshrl.common.base.host.settings import MESH_TAG_ENV
from meshrl.common.mesh.process.child_handle import read_start_time
from meshrl.common.mesh.process.forking.fork_client import FORK_SERVER_ENV, FORK_SERVER_OFF
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.spawning import SpawnOptions
from meshrl.common.mesh.process.tcp_sockets import (
    SocketAddress,
    find_client_hosts,
    find_foreign_users,
    find_listen_addresses,
)
from tests.load import scaled
from tests.unit.common.mesh.process.modules import ended, module, python
from tests.unit.common.mesh.runtime.talking import until

SOON_S = 30.0  # for whatever should happen, on a busy host
NOBODY = 65534


@pytest.fixture(autouse=True, params=["executed", "forked"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Modules keep every promise, however they are started."""
    if request.param == "forked":
        request.getfixturevalue("open_nursery")()
    else:
        monkeypatch.setenv(FORK_SERVER_ENV, FORK_SERVER_OFF)
    return str(request.param)


async def test_a_module_gets_its_arguments_and_its_output_goes_to_the_log(tmp_path: Path) -> None:
    env = module(tmp_path, "says", "import sys; print(__name__, sys.argv[1:])")
    log = tmp_path / "logs" / "says.log"
    child = SystemHost().spawn(python("says", "--to", "me"), name="says", env=env, log=log)
    assert await child.wait(scaled(SOON_S)) == 0
    assert log.read_text() == "__main__ ['--to', 'me']\n"


async def test_a_program_that_is_not_python_is_executed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = SystemHost().spawn(
        ["/bin/sh", "-c", "echo $0 $1; exit 3", "a", "b"], name="sh", log=log
    )
    assert await child.wait(scaled(SOON_S)) == 3
    assert log.read_text() == "a b\n"


async def test_wait_gives_up_at_its_deadline_and_kill_ends_the_process(tmp_path: Path) -> None:
    child = SystemHost().spawn(["sleep", "60"], name="sleep")
    assert await child.wait(0.05) is None
    waiters = asyncio.gather(child.wait(scaled(SOON_S)), child.wait(scaled(SOON_S)))
    await asyncio.sleep(0)
    child.kill()
    assert list(await waiters) == [-signal.SIGKILL] * 2
    assert child.poll() == -signal.SIGKILL


async def test_limits_and_niceness_hold_in_the_child(tmp_path: Path) -> None:
    env = module(
        tmp_path,
        "shows",
        "import os, resource; print(os.nice(0), resource.getrlimit(resource.RLIMIT_NOFILE)[0])",
    )
    log = tmp_path / "log"
    before = os.nice(0)
    child = SystemHost().spawn(
        python("shows"),
        name="shows",
        env=env,
        log=log,
        options=SpawnOptions(niceness=3, rlimits={"NOFILE": 77}),
    )
    assert await child.wait(scaled(SOON_S)) == 0
    assert log.read_text().split() == [str(before + 3), "77"]


PARENT = """
    import asyncio, sys, time
    from pathlib import Path
    from meshrl.common.mesh.process.host import SystemHost
    from meshrl.common.mesh.process.spawning import SpawnOptions
    host = SystemHost()
    child = host.spawn(sys.argv[2:], name="grandchild", options=SpawnOptions(own_session=True))
    Path(sys.argv[1]).write_text(str(child.pid))
    time.sleep(60)
"""


@pytest.mark.parametrize("grandchild", [["sleep", "60"], python("sleeps")])
async def test_children_die_with_a_parent_that_is_killed(
    tmp_path: Path, grandchild: list[str]
) -> None:
    env = module(tmp_path, "parent", PARENT)
    module(tmp_path, "sleeps", "import time; time.sleep(60)")
    note = tmp_path / "pid"
    parent = SystemHost().spawn(python("parent", str(note), *grandchild), name="parent", env=env)
    async with asyncio.timeout(scaled(SOON_S)):
        while not (note.exists() and note.read_text()):
            await asyncio.sleep(0.01)
    pid = int(note.read_text())
    assert read_start_time(pid)
    parent.kill()
    assert await ended(pid)


async def test_a_process_whose_death_pipe_closes_ends_though_its_parent_lives(
    tmp_path: Path,
) -> None:
    up = tmp_path / "up"
    code = f"import pathlib, time; pathlib.Path({str(up)!r}).touch(); time.sleep(600)"
    env = module(tmp_path, "sleeps", code)
    host = SystemHost()
    child = host.spawn(python("sleeps"), name="sleeps", env=env)
    async with asyncio.timeout(scaled(SOON_S)):
        while not up.exists():
            assert await child.wait(0.01) is None
    assert host._spawner._death_pipe is not None
    os.close(host._spawner._death_pipe[1])
    assert await child.wait(scaled(SOON_S)) == -signal.SIGKILL


async def test_a_session_leaves_nothing_behind_when_its_leader_ends(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {note}; exit 0"
    child = SystemHost().spawn(
        ["/bin/sh", "-c", script], name="sh", options=SpawnOptions(own_session=True)
    )
    assert await child.wait(scaled(SOON_S)) == 0
    assert await ended(int(note.read_text()))


ECHO = """
    from meshrl.common.mesh.process.entry.child import ChildChannel
    channel = ChildChannel.from_env()
    channel.move_above(50)
    while (frame := channel.recv()) is not None:
        channel.send(frame[::-1])
"""


async def test_frames_pass_both_ways_whatever_their_size(tmp_path: Path) -> None:
    env = module(tmp_path, "echo", ECHO)
    child = SystemHost().spawn(
        python("echo"), name="echo", env=env, options=SpawnOptions(has_channel=True)
    )
    for frame in (b"", b"abc", bytes(range(256)) * 4000):
        await child.send(frame)
        assert await child.recv(scaled(SOON_S)) == frame[::-1]
    with pytest.raises(DeadlineExceeded):
        await child.recv(0.02)
    child.kill()
    with pytest.raises(PeerLost):
        await child.recv(scaled(SOON_S))


async def test_a_frame_that_cannot_be_one_is_a_typed_error(tmp_path: Path) -> None:
    garbage = """
        import os
        os.write(int(os.environ["MESHRL_CHANNEL_FD"]), b"\\xff" * 64)
        import time; time.sleep(60)
    """
    env = module(tmp_path, "garbage", garbage)
    child = SystemHost().spawn(
        python("garbage"), name="garbage", env=env, options=SpawnOptions(has_channel=True)
    )
    with pytest.raises(BadMessage):
        await child.recv(scaled(SOON_S))
    child.kill()


async def test_a_process_of_another_mesh_or_name_is_not_adopted_on_the_word_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MESH_TAG_ENV, "ours")
    code = "import os, time; open(os.environ['THERE'], 'w'); time.sleep(600)"
    there = tmp_path / "there"
    for mark in ("ours", "another's"):
        env = {**module(tmp_path, "lasts", code), MESH_TAG_ENV: mark, "THERE": str(there)}
        host = SystemHost()
        child = host.spawn(python("lasts", "--name", "a"), name="a", env=env)
        while not there.exists():
            assert await child.wait(0.01) is None
        process = child.pid, child.start_time
        adopted = host.adopt(*process, name="a", program=["lasts", "--name", "a"])
        assert (adopted is not None) == (mark == "ours")
        assert host.adopt(*process, name="a", program=["lasts", "--name", "b"]) is None
        assert host.adopt(*process, name="a") is not None, "by what was noted"
        child.kill()
        await child.wait(scaled(SOON_S))
        there.unlink()


async def test_a_process_is_adopted_only_by_its_pid_and_start_time_together() -> None:
    spawner, adopter = SystemHost(), SystemHost()
    child = spawner.spawn(["sleep", "60"], name="sleep")
    assert adopter.adopt(child.pid, child.start_time + 1, name="sleep") is None
    adopted = adopter.adopt(child.pid, child.start_time, name="sleep")
    assert adopted is not None and adopted.poll() is None
    adopted.kill()
    assert await adopted.wait(scaled(SOON_S)) is not None
    assert await child.wait(scaled(SOON_S)) == -signal.SIGKILL
    assert adopter.adopt(child.pid, child.start_time, name="sleep") is None


async def test_usage_counts_cpu_time_and_names_a_stopped_process(tmp_path: Path) -> None:
    env = module(tmp_path, "spins", "while True: pass")
    child = SystemHost().spawn(python("spins"), name="spins", env=env)
    async with asyncio.timeout(scaled(SOON_S)):
        while (usage := child.read_usage()) is not None and usage.cpu_s < 0.1:
            await asyncio.sleep(0.01)
    assert usage is not None
    os.kill(child.pid, signal.SIGSTOP)
    async with asyncio.timeout(scaled(SOON_S)):  # it stops when it gets a core next
        while usage is not None and usage.state != "T":
            await asyncio.sleep(0.01)
            usage = child.read_usage()
    assert usage is not None and usage.cpu_s >= 0.1
    child.kill()
    assert await child.wait(scaled(SOON_S)) == -signal.SIGKILL
    assert child.read_usage() is None


async def test_every_goes_on_after_a_failure_and_ends_on_false(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[int] = []

    def tick() -> bool:
        calls.append(len(calls))
        if len(calls) == 1:
            raise RuntimeError("redis was away")
        return len(calls) < 3

    SystemHost().run_periodically(0.005, tick, "tick")
    await until(lambda: len(calls) >= 3, SOON_S)
    await asyncio.sleep(0.03)
    assert calls == [0, 1, 2]
    assert "redis was away" in capsys.readouterr().err


async def test_blocking_work_has_a_deadline_and_its_errors_come_through() -> None:
    host = SystemHost()
    assert await host.run_blocking(pow, 2, 5, deadline_s=scaled(5)) == 32
    with pytest.raises(ZeroDivisionError):
        await host.run_blocking(divmod, 1, 0, deadline_s=scaled(5))
    with pytest.raises(DeadlineExceeded, match=r"sleep took longer than 0\.02 s"):
        await host.run_blocking(time.sleep, 0.3, deadline_s=0.02)


FULL_DISK = """
    from pathlib import Path
    from meshrl.common.base.errors import StorageFull
    from meshrl.common.mesh.process.host import SystemHost
    import sys
    file = SystemHost().open_append(Path(sys.argv[1]))
    file.write(b"a" * 600)
    try:
        file.write(b"b" * 600)
    except StorageFull as error:
        print(type(error).__name__, file.tell())
    file.write(b"c" * 300)
    file.sync()
"""


async def test_a_record_that_does_not_fit_leaves_no_trace(tmp_path: Path) -> None:
    env = module(tmp_path, "fills", FULL_DISK)
    path, log = tmp_path / "segment", tmp_path / "log"
    child = SystemHost().spawn(
        python("fills", str(path)),
        name="fills",
        env=env,
        log=log,
        options=SpawnOptions(rlimits={"FSIZE": 1000}),
    )
    assert await child.wait(scaled(SOON_S)) == 0
    assert log.read_text() == "StorageFull 600\n"
    assert path.read_bytes() == b"a" * 600 + b"c" * 300


def test_an_append_file_continues_where_it_ended(tmp_path: Path) -> None:
    host = SystemHost()
    for record in (b"one", b"two"):
        file = host.open_append(tmp_path / "f")
        file.write(record)
        file.close()
    assert (tmp_path / "f").read_bytes() == b"onetwo"


def test_replacing_a_file_leaves_no_scratch_file(tmp_path: Path) -> None:
    path = tmp_path / "alone" / "state.json"
    path.parent.mkdir()
    for content in (b"1", b"2"):
        SystemHost().replace_file(path, content)
    assert path.read_bytes() == b"2"
    assert list(path.parent.iterdir()) == [path]


def end_of(listener: socket.socket) -> SocketAddress:
    host, port = listener.getsockname()[:2]
    return SocketAddress(ip_address(host), port)


def test_a_process_knows_its_own_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end = end_of(listener)
        assert end in find_listen_addresses()
    assert end not in find_listen_addresses()


@pytest.mark.parametrize("everywhere", [False, True])
def test_it_is_told_where_clients_come_from(everywhere: bool) -> None:
    family, host = (socket.AF_INET6, "::") if everywhere else (socket.AF_INET, "127.0.0.1")
    about = {"family": family, "dualstack_ipv6": everywhere}
    with (
        socket.create_server((host, 0), **about) as listener,  # type: ignore[arg-type]
        socket.create_server((host, 0), **about) as other,  # type: ignore[arg-type]
    ):
        end, of_others = end_of(listener), end_of(other)
        assert find_client_hosts({end}) == set()
        source = ("127.0.0.2", 0)
        with socket.create_connection(("127.0.0.1", end.port), source_address=source):
            assert find_client_hosts({end}) == {"127.0.0.2"}
            assert find_client_hosts({of_others}) == set()
            assert find_client_hosts({SocketAddress(ip_address("127.0.0.3"), end.port)}) == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_clients_of_other_users_are_told_from_ours(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_server((host, 0), family=family) as other,
    ):
        end, of_others = end_of(listener), end_of(other)
        with socket.create_connection((host, end.port)):
            assert find_foreign_users({end}) == set()
        told, tell = os.pipe()
        stay, leave = os.pipe()
        stranger = os.fork()
        if stranger == 0:
            os.close(leave)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            connected = socket.socket(family)
            connected.connect((host, end.port))
            os.write(tell, b"!")
            os.read(stay, 1)
            os._exit(0)
        assert os.read(told, 1)
        assert find_foreign_users({end}) == {NOBODY}
        assert find_foreign_users({of_others}) == set()
        os.close(leave)
        os.waitpid(stranger, 0)
        for descriptor in (told, tell, stay):
            os.close(descriptor)
