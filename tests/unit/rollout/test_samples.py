"""A few trajectories of each step are kept to be read, by a stated rule and within bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.common.api.sandbox import OK, RAISED, CallOutcome, RewardCall
from meshrl.common.records import run_lines
from meshrl.services.rollout.samples import FAILED, MOST, TEXT, TURNS, bounded
from meshrl.services.rollout.trajectories.trajectory import Ending, Trajectory
from tests.stories import story_on
from tests.unit.rollout.shard_bench import ShardBench, on_shard


def kept(root: Path) -> list[dict[str, Any]]:
    path = root / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ended(n: int, reward: float | None, length: int = 3, version: int = 0) -> Trajectory:
    t = Trajectory(n, 0, n, version, 0)
    t.begin([1, 2])
    ids = np.full(length, 5, np.int32)
    t.sampled(ids, np.zeros(length, np.float32), np.full(length, version, np.int32))
    t.ending = Ending("done", reward)
    if reward is None:
        t.ending = Ending("failed", None, "reward: raised: ValueError: no", "reward raised")
    return t


@story_on(on_shard, "tmp_path")
async def test_what_a_shard_runs_can_be_read_while_it_goes_on(
    bench: ShardBench, tmp_path: Path
) -> None:
    scores = iter([0.0, 1.0, 0.5])

    def score(call: RewardCall) -> CallOutcome:
        reward = next(scores, None)
        if reward is None:
            return CallOutcome(call.id, RAISED, None, "ValueError: no (m.py:3 in f())")
        return CallOutcome(call.id, OK, reward, "")

    bench.sandbox.scores = score
    bench.job.version = 4
    await (await bench.group())
    await (await bench.group())
    found = kept(tmp_path)
    first = found[0]
    assert first["why"][:2] == ["best", "worst"] and first["step"] == 5
    assert [turn["role"] for turn in first["turns"][:3]] == ["model", "tool", "environment"]
    tool, appended = first["turns"][1:3]
    assert (tool["name"], tool["input"]) == ("cell", "1") and "output" in tool["value"]
    assert appended["text"] == "ok"
    assert first["prompt"] == first["row"]["prompt"]
    assert first["versions"] == [0, 0] and first["staleness"] == 4
    assert {s["reward"] for s in found} >= {0.0, 1.0, None}
    assert [s for s in found if "best" in s["why"]][-1]["reward"] == 1.0
    failed = [s for s in found if s["why"][0] == "failed"]
    assert len(failed) == 3 and failed[0]["failure"] == "reward raised"
    assert "ValueError: no" in failed[0]["error"] and failed[0]["turns"]


@story_on(on_shard, "tmp_path")
async def test_of_a_step_the_best_the_worst_the_longest_and_the_first_failures_are_kept(
    bench: ShardBench, tmp_path: Path
) -> None:
    keep = bench.job.samples
    for n, reward in enumerate([0.5, 0.5, 0.2, 0.9, 0.4, *[None] * 9]):
        keep.ended(ended(n, reward), {"n": n}, 0)
    keep.ended(ended(20, 0.5, length=30), {"n": 20}, 0)
    by = {why: [s["reward"] for s in kept(tmp_path) if why in s["why"]] for why in WHYS}
    assert by["best"] == [0.5, 0.9] and by["worst"] == [0.5, 0.2]
    assert len(by["failed"]) == FAILED and by["longest"] == [0.5, 0.5]
    for n in range(1000):
        keep.ended(ended(100 + n, float(n)), {}, 1)
    assert len([s for s in kept(tmp_path) if s["step"] == 2]) == MOST


WHYS = ("best", "worst", "failed", "longest")


def test_the_file_starts_again_past_its_bound_and_the_one_before_it_is_kept(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(run_lines, "FILE_BYTES", 4000)

    async def story(bench: ShardBench) -> None:
        for n in range(40):
            bench.job.samples.ended(ended(n, float(n)), {"n": n}, n)
        assert (tmp_path / "samples.jsonl").stat().st_size <= 4000
        assert (tmp_path / "samples.older.jsonl").stat().st_size <= 4000

    on_shard(tmp_path, story)


def test_long_texts_and_lists_are_cut_in_the_middle() -> None:
    text = bounded({"a": ["x" * TEXT + "y" * TEXT]})["a"][0]
    assert len(text) < TEXT + 60 and text.startswith("xx") and text.endswith("yy")
    assert f"[... {TEXT} characters ...]" in text
    assert bounded(list(range(1000)))[TURNS // 2 - 1 : TURNS // 2 + 1] == [29, 970]
