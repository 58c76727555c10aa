"""Deletion sweeps of a store that is killed at any write. All needed files are complete at once,
and in the end exactly these are left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.records.checkpoints import STATE_FOLDER, find_committed
from meshrl.common.state import events, jobs
from meshrl.common.state.job_lifecycle import deletion
from meshrl.common.weights.chunks.verified_files import RECORD_FILE
from meshrl.common.weights.layout.manifest import decode_manifest
from meshrl.services.weights.retention.pins import VersionPin, pin_version
from meshrl.services.weights.retention.sweeper import (
    DELETION_GRACE_S,
    ORPHAN_MIN_AGE_S,
    ORPHAN_SCAN_INTERVAL_S,
    SWEEP_INTERVAL_S,
)
from tests.fork_server import run_module
from tests.unit.weights.store_bench import JOB, StoreBench, on_store

COLLECTION_S = DELETION_GRACE_S + 4 * SWEEP_INTERVAL_S
WRITES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.utime", "os.link", "os.truncate")
EVERY = 4  # writes; each part of a test begins at another one
OTHER = "other"  # a job that is deleted


def kill_at_write(count: int) -> None:
    """Kill this process before its `count`th write from now on."""
    remaining = count

    def count_write(event: str, args: Sequence[Any]) -> None:
        nonlocal remaining
        is_file_open = event == "open" and isinstance(args[2], int)
        if event in WRITES or (is_file_open and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            remaining -= 1
            if not remaining:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count_write)


@dataclass
class Needed:
    """Data that must be present at any time."""

    versions: list[str]
    checkpoint: str


async def fill(store: StoreBench) -> Needed:
    """Fill a store with files of each kind to collect and with files to retain."""
    await store.submit(keep_checkpoints=1)
    document = store.document | {"weights": {"keep": 2, "keep_every": 3}}
    await jobs.change_document(store.state, JOB, document, {}, "change")
    await store.begin()
    await store.ready(await store.store_group())  # a checkpoint covers it then
    first = await store.stage(1)
    name = await save(store, 1, first)
    await store.end_groups_with(1, first, name)
    second, third = await store.step(2, name), await store.step(3, name)
    fourth = await store.stage(4)
    await store.commit(4, fourth, await save(store, 4, fourth))
    fifth = await store.stage(5)
    await store.commit(5, fifth, name := await save(store, 5, fifth))
    pin_version(store.chunks, JOB, second, VersionPin(str(store.run_dir), 0, 2))
    await store.submit(OTHER)
    await store.begin(OTHER)
    await jobs.cancel(store.state, OTHER, "stop")
    await deletion.delete_job(store.state, OTHER, "delete")
    return Needed([second, third, fourth, fifth], name)


async def save(store: StoreBench, step: int, manifest: str) -> str:
    """Save a checkpoint with its directory."""
    name = await store.save(step, manifest)
    state = store.run_dir / "checkpoints" / name / STATE_FOLDER
    state.mkdir(parents=True)
    (state / "rank-0.safetensors").write_bytes(b"state")
    return name


async def check(store: StoreBench, needed: Needed) -> None:
    """Check that the data to resume from are complete."""
    for manifest in needed.versions:
        assert await store.is_stored(manifest), manifest
    path = find_committed(store.run_dir)
    assert path is not None and path.stem == needed.checkpoint
    verified_files = path.with_suffix("") / STATE_FOLDER / "rank-0.safetensors"
    assert verified_files.read_bytes() == b"state"
    damaged_fields = [
        event.fields for event in await events.read_all(store.state) if event.kind == "damaged"
    ]
    assert damaged_fields == []


async def collect_all(store: StoreBench) -> set[str]:
    """Return the files that are left after a complete collection, orphans included."""
    await store.clock.sleep(COLLECTION_S)
    store.age(ORPHAN_MIN_AGE_S)
    await store.clock.sleep(ORPHAN_SCAN_INTERVAL_S + COLLECTION_S)
    paths = (path for path in store.root.rglob("*") if path.is_file() and path.name != RECORD_FILE)
    names = {str(path.relative_to(store.root)) for path in paths}
    return {name for name in names if not name.startswith(f"{OTHER}/")}  # the run's directory stays


async def collect_and_exit(store: StoreBench, at: int) -> None:
    """Collect in this process, then exit."""
    try:
        kill_at_write(at)
        await store.clock.sleep(COLLECTION_S)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def wait_and_check_killed(child: int) -> bool:
    """Wait for a child; return True if it was killed, and False if it collected all."""
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, status
    return killed


def run_killed(root: Path, at: int) -> tuple[bool, set[str], set[str]]:
    """Run a collection that may be killed before its `at`th write.
    Returns:
        True if it was killed, the files left in the end, and the files that are needed.
    """
    root.mkdir()
    outcome: list[Any] = []

    async def story(store: StoreBench) -> None:
        needed = await fill(store)
        loop = asyncio.get_running_loop()
        if not (child := os.fork()):
            # time is virtual, so that the loop runs in this process as well
            asyncio._set_running_loop(loop)
            await collect_and_exit(store, at)
        killed = wait_and_check_killed(child)
        await store.restart_store()
        await check(store, needed)
        remaining = await collect_all(store)
        await check(store, needed)
        outcome.append((killed, remaining, list_needed(store, needed)))

    on_store(root, story)
    [(killed, remaining, needed_files)] = outcome
    return killed, remaining, needed_files


def list_needed(store: StoreBench, needed: Needed) -> set[str]:
    """Return exactly the files that are needed."""
    manifests = {digest: decode_manifest(store.chunks.read(digest)) for digest in needed.versions}
    digests = set(manifests)
    digests |= {tensor.chunk for one in manifests.values() for tensor in one.tensors}
    name = f"checkpoints/{needed.checkpoint}"
    files = {f"store/{digest[:2]}/{digest}" for digest in digests}
    files |= {f"store/jobs/{JOB}.json", f"store/pins/{JOB}/{needed.versions[0]}.json"}
    return files | {f"{name}.json", f"{name}/{STATE_FOLDER}/rank-0.safetensors"}


def run_all(root: Path, first: int) -> None:
    """Kill the collection before every EVERY-th of its writes from the `first`."""
    at, killed = first - EVERY, True
    while killed:
        at += EVERY
        killed, remaining, needed_files = run_killed(root / str(at), at)
        assert remaining == needed_files, (
            f"killed before write {at}: {sorted(remaining ^ needed_files)}"
        )
    assert at > 20, "the collection has more writes"


@pytest.mark.rotating(EVERY)
@pytest.mark.parametrize("first", range(1, EVERY + 1))
async def test_collection_killed_at_any_write_leaves_only_needed_files(
    tmp_path: Path, first: int
) -> None:
    # This runs in its own process, since a process with threads of libraries cannot be forked
    # safely.
    words = str(tmp_path), str(first)
    await run_module(__name__, *words, log=tmp_path / "log", deadline_s=240.0)


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), int(sys.argv[2]))
