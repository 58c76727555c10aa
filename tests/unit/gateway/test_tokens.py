"""Tokens: who has a good one comes in, sees the jobs that came with it, and nothing else."""

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
from tests.unit.gateway.conftest import House, line_to

NOBODY = 65534
ROOT = Path(__file__).parents[3]


def test_a_file_that_another_holds_is_waited_for_and_no_longer_than_a_while(
    tmp_path: Path,
) -> None:
    path = tmp_path / access_records.RECORDS_FILE
    with path.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        late = pytest.raises(DeadlineExceeded, match="has the file of tokens locked")
        with late, access_records.edit_records(path, 0.1):
            raise AssertionError("it is another's")
    with access_records.edit_records(path, 0.1) as known:
        assert not known.tokens
    assert path.exists()


async def test_a_job_of_another_directory_becomes_a_run_of_the_mesh(
    house: House, job: Path
) -> None:
    async with Client(token=house.token()) as client:
        handle = await client.submit(job, ["budget.steps=3"])
        run = Path(handle.run_dir)
        assert run == house.runs / "game" and handle.name == "game"
        again = await client.submit(job)
        assert again.name == "game-2" and Path(again.run_dir) == house.runs / "game-2"
        assert [state.name for state in await client.jobs()] == ["game", "game-2"]
    row = await jobs.read_job(house.state, "game")
    bundle = Path(row.document["bundle"]["dir"])
    assert bundle.parent.parent == run and (bundle / "tokenizer/tokenizer.json").is_file()
    assert row.document["budget"]["steps"] == 3
    for name in row.document["bundle"]["files"]:
        assert stat.S_IMODE((bundle / name).stat().st_mode) == 0o600
    held = json.loads((run / "job.json").read_text())
    assert held["job"] == "game" and held["document"] == row.document
    assert (run / "store").readlink() == house.root / "store"


async def test_a_job_that_can_never_fit_is_refused_before_it_is_sent(
    house: House, job: Path
) -> None:
    lease = RegistryEntry("worker/w0", "worker", incarnation="one", run_root=str(house.root))
    token = await register(house.state, lease, 60_000)
    await pool.join_worker(house.state, WorkerRow("w0", "here", "cpu:0", token))
    async with Client(token=house.token()) as client:
        with pytest.raises(Refused, match=r"the job needs 2 workers .* and this mesh has 1"):
            await client.submit(job, ["pool.workers.least=2"])
        assert list(house.runs.iterdir()) == []
        assert (await client.submit(job)).name == "game"


async def test_a_job_has_no_higher_priority_than_its_token_gives(house: House, job: Path) -> None:
    async with Client(token=house.token("alice")) as alice:
        with pytest.raises(Refused, match=r"pool\.priority = 1: jobs of this token have 0 at most"):
            await alice.submit(job, ["pool.priority=1"])
        assert (await alice.submit(job, ["pool.priority=-1"])).name == "game"
    async with Client(token=house.token("bob", priority=3)) as bob:
        with pytest.raises(Refused, match="have 3 at most"):
            await bob.submit(job, ["pool.priority=4"])
        handle = await bob.submit(job, ["pool.priority=3"])
    row = await jobs.read_job(house.state, handle.name)
    assert row.document["pool"]["priority"] == 3


async def test_it_is_followed_and_stopped_with_the_token_it_came_with(
    house: House, job: Path
) -> None:
    async with Client(token=house.token("alice")) as client:
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
        assert again.name == "game-2"  # the run directory of the first one stays
        with pytest.raises(Refused):
            await again.delete()
        with pytest.raises(NotAllowed, match="moves no workers"):
            await client.move("w0", "training")


async def test_a_deletion_may_be_asked_for_again_by_who_got_no_answer(
    house: House, job: Path
) -> None:
    texts = [house.token(name) for name in ("alice", "bob")]
    async with Client(token=texts[0]) as client:
        await (await client.submit(job)).stop()
    async with line_to(texts[0]) as alice, line_to(texts[1]) as bob:
        for _ in range(2):
            assert await alice.call(Gateway.delete, JobRequest("game", "a" * 32))
        for line, op in ((alice, "b" * 32), (bob, "a" * 32)):
            with pytest.raises(NotFound, match="of yours"):
                await line.call(Gateway.delete, JobRequest("game", op))
        for op in ("", "a b", "x" * 1000):
            with pytest.raises(Refused, match="tells no request"):
                await alice.call(Gateway.delete, JobRequest("game", op))


