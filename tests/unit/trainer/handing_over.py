"""A learner's state on its way to another, through files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from meshrl.common.weights.layout.laying import Part, whole
from meshrl.services.trainer.arithmetic.learner import Learner
from meshrl.services.trainer.rows.saved import FIRST, MASTER, SavedRows, save_rows, sync_all


def save_state(path: Path, state: Mapping[str, Tensor]) -> None:
    save_rows(path, FIRST, whole(state))
    sync_all(path)


def load_state(path: Path, state: Mapping[str, Tensor]) -> None:
    """Fills whole tensors in place from what any number of ranks wrote."""
    saved = SavedRows(path)
    for name, part in whole(state).items():
        saved.fill(name, part)


def handed_over(one: Learner, other: Learner, directory: Path) -> None:
    """The other goes on where the one is."""
    save_rows(directory, FIRST, one.saved(masters=True))
    saved = SavedRows(directory)

    def fill(name: str, part: Part) -> None:
        saved.fill(MASTER + name, part)

    other.restore(saved, fill)
