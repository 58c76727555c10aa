"""Checks of a run before it is resumed, and requests to its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.common.api.weights import Manifest, TensorPiece
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import ConfigError, MeshError, NotFound
from meshrl.common.base.files.sealed_documents import encode_sealed
from meshrl.common.job.bundle import bundle_files
from meshrl.common.records.checkpoints import compute_file_digests, format_checkpoint_name
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.layout.manifest import encode_manifest
from meshrl.directory.command_target import read_run
from meshrl.directory.directory_paths import MeshPaths
from meshrl.runs import resumption
from meshrl.runs.model_sampling import ModelChoice, encode_requests, find_model, sample_model
from tests.unit.meshrl.runs.conftest import write_run


def store_chunk(chunks: ChunkStore, content: bytes) -> str:
    digest = compute_digest(content)
    chunks.chunk_path(digest).parent.mkdir(parents=True, exist_ok=True)
    chunks.chunk_path(digest).write_bytes(content)
    return digest


class CheckpointedRun:
    """Run with two checkpoints, each with a version of one tensor."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.chunks = directory, ChunkStore(directory / "store")
        self.bundle = directory / "bundle/d1"
        files = {"modules/job.py": b"x = 1\n", "data/train.jsonl": b"{}\n", "tokenizer.json": b"{}"}
        for name, content in files.items():
            (self.bundle / name).parent.mkdir(parents=True, exist_ok=True)
            (self.bundle / name).write_bytes(content)
        self.held: dict[str, Any] = {
            "job": "sum",
            "document": {
                "bundle": {"dir": str(self.bundle), "files": bundle_files.list_files(self.bundle)}
            },
        }
        (directory / "job.json").write_text(json.dumps(self.held))
        self.names = [self._checkpoint(step) for step in (4, 8)]
        steps = [
            {"kind": "step", "fields": {"checkpoint": name, "version": 9}} for name in self.names
        ]
        lines = "".join(json.dumps(step) + "\n" for step in steps)
        (directory / "events.jsonl").write_text(lines)
        (directory / "mesh/redis").mkdir(parents=True)
        (directory / "mesh/redis/appendonly").write_text("")

    def _checkpoint(self, step: int) -> str:
        chunk = store_chunk(self.chunks, b"%8d" % step)
        tensors = [TensorPiece("w", "F32", [2], chunk, 0, 8, 0, 0, 2)]
        manifest = store_chunk(self.chunks, encode_manifest(Manifest("sum", 0, step, tensors)))
        name = format_checkpoint_name(0, step, manifest)
        state = self.directory / "checkpoints" / name / "state"
        state.mkdir(parents=True)
        self.get_state_path(name).write_bytes(b"0")
        self.get_model_path(name).write_bytes(b"1")
        files = compute_file_digests(state.parent)
        held = {"lineage": 0, "step": step, "weights": manifest, "account": {}, "files": files}
        self.get_manifest_path(name).write_bytes(encode_sealed(held))
        self.tensor, self.manifest = self.chunks.chunk_path(chunk), self.chunks.chunk_path(manifest)
        return name

    def get_manifest_path(self, name: str) -> Path:
        return self.directory / "checkpoints" / f"{name}.json"

    def get_state_path(self, name: str) -> Path:
        return self.directory / "checkpoints" / name / "state/part.safetensors"

    def get_model_path(self, name: str) -> Path:
        return self.directory / "checkpoints" / name / "model.safetensors"

    def check(self) -> None:
        resumption.check_run(self.directory, self.held, MeshPaths(self.directory))


@pytest.fixture
def run(tmp_path: Path) -> CheckpointedRun:
    return CheckpointedRun(tmp_path)


def check_and_fail(run: CheckpointedRun) -> str:
    with pytest.raises(MeshError) as caught:
        run.check()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_intact_run_passes_the_check(run: CheckpointedRun) -> None:
    run.check()


