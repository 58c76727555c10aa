"""Checkpoints of a trainer on a host that does not see where its run is at home: they lie there as
if it did, and training goes on from them.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.job.config import LoraConfig
from meshrl.common.records.checkpoints import STATE, all_checkpoints, manifest_of, verified
from meshrl.sim.mesh.job.job import config_of
from tests.unit.common.base.files.harms import HARMS
from tests.unit.trainer.versions.test_restoring import Trained, trained


def content(path: Path) -> Any:
    """What a file holds, bit for bit; safetensors gives its header's words in any order, and so a
    manifest has other digests each time.
    """
    held = path.read_bytes()
    if path.suffix == ".safetensors":
        data = 8 + int.from_bytes(held[:8], "little")
        return json.loads(held[8:data]), held[data:]
    if path.name.startswith("step-"):
        told = manifest_of(path)
        return told | {"files": list(told["files"])}
    return held


def written(root: Path, away: bool) -> dict[str, Any]:
    """Every file below `checkpoints` of a run's home, by its path there."""
    found: dict[str, Any] = {}
    root.mkdir()

    async def story(bench: Trained) -> None:
        home = bench.store.run_dir / "checkpoints"
        for path in home.rglob("*"):
            if path.is_file():
                name = path.relative_to(home).as_posix()
                found[name] = content(path)
        assert [verified(path)["step"] for path in all_checkpoints(bench.store.run_dir)] == [0, 1]

    trained(root, story, replace(config_of(1, 1, 1, 9), lora=LoraConfig(rank=2)), away)
    shutil.rmtree(root)  # the next one has the same names: PEFT's settings tell of them
    return found


def test_a_checkpoint_is_the_same_to_the_bit_wherever_it_was_written(tmp_path: Path) -> None:
    at_home, away = written(tmp_path / "run", False), written(tmp_path / "run", True)
    assert at_home.keys() == away.keys() and len(at_home) > 8
    assert [name for name in at_home if at_home[name] != away[name]] == []


def test_training_goes_on_from_what_is_fetched_and_leaves_nothing(tmp_path: Path) -> None:
    async def story(bench: Trained) -> None:
        assert await bench.usable() == 1
        assert not [path for path in (tmp_path / "away").rglob("*") if path.is_file()]

    trained(tmp_path, story, away=True)


def test_what_a_killed_process_has_fetched_goes_with_the_next_use_and_no_other_s(
    tmp_path: Path,
) -> None:
    async def story(bench: Trained) -> None:
        name = bench.store.trainer.name.replace("/", "-")
        killed, other = (
            bench.data.here / "restored" / of / "0123456789abcdef-step" for of in (name, "another")
        )
        for copy in (killed, other):
            copy.mkdir(parents=True)
            (copy / "part").write_bytes(b"rows")
        assert await bench.usable() == 1
        assert not killed.exists() and (other / "part").is_file()

    trained(tmp_path, story, away=True)


def test_one_that_is_damaged_at_home_gives_its_place_there(tmp_path: Path) -> None:
    async def story(bench: Trained) -> None:
        bench.store.age(5 * 3600.0)  # what was staged of it has gone
        await bench.store.store.sweeper.sweep()
        HARMS[0](bench.state(1), b"")
        assert await bench.usable() == 0
        told = await bench.told()
        assert told[-1]["what"] == "checkpoint" and bench.names[0] in told[-1]["then"]
        assert (bench.store.run_dir / "quarantine/checkpoints" / bench.names[1] / STATE).is_dir()

    trained(tmp_path, story, away=True)


@pytest.mark.parametrize(
    "lost", [slice(2), slice(1), slice(1, 2)], ids=["both", "manifest", "chunk"]
)
def test_weights_are_made_again_from_the_model_at_home(tmp_path: Path, lost: slice) -> None:
    """Of the manifest and the one chunk that they are of; what is needed of the checkpoint
    meanwhile stays.
    """

    async def story(bench: Trained) -> None:
        chunks = await bench.chunks(1)
        assert len(chunks) == 2
        for path in chunks[lost]:
            path.unlink()
        await bench.store.restart_store()
        assert await bench.usable() == 1
        assert await bench.store.stored(bench.manifests[1])
        assert {one["what"] for one in await bench.told()} <= {"weights"}, "no checkpoint is"
        assert not [path for path in (tmp_path / "away").rglob("*") if path.is_file()]

    trained(tmp_path, story, away=True)


def test_what_an_earlier_start_left_is_removed_here_and_at_home(tmp_path: Path) -> None:
    async def story(bench: Trained) -> None:
        home, here = bench.store.run_dir / "checkpoints", bench.data.here / "checkpoints"
        left = [home / f"{bench.names[1]}.laying", here / f"{bench.names[1]}.cut"]
        for path in left:
            path.mkdir(parents=True)
        await bench.checkpoints.clear(bench.names[1])
        assert not any(path.exists() for path in left)
        assert bench.model(0).is_file() and bench.model(1).is_file()

    trained(tmp_path, story, away=True)
