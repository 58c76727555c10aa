"""Contract of a host for processes, threads, files and ports, on real ones."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
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
from tests.fork_server import wait_until_listening
from tests.load import scaled
from tests.unit.common.mesh.process.conftest import start_fork_server
from tests.unit.common.mesh.process.modules import python_argv, wait_until_ended, write_module
from tests.unit.common.mesh.runtime.talking import until

SOON_S = 30.0  # for anything that should happen, on a busy host
NOBODY = 65534


@pytest.fixture(scope="module")
def fork_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the socket of a fork server for all tests."""
    socket = tmp_path_factory.mktemp("fork") / "socket"
    child = start_fork_server(socket)
    try:
        wait_until_listening(child, socket)
        yield socket
    finally:
        child.kill()


@pytest.fixture(autouse=True, params=["executed", "forked"])
def start_method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Start modules by exec and by fork."""
    forked = request.param == "forked"
    place = str(request.getfixturevalue("fork_socket")) if forked else FORK_SERVER_OFF
    monkeypatch.setenv(FORK_SERVER_ENV, place)
    return str(request.param)


async def test_module_gets_its_arguments_and_its_output_goes_to_the_log(tmp_path: Path) -> None:
    env = write_module(tmp_path, "says", "import sys; print(__name__, sys.argv[1:])")
    log = tmp_path / "logs" / "says.log"
    child = SystemHost().spawn(python_argv("says", "--to", "me"), name="says", env=env, log=log)
    assert await child.wait(scaled(SOON_S)) == 0
    assert log.read_text() == "__main__ ['--to', 'me']\n"


async def test_non_python_program_is_executed(tmp_path: Path) -> None:
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


async def test_limits_and_niceness_apply_to_the_child(tmp_path: Path) -> None:
    env = write_module(
        tmp_path,
        "shows",
        "import os, resource; print(os.nice(0), resource.getrlimit(resource.RLIMIT_NOFILE)[0])",
    )
    log = tmp_path / "log"
    before = os.nice(0)
    child = SystemHost().spawn(
        python_argv("shows"),
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


@pytest.mark.parametrize("grandchild", [["sleep", "60"], python_argv("sleeps")])
async def test_children_die_with_a_killed_parent(tmp_path: Path, grandchild: list[str]) -> None:
    env = write_module(tmp_path, "parent", PARENT)
    write_module(tmp_path, "sleeps", "import time; time.sleep(60)")
    pid_file = tmp_path / "pid"
    parent = SystemHost().spawn(
        python_argv("parent", str(pid_file), *grandchild), name="parent", env=env
    )
    async with asyncio.timeout(scaled(SOON_S)):
        while not (pid_file.exists() and pid_file.read_text()):
            await asyncio.sleep(0.01)
    pid = int(pid_file.read_text())
    assert read_start_time(pid)
    parent.kill()
    assert await wait_until_ended(pid)


async def test_process_ends_when_its_death_pipe_closes(
    tmp_path: Path,
) -> None:
    started_file = tmp_path / "up"
    code = f"import pathlib, time; pathlib.Path({str(started_file)!r}).touch(); time.sleep(600)"
    env = write_module(tmp_path, "sleeps", code)
    host = SystemHost()
    child = host.spawn(python_argv("sleeps"), name="sleeps", env=env)
    async with asyncio.timeout(scaled(SOON_S)):
        while not started_file.exists():
            assert await child.wait(0.01) is None
    assert host._spawner._death_pipe is not None
    os.close(host._spawner._death_pipe[1])
    assert await child.wait(scaled(SOON_S)) == -signal.SIGKILL


async def test_processes_of_a_session_end_with_its_leader(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {pid_file}; exit 0"
    child = SystemHost().spawn(
        ["/bin/sh", "-c", script], name="sh", options=SpawnOptions(own_session=True)
    )
    assert await child.wait(scaled(SOON_S)) == 0
    assert await wait_until_ended(int(pid_file.read_text()))


ECHO = """
    from meshrl.common.mesh.process.entry.child import ChildChannel
    channel = ChildChannel.from_env()
    channel.move_above(50)
    while (frame := channel.recv()) is not None:
        channel.send(frame[::-1])
