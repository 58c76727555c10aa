"""Bundles from outside: whole ones become runs, and of all others nothing is left."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.api.gateway import (
    PIECE_BYTES,
    BeginUpload,
    Gateway,
    SubmittedJob,
    UploadOpened,
    UploadPiece,
)
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, MeshError, NotFound, Overloaded, Refused
from meshrl.common.job.bundle import bundle_files
from meshrl.common.job.bundle.bundle_upload import check_config_paths
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.access import access_token
from meshrl.common.mesh.access.gateway_connection import GatewayConnection
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state import jobs
from meshrl.job import bundle, job_reader
from meshrl.services.gateway.uploads import (
    INCOMING_PREFIX,
    MAX_UPLOADS_PER_TOKEN,
    Upload,
    Uploads,
    parse_config,
)
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.unit.gateway.conftest import House, forwarded, line_to


class Packed:
    """A job as its sender has it."""

    def __init__(self, job: Path, room: Path) -> None:
        found = job_reader.read_job_file(job, [])
        self.directory, self.document = bundle.pack_bundle(found.config, found.base, room)
        about = self.document.pop("bundle")
        self.files: dict[str, Any] = about["files"]
        self.digest: str = about["digest"]
        self.parameters: int = about["parameters"]

    @property
    def begin(self) -> BeginUpload:
        return BeginUpload(self.document, self.digest, self.files, self.parameters)

    def listing(self, files: dict[str, Any]) -> BeginUpload:
        return BeginUpload(
            self.document, bundle_files.compute_digest(files), files, self.parameters
        )

    async def send(self, line: GatewayConnection, upload: str, *left_out: str) -> None:
        for name in self.files.keys() - left_out:
            content = (self.directory / name).read_bytes()
            assert len(content) <= PIECE_BYTES
            await line.call(Gateway.put, UploadPiece(upload, name, 0, content))


@pytest.fixture
def packed(job: Path, tmp_path: Path) -> Packed:
    return Packed(job, tmp_path / "packed")


@pytest.fixture
async def line(house: House) -> AsyncIterator[GatewayConnection]:
    async with line_to(house.token()) as found:
        yield found


@asynccontextmanager
async def opened(line: GatewayConnection, begin: BeginUpload) -> AsyncIterator[UploadOpened]:
    async with aclosing(line.stream(Gateway.upload, begin)) as held:
        yield await anext(held)


async def empty(house: House) -> None:
    """Returns once nothing is left of any upload."""
    async with asyncio.timeout(scaled(20)):
        while list(house.runs.iterdir()):
            await asyncio.sleep(0.02)
    assert await jobs.read_jobs(house.state) == []


async def test_a_whole_bundle_becomes_a_run_and_asking_again_gives_the_same(
    house: House, line: GatewayConnection, packed: Packed
) -> None:
    async with opened(line, packed.begin) as upload:
        await packed.send(line, upload.upload)
        done = await line.call(Gateway.finish, upload.upload)
        assert await line.call(Gateway.finish, upload.upload) == done
    assert [row.id for row in await jobs.read_jobs(house.state)] == [done.job] == ["game"]
    assert sorted(path.name for path in house.runs.iterdir()) == ["game"]


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "name",
    [
        "../escaped",
        "modules/../../escaped",
        "/etc/cron.d/evil",
        "modules//x.py",
        "./modules/x.py",
        "modules/x\n.py",
        "modules/\0",
        "modules",
        "checkpoints/step.json",
        "job.json",
        "modules/" + "x" * 256,
        "modules/" + "d/" * 20 + "x",
    ],
)
async def test_no_name_leads_out_of_a_bundle(
    house: House, line: GatewayConnection, packed: Packed, name: str
) -> None:
    begin = packed.listing(packed.files | {name: [1, "0" * 64]})
    with pytest.raises(Refused, match="is no name of a file in a bundle"):
        async with opened(line, begin):
            pass
    await empty(house)


async def test_lists_that_contradict_themselves_are_refused(
    house: House, line: GatewayConnection, packed: Packed
) -> None:
    twice = packed.files | {"modules/a": [1, "0" * 64], "modules/a/b": [1, "0" * 64]}
    for begin, says in (
        (packed.listing(twice), "both a file and a folder"),
        (BeginUpload(packed.document, "0" * 64, packed.files, 1), "digest is not that of its list"),
        (packed.listing(packed.files | {"data/x": [1 << 50, "0" * 64]}), "the most is"),
        (packed.listing(packed.files | {"data/x": [-1, "0" * 64]}), "no size and digest"),
        (BeginUpload(packed.document, packed.digest, {}, 1), "1 to 10000 files"),
        (BeginUpload(packed.document, packed.digest, [], 1), "1 to 10000 files"),
        (BeginUpload([], packed.digest, packed.files, 1), "a job is a table"),
        (BeginUpload(packed.document, packed.digest, packed.files, -1), "-1 parameters"),
    ):
        with pytest.raises(Refused, match=says):
            async with opened(line, begin):
                pass
    await empty(house)


async def test_a_job_that_names_other_files_or_is_none_is_refused(
    house: House, line: GatewayConnection, packed: Packed
) -> None:
    for table, key, value in (
        ("model", "tokenizer", "/etc/passwd"),
        ("model", "tokenizer", ""),
        ("model", "path", "model"),  # which the bundle has not
        ("dataset", "train", "../../x"),
    ):
        changed = packed.document | {table: packed.document[table] | {key: value}}
        with pytest.raises(Refused, match=f"{table}.{key}"):
            async with opened(line, BeginUpload(changed, packed.digest, packed.files, 1)):
                pass
    wrong = packed.document | {"budget": {"steps": -1}}
    with pytest.raises(ConfigError, match=r"budget\.steps = -1 must be at least 0"):
        async with opened(line, BeginUpload(wrong, packed.digest, packed.files, 1)):
            pass
    await empty(house)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("environment.python", "/usr/bin/python3"),
        ("environment.mcp.files", ["/usr/bin/env"]),
        ("environment.mcp.files", ["python", "-c", "pass"]),
        ("environment.mcp.files", ["python", "/srv/theirs.py"]),
        ("environment.mcp.files", ["python", "server.py", "/etc"]),
        ("environment.mcp.files", ["python", "server.py", "--root=/etc"]),
        ("environment.mcp.files", ["python", "server.py", "../.."]),
        ("sandbox.python", "/usr/bin/python3"),
        ("sandbox.root", "/"),
        ("sandbox.runner", ["/usr/bin/env"]),
        ("rollout.sglang_python", "/usr/bin/python3"),
        ("rollout.sglang_options", ["--chat-template=/etc/passwd"]),
        ("tracking.tensorboard", "/srv/elsewhere"),
        ("tracking.wandb", "project"),
        ("tracking.trackio", "project"),
        ("models.teacher.path", "/srv/model"),
    ],
)
def test_nothing_of_the_meshs_host_is_named(key: str, value: Any) -> None:
    named: Any = value
    for part in reversed(key.split(".")):
        named = {part: named}
    files = {"tokenizer/tokenizer.json": [1, ""], "modules/server.py": [1, ""]}
    document = {"model": {"tokenizer": "tokenizer/tokenizer.json"}} | named
    with pytest.raises(Refused, match=re.escape(key)):
        check_config_paths(parse_config(document), files)


def test_a_holder_of_a_token_writes_nowhere_with_the_owners_credentials() -> None:
    document = JobConfig(out="s3://bucket/path").to_document()
    with pytest.raises(Refused, match="with its owner's credentials"):
        parse_config(document)


def test_what_the_bundle_has_is_named_freely() -> None:
    names = "tokenizer/tokenizer.json", "modules/server.py", "data/evaluation-a.jsonl"
    document = {
        "model": {"tokenizer": "tokenizer/tokenizer.json"},
        "models": {"reference": {"path": "initial"}},
        "evaluation": {"datasets": [{"name": "a", "path": "data/evaluation-a.jsonl"}]},
        "environment": {"mcp": {"own": ["python", "server.py", "--all"]}},
        "rollout": {"sglang_options": ["--mem-fraction-static=0.5"]},
        "tracking": {"tensorboard": True},
    }
    check_config_paths(parse_config(document), {name: [1, ""] for name in names})


async def test_bytes_outside_of_what_was_listed_are_refused(
    house: House, line: GatewayConnection, packed: Packed
) -> None:
    async with opened(line, packed.begin) as upload:
        name, (size, _) = next(iter(packed.files.items()))
        for piece in (
            UploadPiece(upload.upload, name, size, b"x"),
            UploadPiece(upload.upload, name, -1, b"x"),
            UploadPiece(upload.upload, "modules/other.py", 0, b"x"),
            UploadPiece(upload.upload, "../../../x", 0, b"x"),
            UploadPiece(upload.upload, name, 0, bytes(PIECE_BYTES + 1)),
        ):
            with pytest.raises(Refused):
                await line.call(Gateway.put, piece)
        with pytest.raises(NotFound):
            await line.call(Gateway.put, UploadPiece("none", name, 0, b"x"))
    await empty(house)


async def test_a_truncated_or_altered_bundle_becomes_no_run(
    house: House, line: GatewayConnection, packed: Packed
) -> None:
    name = "tokenizer/tokenizer.json"
    async with opened(line, packed.begin) as upload:
        await packed.send(line, upload.upload, name)
        with pytest.raises(Refused, match=f"did not arrive whole: {name}"):
            await line.call(Gateway.finish, upload.upload)
        content = bytearray((packed.directory / name).read_bytes())
        content[0] ^= 1
        await line.call(Gateway.put, UploadPiece(upload.upload, name, 0, bytes(content)))
        with pytest.raises(Refused, match="digest differs"):
            await line.call(Gateway.finish, upload.upload)
    await empty(house)


async def test_a_connection_that_is_cut_leaves_nothing(house: House, packed: Packed) -> None:
    whole = access_token.read_token(house.token())
    async with (
        forwarded(whole.address) as port,
        line_to(replace(whole, address=port.address)) as line,
    ):
        held = line.stream(Gateway.upload, packed.begin)
        upload = await anext(held)
        await packed.send(line, upload.upload, "tokenizer/tokenizer.json")
        assert [path.name.startswith(INCOMING_PREFIX) for path in house.runs.iterdir()] == [True]
        port.cut()
        await empty(house)
        await held.aclose()


async def test_what_is_silent_or_whose_token_is_revoked_is_given_up(
    house: House, line: GatewayConnection, packed: Packed
) -> None:
    async with aclosing(line.stream(Gateway.upload, packed.begin)) as held:
        await anext(held)
        house.revoke("alice")
        with pytest.raises(MeshError, match=r"nothing of the job arrived|revoked"):
            await anext(held)
    await empty(house)


async def test_a_token_has_few_uploads_at_a_time(
    house: House, line: GatewayConnection, packed: Packed
) -> None:
    held = [line.stream(Gateway.upload, packed.begin) for _ in range(MAX_UPLOADS_PER_TOKEN + 1)]
    for one in held[:MAX_UPLOADS_PER_TOKEN]:
        await anext(one)
    with pytest.raises(Overloaded):
        await anext(held[MAX_UPLOADS_PER_TOKEN])
    for one in held:
        await one.aclose()
    await empty(house)


async def test_an_upload_is_its_tokens_alone(
    house: House, line: GatewayConnection, packed: Packed
) -> None:
    async with opened(line, packed.begin) as upload, line_to(house.token("bob")) as other:
        with pytest.raises(NotFound):
            await other.call(Gateway.finish, upload.upload)
    await empty(house)


@pytest.fixture
async def incoming(packed: Packed, tmp_path: Path) -> tuple[Uploads, Packed]:
    """Uploads below `tmp_path/runs`, without a gateway."""
    found = Uploads(SystemHost(), tmp_path / "runs")
    await found.start()
    return found, packed


async def test_a_check_that_was_cut_off_may_be_asked_for_again(
    incoming: tuple[Uploads, Packed],
) -> None:
    known, packed = incoming
    begin = packed.begin
    async with known.open_upload("t", begin, 0.0) as upload:
        for name in packed.files:
            content = (packed.directory / name).read_bytes()
            await known.write_piece(upload, name, 0, content)
        asked = asyncio.create_task(known.check_complete(upload))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled()
        await known.check_complete(upload)


async def test_a_sender_who_leaves_while_it_is_submitted_leaves_a_whole_run(
    incoming: tuple[Uploads, Packed], tmp_path: Path
) -> None:
    known, packed = incoming
    begin, begun, answered = packed.begin, asyncio.Event(), asyncio.Event()

    async def submit(upload: Upload) -> SubmittedJob:
        begun.set()
        await answered.wait()  # for the state, as it may be
        run = known.create_run(upload, "game", {}, tmp_path / "store")
        return SubmittedJob("game", str(run))

    async def sender() -> None:
        async with known.open_upload("t", begin, 0.0) as upload:
            for name in packed.files:
                await known.write_piece(upload, name, 0, (packed.directory / name).read_bytes())
            upload.submission_task = asyncio.create_task(submit(upload))
            await asyncio.Event().wait()

    sending = asyncio.create_task(sender())
    await begun.wait()
    sending.cancel()
    await asyncio.wait([sending], timeout=0.1)
    answered.set()
    await asyncio.wait([sending])
    assert sending.cancelled() and len(known) == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["game"]
    bundle_files.check_files(
        tmp_path / "runs/game/bundle" / begin.digest, packed.files, read_large=True
    )


async def test_what_an_earlier_gateway_left_half_way_is_removed(
    house: House, tmp_path: Path
) -> None:
    left = tmp_path / "runs" / f"{INCOMING_PREFIX}x"
    left.mkdir(parents=True)
    (left / "half").write_text("")
    await Uploads(SystemHost(), tmp_path / "runs").start()
    assert list((tmp_path / "runs").iterdir()) == []


async def test_a_gateway_that_starts_again_meanwhile_has_nothing_of_it(
    packed: Packed, tmp_path: Path
) -> None:
    house = House(tmp_path / "other", open_simulated_state(SystemClock()))
    (house.root / "mesh/logs").mkdir(parents=True)
    async with house.open():
        line = GatewayConnection(access_token.read_token(house.token()))
        line.open()
        held = line.stream(Gateway.upload, packed.begin)
        upload = await anext(held)
    await empty(house)
    async with house.open():
        with pytest.raises(NotFound, match="given up"):
            await packed.send(line, upload.upload)
        await held.aclose()
        await line.close()
    await empty(house)
