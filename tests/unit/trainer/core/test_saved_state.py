"""A checkpoint's files: what was saved is what is loaded, and what went wrong has a name."""

import resource

import pytest
import torch

from common.errors import MeshError
from services.trainer.core.saved_state import load_state, save_state


def test_what_was_saved_is_loaded_bit_by_bit(tmp_path):
    state = {"a": torch.randn(5, 3), "b.c": torch.arange(4), "steps": torch.tensor(7)}
    save_state(tmp_path / "state", state)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load_state(tmp_path / "state", found)
    assert all(torch.equal(tensor, found[name]) for name, tensor in state.items())
    assert not any(b"pickle" in file.read_bytes() for file in (tmp_path / "state").iterdir())


def test_a_file_that_cannot_be_written_is_an_error_that_can_be_handled(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises((OSError, MeshError)):
            save_state(tmp_path / "state", {"a": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_state_of_another_model_is_refused(tmp_path):
    save_state(tmp_path / "state", {"a": torch.zeros(3)})
    with pytest.raises((OSError, MeshError)):
        load_state(tmp_path / "state", {"b": torch.zeros(3)})
