"""Whoever is told to stop in the midst of a fork leaves nobody running."""

from __future__ import annotations

import signal

import pytest

from services.sandbox.jail import keeper
from services.sandbox.jail.usage import Scanned


class Forking(Scanned):
    """A process that is slow to fork: its child appears only once it has stopped."""

    def __init__(self, before: int) -> None:
        super().__init__(1)
        self._before = before  # looks until it stops
        self.told: list[tuple[int, int]] = []

    def standing(self) -> dict[int, bool]:
        if not any(pid == 7 for pid, _ in self.told):
            return {7: False}
        self._before -= 1
        if self._before > 0:
            return {7: False}
        if self._before == 0:
            return {7: True}  # the list of processes was read before its child was there
        return {7: True, 8: any(pid == 8 for pid, _ in self.told)}

    def tell(self, pid: int, number: int) -> None:
        self.told.append((pid, number))


@pytest.mark.parametrize("before", [1, 2, 5])
def test_a_child_of_who_stops_in_the_midst_of_a_fork_is_stopped_too(
    monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    cpu = Forking(before)
    monkeypatch.setattr(keeper.os, "kill", cpu.tell)
    keeper._signal_all(signal.SIGSTOP, "landlock", cpu)
    assert cpu.told == [(7, signal.SIGSTOP), (8, signal.SIGSTOP)]


def test_who_cannot_stop_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Forking(10**9)
    monkeypatch.setattr(keeper.os, "kill", cpu.tell)
    monkeypatch.setattr(keeper, "STOPS_S", 0.02)
    keeper._signal_all(signal.SIGSTOP, "landlock", cpu)
    assert cpu.told == [(7, signal.SIGSTOP)]
