"""What a client asks a gateway: jobs, lines of a run, the mesh at once, weights."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from meshrl.cli import app
from meshrl.client.client import Client
from meshrl.common.api.gateway import Gateway, ModelRequest, ReadModelFile
from meshrl.common.base.digest import compute_file_digest
from meshrl.common.base.errors import ConfigError, NotFound, PeerLost, Refused
from meshrl.common.job.bundle import bundle_files
from meshrl.common.mesh.access import access_token
from meshrl.common.mesh.access.access_token import read_token
from meshrl.common.mesh.transport.keys import KeyPair
from meshrl.common.state import events, jobs
from meshrl.run.monitoring.mesh_top import TokenJobsObserver
from meshrl.services.weights.export import export_selected
from tests.load import scaled
from tests.unit.gateway.conftest import House, forwarded, line_to
from tests.unit.weights.exports.test_export import CONFIG, Run, model, weights


async def test_every_command_takes_the_token_from_the_environment(
    house: House, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(house.token())
    (tmp_path / "token").chmod(0o600)

    async def said(*words: str) -> Result:
        env = {"MESHRL_TOKEN": str(tmp_path / "token"), "MESHRL_HOME": str(tmp_path / "none")}
        found = await asyncio.to_thread(CliRunner(env=env).invoke, app, list(words))
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        return found

    assert "submitted game" in (await said("submit", str(job))).output
    assert "queued" in (await said("status")).output
    [state] = json.loads((await said("status", "game", "--json")).output)["jobs"]
    assert (state["name"], state["phase"]) == ("game", "queued")
    assert "game queued 0/" in " ".join((await said("top", "--once")).output.split())
    late = await said("wait", "game", "--timeout", "0.2")
    assert late.exit_code == 124
    assert "game: stopped" in (await said("cancel", "game")).output
    assert (await said("wait", "game")).exit_code == 3
    watched = await said("watch", "game")
    assert watched.exit_code == 3 and "submitted: job game" in watched.output
    with pytest.raises(NotFound, match="of yours"):
        await said("cancel", "other")
    monkeypatch.chdir(job.parent.parent)  # where a directory is called as the job is
    with pytest.raises(NotFound, match="has no version"):
        await said("export", "game", "--out", str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


async def test_one_token_reaches_its_mesh_by_another_address(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside of a cluster by a name, and through a tunnel by a port of the laptop's own."""
    token = house.token()
    address = access_token.read_token(token).address
    port = address.rpartition(":")[2]
    elsewhere = replace(
        access_token.read_token(token), address="tcp://gateway.nowhere.invalid:7199"
    ).encoded
    monkeypatch.setenv("MESHRL_GATEWAY", f"localhost:{port}")
    async with Client(token=elsewhere) as client:
        assert await client.jobs() == []
    monkeypatch.setenv("MESHRL_GATEWAY", "tcp://localhost")
    with pytest.raises(ConfigError, match="no name or address"):
        await Client(token=token).__aenter__()


async def test_the_only_host_of_a_mesh_is_tried_whether_it_contains_the_models_code(
    house: House, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the gateway, which is on it, and not by who submits."""
    jailed = ["environment.tools={python='python'}", "sandbox.tier=cgroup"]
    monkeypatch.setenv("PATH", "/nowhere")  # no bwrap there
    async with Client(token=house.token()) as client:
        with pytest.raises(Refused, match="python run code that the model wrote"):
            await client.submit(job, jailed)
        assert await client.jobs() == []


FOREVER = 1_000_000


async def test_a_connection_that_ends_without_a_word_is_tried_again(house: House) -> None:
    ticket = read_token(house.token())
    async with (
        forwarded(ticket.address, 2) as port,
        line_to(replace(ticket, address=port.address)) as line,
    ):
        assert (await line.call(Gateway.jobs, None, scaled(60.0))).jobs == []
    assert port.came == 3


async def test_who_hears_nothing_until_the_end_is_told_what_that_may_be(house: House) -> None:
    ticket = read_token(house.token())
    async with forwarded(ticket.address, FOREVER) as port:
        ended = replace(ticket, address=port.address)
        another = replace(ticket, gateway=KeyPair.generate().public.decode())
        for silent in (ended, another):
            async with line_to(silent) as line:
                with pytest.raises(PeerLost, match=r"nobody is behind that address.*another key"):
                    await line.call(Gateway.jobs, None, scaled(1.0))
    assert port.came > 1


async def test_its_steps_and_judged_moves_are_seen_with_the_token(house: House, job: Path) -> None:
    onlooker = TokenJobsObserver()
    async with Client(token=house.token("alice")) as client:
        assert (await onlooker.read_frame(client)).jobs == ()
        handle = await client.submit(job)
        [before] = (await onlooker.read_frame(client)).jobs
        assert (before.job, before.phase, before.reward) == (handle.name, "queued", None)
        for step in (1, 2):
            metrics = {"reward": step / 4, "wait_s": 1.0, "train_s": 3.0}
            told = {"job": handle.name, "step": step, "metrics": metrics}
            await events.append(house.state, "step", told)
        moved = {"resident": "g1.1", "to": "training", "paid": True}
        for of in (handle.name, "another"):
            await events.append(house.state, "move_judged", {"job": of, **moved})
        for _ in range(2):  # what is heard once counts once
            found = await onlooker.read_frame(client)
            [now] = found.jobs
            assert (now.rewards, now.wait_share) == ((0.25, 0.5), 0.25)
            assert [(m.job, m.gang, m.paid) for m in found.move_outcomes] == [
                (handle.name, "g1", True)
            ]
        await handle.stop()
        assert (await onlooker.read_frame(client)).jobs[0].phase == "stopped"
        await handle.delete()
        assert (await onlooker.read_frame(client)).jobs == ()


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
    export_selected(run, tmp_path / "wanted", None, False)
    async with line_to(trained) as line:
        async with Client(token=trained) as client:
            asked = line.call(Gateway.model, ModelRequest("j", -1, False))
            first, out = await asyncio.gather(asked, client.weights("j", out=tmp_path / "got"))
            assert bundle_files.list_files(out) == bundle_files.list_files(tmp_path / "wanted")
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
            assert compute_file_digest(tmp_path / "read") == fetched.files[name][1]


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
                await client.run_versions_command("j", act, "0")
    async with Client(token=house.token("bob")) as other:
        with pytest.raises(NotFound, match="of yours"):
            await other.pin("j", 0)
    assert not list((house.root / "mesh/logs").glob("versions-*"))
