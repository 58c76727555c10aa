"""Access tokens: a valid one admits its holder to the jobs submitted with it, and to no others."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import NoneType

import pytest
from typer.testing import CliRunner

from meshrl import Client
from meshrl.cli import app
from meshrl.common.api.calls.call_permissions import CALL_PERMISSIONS, CLIENT
from meshrl.common.api.calls.interface import Call
from meshrl.common.api.gateway import Gateway, JobRequest
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import (
    ConfigError,
    DeadlineExceeded,
    NotAllowed,
    NotFound,
    PeerLost,
    Refused,
    UnknownMethod,
)
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.access import access_records, access_token
from meshrl.common.mesh.transport.keys import KeyPair
from meshrl.common.state import jobs
from meshrl.common.state.job_lifecycle import deletion
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.rows import WorkerRow
from meshrl.common.state.registry import RegistryEntry, register
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.unit.gateway.conftest import GatewayBench, connect

NOBODY = 65534
ROOT = Path(__file__).parents[3]


def test_locked_token_file_is_waited_for_until_the_deadline(
    tmp_path: Path,
) -> None:
    path = tmp_path / access_records.RECORDS_FILE
    with path.with_suffix(".lock").open("w") as locked_file:
        fcntl.flock(locked_file, fcntl.LOCK_EX)
        deadline_error = pytest.raises(DeadlineExceeded, match="has locked the token file")
        with deadline_error, access_records.edit_records(path, 0.1):
            raise AssertionError("it is another's")
    with access_records.edit_records(path, 0.1) as known:
        assert not known.tokens
    assert path.exists()


async def test_submitted_job_of_another_directory_becomes_a_run(
    bench: GatewayBench, job: Path
) -> None:
    async with Client(token=bench.token()) as client:
        handle = await client.submit(job, ["budget.steps=3"])
        run = Path(handle.run_dir)
        assert run == bench.runs / "game" and handle.name == "game"
        again = await client.submit(job)
        assert again.name == "game-2" and Path(again.run_dir) == bench.runs / "game-2"
        assert [state.name for state in await client.jobs()] == ["game", "game-2"]
    row = await jobs.read_job(bench.state, "game")
    bundle = Path(row.document["bundle"]["dir"])
    assert bundle.parent.parent == run and (bundle / "tokenizer/tokenizer.json").is_file()
    assert row.document["budget"]["steps"] == 3
    for name in row.document["bundle"]["files"]:
        assert stat.S_IMODE((bundle / name).stat().st_mode) == 0o600
    locked_file = json.loads((run / "job.json").read_text())
    assert locked_file["job"] == "game" and locked_file["document"] == row.document
    assert (run / "store").readlink() == bench.root / "store"


async def test_infeasible_job_is_rejected_before_its_upload(bench: GatewayBench, job: Path) -> None:
    lease = RegistryEntry("worker/w0", "worker", incarnation="one", run_root=str(bench.root))
    token = await register(bench.state, lease, 60_000)
    await pool.join_worker(bench.state, WorkerRow("w0", "here", "cpu:0", token))
    async with Client(token=bench.token()) as client:
        with pytest.raises(Refused, match=r"the job needs 2 workers .* but this mesh has 1"):
            await client.submit(job, ["pool.workers.least=2"])
        assert list(bench.runs.iterdir()) == []
        assert (await client.submit(job)).name == "game"


async def test_job_priority_is_limited_by_its_token(bench: GatewayBench, job: Path) -> None:
    async with Client(token=bench.token("alice")) as alice:
        with pytest.raises(
            Refused, match=r"pool\.priority = 1 exceeds 0, the maximum of this token's jobs"
        ):
            await alice.submit(job, ["pool.priority=1"])
        assert (await alice.submit(job, ["pool.priority=-1"])).name == "game"
    async with Client(token=bench.token("bob", priority=3)) as bob:
        with pytest.raises(Refused, match="exceeds 3, the maximum"):
            await bob.submit(job, ["pool.priority=4"])
        handle = await bob.submit(job, ["pool.priority=3"])
    row = await jobs.read_job(bench.state, handle.name)
    assert row.document["pool"]["priority"] == 3


async def test_job_is_followed_and_stopped_with_its_token(bench: GatewayBench, job: Path) -> None:
    async with Client(token=bench.token("alice")) as client:
        handle = await client.submit(job)
        kinds = []
        async for event in handle.events():
            kinds.append(event.kind)
            if event.kind == "submitted":
                assert await handle.stop()
        assert kinds == ["submitted", "phase"]
        assert (await handle.state()).phase == "stopped"
        await handle.delete()
        assert await client.jobs() == []
        again = await client.submit(job)
        assert again.name == "game-2"  # the run directory of the first job stays
        with pytest.raises(Refused):
            await again.delete()
        with pytest.raises(NotAllowed, match="does not allow moving workers"):
            await client.move("w0", "training")
        with pytest.raises(NotAllowed, match="does not allow placing jobs"):
            await client.place("game", "game-2")


async def test_deletion_can_be_repeated_after_a_lost_answer(bench: GatewayBench, job: Path) -> None:
    texts = [bench.token(name) for name in ("alice", "bob")]
    async with Client(token=texts[0]) as client:
        await (await client.submit(job)).stop()
    async with connect(texts[0]) as alice, connect(texts[1]) as bob:
        for _ in range(2):
            assert await alice.call(Gateway.delete, JobRequest("game", "a" * 32))
        for line, op in ((alice, "b" * 32), (bob, "a" * 32)):
            with pytest.raises(NotFound, match="this token has no job"):
                await line.call(Gateway.delete, JobRequest("game", op))
        for op in ("", "a b", "x" * 1000):
            with pytest.raises(Refused, match="is not a valid request ID"):
                await alice.call(Gateway.delete, JobRequest("game", op))


async def test_jobs_of_other_tokens_and_of_the_owner_are_hidden(
    bench: GatewayBench, job: Path, tmp_path: Path
) -> None:
    document = JobConfig(name="own").to_document()
    await jobs.submit(bench.state, "own", document, str(tmp_path / "own"), "op")
    async with Client(token=bench.token("alice")) as alice:
        await alice.submit(job)
    async with Client(token=bench.token("bob")) as bob:
        assert await bob.jobs() == []
        for name in ("game", "own", "none", "mesh"):
            for request in (
                bob.job(name),
                bob.stop(name),
                bob.delete(name),
                bob.weights(name, out=tmp_path / "w"),
            ):
                with pytest.raises(NotFound, match="this token has no job"):
                    await request
            with pytest.raises(NotFound):
                async for _ in bob.events(name):
                    pass
    assert not (await jobs.read_job(bench.state, "game")).is_terminal


async def test_job_with_the_name_of_a_deleted_one_belongs_to_its_own_token(
    bench: GatewayBench, tmp_path: Path
) -> None:
    document, texts = JobConfig(name="j").to_document(), {}

    async def create_job_of(name: str) -> None:
        (bench.runs / "j").mkdir(parents=True)
        token = next(t.id for t in access_records.read_records(bench.file).tokens if t.name == name)
        record = {"job": "j", "token": token, "document": document}
        (bench.runs / "j/job.json").write_text(json.dumps(record))
        await jobs.submit(bench.state, "j", document, str(bench.runs / "j"), name)

    for name in ("alice", "bob"):
        texts[name] = bench.token(name)
    async with Client(token=texts["alice"]) as alice, Client(token=texts["bob"]) as bob:
        await create_job_of("alice")
        assert [one.name for one in await alice.jobs()] == ["j"]
        await jobs.cancel(bench.state, "j", "stop")
        await deletion.delete_job(
            bench.state, "j", "delete"
        )  # as the mesh's owner or its retention does
        await deletion.confirm_store_deletion(bench.state, "j")
        shutil.rmtree(bench.runs / "j")
        await create_job_of("bob")
        assert [one.name for one in await bob.jobs()] == ["j"]
        assert await alice.jobs() == []
        for request in (alice.job("j"), alice.stop("j"), alice.weights("j", out=tmp_path / "w")):
            with pytest.raises(NotFound, match="this token has no job"):
                await request


async def test_name_of_a_deleted_job_is_not_reused(bench: GatewayBench, job: Path) -> None:
    async with Client(token=bench.token("alice")) as alice:
        handle = await alice.submit(job)
        await handle.stop()
        await handle.delete()
    await deletion.confirm_store_deletion(bench.state, "game")
    shutil.rmtree(bench.runs / "game")
    async with Client(token=bench.token("bob")) as bob:
        again = await bob.submit(job)
        assert again.name == "game-2"  # its events are separate from the deleted job's


async def test_revoked_token_ends_open_connections(bench: GatewayBench) -> None:
    text = bench.token("alice")
    async with Client(token=text) as client:
        assert await client.jobs() == []
        bench.revoke("alice")
        with pytest.raises(NotAllowed, match="revoked"):
            await client.jobs()
    with pytest.raises(NotAllowed, match="revoked"):
        async with Client(token=text):
            raise AssertionError("it was let in")


async def test_expired_or_forged_token_is_rejected(bench: GatewayBench) -> None:
    forged = replace(
        access_token.read_token(bench.token("bob")), secret=KeyPair.generate().secret.decode()
    )
    for text in (bench.token("alice", lasts_s=0.0), forged.encoded):
        with pytest.raises(NotAllowed, match="rejects this token"):
            async with Client(token=text):
                raise AssertionError("it was let in")


async def test_tokens_stay_valid_after_a_restart(tmp_path: Path) -> None:
    other = GatewayBench(tmp_path / "other", open_simulated_state(SystemClock()))
    (other.root / "mesh").mkdir(parents=True)
    async with other.open():
        text = other.token()
    async with other.open(), Client(token=text) as client:
        assert await client.jobs() == []


async def test_missing_mesh_is_reported(bench: GatewayBench, tmp_path: Path) -> None:
    unreachable = replace(access_token.read_token(bench.token()), address="tcp://127.0.0.1:9")
    with pytest.raises(PeerLost, match="no mesh answers at this address"):
        async with Client(token=unreachable.encoded):
            raise AssertionError("something answered")


async def test_only_the_gateway_can_be_called(bench: GatewayBench) -> None:
    async with connect(bench.token()) as line:
        strange: Call[None, None] = Call(NoneType, NoneType, deadline_s=scaled(5.0))
        for name in ("drain", "look", "stage", "__init__", "start"):
            strange.name = strange.label = name
            with pytest.raises((NotAllowed, UnknownMethod)):
                await line.call(strange, None)
        assert (await line.call(Gateway.jobs, None)).jobs == []
    assert {name.partition(".")[0] for name, who in CALL_PERMISSIONS.items() if CLIENT in who} == {
        "Gateway"
    }


def test_token_is_read_from_text_or_a_private_file(tmp_path: Path) -> None:
    made = access_token.AccessToken("tcp://h:1", "g" * 40, "s" * 40)
    file = tmp_path / "token"
    file.write_text(made.encoded + "\n")
    file.chmod(0o600)
    assert access_token.read_token(made.encoded) == access_token.read_token(
        file
    ) == made and "sss" not in repr(made)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="other users can read"):
        access_token.read_token(file)
    for wrong in (made.encoded[:-30], "meshrl-token:", str(tmp_path / "none")):
        with pytest.raises(ConfigError):
            access_token.read_token(wrong)


async def test_command_line_creates_lists_and_revokes_tokens(
    bench: GatewayBench, tmp_path: Path
) -> None:
    def invoke(*words: str) -> str:
        found = CliRunner().invoke(app, ["token", *words, "--mesh", str(bench.root)])
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        return found.output

    (bench.root / "mesh/settings.json").write_text("{}")
    file = tmp_path / "alice.token"
    assert str(file) in invoke("create", "alice", "--days", "1", "--out", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (
        access_token.read_token(file).secret not in bench.file.read_text()
    )  # it contains digests of public keys
    async with Client(token=file) as client:
        assert await client.jobs() == []
    with pytest.raises(Refused, match="already has a token"):
        invoke("create", "alice")
    assert invoke("create", "bob").startswith(access_token.TOKEN_PREFIX)
    assert [(t["name"], t["good"]) for t in json.loads(invoke("list", "--json"))] == [
        ("alice", True),
        ("bob", True),
    ]
    invoke("create", "carol", "--priority", "2")
    assert [t["priority"] for t in json.loads(invoke("list", "--json"))] == [0, 0, 2]
    assert "revoked 1" in invoke("revoke", "alice")
    assert "valid" in invoke("list") and not json.loads(invoke("list", "--json"))[0]["good"]
    with pytest.raises(NotFound):
        invoke("revoke", "alice")


# Only root can become another user. That user may be unable to read the interpreter's directory, so
# its modules are imported first.
THEIRS = f"""
import os, sys
from pathlib import Path
from meshrl.commands import status as commands
from meshrl.__main__ import main
from meshrl.client import job_check, remote_transport
job_check.load_checked_job(Path("game/job.toml"), [], None)
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
for forbidden in (sys.argv.pop(), "/etc/shadow"):
    try:
        os.listdir(forbidden) if os.path.isdir(forbidden) else open(forbidden)
        sys.exit(forbidden + " can be read")
    except OSError:
        pass
