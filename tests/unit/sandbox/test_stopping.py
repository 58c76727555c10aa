"""Whoever is told to stop in the midst of a fork leaves nobody running."""

from __future__ import annotations

import os
import signal

import pytest

from meshrl.services.sandbox.jail import init_process
from meshrl.services.sandbox.jail.metering.usage import ScannedCpuTime


class Forking(ScannedCpuTime):
    """Processes that each are told to stop in the midst of a fork: the next one appears only once
    its parent has stopped.
    """

    def __init__(self, processes: int, slow: int) -> None:
        super().__init__(1)
        self._processes_left, self._slow = processes - 1, slow
        self._there: dict[int, bool] = {1: False}
        self._looks = 0
        self.told: list[tuple[int, int]] = []

    def list_stopped(self) -> dict[int, bool]:
        newest = max(self._there)
        if (newest, signal.SIGSTOP) not in self.told:
            return dict(self._there)
        if not self._there[newest]:
            self._looks += 1
            self._there[newest] = self._looks % self._slow == 0
        elif self._processes_left:
            self._processes_left -= 1
            self._there[newest + 1] = False
        return dict(self._there)

    def tell(self, pid: int, number: int) -> None:
        self.told.append((pid, number))


@pytest.mark.parametrize("slow", [1, 2, 5])
@pytest.mark.parametrize("processes", [2, 4])
def test_a_child_of_who_stops_in_the_midst_of_a_fork_is_stopped_too(
    monkeypatch: pytest.MonkeyPatch, processes: int, slow: int
) -> None:
    cpu = Forking(processes, slow)
    monkeypatch.setattr(os, "kill", cpu.tell)
    init_process._signal_all(signal.SIGSTOP, "landlock", cpu)
    assert cpu.told == [(pid, signal.SIGSTOP) for pid in range(1, processes + 1)]


def test_who_cannot_stop_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Forking(1, 10**9)
    monkeypatch.setattr(os, "kill", cpu.tell)
    monkeypatch.setattr(init_process, "STOP_TIMEOUT_S", 0.02)
    init_process._signal_all(signal.SIGSTOP, "landlock", cpu)
    assert cpu.told == [(1, signal.SIGSTOP)]
