"""A trainer whose last checkpoint is damaged goes on: from its weights elsewhere, or from the
checkpoint before, with every trajectory accounted for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.api.weights import Manifest
from meshrl.common.base.digest import digest_of_file
from meshrl.common.base.encoding.blob import unpack
from meshrl.common.records.checkpoints import STATE, manifest_of
from meshrl.common.state import events, groups, jobs
from meshrl.common.state.lifecycle.accounting import account
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.sim.mesh.job.job import JOB
from meshrl.sim.mesh.world.world import Size, World
from tests.mesh.simulated.worlds import on_world, until_over

STEPS = 9
BROKEN_AT = 8  # checkpoints are written every third step, and two are kept


def flip(path: Path) -> None:
    """One bit, in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def state_of(checkpoint: Path) -> Path:
    return max((checkpoint.with_suffix("") / STATE).iterdir(), key=lambda file: file.stat().st_size)


def chunks_of(checkpoint: Path) -> list[Path]:
    """The manifest of its weights in the store, and their chunks."""
    store = ChunkStore(checkpoint.parents[1] / "store")
    manifest = manifest_of(checkpoint)["weights"]
    described = unpack(Manifest, store.read(manifest)).tensors
    return [store.path(digest) for digest in {manifest, *(t.chunk for t in described)}]


def told_of(tmp_path: Path, break_it: Callable[[Path], None]) -> dict[str, Any]:
    """What is on record of a run whose trainer dies after `break_it` was done to the manifest of
    its last checkpoint.
    """

    async def story(world: World) -> dict[str, Any]:
        row = await jobs.job(world.state, JOB)
        while row.version < BROKEN_AT:
            await world.clock.sleep(0.5)
            row = await jobs.job(world.state, JOB)
        break_it(tmp_path / f"checkpoints/{row.checkpoint}.json")
        for name in ("weights", f"trainer/{JOB}"):  # the store remembers manifests
            next(p for p in world.machine.alive if p.name == name).kill()
        await until_over(world)
        mesh = world.around.meshes["weights"]
        told = await events.read_all(mesh.state)
        in_flight = (await groups.in_flight(mesh.state, JOB)).samples
        return {
            "account": account(told, in_flight, JOB),
            "lineages": [e.fields for e in told if e.kind == "lineage"],
            "damaged": [e.fields for e in told if e.kind == "damaged"],
            "steps": [e.fields["step"] for e in told if e.kind == "step"],
        }

    return on_world(tmp_path, Size(steps=STEPS), story)


def delete(checkpoint: Path) -> None:
    checkpoint.unlink()


def flip_state(checkpoint: Path) -> None:
    flip(state_of(checkpoint))


@pytest.mark.rotating(2)
@pytest.mark.parametrize("break_it", [delete, flip_state])
def test_an_older_checkpoint_takes_the_place_of_a_damaged_one(
    tmp_path: Path, break_it: Callable[[Path], None]
) -> None:
    seen = told_of(tmp_path, break_it)
    [back] = seen["lineages"]
    assert (back["lineage"], back["version"], back["lost_through"]) == (1, 3, 6)
    assert back["host_lost"] >= 3 * 3 * 3, "three steps of three groups of three"
    assert seen["steps"][-1] == STEPS
    assert (seen["account"]["lost"], seen["account"]["trained_twice"]) == (0, 0)
    assert [one["what"] for one in seen["damaged"]][:1] == ["checkpoint"]
    assert "step-000-000003" in seen["damaged"][0]["then"]
    assert list((tmp_path / "quarantine/checkpoints").glob("step-000-000006-*"))


@pytest.mark.deep
def test_weights_that_the_store_lacks_are_made_again_from_the_checkpoint(tmp_path: Path) -> None:
    def break_it(checkpoint: Path) -> None:
        for path in chunks_of(checkpoint):
            flip(path)

    seen = told_of(tmp_path, break_it)
    assert seen["lineages"] == [], "the steps since were replayed"
    assert any("written again from" in one["then"] for one in seen["damaged"])
    assert len(list((tmp_path / "store/quarantine").glob("??/*"))) >= 2
    assert (seen["account"]["lost"], seen["account"]["trained_twice"]) == (0, 0)


@pytest.mark.rotating(2)
def test_weights_that_an_engine_cannot_load_are_written_again_by_the_trainer(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> list[dict[str, Any]]:
        row = await jobs.job(world.state, JOB)
        while row.version < 4:
            await world.clock.sleep(0.5)
            row = await jobs.job(world.state, JOB)
        path = ChunkStore(tmp_path / "store").path(row.manifest)
        flip(path)
        for process in world.machine.alive:
            if process.name == "weights" or process.kind == "engine":  # who has read it already
                process.kill()
        while not path.exists() or digest_of_file(path) != path.name:
            await world.clock.sleep(0.1)
        await until_over(world)
        told = await events.read_all(world.around.meshes["weights"].state)
        return [event.fields for event in told if event.kind == "damaged"]

    seen = on_world(tmp_path, Size(steps=7), story, limit_s=1800.0)
    assert {one["what"] for one in seen} == {"weights"}
    assert (tmp_path / "store/quarantine").is_dir()