main()
"""


@pytest.fixture
def other_users_directory(job: Path) -> Iterator[Path]:
    """Create another user's directory with the job."""
    with tempfile.TemporaryDirectory(prefix="theirs-") as made:
        shutil.copytree(job.parent, Path(made) / "game")
        yield Path(made)


def change_owner(directory: Path) -> None:
    for path in (directory, *directory.rglob("*")):
        os.chown(path, NOBODY, NOBODY)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_submits_from_their_own_directory(
    bench: GatewayBench, other_users_directory: Path
) -> None:
    (other_users_directory / "token").write_text(bench.token() + "\n")
    (other_users_directory / "token").chmod(0o600)
    change_owner(other_users_directory)
    words = [sys.executable, "-c", THEIRS, "submit", "game/job.toml", "--token", "token"]
    client = await asyncio.create_subprocess_exec(
        *[*words, str(bench.root / "mesh")],
        cwd=other_users_directory,
        env=os.environ
        | {
            "HOME": str(other_users_directory),
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(other_users_directory),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    invoke = (await asyncio.wait_for(client.communicate(), scaled(90)))[0].decode()
    assert client.returncode == 0, invoke
    assert f"submitted game; its run directory is {bench.runs / 'game'}" in invoke
    files = [bench.runs / "game", *(bench.runs / "game").rglob("*")]
    assert {path.lstat().st_uid for path in files} == {os.geteuid()}
    assert (await jobs.read_job(bench.state, "game")).run_dir == str(bench.runs / "game")
