"""A learner's state on its way to another, through files."""

from __future__ import annotations

from pathlib import Path

from common.weights.layout.laying import Part
from services.trainer.arithmetic.learner import Learner
from services.trainer.rows.saved import FIRST, MASTER, SavedRows, save_rows


def handed_over(one: Learner, other: Learner, directory: Path) -> None:
    """The other goes on where the one is."""
    save_rows(directory, FIRST, one.saved(masters=True))
    saved = SavedRows(directory)

    def fill(name: str, part: Part) -> None:
        saved.fill(MASTER + name, part)

    other.restore(saved, fill)
