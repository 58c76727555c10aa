"""Transfer of a learner's state to another learner through files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from meshrl.common.weights.layout.chunk_builder import TensorRows, as_complete_rows
from meshrl.services.trainer.learner.learner import Learner
from meshrl.services.trainer.rows.saved_rows import (
    FIRST_FILE,
    MASTER_PREFIX,
    SavedRows,
    save_rows,
    sync_files,
)


def save_state(path: Path, state: Mapping[str, Tensor]) -> None:
    save_rows(path, FIRST_FILE, as_complete_rows(state))
    sync_files(path)


def load_state(path: Path, state: Mapping[str, Tensor]) -> None:
    """Fill whole tensors in place from the files of any number of ranks."""
    saved = SavedRows(path)
    for name, part in as_complete_rows(state).items():
        saved.fill(name, part)


def transfer_state(one: Learner, other: Learner, directory: Path) -> None:
    """Transfer the state of one learner to the other through `directory`."""
    save_rows(directory, FIRST_FILE, one.get_checkpoint_rows(include_masters=True))
    saved = SavedRows(directory)

    def fill(name: str, part: TensorRows) -> None:
        saved.fill(MASTER_PREFIX + name, part)

    other.restore(saved, fill)
