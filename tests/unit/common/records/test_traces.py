"""Traces are written in few pieces, of the share of groups that a job asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig, TrackingConfig
from meshrl.common.records import run_lines
from meshrl.common.records.run_lines import Traces
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost


def job(root: Path, share: float) -> JobData:
    config = JobConfig(name="tiny", tracking=TrackingConfig(trace=share))
    return JobData("tiny", config, root / "bundle", root)


def written(root: Path) -> list[dict[str, Any]]:
    path = root / "trace" / "shard-0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_lines_are_gathered_for_a_second_and_all_are_there_at_the_end(tmp_path: Path) -> None:
    async def story(clock: VirtualClock, random: Random) -> None:
        host = SimulatedHost(clock, random.child("host"))
        told = Traces(alone("rollout/tiny/0", clock, random, host), job(tmp_path, 1.0), "shard-0")
        for n in range(5):
            told.write({"n": n})
        assert [row["n"] for row in written(tmp_path)] == [0]
        await clock.sleep(run_lines.GATHERED_S)
        told.write({"n": 5})
        assert [row["n"] for row in written(tmp_path)] == [0, 1, 2, 3, 4, 5]
        told.write({"n": 6, "long": "x" * run_lines.GATHERED_BYTES})
        assert written(tmp_path)[-1]["n"] == 6
        told.write({"n": 7})
        await told.close()
        assert [row["n"] for row in written(tmp_path)] == list(range(8))

    run_virtual(story)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1 / 3, 0.9, 1.0])
def test_the_share_of_groups_that_is_asked_for_is_traced(share: float, tmp_path: Path) -> None:
    async def story(clock: VirtualClock, random: Random) -> None:
        host = SimulatedHost(clock, random.child("host"))
        told = Traces(alone("rollout/tiny/0", clock, random, host), job(tmp_path, share), "shard-0")
        for first in (0, 1 << 40):  # of training, of evaluation
            for groups in (100, 1000):
                found = sum(told.has(first + group) for group in range(groups))
                assert found == pytest.approx(share * groups, abs=1)
        told.write({"n": 0})
        await told.close()
        assert bool(written(tmp_path)) == (share > 0)

    run_virtual(story)


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    async def story(clock: VirtualClock, random: Random) -> None:
        host = SimulatedHost(clock, random.child("host"))
        told = Traces(alone("rollout/tiny/0", clock, random, host), job(tmp_path, 1.0), "shard-0")
        host.disk_bytes = 0
        told.write({"n": 0})
        host.disk_bytes = -1
        await clock.sleep(run_lines.GATHERED_S)
        told.write({"n": 1})
        await told.close()
        assert [row["n"] for row in written(tmp_path)] == [1]

    run_virtual(story)
