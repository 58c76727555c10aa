"""Client commands through a gateway: jobs, events, mesh status and weights."""

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
from meshrl.runs.monitoring.mesh_top import TokenJobsObserver
from meshrl.services.weights.export import export_selected
from tests.load import scaled
from tests.unit.gateway.conftest import GatewayBench, connect, forward_to
from tests.unit.weights.exports.test_export import CONFIG, Run, model, weights


async def test_commands_read_the_token_from_the_environment(
    bench: GatewayBench, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(bench.token())
    (tmp_path / "token").chmod(0o600)

    async def invoke(*words: str) -> Result:
        env = {"MESHRL_TOKEN": str(tmp_path / "token"), "MESHRL_HOME": str(tmp_path / "none")}
        found = await asyncio.to_thread(CliRunner(env=env).invoke, app, list(words))
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        return found

    assert "submitted game" in (await invoke("submit", str(job))).output
    assert "queued" in (await invoke("status")).output
    [state] = json.loads((await invoke("status", "game", "--json")).output)["jobs"]
    assert (state["name"], state["phase"]) == ("game", "queued")
    assert "game queued 0/" in " ".join((await invoke("top", "--once")).output.split())
    timeout_result = await invoke("wait", "game", "--timeout", "0.2")
    assert timeout_result.exit_code == 124
    assert "game: stopped" in (await invoke("cancel", "game")).output
    assert (await invoke("wait", "game")).exit_code == 3
    watched = await invoke("watch", "game")
    assert watched.exit_code == 3 and "submitted: job game" in watched.output
    with pytest.raises(NotFound, match="this token has no job"):
        await invoke("cancel", "other")
    monkeypatch.chdir(job.parent.parent)  # a directory with the job's name
    with pytest.raises(NotFound, match="has no version"):
        await invoke("export", "game", "--out", str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


async def test_gateway_address_of_a_token_can_be_replaced(
    bench: GatewayBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reach the gateway by a name inside of a cluster, and by a local port through a tunnel."""
    token = bench.token()
    address = access_token.read_token(token).address
    port = address.rpartition(":")[2]
    other_address = replace(
        access_token.read_token(token), address="tcp://gateway.nowhere.invalid:7199"
    ).encoded
    monkeypatch.setenv("MESHRL_GATEWAY", f"localhost:{port}")
    async with Client(token=other_address) as client:
        assert await client.jobs() == []
    monkeypatch.setenv("MESHRL_GATEWAY", "tcp://localhost")
    with pytest.raises(ConfigError, match="not a host name or address"):
        await Client(token=token).__aenter__()


async def test_gateway_checks_the_only_hosts_sandbox_before_submission(
    bench: GatewayBench, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the gateway, which runs on that host, check it in place of the client."""
    jailed = ["environment.tools={python='python'}", "sandbox.tier=cgroup"]
    monkeypatch.setenv("PATH", "/nowhere")  # no bwrap here
    async with Client(token=bench.token()) as client:
        with pytest.raises(Refused, match="python run code that the model wrote"):
            await client.submit(job, jailed)
        assert await client.jobs() == []


FOREVER = 1_000_000


async def test_closed_connection_is_retried(bench: GatewayBench) -> None:
    ticket = read_token(bench.token())
    async with (
        forward_to(ticket.address, 2) as port,
        connect(replace(ticket, address=port.address)) as line,
    ):
        assert (await line.call(Gateway.jobs, None, scaled(60.0))).jobs == []
    assert port.connection_count == 3


async def test_unreachable_gateway_error_names_possible_causes(bench: GatewayBench) -> None:
    ticket = read_token(bench.token())
    async with forward_to(ticket.address, FOREVER) as port:
        closing_port = replace(ticket, address=port.address)
        wrong_key = replace(ticket, gateway=KeyPair.generate().public.decode())
        for unreachable in (closing_port, wrong_key):
            async with connect(unreachable) as line:
                with pytest.raises(PeerLost, match=r"no process listens there.*its key differs"):
                    await line.call(Gateway.jobs, None, scaled(1.0))
    assert port.connection_count > 1


async def test_top_shows_steps_and_judged_moves_of_the_tokens_jobs(
    bench: GatewayBench, job: Path
) -> None:
    observer = TokenJobsObserver()
    async with Client(token=bench.token("alice")) as client:
        assert (await observer.read_frame(client)).jobs == ()
        handle = await client.submit(job)
        [before] = (await observer.read_frame(client)).jobs
        assert (before.job, before.phase, before.reward) == (handle.name, "queued", None)
        for step in (1, 2):
            metrics = {"reward": step / 4, "wait_s": 1.0, "train_s": 3.0}
            fields = {"job": handle.name, "step": step, "metrics": metrics}
            await events.append(bench.state, "step", fields)
        move = {"resident": "g1.1", "to": "training", "paid": True}
        for job_name in (handle.name, "another"):
            await events.append(bench.state, "move_judged", {"job": job_name, **move})
        for _ in range(2):  # repeated events count once
            found = await observer.read_frame(client)
            [now] = found.jobs
            assert (now.rewards, now.wait_share) == ((0.25, 0.5), 0.25)
            assert [(m.job, m.gang, m.paid) for m in found.move_outcomes] == [
                (handle.name, "g1", True)
            ]
        await handle.stop()
        assert (await observer.read_frame(client)).jobs[0].phase == "stopped"
        await handle.delete()
        assert (await observer.read_frame(client)).jobs == ()


@pytest.fixture
async def trained_job_token(bench: GatewayBench, tmp_path: Path) -> str:
    """Create a job `j` of the mesh with a version; return the token that submitted it."""
    run = Run(tmp_path / "made", CONFIG)
    run.event("initial", version=0, manifest=run.store(weights(model(0)), 0))
    job_record = json.loads((run.directory / "job.json").read_text())
    text = bench.token()
    token = json.loads(bench.file.read_text())["tokens"][0]["id"]
    shutil.move(run.directory, bench.runs / "j")
    (bench.runs / "j/job.json").write_text(json.dumps(job_record | {"token": token}))
    await jobs.submit(bench.state, "j", job_record["document"], str(bench.runs / "j"), "op")
    return text


async def test_downloaded_files_match_an_export_during_concurrent_requests(
    bench: GatewayBench, trained_job_token: str, tmp_path: Path
) -> None:
    run, exports = bench.runs / "j", bench.runs / "j/exports"
    (exports / "cut-off.partial").mkdir(parents=True)
    export_selected(run, tmp_path / "wanted", None, False)
    async with connect(trained_job_token) as line:
        async with Client(token=trained_job_token) as client:
            export_request = line.call(Gateway.model, ModelRequest("j", -1, False))
            first, out = await asyncio.gather(
                export_request, client.weights("j", out=tmp_path / "got")
            )
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


async def test_only_exported_files_can_be_read(bench: GatewayBench, trained_job_token: str) -> None:
    (bench.runs / "j/exports/last").mkdir(parents=True)
    (bench.runs / "j/exports/last/config.json").write_text("mine")
    (bench.runs / "j/exports/last/link").symlink_to(bench.root / "mesh/gateway.json")
    async with connect(trained_job_token) as line:
        mine = await line.call(Gateway.read, ReadModelFile("j", "last", "config.json", 1))
        assert mine == b"ine"
        for version, name in (
            ("last", "../../job.json"),
            ("last", str(bench.root / "mesh/gateway.json")),
            ("last", "link"),
            ("..", "job.json"),
            ("../..", "j/job.json"),
            ("last", "none"),
            ("last", ""),
        ):
            with pytest.raises(NotFound):
                await line.call(Gateway.read, ReadModelFile("j", version, name, 0))


async def test_tokens_pin_only_versions_of_their_own_jobs(
    bench: GatewayBench, trained_job_token: str
) -> None:
    async with Client(token=trained_job_token) as client:
        [one] = await client.versions("j")
        assert one["why"] == ["current"]
        await client.pin("j", "last", "--note")
        [one] = await client.versions("j")
        assert one["why"] == ["current", "pinned"] and one["note"] == "--note"
        with pytest.raises(NotFound, match=r"not have version 9\. Choose one of 0") as caught:
            await client.pin("j", 9)
        assert str(bench.root) not in str(caught.value), "no directory of the mesh's host is told"
        await client.unpin("j", 0)
        assert (await client.versions("j"))[0]["why"] == ["current"]
        for action in ("diff", "export", "import", "--help", ""):
            with pytest.raises(Refused, match="a token may not request the action"):
                await client.run_versions_command("j", action, "0")
    async with Client(token=bench.token("bob")) as other:
        with pytest.raises(NotFound, match="this token has no job"):
            await other.pin("j", 0)
    assert not list((bench.root / "mesh/logs").glob("versions-*"))
