"""Uploaded bundles: complete ones become runs, and all others leave no files."""

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
from tests.unit.gateway.conftest import GatewayBench, connect, forward_to


class PackedJob:
    """Bundle of a job at its sender."""

    def __init__(self, job: Path, room: Path) -> None:
        uploads = job_reader.read_job_file(job, [])
        self.directory, self.document = bundle.pack_bundle(uploads.config, uploads.base, room)
        about = self.document.pop("bundle")
        self.files: dict[str, Any] = about["files"]
        self.digest: str = about["digest"]
        self.parameters: int = about["parameters"]

    @property
    def complete_request(self) -> BeginUpload:
        return BeginUpload(self.document, self.digest, self.files, self.parameters)

    def make_request(self, files: dict[str, Any]) -> BeginUpload:
        return BeginUpload(
            self.document, bundle_files.compute_digest(files), files, self.parameters
        )

    async def upload_files(self, line: GatewayConnection, upload: str, *left_out: str) -> None:
        for name in self.files.keys() - left_out:
            content = (self.directory / name).read_bytes()
            assert len(content) <= PIECE_BYTES
            await line.call(Gateway.put, UploadPiece(upload, name, 0, content))


@pytest.fixture
def packed_job(job: Path, tmp_path: Path) -> PackedJob:
    return PackedJob(job, tmp_path / "packed")


@pytest.fixture
async def line(bench: GatewayBench) -> AsyncIterator[GatewayConnection]:
    async with connect(bench.token()) as uploads:
        yield uploads


@asynccontextmanager
async def open_upload(
    line: GatewayConnection, complete_request: BeginUpload
) -> AsyncIterator[UploadOpened]:
    async with aclosing(line.stream(Gateway.upload, complete_request)) as stream:
        yield await anext(stream)


async def wait_until_empty(bench: GatewayBench) -> None:
    """Wait until no file of any upload is left."""
    async with asyncio.timeout(scaled(20)):
        while list(bench.runs.iterdir()):
            await asyncio.sleep(0.02)
    assert await jobs.read_jobs(bench.state) == []


async def test_complete_bundle_becomes_a_run_once(
    bench: GatewayBench, line: GatewayConnection, packed_job: PackedJob
) -> None:
    async with open_upload(line, packed_job.complete_request) as upload:
        await packed_job.upload_files(line, upload.upload)
        done = await line.call(Gateway.finish, upload.upload)
        assert await line.call(Gateway.finish, upload.upload) == done
    assert [row.id for row in await jobs.read_jobs(bench.state)] == [done.job] == ["game"]
    assert sorted(path.name for path in bench.runs.iterdir()) == ["game"]


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
async def test_file_name_outside_the_bundle_is_rejected(
    bench: GatewayBench, line: GatewayConnection, packed_job: PackedJob, name: str
) -> None:
    complete_request = packed_job.make_request(packed_job.files | {name: [1, "0" * 64]})
    with pytest.raises(Refused, match="is not a valid file name in a bundle"):
        async with open_upload(line, complete_request):
            pass
    await wait_until_empty(bench)


async def test_inconsistent_file_list_is_rejected(
    bench: GatewayBench, line: GatewayConnection, packed_job: PackedJob
) -> None:
    conflicting_files = packed_job.files | {
        "modules/a": [1, "0" * 64],
        "modules/a/b": [1, "0" * 64],
    }
    for complete_request, expected_error in (
        (packed_job.make_request(conflicting_files), "both a file and a folder"),
        (
            BeginUpload(packed_job.document, "0" * 64, packed_job.files, 1),
            "digest does not match its list",
        ),
        (
            packed_job.make_request(packed_job.files | {"data/x": [1 << 50, "0" * 64]}),
            "the limit is",
        ),
        (
            packed_job.make_request(packed_job.files | {"data/x": [-1, "0" * 64]}),
            "not a valid size and digest",
        ),
        (BeginUpload(packed_job.document, packed_job.digest, {}, 1), "1 to 10000 files"),
        (BeginUpload(packed_job.document, packed_job.digest, [], 1), "1 to 10000 files"),
        (BeginUpload([], packed_job.digest, packed_job.files, 1), "a job must be a table"),
        (
            BeginUpload(packed_job.document, packed_job.digest, packed_job.files, -1),
            "-1 parameters",
        ),
    ):
        with pytest.raises(Refused, match=expected_error):
            async with open_upload(line, complete_request):
                pass
    await wait_until_empty(bench)


