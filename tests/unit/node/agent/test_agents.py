"""Recovery of running processes, cleanup of old runs, refused starts and log files of an agent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import NotFound
from meshrl.common.base.files.run_host import create_run_host
from meshrl.common.base.host.settings import MESH_TAG_ENV, SETTINGS_ENV
from meshrl.common.base.random import Random
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.process.child_handle import read_start_time
from meshrl.common.mesh.process.diagnosis.failure import Failure
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.mesh import MeshSettings
from meshrl.common.state import jobs, registry
from meshrl.common.state.server_state import run_host
from meshrl.services.node.agent import MAX_READ_BYTES, HostLogFiles
from meshrl.services.node.job_services import service_command_words
from meshrl.services.node.old_runs import UNKNOWN_JOB_TTL_S, sweep
from meshrl.services.node.pid_file import PidFile
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.gpus.driver import Gpus
from tests.load import scaled
from tests.meshes import SECRET, alone, on_sockets
from tests.unit.common.mesh.process.modules import python_argv
from tests.unit.node.smallmesh import SmallMesh

SOON_S = 30.0  # limit for the exit of a process on a busy host
NAME = "rollout/calc/0"
OURS, ANOTHERS = "a mark", "another mark"


@contextmanager
def spawn_service(mark: str, *words: str) -> Iterator[int]:
    code = "import time; print(flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env={**os.environ, MESH_TAG_ENV: mark},
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child.pid
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("mark", "named", "known"),
    [
        (OURS, NAME, True),
        (OURS, "rollout/calc/1", False),
        (OURS, "", False),
        (ANOTHERS, NAME, False),
    ],
)
async def test_agent_finds_only_processes_that_match_pid_and_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, named: str, known: bool
) -> None:
    monkeypatch.setenv(MESH_TAG_ENV, OURS)
    settings = MeshSettings(redis_url="simulated", run_root=str(tmp_path), host="one")
    mesh = alone("node/one", SystemClock(), Random(0), SystemHost(), settings=settings)
    notes = PidFile(mesh, tmp_path / "notes.json", service_command_words)
    with spawn_service(mark, *(service_command_words(named) if named else ())) as pid:
        entry = registry.RegistryEntry(NAME, "rollout", host="one", pid=pid, incarnation="x")
        entry.start_time = read_start_time(pid)
        await registry.register(mesh.state, entry, 600_000)
        strange = registry.RegistryEntry(
            "rollout/calc", "rollout", host="one", pid=pid, incarnation="y"
        )
        await registry.register(mesh.state, strange, 600_000)
        assert list(await notes.find_running(["rollout"])) == [NAME][: int(known)]
        ended = await notes.kill_unrecorded(NAME)
        assert (ended is not None) == known
        if ended is not None:
            await ended.wait(scaled(SOON_S))
        assert bool(read_start_time(pid)) != known


async def test_sweep_removes_only_files_that_no_job_needs(tmp_path: Path) -> None:
    clock, root = SystemClock(), tmp_path / "second"
    state = open_simulated_state(clock)
    await run_host.write_run_host(state, create_run_host("head", tmp_path / "head", b"probe"))
    settings = MeshSettings(redis_url=state.url, run_root=str(root), host="second")
    mesh = on_sockets("node/second", state, clock, settings=settings)
    for job in ("going", "ended"):
        await jobs.submit(state, job, JobConfig(name=job).to_document(), "/runs", job)
    await jobs.cancel(state, "ended", "stop")
    since = {job: (await jobs.read_job(state, job)).created_ms for job in ("going", "ended")}
    kept = [f"going/{since['going']}", "unknown/7", "going/notes"]
    gone = ["going/1", f"ended/{since['ended']}", "forgotten/8"]
    for name in (*kept, *gone):
        (root / "runs" / name / "ledger").mkdir(parents=True)
    long_ago = clock.wall() - 2 * UNKNOWN_JOB_TTL_S
    for path in (root / "runs/forgotten/8/ledger", root / "runs/forgotten/8"):
        os.utime(path, (long_ago, long_ago))

    # left by a process that was killed
    (root / "bundles/.gone-a-bundle.123/modules").mkdir(parents=True)
    (root / "bundles/another").mkdir()
    (unused := root / "chunks/5e/5e").parent.mkdir(parents=True)
    unused.touch()
    os.utime(unused, (long_ago, long_ago))

    await run_host.write_run_host(state, create_run_host("second", tmp_path / "head", b"probe"))
    await sweep(mesh)  # on the run host, nothing else is removed
    assert [path.name for path in (root / "bundles").iterdir()] == ["another"]
    assert all((root / "runs" / name).is_dir() for name in (*kept, *gone)) and unused.exists()
    await run_host.write_run_host(state, create_run_host("head", tmp_path / "head", b"probe"))
    await sweep(mesh)
    assert all((root / "runs" / name).is_dir() for name in kept)
    assert not any((root / "runs" / name).exists() for name in gone)
    assert not (root / "runs/ended").exists() and not unused.exists()
    await mesh.leave()
    await state.close()


ENDS_S = 60.0


async def start_and_fail(
    mesh: SmallMesh, settings: MeshSettings, *words: str, env: Mapping[str, str] = {}
) -> Failure:
    """Return the error that ends a process of the mesh under these settings."""
    path, log = mesh.directory / "refusing.json", mesh.directory / "refused.log"
    settings.to_file(path)
    host = SystemHost()
    child = host.spawn(
        python_argv(*words), name="refused", env={**env, SETTINGS_ENV: str(path)}, log=log
    )
    assert await child.wait(scaled(ENDS_S)) == 1, log.read_text()
    failure = host.find_failure(child.pid, log)
    assert failure is not None and failure.is_fatal, log.read_text()
    return failure


@pytest.mark.parametrize("module", ["meshrl.services.planner", "meshrl.services.weights"])
async def test_bind_address_of_another_host_is_named(mesh: SmallMesh, module: str) -> None:
    settings = MeshSettings(
        mesh.settings.redis_url,
        str(mesh.directory),
        bind="tcp://192.0.2.1:*",
        host="here",
        secret=SECRET,
    )
    failure = await start_and_fail(mesh, settings, module)
    assert "cannot listen on tcp://192.0.2.1:*" in failure.text
    assert failure.where == "mesh.bind" and failure.fix


@pytest.mark.deep
@pytest.mark.needs("compiler")
async def test_missing_gpus_are_reported(mesh: SmallMesh, gpus: Gpus) -> None:
    words = ["meshrl.services.node", "--device", "cuda", "--workers", "2"]
    failure = await start_and_fail(mesh, mesh.settings, *words, env=gpus.environment)
    assert "the driver lists 0 GPUs" in failure.text and "mesh.device" in failure.fix
    gpus.gpu("GPU-a")
    failure = await start_and_fail(mesh, mesh.settings, *words, env=gpus.environment)
    assert "2 workers are requested, but there are 1 GPUs" in failure.text
    gpus.gpu("GPU-b")
    hidden = gpus.environment | {"CUDA_VISIBLE_DEVICES": "GPU-b"}
    failure = await start_and_fail(mesh, mesh.settings, *words, env=hidden)
    assert "there are 1 GPUs (cuda:1 NVIDIA H100)" in failure.text


def test_log_is_read_in_whole_lines_and_followed_as_it_grows(tmp_path: Path) -> None:
    path, logs = tmp_path / "engine-g1.log", HostLogFiles(tmp_path)
    path.write_text("one\ntwo\nthr")
    [file] = logs.list_files()
    assert (file.name, file.bytes) == ("engine-g1", 11)
    end = logs.read("engine-g1", -5, 100)
    assert (end.text, end.next_offset, end.file_size_bytes) == ("o\nthr", 11, 11)
    part = logs.read("engine-g1", 0, 6)
    assert (part.text, part.next_offset) == ("one\n", 4)
    assert logs.read("engine-g1", part.next_offset, 100).text == "two\n"
    with path.open("a") as log:
        log.write("ee\nfour")
    assert logs.read("engine-g1", 8, 100).text == "three\n"
    assert logs.read("engine-g1", 10_000, 100).text == ""


def test_long_line_is_read_in_parts_of_limited_size(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("x" * (3 * MAX_READ_BYTES))
    part = HostLogFiles(tmp_path).read("a", 0, 10 * MAX_READ_BYTES)
    assert part.next_offset == len(part.text) == MAX_READ_BYTES


@pytest.mark.parametrize("name", ["b", "../secret", "/etc/passwd", "", "secret\0"])
def test_only_log_files_can_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/a.log").write_text("a\n")
    (tmp_path / "secret.log").write_text("hush\n")
    with pytest.raises(NotFound):
        HostLogFiles(tmp_path / "logs").read(name, 0, 10)
