"""Work counters of a shard: time, tokens and states of its training trajectories."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.common.api.sandbox import OK, RAISED, CallOutcome, RewardCall
from meshrl.common.base.files.json_lines import iterate_rows
from meshrl.common.job.evaluation_plan import EvaluationPlan
from meshrl.common.records import line_files
from meshrl.common.state.pool.demand.measurements import MeasuredWork, decode_work
from meshrl.services.rollout.evaluation import evaluate
from meshrl.services.rollout.record.group_commit import WINDOW_S
from meshrl.services.rollout.sample_writer import (
    MAX_FAILED_SAMPLES,
    MAX_SAMPLES,
    MAX_TEXT_CHARS,
    MAX_TURNS,
    truncate,
)
from meshrl.services.rollout.trajectories.trajectory import Trajectory, TrajectoryOutcome
from tests.stories import story_on
from tests.unit.rollout.shard_bench import ENGINES, ShardBench, run_on_shard

SCORE_S = 3.0


def measure_work(bench: ShardBench) -> MeasuredWork:
    return bench.job.runner.work_counters.measure_work(
        bench.job.runner.group_commit.recorded_tokens
    )


@story_on(run_on_shard, "tmp_path")
async def test_time_splits_into_engine_queue_and_tool_also_in_flight(bench: ShardBench) -> None:
    bench.sandbox.takes_s = SCORE_S
    began = bench.clock.monotonic()
    tasks = [await bench.group() for _ in range(5)]  # 15 trajectories for 8 slots
    await bench.clock.sleep(0.5)
    early = measure_work(bench)
    assert early.flight_s == pytest.approx(15 * (bench.clock.monotonic() - began), abs=1e-6)
    assert early.queue_s > 1.0 and early.engine_s > 1.0 and early.trajectories == 0
    await asyncio.gather(*tasks)
    late = measure_work(bench)
    assert (late.groups, late.trajectories) == (5, 15)
    assert late.flight_s == pytest.approx(late.engine_s + late.queue_s + late.tool_s)
    assert late.tool_s > 15 * SCORE_S and late.sampled > 0
    assert late.sampled == sum(s.engine.tokens_generated for s in bench.engines)
    await bench.clock.sleep(100.0)
    idle = measure_work(bench)
    assert idle.idle_s == pytest.approx(late.idle_s + 100.0)
    assert replace(idle, idle_s=late.idle_s) == late
    published = decode_work(bench.job.stats().work)
    assert asdict(published) == pytest.approx(asdict(idle), abs=0.001)


@story_on(run_on_shard, "tmp_path")
async def test_evaluation_is_not_counted_as_work(bench: ShardBench) -> None:
    await evaluate(bench.job, EvaluationPlan("step-0", 0, ("sampled",)), 0)
    assert bench.job.runner.group_commit.sampled_tokens > 0
    assert measure_work(bench) == MeasuredWork() and bench.job.stats().work == {}


@pytest.mark.deep
@story_on(run_on_shard, "tmp_path")
async def test_pause_is_not_counted_as_work(bench: ShardBench) -> None:
    task = await bench.group()
    await bench.clock.sleep(0.1)
    bench.mesh.job_clock.set_paused(True)
    before = measure_work(bench)
    await bench.clock.sleep(1000.0)
    assert measure_work(bench).flight_s == before.flight_s
    bench.mesh.job_clock.set_paused(False)
    await task


@story_on(run_on_shard, "tmp_path")
async def test_gate_time_counts_while_free_slots_wait_for_it(bench: ShardBench) -> None:
    job = bench.job
    admissions = asyncio.create_task(job.admit_forever())
    job.admission_open = True
    job.runner.slot_freed.set()
    await bench.clock.sleep(2.0)
    assert measure_work(bench).shut_s == 0, "the gate lets through more than there is room for"
    await close_gate(bench)
    while job.runner.active_trajectories:
        await bench.clock.sleep(0.01)
    shut_s = measure_work(bench).shut_s
    await bench.clock.sleep(10.0)
    assert measure_work(bench).shut_s == pytest.approx(shut_s + 10.0)
    job.admission_open = False
    await bench.clock.sleep(1.0)
    shut_s = measure_work(bench).shut_s
    await bench.clock.sleep(10.0)
    assert measure_work(bench).shut_s == shut_s, "nobody asks"
    admissions.cancel()


async def close_gate(bench: ShardBench) -> None:
    """Close the staleness gate."""
    key = "{" + bench.job.job.id + "}:job"
    await bench.state.run_command("HSET", key, "groups_per_step", "0")


@story_on(run_on_shard, "tmp_path")
async def test_lengths_of_successful_training_trajectories_are_recorded(bench: ShardBench) -> None:
    await asyncio.gather(*[await bench.group() for _ in range(5)])
    await asyncio.gather(*[await bench.group() for _ in range(5)])
    lengths = bench.job.runner.work_counters.length_summary
    assert (
        lengths is not None
        and lengths.trajectories == bench.job.runner.work_counters.trajectories == 30
    )
    sampled = measure_work(bench).sampled
    assert (
        lengths.sampled_tokens[0] <= sampled / 30 <= lengths.sampled_tokens[-1]
        and lengths.mean_prompt_tokens > 0
    )
    assert bench.job.stats().lengths == lengths.encode()
    assert measure_work(bench).prompted == pytest.approx(30 * lengths.mean_prompt_tokens)


async def read_traces(bench: ShardBench) -> list[dict[str, Any]]:
    await bench.job.runner.tracer.close()
    return list(iterate_rows(bench.root / "trace" / "shard-0.jsonl"))


def states(row: dict[str, Any]) -> list[str]:
    """Return the states of a trace row that take time in this bench."""
    return [state for state in row["parts"][::2] if state in ("prefill", "decode", "reward")]


@story_on(run_on_shard, "tmp_path")
async def test_trace_covers_all_states_of_a_trajectory(bench: ShardBench) -> None:
    bench.sandbox.takes_s = 2.0
    began = bench.clock.wall()
    await (await bench.group())
    finish_trajectory = bench.clock.wall()
    rows = await read_traces(bench)
    assert sorted(row["member"] for row in rows) == [0, 1, 2]
    for row in rows:
        assert states(row) == ["prefill", "decode", "prefill", "decode", "reward"]
        spent = dict.fromkeys(row["parts"][::2], 0.0)
        for state, ms in zip(row["parts"][::2], row["parts"][1::2], strict=True):
            spent[state] += ms / 1000
        assert spent["reward"] >= 2.0
        # A turn has about 20 tokens at 100 per second; the first ends the prefill.
        assert spent["decode"] > spent["prefill"] - 2 * WINDOW_S > 0
        assert began <= row["at"] <= row["at"] + sum(spent.values()) <= finish_trajectory + 1e-3
        assert (row["training"], row["ending"], row["reward"]) == (True, "done", 1.0)
        assert 0 < row["prompt"] < row["tokens"]
    last = max(row["at"] + sum(row["parts"][1::2]) / 1000 for row in rows)
    assert finish_trajectory - last < 0.1  # the rest belongs to the group


@story_on(run_on_shard, "tmp_path")
async def test_wait_for_an_engine_counts_as_queue_time(bench: ShardBench) -> None:
    for service in bench.engines:
        await service.mesh.leave()
    await bench.clock.sleep(10.0)
    group = await bench.group()
    await bench.clock.sleep(30.0)
    await bench._add_engine(ENGINES)
    await group
    for row in await read_traces(bench):
        queued = row["parts"][row["parts"].index("queue") + 1]
        assert 29_000 < queued < 40_000


@story_on(run_on_shard, "tmp_path")
async def test_trace_of_a_cancelled_trajectory_has_no_ending(bench: ShardBench) -> None:
    bench.sandbox.takes_s = 500.0
    group = asyncio.ensure_future(await bench.group())
    await bench.clock.sleep(30.0)
    group.cancel()
    await asyncio.gather(group, return_exceptions=True)
    rows = await read_traces(bench)
    assert len(rows) == 3
    assert all(row["ending"] == "" and row["parts"][-2] == "reward" for row in rows)


@story_on(run_on_shard, "tmp_path")
async def test_untraced_group_writes_no_line(bench: ShardBench) -> None:
    bench.job.runner.tracer._traces.traced_fraction = 0.5  # every second group
    await (await bench.group())
    await (await bench.group())
    assert {row["group"] % 2 for row in await read_traces(bench)} == {1}
    t = Trajectory(0, 0, 0, 0, 0)
    with bench.job.runner.tracer.trace(t):
        assert not hasattr(t.stopwatch, "list_parts")


def read_samples(root: Path) -> list[dict[str, Any]]:
    path = root / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def finish_trajectory(
    n: int, reward: float | None, length: int = 3, version: int = 0
) -> Trajectory:
    t = Trajectory(n, 0, n, version, 0)
    t.set_prompt([1, 2])
    ids = np.full(length, 5, np.int32)
    t.append_sampled(ids, np.zeros(length, np.float32), np.full(length, version, np.int32))
    t.outcome = TrajectoryOutcome("done", reward)
    if reward is None:
        t.outcome = TrajectoryOutcome(
            "failed", None, "reward: raised: ValueError: no", "reward raised"
        )
    return t


@story_on(run_on_shard, "tmp_path")
async def test_samples_are_readable_during_the_run(bench: ShardBench, tmp_path: Path) -> None:
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
    samples = read_samples(tmp_path)
    first = samples[0]
    assert first["why"][:2] == ["best", "worst"] and first["step"] == 5
    assert [turn["role"] for turn in first["turns"][:3]] == ["model", "tool", "environment"]
    tool, appended = first["turns"][1:3]
    assert (tool["name"], tool["input"]) == ("cell", "1") and "output" in tool["value"]
    assert appended["text"] == "ok"
    assert first["prompt"] == first["row"]["prompt"]
    assert first["versions"] == [0, 0] and first["staleness"] == 4
    assert {s["reward"] for s in samples} >= {0.0, 1.0, None}
    assert [s for s in samples if "best" in s["why"]][-1]["reward"] == 1.0
    failed = [s for s in samples if s["why"][0] == "failed"]
    assert len(failed) == 3 and failed[0]["failure"] == "reward raised"
    assert "ValueError: no" in failed[0]["error"] and failed[0]["turns"]


@story_on(run_on_shard, "tmp_path")
async def test_best_worst_longest_and_first_failed_samples_of_a_step_are_saved(
    bench: ShardBench, tmp_path: Path
) -> None:
    sample_writer = bench.job.samples
    for n, reward in enumerate([0.5, 0.5, 0.2, 0.9, 0.4, *[None] * 9]):
        sample_writer.write_training_sample(finish_trajectory(n, reward), {"n": n}, 0)
    sample_writer.write_training_sample(finish_trajectory(20, 0.5, length=30), {"n": 20}, 0)
    by = {why: [s["reward"] for s in read_samples(tmp_path) if why in s["why"]] for why in REASONS}
    assert by["best"] == [0.5, 0.9] and by["worst"] == [0.5, 0.2]
    assert len(by["failed"]) == MAX_FAILED_SAMPLES and by["longest"] == [0.5, 0.5]
    for n in range(1000):
        sample_writer.write_training_sample(finish_trajectory(100 + n, float(n)), {}, 1)
    assert len([s for s in read_samples(tmp_path) if s["step"] == 2]) == MAX_SAMPLES


REASONS = ("best", "worst", "failed", "longest")


@story_on(run_on_shard, "tmp_path")
async def test_sample_file_rotates_at_its_size_limit_with_one_older_file(
    bench: ShardBench, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(line_files, "MAX_FILE_BYTES", 4000)
    for n in range(40):
        bench.job.samples.write_training_sample(finish_trajectory(n, float(n)), {"n": n}, n)
    assert (tmp_path / "samples.jsonl").stat().st_size <= 4000
    assert (tmp_path / "samples.older.jsonl").stat().st_size <= 4000


def test_long_texts_and_lists_are_truncated_in_the_middle() -> None:
    text = truncate({"a": ["x" * MAX_TEXT_CHARS + "y" * MAX_TEXT_CHARS]})["a"][0]
    assert len(text) < MAX_TEXT_CHARS + 60 and text.startswith("xx") and text.endswith("yy")
    assert f"[... {MAX_TEXT_CHARS} characters ...]" in text
    assert truncate(list(range(1000)))[MAX_TURNS // 2 - 1 : MAX_TURNS // 2 + 1] == [29, 970]
