"""A safetensors file that is written tensor by tensor is what safetensors itself writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshrl.common.model.files.safetensors_file import Unfinished

TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a": torch.tensor(7, dtype=torch.int64),
    "narrow": torch.arange(3, dtype=torch.bfloat16),
    "none": torch.zeros(0, 4),
    "c": torch.arange(6, dtype=torch.float32).reshape(3, 2).T,
}


def test_its_bytes_are_those_of_safetensors(tmp_path: Path) -> None:
    whole = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(whole, tmp_path / "theirs", metadata={"format": "pt"})
    file = Unfinished(tmp_path / "ours", {name: t.to("meta") for name, t in TENSORS.items()})
    for name, tensor in reversed(TENSORS.items()):
        assert not (tmp_path / "ours").exists()
        file.put(name, tensor)
    file.finish()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_it_does_not_appear_without_all_of_them(tmp_path: Path) -> None:
    file = Unfinished(tmp_path / "ours", TENSORS)
    file.put("a", TENSORS["a"])
    with pytest.raises(ValueError, match="b was not written"):
        file.finish()
    assert not (tmp_path / "ours").exists()