@pytest.mark.parametrize("name", ["data/train.jsonl", "modules/job.py", "tokenizer.json"])
def test_changed_bundle_file_is_named(run: CheckpointedRun, name: str) -> None:
    content = (run.bundle / name).read_bytes()
    (run.bundle / name).write_bytes(b"")
    assert f"{run.bundle / name} has 0 bytes" in check_and_fail(run)
    flipped = bytearray(content)
    flipped[-1] ^= 4
    (run.bundle / name).write_bytes(flipped)
    assert f"{run.bundle / name} is corrupt: its digest differs" in check_and_fail(run)
    (run.bundle / name).unlink()
    assert f"{run.bundle / name} is missing" in check_and_fail(run)


def test_corrupt_checkpoint_is_replaced_by_the_previous_one(run: CheckpointedRun) -> None:
    (state := run.get_state_path(run.names[1])).unlink()
    run.check()
    (first := run.get_manifest_path(run.names[0])).write_text("{")
    error = check_and_fail(run)
    assert "no checkpoint of the run is complete" in error and f"{state} is missing" in error
    first.unlink()
    assert f"{state} is missing" in check_and_fail(run)
    run.get_manifest_path(run.names[1]).unlink()
    assert f"{run.get_manifest_path(run.names[1])} is missing" in check_and_fail(run)


@pytest.mark.parametrize("which", ["tensor", "manifest"])
def test_weights_may_be_in_the_store_or_in_the_checkpoint(run: CheckpointedRun, which: str) -> None:
    run.get_manifest_path(run.names[0]).unlink()
    (model := run.get_model_path(run.names[1])).rename(model.with_name("elsewhere"))
    run.check()
    (chunk := getattr(run, which)).unlink()
    error = check_and_fail(run)
    assert str(model) in error and str(chunk) in error
    model.with_name("elsewhere").rename(model)
    run.check()


def test_moved_run_names_its_original_directory(run: CheckpointedRun, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    with pytest.raises(NotFound, match=f"mv {moved} {run.directory}"):
        resumption.check_run(moved, run.held, MeshPaths(moved))


def test_missing_mesh_of_a_submitted_run_is_named(run: CheckpointedRun, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"does not exist: .*/up"):
        resumption.check_run(run.directory, run.held, MeshPaths(tmp_path / "up"))


@pytest.fixture(autouse=True)
def hidden_mesh_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide any mesh of the user who runs the tests."""
    monkeypatch.setenv("MESHRL_HOME", str(tmp_path / "home"))


def test_json_object_is_a_row_and_other_text_a_prompt() -> None:
    texts = ["1+2?\n", '{"prompt": "a", "answer": 3}', "{not json}", '["a"]', " \n", " x"]
    assert [json.loads(line) for line in encode_requests(texts)] == [
        {"prompt": "1+2?"},
        {"row": {"prompt": "a", "answer": 3}},
        {"prompt": "{not json}"},
        {"prompt": '["a"]'},
        {"prompt": " x"},
    ]


def test_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is neither a run directory nor a job"):
        sample_model(tmp_path / "nothing", "x", ModelChoice())


@pytest.mark.deep
def test_run_without_a_version_is_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"phase": "training", "error": ""}], [])
    with pytest.raises(NotFound, match=r"has no model yet: .* has no version\.") as caught:
        sample_model(run, "x", ModelChoice())
    assert "first version" in caught.value.fix
    with pytest.raises(NotFound, match="no best version"):
        sample_model(run, "x", ModelChoice(best=True))
    with pytest.raises(ConfigError, match="two versions"):
        sample_model(run, "x", ModelChoice(step=3, best=True))


def test_model_of_a_finished_run_is_its_exported_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"phase": "finished", "error": ""}], [0.5])
    (run / "model").mkdir()
    (run / "model/config.json").write_text("{}")
    assert find_model(read_run(run), None, False, tmp_path) == run / "model"


def test_missing_prompt_is_an_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"phase": "finished", "error": ""}], [0.5])
    found = CliRunner().invoke(app, ["sample", str(run), "-"], input="\n\n")
    assert isinstance(found.exception, ConfigError) and "the prompt is missing" in str(
        found.exception
    )
