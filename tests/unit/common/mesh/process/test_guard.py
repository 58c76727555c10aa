"""All that an author's code starts ends with its process, and what it prints is bounded."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from meshrl.common.mesh.process.entry.guard import TAIL_BYTES
from meshrl.common.mesh.process.forking.birth import NURSERY_ENV, OFF
from meshrl.common.mesh.process.handle import SystemChild, start_time
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.output.log_bounds import BURST, RATE
from meshrl.common.mesh.process.starting import Spawning
from tests.load import scaled
from tests.unit.common.mesh.process.modules import ended, module, python
from tests.unit.common.mesh.process.test_nursery import Open

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
    from meshrl.common.mesh.process.starting import Spawning

    async def main():
        argv = [sys.executable, "-m", "orphans", sys.argv[1]]
        log = Path(sys.argv[2])
        how = Spawning(pipe=True, guarded=True)
        child = SystemHost().spawn(argv, name="code", log=log, how=how)
        await asyncio.sleep(3600)

    asyncio.run(main())
"""


@pytest.fixture(params=["forked", "executed"])
def way(request: pytest.FixtureRequest, open_nursery: Open, monkeypatch: pytest.MonkeyPatch) -> str:
    """How guarded processes begin."""
    if request.param == "forked":
        open_nursery()
    else:
        monkeypatch.setenv(NURSERY_ENV, OFF)
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
    assert all(map(start_time, found))
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
            how=Spawning(pipe=True, guarded=True),
        )
        left = await orphans(pids)
        usage = child.usage()
        assert usage is not None and child.pid not in left
        if how == b"kill":
            child.kill()
        else:
            await child.send(how)
        assert await child.wait(scaled(20)) == code, log.read_text()
        assert not any(map(start_time, [*left, child.pid])), (way, how)
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
        how=Spawning(pipe=True, guarded=True),
    )
    await orphans(tmp_path / "more")
    assert child.usage() is not None
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
        python("raises"), name="r", env=env, log=log, how=Spawning(pipe=True, guarded=True)
    )
    assert await child.wait(scaled(20)) == 1
    failure = host.failure_of(child.pid, log, 1)
    assert failure is not None and failure.text == "at import", way
    child.close()


async def test_output_of_guarded_code_is_bounded_and_the_drop_is_noted(
    tmp_path: Path, way: str
) -> None:
    log = tmp_path / "log"
    env = module(tmp_path, "prints", PRINTS)
    begun = asyncio.get_running_loop().time()
    child = SystemHost().spawn(
        python("prints"), name="p", env=env, log=log, how=Spawning(guarded=True)
    )
    assert await child.wait(scaled(30)) == 0
    took_s = asyncio.get_running_loop().time() - begun
    content = log.read_bytes()
    dropped = sum(map(int, re.findall(rb"\[meshrl: (\d+) bytes of output dropped", content)))
    assert content.count(b"x") <= BURST + took_s * (RATE + TAIL_BYTES) + TAIL_BYTES, way
    text = re.sub(rb"\n\[meshrl: .*\]\n", b"", content)
    assert text.endswith(b"last words\n")
    assert dropped and len(text) + dropped == (12 << 20) + len("last words\n")
    assert isinstance(child, SystemChild) and sys.platform == "linux"
