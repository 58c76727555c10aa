"""Processes: start, answers, logs and exit, with all their descendants."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.common.base.errors import ConfigError, DeadlineExceeded, MeshError
from meshrl.common.base.host.settings import SETTINGS_ENV, MeshSettings
from meshrl.common.mesh.process.child_handle import SystemChild, read_start_time
from meshrl.common.mesh.process.command_output import run_for_document
from meshrl.common.mesh.process.entry.guard import TAIL_BYTES
from meshrl.common.mesh.process.forking.fork_client import FORK_SERVER_ENV, FORK_SERVER_OFF
from meshrl.common.mesh.process.forking.fork_setup import wait_for_start
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.output.log_bounds import BURST_BYTES, RATE_BYTES_PER_S
from meshrl.common.mesh.process.spawning import SpawnOptions
from tests.load import scaled
from tests.unit.common.mesh.process.modules import python_argv, wait_until_ended, write_module
from tests.unit.common.mesh.process.test_fork_server import Open

SERVICE = """
import asyncio
from meshrl.common.mesh.runtime.mesh import run_service

async def main():
    print("up", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("cleaned up", flush=True)

run_service(main)
"""
IMPORTED = """
    import os, tempfile
    kept = tempfile.TemporaryDirectory(dir=os.path.dirname(__file__), prefix="kept")
"""
ENDS = """
    import tempfile, imported
    own = tempfile.TemporaryDirectory()
    print(imported.kept.name, own.name)
"""
FULL_DEVICE = Path("/dev/full")  # every write to it fails: no space is left
NOISY_PROGRAM = """
    import sys, warnings
    from meshrl.common.mesh.process.output.streams import install_lossy_output
    if sys.argv[1] == "lossy":
        install_lossy_output()
    for number in range(3):
        print("a line " * 1000, flush=True)
        print("an error", file=sys.stderr, flush=True)
    warnings.warn("a warning")
    sys.exit(7)
"""
# Each of these writes its pid into the file named by the first argument and then sleeps.
ORPHANS = """
    import os, signal, subprocess, sys
    from meshrl.common.mesh.process.entry.child import ChildChannel

    stays = sys.argv[1] + ".sh"
    with open(stays, "w") as file:
        file.write(f"echo $$ >> {sys.argv[1]}; exec sleep 1000")
    channel = ChildChannel.from_env()
    subprocess.Popen(["setsid", "sh", stays])
    subprocess.run(f"nohup setsid sh {stays} > /dev/null 2>&1 &", shell=True)
    os.system(f"env -i PATH={os.environ['PATH']} setsid sh -c '(sh {stays} &)' &")
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with open(sys.argv[1], "a") as file:
                file.write(f"{os.getpid()}\\n")
            while True:
                signal.pause()
        os._exit(0)
    while (frame := channel.recv()) is not None:
        if frame == b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        sys.exit(5)
"""
ORPHAN_COUNT = 4  # started by ORPHANS
PRINTS = """
    import os, subprocess, sys
    for _ in range(12):
        os.write(1, (b"x" * 1023 + b"\\n") * 1024)
    sys.exit(subprocess.run(["sh", "-c", "echo last words >&2"]).returncode)
"""
OWNER = """
    import asyncio, sys
    from pathlib import Path
    from meshrl.common.mesh.process.host import SystemHost
    from meshrl.common.mesh.process.spawning import SpawnOptions

    async def main():
        argv = [sys.executable, "-m", "orphans", sys.argv[1]]
        log = Path(sys.argv[2])
        options = SpawnOptions(has_channel=True, is_guarded=True)
        child = SystemHost().spawn(argv, name="code", log=log, options=options)
        await asyncio.sleep(3600)

    asyncio.run(main())
"""


@pytest.mark.rotating(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_service_cleanly(number: signal.Signals) -> None:
    argv = [sys.executable, "-c", SERVICE]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.stdout.read() == "cleaned up\n"
        assert process.wait(timeout=scaled(20)) == 0


def test_settings_are_read_from_the_file_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.json"
    settings = MeshSettings(
        redis_url="redis://localhost", run_root="/runs", stall_s=5.0, secret="5e1f"
    )
    path.write_text("{}")
    path.chmod(0o644)
    settings.to_file(path)
    assert path.stat().st_mode & 0o777 == 0o600, "the URL may hold a password"
    assert "localhost" not in repr(settings) and "5e1f" not in repr(settings)
    monkeypatch.setenv(SETTINGS_ENV, str(path))
    assert MeshSettings.from_env() == settings
    path.write_text(json.dumps({**dataclasses.asdict(settings), "colour": "blue"}))
    with pytest.raises(ConfigError, match="colour"):
        MeshSettings.from_env()
    monkeypatch.delenv(SETTINGS_ENV)
    with pytest.raises(ConfigError, match=SETTINGS_ENV):
        MeshSettings.from_env()


def test_settings_readable_or_owned_by_other_users_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.json"
    MeshSettings(redis_url="redis://localhost", run_root="/runs").to_file(path)
    monkeypatch.setenv(SETTINGS_ENV, str(path))
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 640") as raised:
        MeshSettings.from_env()
    assert "chmod 600" in raised.value.fix
    if os.geteuid() == 0:
        path.chmod(0o600)
        os.chown(path, 65534, 65534)
        with pytest.raises(ConfigError, match="user 65534"):
            MeshSettings.from_env()


async def run_command(logs: Path, code: str, within_s: float = 0.0) -> dict[str, object]:
    command = [sys.executable, "-c", code]
    return await run_for_document(SystemHost(), command, "asked/j", logs, within_s or scaled(60.0))


async def test_last_output_line_is_the_document_and_the_log_is_removed(tmp_path: Path) -> None:
    logs = tmp_path / "mesh" / "logs"
    assert await run_command(logs, "print('first'); print('{\"a\": 1}')") == {"a": 1}
    assert list(logs.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("", "without a word"),
        ("raise SystemExit('no such file')", "no such file"),
        ("print('[1]')", r"\[1\]"),
    ],
)
async def test_error_without_a_document_quotes_the_last_output(
    tmp_path: Path, code: str, why: str
) -> None:
    with pytest.raises(MeshError, match=f"asked/j has exited without an answer: {why}"):
        await run_command(tmp_path, code)
    assert not os.listdir(tmp_path)


async def test_unresponsive_command_is_killed_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="asked/j"):
        await run_command(tmp_path, "import time; time.sleep(1e6)", within_s=0.2)
    assert not os.listdir(tmp_path)


async def test_forked_process_removes_only_its_own_temporary_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_fork_server: Callable[..., SystemChild]
) -> None:
    paths = write_module(tmp_path, "imported", IMPORTED) | write_module(tmp_path, "ends", ENDS)
    monkeypatch.setenv("PYTHONPATH", paths["PYTHONPATH"])
    open_fork_server("imported")
    host, log = SystemHost(), tmp_path / "log"
    for _ in range(2):
        child = host.spawn(python_argv("ends"), name="ends", log=log)
        assert await child.wait(scaled(20)) == 0, log.read_text()
    import_dir, own_dir, second_import_dir, second_own_dir = map(Path, log.read_text().split())
    assert import_dir == second_import_dir and import_dir.is_dir()
    assert not own_dir.exists() and not second_own_dir.exists()


@pytest.mark.parametrize("signal_bytes", [b"go", b"", b"x"])
def test_forked_process_starts_only_on_its_owners_signal(signal_bytes: bytes) -> None:
    owner_end, process_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with owner_end, process_end:
        if signal_bytes:
            owner_end.send(signal_bytes)
        owner_end.close()
        assert wait_for_start(process_end) is (signal_bytes == b"go")


def test_process_does_not_start_if_its_owner_ended_before_reading_its_pid() -> None:
    owner_end, process_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with process_end:
        process_end.send(b"the number of the process")
        owner_end.close()
        assert not wait_for_start(process_end)


@pytest.mark.skipif(not FULL_DEVICE.exists(), reason="this system has no /dev/full")
def test_full_disk_loses_log_output_without_ending_the_process() -> None:
    def status(output_mode: str) -> int:
        with FULL_DEVICE.open("w") as log:
            argv = [sys.executable, "-c", textwrap.dedent(NOISY_PROGRAM), output_mode]
            return subprocess.run(argv, stdout=log, stderr=log, check=False).returncode

    assert (status("plain"), status("lossy")) == (1, 7)


def test_lossy_output_is_complete_while_there_is_space(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        argv = [sys.executable, "-c", textwrap.dedent(NOISY_PROGRAM), "lossy"]
        subprocess.run(argv, stdout=file, stderr=file, check=False)
    assert log.read_text().count("a line a line") > 3 and log.read_text().count("an error") == 3


@pytest.fixture(params=["forked", "executed"])
def start_method(
    request: pytest.FixtureRequest, open_fork_server: Open, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Start guarded processes by fork and by exec."""
    if request.param == "forked":
        open_fork_server()
    else:
        monkeypatch.setenv(FORK_SERVER_ENV, FORK_SERVER_OFF)
    return str(request.param)


def read_pids(pids: Path) -> list[int]:
    """Return the numbers in the complete lines of a file."""
    text = pids.read_text() if pids.exists() else ""
    return list(map(int, text[: text.rfind("\n") + 1].split()))


async def wait_for_orphans(pids: Path) -> list[int]:
    """Return the processes that the code has started, once all exist."""
    async with asyncio.timeout(scaled(20)):
        while len(found := read_pids(pids)) < ORPHAN_COUNT:
            await asyncio.sleep(0.01)
    assert all(map(read_start_time, found))
    return found


async def test_descendants_of_guarded_code_end_with_it(tmp_path: Path, start_method: str) -> None:
    env = write_module(tmp_path, "orphans", ORPHANS)
    for ending, code in ((b"crash", -signal.SIGSEGV), (b"exit", 5), (b"kill", -signal.SIGKILL)):
        pids, log = tmp_path / ending.decode(), tmp_path / "log"
        child = SystemHost().spawn(
            python_argv("orphans", str(pids)),
            name="c",
            env=env,
            log=log,
            options=SpawnOptions(has_channel=True, is_guarded=True),
        )
        orphan_pids = await wait_for_orphans(pids)
        usage = child.read_usage()
        assert usage is not None and child.pid not in orphan_pids
        if ending == b"kill":
            child.kill()
        else:
            await child.send(ending)
        assert await child.wait(scaled(20)) == code, log.read_text()
        assert not any(map(read_start_time, [*orphan_pids, child.pid])), (start_method, ending)
        child.close()


async def test_guarded_code_ends_with_its_owner_and_with_its_guard(
    tmp_path: Path, start_method: str
) -> None:
    env = write_module(tmp_path, "orphans", ORPHANS) | write_module(tmp_path, "owner", OWNER)
    pids, log = tmp_path / "pids", tmp_path / "log"
    owner = SystemHost().spawn(
        python_argv("owner", str(pids), str(log)), name="o", env=env, log=log
    )
    orphan_pids = await wait_for_orphans(pids)
    owner.kill()
    assert all([await wait_until_ended(pid) for pid in orphan_pids]), start_method

    child = SystemHost().spawn(
        python_argv("orphans", str(tmp_path / "more")),
        name="c",
        env=env,
        options=SpawnOptions(has_channel=True, is_guarded=True),
    )
    await wait_for_orphans(tmp_path / "more")
    assert child.read_usage() is not None
    os.kill(child._guard, signal.SIGKILL)  # killing the guard also kills the process
    assert await child.wait(scaled(20)) == -signal.SIGKILL
    assert await wait_until_ended(child.pid)
    for pid in read_pids(tmp_path / "more"):
        os.kill(pid, signal.SIGKILL)
    child.close()


async def test_error_of_guarded_code_is_found_if_it_ended_before_its_pid_was_known(
    tmp_path: Path, start_method: str
) -> None:
    env, log = write_module(tmp_path, "raises", "raise ValueError('at import')"), tmp_path / "log"
    host = SystemHost()
    child = host.spawn(
        python_argv("raises"),
        name="r",
        env=env,
        log=log,
        options=SpawnOptions(has_channel=True, is_guarded=True),
    )
    assert await child.wait(scaled(20)) == 1
    failure = host.find_failure(child.pid, log, 1)
    assert failure is not None and failure.text == "at import", start_method
    child.close()


async def test_output_of_guarded_code_is_bounded_and_drops_are_logged(
    tmp_path: Path, start_method: str
) -> None:
    log = tmp_path / "log"
    env = write_module(tmp_path, "prints", PRINTS)
    start_s = asyncio.get_running_loop().time()
    child = SystemHost().spawn(
        python_argv("prints"), name="p", env=env, log=log, options=SpawnOptions(is_guarded=True)
    )
    assert await child.wait(scaled(30)) == 0
    took_s = asyncio.get_running_loop().time() - start_s
    content = log.read_bytes()
    dropped = sum(map(int, re.findall(rb"\[meshrl: (\d+) bytes of output dropped", content)))
    assert (
        content.count(b"x") <= BURST_BYTES + took_s * (RATE_BYTES_PER_S + TAIL_BYTES) + TAIL_BYTES
    ), start_method
    text = re.sub(rb"\n\[meshrl: .*\]\n", b"", content)
    assert text.endswith(b"last words\n")
    assert dropped and len(text) + dropped == (12 << 20) + len("last words\n")
    assert isinstance(child, SystemChild) and sys.platform == "linux"
