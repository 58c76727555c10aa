"""Jails that are stopped during a fork."""

from __future__ import annotations

import os
import signal

import pytest

from meshrl.services.sandbox.jail import init_process
from meshrl.services.sandbox.jail.metering.usage import ScannedCpuTime


class SimulatedForks(ScannedCpuTime):
    """Processes that are each stopped during a fork: each child appears only once its parent has
    stopped.
    """

    def __init__(self, processes: int, polls_until_stopped: int) -> None:
        super().__init__(1)
        self._processes_left, self._polls_until_stopped = processes - 1, polls_until_stopped
        self._is_stopped_by_pid: dict[int, bool] = {1: False}
        self._polls = 0
        self.signals: list[tuple[int, int]] = []

    def list_stopped(self) -> dict[int, bool]:
        newest = max(self._is_stopped_by_pid)
        if (newest, signal.SIGSTOP) not in self.signals:
            return dict(self._is_stopped_by_pid)
        if not self._is_stopped_by_pid[newest]:
            self._polls += 1
            self._is_stopped_by_pid[newest] = self._polls % self._polls_until_stopped == 0
        elif self._processes_left:
            self._processes_left -= 1
            self._is_stopped_by_pid[newest + 1] = False
        return dict(self._is_stopped_by_pid)

    def record_signal(self, pid: int, number: int) -> None:
        self.signals.append((pid, number))


@pytest.mark.parametrize("polls_until_stopped", [1, 2, 5])
@pytest.mark.parametrize("processes", [2, 4])
def test_child_forked_while_its_parent_is_stopped_is_stopped_too(
    monkeypatch: pytest.MonkeyPatch, processes: int, polls_until_stopped: int
) -> None:
    cpu = SimulatedForks(processes, polls_until_stopped)
    monkeypatch.setattr(os, "kill", cpu.record_signal)
    init_process._signal_all(signal.SIGSTOP, "landlock", cpu)
    assert cpu.signals == [(pid, signal.SIGSTOP) for pid in range(1, processes + 1)]


def test_waiting_for_a_process_that_cannot_stop_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = SimulatedForks(1, 10**9)
    monkeypatch.setattr(os, "kill", cpu.record_signal)
    monkeypatch.setattr(init_process, "STOP_TIMEOUT_S", 0.02)
    init_process._signal_all(signal.SIGSTOP, "landlock", cpu)
    assert cpu.signals == [(1, signal.SIGSTOP)]
