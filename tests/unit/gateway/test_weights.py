"""A job's model by its token: the bytes that the mesh would export, and no other file of it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from meshrl import Client
from meshrl.common.api.gateway import Gateway, ModelRequest, ReadModelFile
from meshrl.common.base.digest import digest_of_file
from meshrl.common.base.errors import NotFound, Refused
from meshrl.common.job.bundle import bundle_files
from meshrl.common.state import jobs
from meshrl.services.weights.export import write
from tests.unit.gateway.conftest import House, line_to
from tests.unit.weights.test_export import CONFIG, Run, model, weights


@pytest.fixture
async def trained(house: House, tmp_path: Path) -> str:
    """A job `j` of the house that has a version, and the token that it came with."""
    run = Run(tmp_path / "made", CONFIG)
    run.event("initial", version=0, manifest=run.store(weights(model(0)), 0))
    held = json.loads((run.directory / "job.json").read_text())
    text = house.token()
    token = json.loads(house.file.read_text())["tokens"][0]["id"]
    shutil.move(run.directory, house.runs / "j")
    (house.runs / "j/job.json").write_text(json.dumps(held | {"token": token}))
    await jobs.submit(house.state, "j", held["document"], str(house.runs / "j"), "op")
    return text


async def test_the_files_that_arrive_are_those_of_an_export_whatever_is_asked_meanwhile(
    house: House, trained: str, tmp_path: Path
) -> None:
    run, exports = house.runs / "j", house.runs / "j/exports"
    (exports / "cut-off.partial").mkdir(parents=True)
    write(run, tmp_path / "wanted", None, False)
    async with line_to(trained) as line:
        async with Client(token=trained) as client:
            asked = line.call(Gateway.model, ModelRequest("j", -1, False))
            first, out = await asyncio.gather(asked, client.weights("j", out=tmp_path / "got"))
            assert bundle_files.listed(out) == bundle_files.listed(tmp_path / "wanted")
            with pytest.raises(Refused, match="not empty"):
                await client.weights("j", out=tmp_path / "got")
        assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []
        assert os.listdir(exports) == [first.name]
        newer = Run(tmp_path / "newer", CONFIG)
        fields = {"job": "j", "version": 1, "manifest": newer.store(weights(model(1)), 1)}
        shutil.copytree(newer.directory / "store", run / "store", dirs_exist_ok=True)
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps({"id": "2-0", "ms": 0, "kind": "step", "fields": fields}) + "\n")
        second = await line.call(Gateway.model, ModelRequest("j", -1, False))
        name = "model.safetensors"
        assert second.files[name] != first.files[name]
        for fetched, step in ((first, "0-"), (second, "1-")):
            assert fetched.name.startswith(step)
            found = await line.call(Gateway.read, ReadModelFile("j", fetched.name, name, 0))
            (tmp_path / "read").write_bytes(found)
            assert digest_of_file(tmp_path / "read") == fetched.files[name][1]


async def test_nothing_else_of_the_run_can_be_read(house: House, trained: str) -> None:
    (house.runs / "j/exports/last").mkdir(parents=True)
    (house.runs / "j/exports/last/config.json").write_text("mine")
    (house.runs / "j/exports/last/link").symlink_to(house.root / "mesh/gateway.json")
    async with line_to(trained) as line:
        mine = await line.call(Gateway.read, ReadModelFile("j", "last", "config.json", 1))
        assert mine == b"ine"
        for version, name in (
            ("last", "../../job.json"),
            ("last", str(house.root / "mesh/gateway.json")),
            ("last", "link"),
            ("..", "job.json"),
            ("../..", "j/job.json"),
            ("last", "none"),
            ("last", ""),
        ):
            with pytest.raises(NotFound):
                await line.call(Gateway.read, ReadModelFile("j", version, name, 0))


async def test_holders_of_tokens_pin_versions_of_their_jobs_alone(
    house: House, trained: str
) -> None:
    async with Client(token=trained) as client:
        [one] = await client.versions("j")
        assert one["why"] == ["current"]
        await client.pin("j", "last", "--note")
        [one] = await client.versions("j")
        assert one["why"] == ["current", "pinned"] and one["note"] == "--note"
        with pytest.raises(NotFound, match=r"j does not hold version 9\. It holds 0") as caught:
            await client.pin("j", 9)
        assert str(house.root) not in str(caught.value), "no directory of the mesh's host is told"
        await client.unpin("j", 0)
        assert (await client.versions("j"))[0]["why"] == ["current"]
        for act in ("diff", "export", "import", "--help", ""):
            with pytest.raises(Refused, match="nothing that a token can ask"):
                await client.on_versions("j", act, "0")
    async with Client(token=house.token("bob")) as other:
        with pytest.raises(NotFound, match="of yours"):
            await other.pin("j", 0)
    assert not list((house.root / "mesh/logs").glob("versions-*"))
