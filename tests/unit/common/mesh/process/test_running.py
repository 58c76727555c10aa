"""Processes: how they start, answer, log and end, with all that they started."""

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
from tests.unit.common.mesh.process.modules import ended, module, python
from tests.unit.common.mesh.process.test_nursery import Open

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
FULL = Path("/dev/full")  # every write to it is refused: no space is left
CODE = """
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
# Each of these writes its pid into the file named by the first argument and stays.
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
STARTED = 4  # by it
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_service_cleanly(number: signal.Signals) -> None:
    argv = [sys.executable, "-c", SERVICE]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.stdout.read() == "cleaned up\n"
        assert process.wait(timeout=scaled(20)) == 0


def test_settings_come_from_the_file_that_the_environment_names(
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


def test_settings_that_others_can_read_or_have_made_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.json"
    MeshSettings(redis_url="redis://localhost", run_root="/runs").to_file(path)
    monkeypatch.setenv(SETTINGS_ENV, str(path))
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 640") as refused:
        MeshSettings.from_env()
    assert "chmod 600" in refused.value.fix
    if os.geteuid() == 0:
        path.chmod(0o600)
        os.chown(path, 65534, 65534)
        with pytest.raises(ConfigError, match="user 65534"):
            MeshSettings.from_env()


async def asked(logs: Path, code: str, within_s: float = 0.0) -> dict[str, object]:
    command = [sys.executable, "-c", code]
    return await run_for_document(SystemHost(), command, "asked/j", logs, within_s or scaled(60.0))


async def test_the_last_line_is_the_answer_and_nothing_is_left(tmp_path: Path) -> None:
    logs = tmp_path / "mesh" / "logs"
    assert await asked(logs, "print('first'); print('{\"a\": 1}')") == {"a": 1}
    assert list(logs.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("", "without a word"),
        ("raise SystemExit('no such file')", "no such file"),
        ("print('[1]')", r"\[1\]"),
    ],
)
async def test_who_ends_without_an_answer_is_told_by_its_last_words(
    tmp_path: Path, code: str, why: str
) -> None:
    with pytest.raises(MeshError, match=f"asked/j has ended without an answer: {why}"):
        await asked(tmp_path, code)
    assert not os.listdir(tmp_path)


async def test_one_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="asked/j"):
        await asked(tmp_path, "import time; time.sleep(1e6)", within_s=0.2)
    assert not os.listdir(tmp_path)


async def test_a_fork_removes_at_its_end_what_it_has_made_and_nothing_of_the_nursery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_nursery: Callable[..., SystemChild]
) -> None:
    paths = module(tmp_path, "imported", IMPORTED) | module(tmp_path, "ends", ENDS)
    monkeypatch.setenv("PYTHONPATH", paths["PYTHONPATH"])
    open_nursery("imported")
    host, log = SystemHost(), tmp_path / "log"
    for _ in range(2):
        child = host.spawn(python("ends"), name="ends", log=log)
        assert await child.wait(scaled(20)) == 0, log.read_text()
    kept, own, kept_again, own_again = map(Path, log.read_text().split())
    assert kept == kept_again and kept.is_dir()
    assert not own.exists() and not own_again.exists()


@pytest.mark.parametrize("told", [b"go", b"", b"x"])
def test_a_process_begins_at_its_owners_word_only(told: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        if told:
            ours.send(told)
        ours.close()
        assert wait_for_start(theirs) is (told == b"go")


def test_an_owner_that_ended_before_it_read_the_answer_lets_nothing_go() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.send(b"the number of the process")
        ours.close()
        assert not wait_for_start(theirs)


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_what_a_full_disk_does_not_take_of_a_log_is_lost_and_ends_nobody() -> None:
    def status(how: str) -> int:
        with FULL.open("w") as log:
            argv = [sys.executable, "-c", textwrap.dedent(CODE), how]
            return subprocess.run(argv, stdout=log, stderr=log, check=False).returncode

    assert (status("plain"), status("lossy")) == (1, 7)


def test_what_there_is_room_for_is_there(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        argv = [sys.executable, "-c", textwrap.dedent(CODE), "lossy"]
        subprocess.run(argv, stdout=file, stderr=file, check=False)
    assert log.read_text().count("a line a line") > 3 and log.read_text().count("an error") == 3


@pytest.fixture(params=["forked", "executed"])
def way(request: pytest.FixtureRequest, open_nursery: Open, monkeypatch: pytest.MonkeyPatch) -> str:
    """How guarded processes begin."""
    if request.param == "forked":
        open_nursery()
    else:
        monkeypatch.setenv(FORK_SERVER_ENV, FORK_SERVER_OFF)
    return str(request.param)


def numbers(pids: Path) -> list[int]:
    """The numbers in a file, of whole lines."""
    text = pids.read_text() if pids.exists() else ""
    return list(map(int, text[: text.rfind("\n") + 1].split()))


async def orphans(pids: Path) -> list[int]:
    """The processes that the code has started, once all are there."""
    async with asyncio.timeout(scaled(20)):
        while len(found := numbers(pids)) < STARTED:
            await asyncio.sleep(0.01)
    assert all(map(read_start_time, found))
    return found


async def test_nothing_that_guarded_code_started_outlives_it(tmp_path: Path, way: str) -> None:
    env = module(tmp_path, "orphans", ORPHANS)
    for how, code in ((b"crash", -signal.SIGSEGV), (b"exit", 5), (b"kill", -signal.SIGKILL)):
        pids, log = tmp_path / how.decode(), tmp_path / "log"
        child = SystemHost().spawn(
            python("orphans", str(pids)),
            name="c",
            env=env,
            log=log,
            options=SpawnOptions(has_channel=True, is_guarded=True),
        )
        left = await orphans(pids)
        usage = child.read_usage()
        assert usage is not None and child.pid not in left
        if how == b"kill":
            child.kill()
        else:
            await child.send(how)
        assert await child.wait(scaled(20)) == code, log.read_text()
        assert not any(map(read_start_time, [*left, child.pid])), (way, how)
        child.close()


async def test_guarded_code_ends_with_its_owner_and_with_a_killed_guard(
    tmp_path: Path, way: str
) -> None:
    env = module(tmp_path, "orphans", ORPHANS) | module(tmp_path, "owner", OWNER)
    pids, log = tmp_path / "pids", tmp_path / "log"
    owner = SystemHost().spawn(python("owner", str(pids), str(log)), name="o", env=env, log=log)
    left = await orphans(pids)
    owner.kill()
    assert all([await ended(pid) for pid in left]), way

    child = SystemHost().spawn(
        python("orphans", str(tmp_path / "more")),
        name="c",
        env=env,
        options=SpawnOptions(has_channel=True, is_guarded=True),
    )
    await orphans(tmp_path / "more")
    assert child.read_usage() is not None
    os.kill(child._guard, signal.SIGKILL)  # the process itself ends with it
    assert await child.wait(scaled(20)) == -signal.SIGKILL
    assert await ended(child.pid)
    for pid in numbers(tmp_path / "more"):
        os.kill(pid, signal.SIGKILL)
    child.close()


async def test_error_of_guarded_code_is_found_though_it_ended_before_its_pid_was_known(
    tmp_path: Path, way: str
) -> None:
    env, log = module(tmp_path, "raises", "raise ValueError('at import')"), tmp_path / "log"
    host = SystemHost()
    child = host.spawn(
        python("raises"),
        name="r",
        env=env,
        log=log,
        options=SpawnOptions(has_channel=True, is_guarded=True),
    )
    assert await child.wait(scaled(20)) == 1
    failure = host.find_failure(child.pid, log, 1)
    assert failure is not None and failure.text == "at import", way
    child.close()


async def test_output_of_guarded_code_is_bounded_and_the_drop_is_noted(
    tmp_path: Path, way: str
) -> None:
    log = tmp_path / "log"
    env = module(tmp_path, "prints", PRINTS)
    begun = asyncio.get_running_loop().time()
    child = SystemHost().spawn(
        python("prints"), name="p", env=env, log=log, options=SpawnOptions(is_guarded=True)
    )
    assert await child.wait(scaled(30)) == 0
    took_s = asyncio.get_running_loop().time() - begun
    content = log.read_bytes()
    dropped = sum(map(int, re.findall(rb"\[meshrl: (\d+) bytes of output dropped", content)))
    assert (
        content.count(b"x") <= BURST_BYTES + took_s * (RATE_BYTES_PER_S + TAIL_BYTES) + TAIL_BYTES
    ), way
    text = re.sub(rb"\n\[meshrl: .*\]\n", b"", content)
    assert text.endswith(b"last words\n")
    assert dropped and len(text) + dropped == (12 << 20) + len("last words\n")
    assert isinstance(child, SystemChild) and sys.platform == "linux"
