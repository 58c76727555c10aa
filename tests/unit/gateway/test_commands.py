"""The command line with a token: the same commands, for jobs of somebody else's mesh."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from meshrl.cli import app
from meshrl.client.client import Client
from meshrl.common.base.errors import ConfigError, NotFound, Refused
from meshrl.common.mesh.access import ticket
from tests.unit.gateway.conftest import House


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
    address = ticket.read(token).address
    port = address.rpartition(":")[2]
    elsewhere = replace(ticket.read(token), address="tcp://gateway.nowhere.invalid:7199").text
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