async def test_job_with_other_files_or_invalid_values_is_rejected(
    bench: GatewayBench, line: GatewayConnection, packed_job: PackedJob
) -> None:
    for table, key, value in (
        ("model", "tokenizer", "/etc/passwd"),
        ("model", "tokenizer", ""),
        ("model", "path", "model"),  # not in the bundle
        ("dataset", "train", "../../x"),
    ):
        document_with_change = packed_job.document | {
            table: packed_job.document[table] | {key: value}
        }
        with pytest.raises(Refused, match=f"{table}.{key}"):
            async with open_upload(
                line, BeginUpload(document_with_change, packed_job.digest, packed_job.files, 1)
            ):
                pass
    invalid_document = packed_job.document | {"budget": {"steps": -1}}
    with pytest.raises(ConfigError, match=r"budget\.steps = -1 must be at least 0"):
        async with open_upload(
            line, BeginUpload(invalid_document, packed_job.digest, packed_job.files, 1)
        ):
            pass
    await wait_until_empty(bench)


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
def test_paths_of_the_meshs_host_are_rejected(key: str, value: Any) -> None:
    named: Any = value
    for part in reversed(key.split(".")):
        named = {part: named}
    files = {"tokenizer/tokenizer.json": [1, ""], "modules/server.py": [1, ""]}
    document = {"model": {"tokenizer": "tokenizer/tokenizer.json"}} | named
    with pytest.raises(Refused, match=re.escape(key)):
        check_config_paths(parse_config(document), files)


def test_output_with_the_owners_credentials_is_rejected() -> None:
    document = JobConfig(out="s3://bucket/path").to_document()
    with pytest.raises(Refused, match="with its owner's credentials"):
        parse_config(document)


def test_bundled_files_are_accepted() -> None:
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


async def test_bytes_outside_the_file_list_are_rejected(
    bench: GatewayBench, line: GatewayConnection, packed_job: PackedJob
) -> None:
    async with open_upload(line, packed_job.complete_request) as upload:
        name, (size, _) = next(iter(packed_job.files.items()))
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
    await wait_until_empty(bench)


async def test_truncated_or_altered_bundle_is_rejected(
    bench: GatewayBench, line: GatewayConnection, packed_job: PackedJob
) -> None:
    name = "tokenizer/tokenizer.json"
    async with open_upload(line, packed_job.complete_request) as upload:
        await packed_job.upload_files(line, upload.upload, name)
        with pytest.raises(Refused, match=f"received bundle is corrupt: {name}"):
            await line.call(Gateway.finish, upload.upload)
        content = bytearray((packed_job.directory / name).read_bytes())
        content[0] ^= 1
        await line.call(Gateway.put, UploadPiece(upload.upload, name, 0, bytes(content)))
        with pytest.raises(Refused, match="digest differs"):
            await line.call(Gateway.finish, upload.upload)
    await wait_until_empty(bench)


async def test_lost_connection_leaves_no_files(bench: GatewayBench, packed_job: PackedJob) -> None:
    direct_token = access_token.read_token(bench.token())
    async with (
        forward_to(direct_token.address) as port,
        connect(replace(direct_token, address=port.address)) as line,
    ):
        stream = line.stream(Gateway.upload, packed_job.complete_request)
        upload = await anext(stream)
        await packed_job.upload_files(line, upload.upload, "tokenizer/tokenizer.json")
        assert [path.name.startswith(INCOMING_PREFIX) for path in bench.runs.iterdir()] == [True]
        port.cut()
        await wait_until_empty(bench)
        await stream.aclose()


async def test_idle_or_revoked_upload_is_discarded(
    bench: GatewayBench, line: GatewayConnection, packed_job: PackedJob
) -> None:
    async with aclosing(line.stream(Gateway.upload, packed_job.complete_request)) as stream:
        await anext(stream)
        bench.revoke("alice")
        with pytest.raises(MeshError, match=r"no data of the job arrived|revoked"):
            await anext(stream)
    await wait_until_empty(bench)


