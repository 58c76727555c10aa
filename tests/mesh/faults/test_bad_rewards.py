"""Rewards that raise, hang or return garbage, through the whole mesh."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest

from meshrl.common.base.files import lines
from meshrl.view.history import samples
from tests.mesh.jobs import digits
from tests.mesh.running import Run
from tests.unit.docs.test_documents import units

pytestmark = pytest.mark.timeout(300)


def sleeping() -> list[int]:
    """The processes that the reward `digits:broken` has left behind."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] == ["sleep", str(digits.STAYS_S)]:
            found.append(process.pid)
    return found


@pytest.mark.deep
def test_rows_that_cannot_be_scored_are_dropped_by_type_and_the_others_train(
    run: Callable[..., Run],
) -> None:
    mesh = run(reward__use="digits:unreliable", budget__steps=3)
    assert mesh.finish() == 0, mesh.said
    summary = mesh.summary()
    assert (summary["phase"], summary["steps"]) == ("finished", 3)
    assert (summary["lost"], summary["trained_twice"]) == (0, 0)
    assert summary["typed_drops"] >= 4
    told = " ".join(fields["reason"] for fields in mesh.events("dropped"))
    assert "failed" in told
    log = (mesh.directory / "mesh/logs/rollout-digits-0.log").read_text()
    assert "reward: raised: ValueError: no (digits.py:" in log
    assert "reward: timeout: reward took more than 0.3 s" in log
    assert "reward: bad_value: reward returned 'a lot', a str" in log
    assert mesh.audit()["lost"] == 0
    assert "reward raised at digits.py:" in mesh.said
    assert "reward timed out at digits.py:" in mesh.said
    rows = lines.whole(mesh.directory / "metrics.jsonl")
    assert summary["failed_share"] > 0 and any(row["failed_share"] for row in rows)
    documented = units("algorithms.md", "## Health of a step")
    assert {key for row in rows for key in row} <= documented.keys()
    kinds = {failure["kind"]: failure["count"] for failure in summary["failures"]}
    assert min(kinds["reward raised"], kinds["reward timed out"]) > 0
    kept = samples.read(mesh.directory)
    assert {sample["reward"] is None for sample in kept} == {True, False}
    assert all(sample["turns"][0]["role"] == "model" for sample in kept)


@pytest.mark.rotating(2)
def test_a_job_whose_reward_always_raises_fails_and_says_what_it_raised(
    run: Callable[..., Run],
) -> None:
    mesh = run(reward__use="digits:broken")
    assert mesh.finish() == 1
    assert not sleeping(), "they have outlived their job"
    assert "error: the job failed: all of the last" in mesh.said
    assert "ValueError: cannot judge ?" in mesh.said
    summary = mesh.summary()
    assert (summary["phase"], summary["steps"], summary["trained"]) == ("failed", 0, 0)
    assert summary["lost"] == 0
    assert summary["typed_drops"] > 0
