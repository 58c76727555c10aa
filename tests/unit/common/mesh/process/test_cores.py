"""How busy the processors are that this process may run on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from meshrl.common.mesh.process import cores
from meshrl.common.mesh.process.cores import TICKS, Cores, of_stat
from meshrl.common.mesh.process.ends import limits
from meshrl.common.mesh.process.host import SystemHost

STAT = """cpu  900 0 900 900 0 0 0 0 0 0
cpu0 100 20 30 4000 500 6 7 8 50 60
cpu1 1000 0 0 10 0 0 0 0 0 0
cpu2 1 1 1 10 0 0 0 0 0 0
intr 5 6 7
"""


def test_idle_time_and_what_guests_had_of_it_does_not_count_twice() -> None:
    assert of_stat(STAT, {0}) == Cores(1, (100 + 20 + 30 + 6 + 7 + 8) / TICKS)
    assert of_stat(STAT, {1, 2}) == Cores(2, 1003 / TICKS)


def test_work_of_this_process_shows_as_busy_processors() -> None:
    before, used_s = SystemHost().cores(), time.process_time()
    while time.process_time() - used_s < 0.2:
        sum(range(1000))
    after = SystemHost().cores()
    assert after.number == before.number <= len(os.sched_getaffinity(0))
    assert after.busy_s - before.busy_s >= 0.2 - 3 / TICKS


@pytest.mark.parametrize(
    "files",
    [
        {"cpu.max": "150000 100000", "cpu.stat": "usage_usec 2500000\nuser_usec 1\n"},
        {
            "cpu.cfs_quota_us": "150000",
            "cpu.cfs_period_us": "100000",
            "cpuacct.usage": "2500000000",
        },
    ],
)
def test_a_control_group_with_a_share_says_what_it_has_used(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "group").mkdir()
    for name, text in files.items():
        (tmp_path / "group" / name).write_text(text)
    monkeypatch.setattr(limits, "groups_of", lambda controller: [tmp_path / "group"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert cores.cores() == Cores(1.5, 2.5)
