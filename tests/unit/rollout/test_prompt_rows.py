"""Rows of the groups that a shard opens."""

from __future__ import annotations

from meshrl.common.api.sandbox import OK, CallOutcome, RewardCall
from meshrl.common.job.prompt_order import PromptMix, PromptOrder
from tests.stories import story_on
from tests.unit.rollout.shard_bench import ShardBench, run_on_shard


@story_on(run_on_shard, "tmp_path")
async def test_groups_take_rows_in_the_order_of_the_seed_into_the_second_epoch(
    bench: ShardBench,
) -> None:
    scored: list[str] = []

    def score(call: RewardCall) -> CallOutcome:
        scored.append(call.row["prompt"])
        return CallOutcome(call.id, OK, 1.0, "")

    bench.sandbox.scores = score
    for _ in range(9):
        await (await bench.group())
    order = PromptOrder(PromptMix(0, [1.0]), [8], shuffles=True)
    rows = [order.find_row(prompt) for prompt in range(9)]
    assert scored == [f"question {row}?" for row in rows for _ in range(3)]
