"""The view of a run that `meshrl run` carries on, which no fault of the view may end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from meshrl.view.guard import WarningGuard
from meshrl.view.history.run_snapshot import RunSnapshot
from meshrl.view.live.view import View


class GuardedView:
    """A view of a run whose faults, such as a closed pipe, do not end the run."""

    def __init__(self, view: View) -> None:
        self._view, self._guard = view, WarningGuard()

    def __enter__(self) -> Self:
        with self._guard("the view"):
            self._view.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        with self._guard("the view"):
            self._view.__exit__(kind, error, tb)

    def say(self, text: str) -> None:
        """Print a line."""
        with self._guard("the view"):
            self._view.say(text)

    def show(self, shot: RunSnapshot, rows: Sequence[dict[str, Any]]) -> None:
        """Draw a snapshot of the run."""
        with self._guard("the view"):
            self._view.show(shot, rows)
