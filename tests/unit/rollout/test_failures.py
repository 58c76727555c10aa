"""Failures of a job's own code as events: the first at once, the others as counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshrl.common.api.sandbox import RAISED, TIMEOUT, CallOutcome, RewardCall
from meshrl.common.job.bundle.source_locations import (
    append_location,
    extract_location,
    locate_error,
    locate_function,
    strip_location,
)
from meshrl.common.job.prompt_order import PromptMix, PromptOrder
from meshrl.common.state import events, jobs
from meshrl.common.state.redis.keys import job_prefix
from meshrl.services.rollout.rewards.sandbox_client import MAX_TIMEOUTS
from meshrl.services.rollout.shard import RolloutShard
from meshrl.services.rollout.trajectories.failures import (
    MIN_HUNG_CALLS,
    REPORT_INTERVAL_S,
    FailureReporter,
    TrajectoryFailed,
)
from tests.contract.state.state_bench import JOB
from tests.stories import story_on
from tests.unit.rollout.shard_bench import ShardBench, run_on_shard

RAISES = "ValueError: no (m.py:3 in f())"
SLEEPS = "reward took more than 10 s (m.py:7 in g())"


async def read_failures(bench: ShardBench) -> list[dict[str, Any]]:
    return [e.fields for e in await events.read_all(bench.state) if e.kind == "failure"]


def score_with(status: str, error: str) -> Callable[[RewardCall], CallOutcome]:
    return lambda call: CallOutcome(call.id, status, None, error)


@story_on(run_on_shard, "tmp_path")
async def test_first_failure_is_reported_at_once_and_others_as_a_count(
    bench: ShardBench,
) -> None:
    bench.sandbox.scores = score_with(RAISED, RAISES)
    await (await bench.group())
    await bench.clock.sleep(1.0)
    (first,) = await read_failures(bench)
    text = "ValueError: no"
    assert first == first | {"kind": "reward raised", "text": text, "where": "m.py:3 in f()"}
    assert (first["job"], first["evaluation"], first["calls"]) == (JOB, False, 0)
    await (await bench.group())
    await bench.clock.sleep(REPORT_INTERVAL_S + 1.0)
    every = await read_failures(bench)
    assert len(every) <= 3, "one event of a kind in so many seconds"
    assert sum(event["count"] for event in every) == 6, "two groups of three"


@story_on(run_on_shard, "tmp_path")
async def test_concurrent_failure_reports_are_all_counted(bench: ShardBench) -> None:
    failures = bench.job.runner.failures
    for text in (RAISES, SLEEPS, RAISES):
        failures.count_failure(TrajectoryFailed(text, kind="reward raised"))
        await asyncio.gather(*(failures.report(last=True) for _ in range(3)))
    assert sum(event["count"] for event in await read_failures(bench)) == 3


@story_on(run_on_shard, "tmp_path")
async def test_new_failure_kind_during_a_report_is_reported_next(bench: ShardBench) -> None:
    failures = bench.job.runner.failures
    failures.count_failure(TrajectoryFailed("one", kind="reward raised"))
    telling = asyncio.ensure_future(failures.report(last=True))
    await asyncio.sleep(0)
    failures.count_failure(TrajectoryFailed("two", kind="environment raised"))
    await telling
    await failures.report(last=True)
    assert [event["text"] for event in await read_failures(bench)] == ["one", "two"]


@story_on(run_on_shard, "tmp_path")
async def test_second_job_of_a_shard_reports_its_own_first_failure(bench: ShardBench) -> None:
    for failures in (bench.job.runner.failures, FailureReporter(bench.job.mesh, "another")):
        failures.count_failure(TrajectoryFailed("one", kind="reward raised"))
        await failures.report(last=True)
    assert [event["job"] for event in await read_failures(bench)] == [JOB, "another"]


@story_on(run_on_shard, "tmp_path")
async def test_occasionally_hanging_tool_does_not_fail_the_job(bench: ShardBench) -> None:
    failures = bench.job.runner.failures
    for _ in range(3 * MIN_HUNG_CALLS):
        failures.count_timeout(
            "look", "look timed out", "slow", 10.0, "environment.tool_deadline_s"
        )
        await bench.clock.sleep(10.0)
        failures.clear_timeouts("reward")
        assert not failures.hopeless_reason


@story_on(run_on_shard, "tmp_path")
async def test_reward_that_ended_often_hangs_for_longer_before_the_job_fails(
    bench: ShardBench,
) -> None:
    failures, least = bench.job.runner.failures, 3 * MIN_HUNG_CALLS
    for _ in range(least // 2):
        failures.clear_timeouts("reward")
    for call in range(1, least + 1):
        assert not failures.hopeless_reason, call
        failures.count_timeout("reward", "reward timed out", "slow", 1.0, "reward.deadline_s")
        await bench.clock.sleep(1.0)
    assert f"none of the last {least} calls" in failures.hopeless_reason


@story_on(run_on_shard, "tmp_path")
async def test_hanging_reward_is_reported_before_its_trajectory_fails(bench: ShardBench) -> None:
    bench.sandbox.scores = score_with(TIMEOUT, SLEEPS)
    bench.sandbox.max_scores_per_batch = 1
    await (await bench.group())
    await bench.clock.sleep(1.0)
    (first,) = await read_failures(bench)
    assert (first["kind"], first["where"]) == ("reward timed out", "m.py:7 in g()")
    assert (first["count"], first["calls"]) == (0, 1)
    assert first["fix"] == "Make it finish, or raise reward.deadline_s"


@story_on(run_on_shard, "tmp_path")
async def test_always_hanging_reward_fails_the_job_by_name(bench: ShardBench) -> None:
    bench.sandbox.scores = score_with(TIMEOUT, SLEEPS)
    bench.sandbox.takes_s = 10.0
    began = bench.clock.monotonic()
    for _ in range(-(-MIN_HUNG_CALLS // (3 * MAX_TIMEOUTS)) + 2):
        await bench.group()
    while (row := await jobs.read_job(bench.state, JOB)).phase != jobs.Phase.FAILED:
        await bench.clock.sleep(1.0)
    assert "none of the last" in row.error and SLEEPS in row.error
    assert bench.clock.monotonic() - began < 200.0


def test_failure_location_is_in_the_authors_code(tmp_path: Path) -> None:
    (tmp_path / "authors.py").write_text(
        "import json\n\n\ndef reads(text):\n    return json.loads(text)\n"
    )
    namespace: dict[str, Any] = {}
    code = compile((tmp_path / "authors.py").read_text(), str(tmp_path / "authors.py"), "exec")
    exec(code, namespace)
    try:
        namespace["reads"]("{")
    except ValueError as error:
        place = locate_error(error, str(tmp_path))
    assert place == "authors.py:5 in reads()"
    assert locate_function(namespace["reads"], str(tmp_path)) == "authors.py:4 in reads()"
    text = append_location("x" * 1000 + " (", place)
    assert extract_location(text) == place and len(strip_location(text)) == 500
    assert extract_location("odd (text)") == "" and strip_location("odd (text)") == "odd (text)"


@story_on(run_on_shard, "tmp_path")
async def test_prompt_that_fills_the_context_fails_its_trajectory_by_name(
    bench: ShardBench,
) -> None:
    bench.job.train_rows = [{"prompt": "a" * 200}]
    bench.job.prompt_order = PromptOrder(PromptMix(0, [1.0]), [1], shuffles=True)
    await (await bench.group())
    await bench.clock.sleep(1.0)
    (first,) = await read_failures(bench)
    assert (first["kind"], first["count"]) == ("prompt too long", 3)
    assert first["text"].endswith("its prompt has 200 tokens")


@story_on(run_on_shard, "tmp_path")
async def test_unreadable_job_document_fails_the_job_and_ends_its_shard(
    bench: ShardBench, tmp_path: Path
) -> None:
    row = await jobs.read_job(bench.state, JOB)
    document = json.dumps(row.document | {"renamed": 1})
    await bench.state.run_command("HSET", f"{job_prefix(JOB)}:submission", "document", document)
    async with bench.clock.timeout(5.0, "the end of the shard"):
        await RolloutShard(bench.mesh, tmp_path).serve()
    failed = await jobs.read_job(bench.state, JOB)
    assert failed.phase == jobs.Phase.FAILED and "renamed" in failed.error