"""


async def test_frames_of_any_size_pass_both_ways(tmp_path: Path) -> None:
    env = write_module(tmp_path, "echo", ECHO)
    child = SystemHost().spawn(
        python_argv("echo"), name="echo", env=env, options=SpawnOptions(has_channel=True)
    )
    for frame in (b"", b"abc", bytes(range(256)) * 4000):
        await child.send(frame)
        assert await child.recv(scaled(SOON_S)) == frame[::-1]
    with pytest.raises(DeadlineExceeded):
        await child.recv(0.02)
    child.kill()
    with pytest.raises(PeerLost):
        await child.recv(scaled(SOON_S))


async def test_malformed_frame_raises_a_typed_error(tmp_path: Path) -> None:
    garbage = """
        import os
        os.write(int(os.environ["MESHRL_CHANNEL_FD"]), b"\\xff" * 64)
        import time; time.sleep(60)
    """
    env = write_module(tmp_path, "garbage", garbage)
    child = SystemHost().spawn(
        python_argv("garbage"), name="garbage", env=env, options=SpawnOptions(has_channel=True)
    )
    with pytest.raises(BadMessage):
        await child.recv(scaled(SOON_S))
    child.kill()


async def test_process_of_another_mesh_or_name_is_not_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MESH_TAG_ENV, "ours")
    code = "import os, time; open(os.environ['THERE'], 'w'); time.sleep(600)"
    started_file = tmp_path / "there"
    for mesh_tag in ("ours", "another's"):
        env = {
            **write_module(tmp_path, "lasts", code),
            MESH_TAG_ENV: mesh_tag,
            "THERE": str(started_file),
        }
        host = SystemHost()
        child = host.spawn(python_argv("lasts", "--name", "a"), name="a", env=env)
        while not started_file.exists():
            assert await child.wait(0.01) is None
        process = child.pid, child.start_time
        adopted = host.adopt(*process, name="a", program=["lasts", "--name", "a"])
        assert (adopted is not None) == (mesh_tag == "ours")
        assert host.adopt(*process, name="a", program=["lasts", "--name", "b"]) is None
        assert host.adopt(*process, name="a") is not None, "by what was noted"
        child.kill()
        await child.wait(scaled(SOON_S))
        started_file.unlink()


async def test_process_is_adopted_only_by_pid_and_start_time() -> None:
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
    env = write_module(tmp_path, "spins", "while True: pass")
    child = SystemHost().spawn(python_argv("spins"), name="spins", env=env)
    async with asyncio.timeout(scaled(SOON_S)):
        while (usage := child.read_usage()) is not None and usage.cpu_s < 0.1:
            await asyncio.sleep(0.01)
    assert usage is not None
    os.kill(child.pid, signal.SIGSTOP)
    async with asyncio.timeout(scaled(SOON_S)):  # it stops when it next gets a core
        while usage is not None and usage.state != "T":
            await asyncio.sleep(0.01)
            usage = child.read_usage()
    assert usage is not None and usage.cpu_s >= 0.1
    child.kill()
    assert await child.wait(scaled(SOON_S)) == -signal.SIGKILL
    assert child.read_usage() is None


async def test_periodic_function_continues_after_an_error_and_ends_on_false(
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


async def test_blocking_work_has_a_deadline_and_raises_its_errors() -> None:
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


async def test_record_that_does_not_fit_leaves_no_bytes(tmp_path: Path) -> None:
    env = write_module(tmp_path, "fills", FULL_DISK)
    path, log = tmp_path / "segment", tmp_path / "log"
    child = SystemHost().spawn(
        python_argv("fills", str(path)),
        name="fills",
        env=env,
        log=log,
        options=SpawnOptions(rlimits={"FSIZE": 1000}),
    )
    assert await child.wait(scaled(SOON_S)) == 0
    assert log.read_text() == "StorageFull 600\n"
    assert path.read_bytes() == b"a" * 600 + b"c" * 300


def test_reopened_append_file_continues_at_its_end(tmp_path: Path) -> None:
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


def get_socket_address(listener: socket.socket) -> SocketAddress:
    host, port = listener.getsockname()[:2]
    return SocketAddress(ip_address(host), port)


def test_listen_addresses_of_the_process_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = get_socket_address(listener)
        assert address in find_listen_addresses()
    assert address not in find_listen_addresses()


@pytest.mark.parametrize("everywhere", [False, True])
def test_hosts_of_connected_clients_are_found(everywhere: bool) -> None:
    family, host = (socket.AF_INET6, "::") if everywhere else (socket.AF_INET, "127.0.0.1")
    socket_options = {"family": family, "dualstack_ipv6": everywhere}
    with (
        socket.create_server((host, 0), **socket_options) as listener,  # type: ignore[arg-type]
        socket.create_server((host, 0), **socket_options) as other,  # type: ignore[arg-type]
    ):
        address, other_address = get_socket_address(listener), get_socket_address(other)
        assert find_client_hosts({address}) == set()
        source = ("127.0.0.2", 0)
        with socket.create_connection(("127.0.0.1", address.port), source_address=source):
            assert find_client_hosts({address}) == {"127.0.0.2"}
            assert find_client_hosts({other_address}) == set()
            assert (
                find_client_hosts({SocketAddress(ip_address("127.0.0.3"), address.port)}) == set()
            )


CLIENT_PROGRAM = """
import os, socket, sys
family, host, port, user = sys.argv[1:]
os.setresuid(int(user), int(user), int(user))
client = socket.socket(int(family))
client.connect((host, int(port)))
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_clients_of_other_users_are_found(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_server((host, 0), family=family) as other,
    ):
        address, other_address = get_socket_address(listener), get_socket_address(other)
        with socket.create_connection((host, address.port)):
            assert find_foreign_users({address}) == set()
        # This process must not fork: libraries of earlier tests have threads, which no fork has.
        words = [str(int(family)), host, str(address.port), str(NOBODY)]
        command = [sys.executable, "-I", "-c", CLIENT_PROGRAM, *words]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe) as client:
            assert client.stdin is not None and client.stdout is not None
            assert client.stdout.readline()
            assert find_foreign_users({address}) == {NOBODY}
            assert find_foreign_users({other_address}) == set()
            client.stdin.close()
        assert client.returncode == 0
