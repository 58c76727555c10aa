"""Saved state of a checkpoint: any number of readers loads the rows of any number of writers."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from meshrl.common.base.digest import compute_file_digest
from meshrl.common.base.errors import CorruptData, MeshError
from meshrl.common.weights.layout.chunk_builder import TensorRows
from meshrl.services.trainer.rows.saved_rows import SavedRows, save_rows, select_rank_files
from tests.unit.trainer.state_transfer import load_state, save_state

STATE = {
    "a": torch.randn(5, 3),
    "b.c": torch.arange(4),
    "steps": torch.tensor(7),
    "w": torch.randn(7, 2, 2).to(torch.bfloat16),
}


def rows(tensor: torch.Tensor, rank: int, ranks: int) -> TensorRows:
    if not tensor.dim():
        return TensorRows((), 0, tensor)
    each = -(-len(tensor) // ranks)
    low, high = min(rank * each, len(tensor)), min((rank + 1) * each, len(tensor))
    return TensorRows(tuple(tensor.shape), low, tensor[low:high])


def save_by_ranks(path: Path, ranks: int) -> None:
    for rank in range(ranks):
        parts = {name: rows(tensor, rank, ranks) for name, tensor in STATE.items()}
        parts = {n: p for n, p in parts.items() if p.rows.numel() and (p.shape or not rank)}
        save_rows(path, file_name(rank), parts)


def file_name(rank: int) -> str:
    return f"part-{rank:05d}-00000.safetensors"


def test_digest_is_that_of_the_written_bytes(tmp_path: Path) -> None:
    digest = save_rows(tmp_path, "part.safetensors", {n: rows(t, 0, 1) for n, t in STATE.items()})
    assert digest == compute_file_digest(tmp_path / "part.safetensors")


@pytest.mark.parametrize("writers", [1, 2, 3, 6])
@pytest.mark.parametrize("readers", [1, 2, 5])
def test_rows_saved_by_any_ranks_are_loaded_by_any_others(
    tmp_path: Path, writers: int, readers: int
) -> None:
    save_by_ranks(tmp_path, writers)
    saved = SavedRows(tmp_path)
    for rank in range(readers):
        for name, tensor in STATE.items():
            expected = rows(tensor, rank, readers)
            found = TensorRows(expected.shape, expected.first_row, torch.zeros_like(expected.rows))
            saved.fill(name, found)
            assert torch.equal(found.rows, expected.rows), name


def test_loaded_state_equals_the_saved_bits(tmp_path: Path) -> None:
    save_state(tmp_path / "state", STATE)
    found = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    load_state(tmp_path / "state", found)
    assert all(torch.equal(tensor, found[name]) for name, tensor in STATE.items())
    assert not any(b"pickle" in file.read_bytes() for file in (tmp_path / "state").iterdir())


def test_states_of_earlier_versions_load_and_torch_loads_ours(tmp_path: Path) -> None:
    """Check that states of an earlier MeshRL, written by torch.distributed.checkpoint, still
    load.
    """
    old, new = tmp_path / "old", tmp_path / "new"
    writer = HuggingFaceStorageWriter(str(old), save_distributed=True)
    saver.save(dict(STATE), storage_writer=writer, no_dist=True)
    found = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    load_state(old, found)
    assert all(torch.equal(tensor, found[name]) for name, tensor in STATE.items())
    save_by_ranks(new, 3)
    found = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    loader.load(found, storage_reader=HuggingFaceStorageReader(str(new)), no_dist=True)
    assert all(torch.equal(tensor, found[name]) for name, tensor in STATE.items())


def test_unwritable_file_raises_a_typed_error(tmp_path: Path) -> None:
    soft, missing_tensor = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, missing_tensor))
    try:
        with pytest.raises((OSError, MeshError)):
            save_state(tmp_path / "state", {"a": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, missing_tensor))


def test_state_of_another_model_or_without_rows_is_rejected(tmp_path: Path) -> None:
    save_state(tmp_path / "state", {"a": torch.zeros(3), "b": torch.zeros(2, 2)})
    for requested in ({"c": torch.zeros(3)}, {"a": torch.zeros(4)}, {"b": torch.zeros(2, 3)}):
        with pytest.raises(CorruptData, match="are incomplete"):
            load_state(tmp_path / "state", requested)


def test_rank_restores_from_its_own_and_the_replicated_files(tmp_path: Path) -> None:
    save_by_ranks(tmp_path / "all/state", 3)
    names = [f"state/{file.name}" for file in (tmp_path / "all/state").iterdir()]
    for rank in range(3):
        found = select_rank_files(names, rank, 3)
        assert found == [f"state/{file_name(writer)}" for writer in sorted({0, rank})]
        for name in found:
            target = tmp_path / f"{rank}" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.hardlink_to(tmp_path / "all" / name)
        saved = SavedRows(tmp_path / f"{rank}/state")
        for name, tensor in STATE.items():
            expected = rows(tensor, rank, 3)
            part = TensorRows(expected.shape, expected.first_row, torch.zeros_like(expected.rows))
            saved.fill(name, part)
            assert torch.equal(part.rows, expected.rows), name
    assert (
        select_rank_files(names, 0, 2)
        == select_rank_files(names, 3, 4)
        == select_rank_files(names[:2], 1, 3)
        == []
    )


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_state_without_the_rows_of_a_rank_is_rejected(tmp_path: Path, missing: int) -> None:
    save_by_ranks(tmp_path, 3)
    (tmp_path / file_name(missing)).unlink()
    saved = SavedRows(tmp_path)
    with pytest.raises(CorruptData, match="are incomplete"):
        saved.fill("a", TensorRows((5, 3), 0, torch.zeros(5, 3)))
    stored = rows(STATE["a"], 1 if missing != 1 else 0, 3)
    found = TensorRows(stored.shape, stored.first_row, torch.zeros_like(stored.rows))
    saved.fill("a", found)
    assert torch.equal(found.rows, stored.rows), "of the others all is there"


@pytest.mark.parametrize("how", ["empty", "cut", "another"])
def test_invalid_file_is_reported_by_name(tmp_path: Path, how: str) -> None:
    save_state(tmp_path, {"a": torch.zeros(1000)})
    [file] = tmp_path.iterdir()
    content = file.read_bytes()
    head = json.dumps({"a": {"dtype": "F32", "shape": 3}}).encode()
    another = len(head).to_bytes(8, "little") + head
    file.write_bytes({"empty": b"", "cut": content[:-100], "another": another}[how])
    with pytest.raises(CorruptData) as error_info:
        load_state(tmp_path, {"a": torch.zeros(1000)})
    assert error_info.value.where == str(file)


def test_files_without_requested_tensors_are_opened_once(tmp_path: Path) -> None:
    """Check that a state of many files is not read once for each of them."""
    for number in range(3):
        tensor = torch.full((2,), float(number))
        save_rows(tmp_path, f"{number}.safetensors", {f"t{number}": TensorRows((2,), 0, tensor)})
    saved, files = SavedRows(tmp_path), sorted(tmp_path.iterdir())
    for number, file in enumerate(files):
        found = torch.zeros(2)
        saved.fill(f"t{number}", TensorRows((2,), 0, found))
        assert found.tolist() == [number, number]
        file.write_bytes(b"")  # a later open fails