async def test_nobody_sees_a_job_of_another_token_or_of_the_meshs_user(
    house: House, job: Path, tmp_path: Path
) -> None:
    document = JobConfig(name="own").to_document()
    await jobs.submit(house.state, "own", document, str(tmp_path / "own"), "op")
    async with Client(token=house.token("alice")) as alice:
        await alice.submit(job)
    async with Client(token=house.token("bob")) as bob:
        assert await bob.jobs() == []
        for name in ("game", "own", "none", "mesh"):
            for asked in (
                bob.job(name),
                bob.stop(name),
                bob.delete(name),
                bob.weights(name, out=tmp_path / "w"),
            ):
                with pytest.raises(NotFound, match="of yours"):
                    await asked
            with pytest.raises(NotFound):
                async for _ in bob.events(name):
                    pass
    assert not (await jobs.read_job(house.state, "game")).is_terminal


async def test_a_job_that_takes_a_deleted_ones_place_is_its_own_tokens(
    house: House, tmp_path: Path
) -> None:
    document, texts = JobConfig(name="j").to_document(), {}

    async def comes(name: str) -> None:
        (house.runs / "j").mkdir(parents=True)
        token = next(t.id for t in access_records.read_records(house.file).tokens if t.name == name)
        about = {"job": "j", "token": token, "document": document}
        (house.runs / "j/job.json").write_text(json.dumps(about))
        await jobs.submit(house.state, "j", document, str(house.runs / "j"), name)

    for name in ("alice", "bob"):
        texts[name] = house.token(name)
    async with Client(token=texts["alice"]) as alice, Client(token=texts["bob"]) as bob:
        await comes("alice")
        assert [one.name for one in await alice.jobs()] == ["j"]
        await jobs.cancel(house.state, "j", "stop")
        await deletion.delete_job(house.state, "j", "delete")  # the mesh's own user, or its age
        await deletion.confirm_store_deletion(house.state, "j")
        shutil.rmtree(house.runs / "j")
        await comes("bob")
        assert [one.name for one in await bob.jobs()] == ["j"]
        assert await alice.jobs() == []
        for asked in (alice.job("j"), alice.stop("j"), alice.weights("j", out=tmp_path / "w")):
            with pytest.raises(NotFound, match="of yours"):
                await asked


async def test_the_name_of_a_deleted_job_is_not_given_again(house: House, job: Path) -> None:
    async with Client(token=house.token("alice")) as alice:
        handle = await alice.submit(job)
        await handle.stop()
        await handle.delete()
    await deletion.confirm_store_deletion(house.state, "game")
    shutil.rmtree(house.runs / "game")
    async with Client(token=house.token("bob")) as bob:
        again = await bob.submit(job)
        assert again.name == "game-2"  # whose events are those of no other job


async def test_a_token_that_is_revoked_is_good_no_more_also_for_who_is_in(house: House) -> None:
    text = house.token("alice")
    async with Client(token=text) as client:
        assert await client.jobs() == []
        house.revoke("alice")
        with pytest.raises(NotAllowed, match="revoked"):
            await client.jobs()
    with pytest.raises(NotAllowed, match="revoked"):
        async with Client(token=text):
            raise AssertionError("it was let in")


async def test_a_token_that_has_expired_or_was_made_up_lets_nobody_in(house: House) -> None:
    made_up = replace(
        access_token.read_token(house.token("bob")), secret=KeyPair.generate().secret.decode()
    )
    for text in (house.token("alice", lasts_s=0.0), made_up.encoded):
        with pytest.raises(NotAllowed, match="does not take this token"):
            async with Client(token=text):
                raise AssertionError("it was let in")


async def test_tokens_stay_good_when_the_mesh_starts_again(tmp_path: Path) -> None:
    other = House(tmp_path / "other", open_simulated_state(SystemClock()))
    (other.root / "mesh").mkdir(parents=True)
    async with other.open():
        text = other.token()
    async with other.open(), Client(token=text) as client:
        assert await client.jobs() == []