async def test_concurrent_uploads_of_a_token_are_limited(
    bench: GatewayBench, line: GatewayConnection, packed_job: PackedJob
) -> None:
    stream = [
        line.stream(Gateway.upload, packed_job.complete_request)
        for _ in range(MAX_UPLOADS_PER_TOKEN + 1)
    ]
    for one in stream[:MAX_UPLOADS_PER_TOKEN]:
        await anext(one)
    with pytest.raises(Overloaded):
        await anext(stream[MAX_UPLOADS_PER_TOKEN])
    for one in stream:
        await one.aclose()
    await wait_until_empty(bench)


async def test_upload_belongs_to_its_token(
    bench: GatewayBench, line: GatewayConnection, packed_job: PackedJob
) -> None:
    async with (
        open_upload(line, packed_job.complete_request) as upload,
        connect(bench.token("bob")) as other,
    ):
        with pytest.raises(NotFound):
            await other.call(Gateway.finish, upload.upload)
    await wait_until_empty(bench)


@pytest.fixture
async def incoming(packed_job: PackedJob, tmp_path: Path) -> tuple[Uploads, PackedJob]:
    """Create uploads below `tmp_path/runs` without a gateway."""
    uploads = Uploads(SystemHost(), tmp_path / "runs")
    await uploads.start()
    return uploads, packed_job


async def test_cancelled_check_can_be_repeated(
    incoming: tuple[Uploads, PackedJob],
) -> None:
    uploads, packed_job = incoming
    complete_request = packed_job.complete_request
    async with uploads.open_upload("t", complete_request, 0.0) as upload:
        for name in packed_job.files:
            content = (packed_job.directory / name).read_bytes()
            await uploads.write_piece(upload, name, 0, content)
        check = asyncio.create_task(uploads.check_complete(upload))
        await asyncio.sleep(0)
        check.cancel()
        await asyncio.wait([check])
        assert check.cancelled()
        await uploads.check_complete(upload)


async def test_sender_lost_during_submission_leaves_a_complete_run(
    incoming: tuple[Uploads, PackedJob], tmp_path: Path
) -> None:
    uploads, packed_job = incoming
    complete_request, submission_started, state_answered = (
        packed_job.complete_request,
        asyncio.Event(),
        asyncio.Event(),
    )

    async def submit(upload: Upload) -> SubmittedJob:
        submission_started.set()
        await state_answered.wait()  # wait like for a slow state store
        run = uploads.create_run(upload, "game", {}, tmp_path / "store")
        return SubmittedJob("game", str(run))

    async def send_and_wait() -> None:
        async with uploads.open_upload("t", complete_request, 0.0) as upload:
            for name in packed_job.files:
                await uploads.write_piece(
                    upload, name, 0, (packed_job.directory / name).read_bytes()
                )
            upload.submission_task = asyncio.create_task(submit(upload))
            await asyncio.Event().wait()

    sender_task = asyncio.create_task(send_and_wait())
    await submission_started.wait()
    sender_task.cancel()
    await asyncio.wait([sender_task], timeout=0.1)
    state_answered.set()
    await asyncio.wait([sender_task])
    assert sender_task.cancelled() and len(uploads) == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["game"]
    bundle_files.check_files(
        tmp_path / "runs/game/bundle" / complete_request.digest, packed_job.files, read_large=True
    )


async def test_unfinished_uploads_of_an_earlier_gateway_are_removed(
    bench: GatewayBench, tmp_path: Path
) -> None:
    unfinished = tmp_path / "runs" / f"{INCOMING_PREFIX}x"
    unfinished.mkdir(parents=True)
    (unfinished / "half").write_text("")
    await Uploads(SystemHost(), tmp_path / "runs").start()
    assert list((tmp_path / "runs").iterdir()) == []


async def test_restarted_gateway_discards_open_uploads(
    packed_job: PackedJob, tmp_path: Path
) -> None:
    bench = GatewayBench(tmp_path / "other", open_simulated_state(SystemClock()))
    (bench.root / "mesh/logs").mkdir(parents=True)
    async with bench.open():
        line = GatewayConnection(access_token.read_token(bench.token()))
        line.open()
        stream = line.stream(Gateway.upload, packed_job.complete_request)
        upload = await anext(stream)
    await wait_until_empty(bench)
    async with bench.open():
        with pytest.raises(NotFound, match="has expired"):
            await packed_job.upload_files(line, upload.upload)
        await stream.aclose()
        await line.close()
    await wait_until_empty(bench)