async def test_without_a_mesh_the_caller_is_told_so(house: House, tmp_path: Path) -> None:
    gone = replace(access_token.read_token(house.token()), address="tcp://127.0.0.1:9")
    with pytest.raises(PeerLost, match="no mesh answers there"):
        async with Client(token=gone.encoded):
            raise AssertionError("something answered")


async def test_nothing_of_the_mesh_but_the_gateway_can_be_called(house: House) -> None:
    async with line_to(house.token()) as line:
        strange: Call[None, None] = Call(NoneType, NoneType, deadline_s=scaled(5.0))
        for name in ("drain", "look", "stage", "__init__", "start"):
            strange.name = strange.label = name
            with pytest.raises((NotAllowed, UnknownMethod)):
                await line.call(strange, None)
        assert (await line.call(Gateway.jobs, None)).jobs == []
    assert {name.partition(".")[0] for name, who in CALL_PERMISSIONS.items() if CLIENT in who} == {
        "Gateway"
    }


def test_a_ticket_is_read_from_text_or_a_file_that_nobody_else_can_read(tmp_path: Path) -> None:
    made = access_token.AccessToken("tcp://h:1", "g" * 40, "s" * 40)
    file = tmp_path / "token"
    file.write_text(made.encoded + "\n")
    file.chmod(0o600)
    assert access_token.read_token(made.encoded) == access_token.read_token(
        file
    ) == made and "sss" not in repr(made)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read"):
        access_token.read_token(file)
    for wrong in (made.encoded[:-30], "meshrl-token:", str(tmp_path / "none")):
        with pytest.raises(ConfigError):
            access_token.read_token(wrong)


async def test_the_command_line_makes_lists_and_revokes_them(house: House, tmp_path: Path) -> None:
    def said(*words: str) -> str:
        found = CliRunner().invoke(app, ["token", *words, "--mesh", str(house.root)])
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        return found.output

    (house.root / "mesh/settings.json").write_text("{}")
    file = tmp_path / "alice.token"
    assert str(file) in said("create", "alice", "--days", "1", "--out", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (
        access_token.read_token(file).secret not in house.file.read_text()
    )  # it has digests of public keys
    async with Client(token=file) as client:
        assert await client.jobs() == []
    with pytest.raises(Refused, match="has a token already"):
        said("create", "alice")
    assert said("create", "bob").startswith(access_token.TOKEN_PREFIX)
    assert [(t["name"], t["good"]) for t in json.loads(said("list", "--json"))] == [
        ("alice", True),
        ("bob", True),
    ]
    said("create", "carol", "--priority", "2")
    assert [t["priority"] for t in json.loads(said("list", "--json"))] == [0, 0, 2]
    assert "revoked 1" in said("revoke", "alice")
    assert "good" in said("list") and not json.loads(said("list", "--json"))[0]["good"]
    with pytest.raises(NotFound):
        said("revoke", "alice")


# Only root can become another user. The interpreter may lie where that user cannot read: what is
# imported on the way is imported first.
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
def theirs(job: Path) -> Iterator[Path]:
    """A directory of another user's, with the job."""
    with tempfile.TemporaryDirectory(prefix="theirs-") as made:
        shutil.copytree(job.parent, Path(made) / "game")
        yield Path(made)


def hand_over(directory: Path) -> None:
    for path in (directory, *directory.rglob("*")):
        os.chown(path, NOBODY, NOBODY)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_submits_from_a_directory_of_their_own(
    house: House, theirs: Path
) -> None:
    (theirs / "token").write_text(house.token() + "\n")
    (theirs / "token").chmod(0o600)
    hand_over(theirs)
    words = [sys.executable, "-c", THEIRS, "submit", "game/job.toml", "--token", "token"]
    client = await asyncio.create_subprocess_exec(
        *[*words, str(house.root / "mesh")],
        cwd=theirs,
        env=os.environ | {"HOME": str(theirs), "PYTHONPATH": str(ROOT), "TMPDIR": str(theirs)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = (await asyncio.wait_for(client.communicate(), scaled(90)))[0].decode()
    assert client.returncode == 0, said
    assert f"submitted game; its run directory is {house.runs / 'game'}" in said
    files = [house.runs / "game", *(house.runs / "game").rglob("*")]
    assert {path.lstat().st_uid for path in files} == {os.geteuid()}
    assert (await jobs.read_job(house.state, "game")).run_dir == str(house.runs / "game")
