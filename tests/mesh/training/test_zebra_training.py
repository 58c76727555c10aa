"""Training of a gang whose ranks have attention or experts, with any of them lost."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from meshrl.common.api.calls.role import SetTier
from meshrl.common.state import jobs
from meshrl.common.state.pool.workers.rows import ExpertSplit
from tests.load import scaled
from tests.mesh.elastic import STEPS, ElasticMesh, Training
from tests.mesh.training.test_elastic_training import set_tier_with_retries

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.group("zebra"),
]

LEAVES_S = 60.0  # until a core is removable after a checkpoint
RANKS = 3  # two with attention, one with experts
SETTINGS: dict[str, Any] = {
    "training__deterministic": "true",  # so that runs have equal bins
    "training__zebra__attention": 2,
    "training__zebra__micro_batches": 2,
    "training__zebra__hosted": "[1]",
    "model__config__model_type": '"qwen3_moe"',
    "model__config__num_experts": 6,
    "model__config__num_experts_per_tok": 2,
    "model__config__moe_intermediate_size": 32,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def elastic() -> AsyncIterator[ElasticMesh]:
    with tempfile.TemporaryDirectory(prefix="z") as made:  # short: the path of a unix socket is
        mesh = ElasticMesh(Path(made))
        await mesh.open()
        try:
            yield mesh
        finally:
            await mesh.close()


@pytest.mark.deep
async def test_lost_or_hung_ranks_of_either_kind_do_not_change_the_weights(
    elastic: ElasticMesh,
) -> None:
    """Require bit-identical weights: the step is repeated from its record.

    Checkpoint and offloaded rows do not depend on the gang. A hybrid computes whole rounds alone.
    """
    undisturbed_weights = Training(elastic, "calm", RANKS)
    await undisturbed_weights.start(**SETTINGS)
    await undisturbed_weights.train(STEPS)
    expected = await undisturbed_weights.weights()
    for name in ("trainer/calm", "rank/calm/1", "rank/calm/2"):
        elastic.kill(name)

    training = Training(elastic, "stormy", RANKS)
    await training.start(**SETTINGS)
    await training.train(3)
    for rank in (2, 1):
        await training.release(2)
        elastic.kill(f"rank/stormy/{rank}")
        await training.start_rank(rank)
        await training.wait_for_released_steps()
    lost = len(await elastic.events("rank_lost"))
    hung = elastic.children["rank/stormy/2"].pid
    await training.release(2)
    elastic.stop("rank/stormy/2")

    async def has_lost_more() -> bool:
        return len(await elastic.events("rank_lost")) > lost

    await elastic.until("the hung rank is lost", has_lost_more, 4 * training.rank_deadline_s)
    os.kill(hung, signal.SIGKILL)
    await training.start_rank(2)
    await training.wait_for_released_steps()
    await training.release(2)
    elastic.kill("trainer/stormy")  # rank 0, in the middle of the schedule or between two
    await training.start_core()
    await training.wait_for_released_steps()
    await training.train(STEPS - 11)
    found = await training.weights()
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


@pytest.mark.rotating(3)
async def test_core_resumes_from_a_checkpoint_on_ranks_of_another_division(
    elastic: ElasticMesh,
) -> None:
    """Check that a core covered by a checkpoint resumes on ranks of another division. A rank's
    worker kills it as soon as it is removable, without a wait for its answer. Both emulate the
    speed of the ranks' declared accelerators.
    """
    training = Training(elastic, "changing", RANKS)
    training.accelerators = ["cpu:0 L40S", "cpu:1 L40S", "cpu:2 T4"]
    alike = {key: value for key, value in SETTINGS.items() if "zebra" not in key}
    alike["training__pace"] = '"declared/30/64"'
    await training.start(**alike, training__checkpoint_every=50)
    await training.train(2)
    names = ["rank/changing/2", "rank/changing/1", "trainer/changing"]
    await wait_for_emulated_work(elastic, names, 2)

    async def wait_and_kill(name: str) -> None:
        await set_tier_with_retries(elastic, name, SetTier("absent", 1, False, "", ""))
        elastic.kill(name)

    async with asyncio.timeout(scaled(LEAVES_S)):
        await asyncio.gather(*map(wait_and_kill, names))
    training.apart = ExpertSplit(2, 2, (1,))
    await training.start_core()
    for rank in (1, 2):
        await training.start_rank(rank)
    await training.train(2)
    assert await training.count_committed_steps() == 4, "no step was made twice"
    await wait_for_emulated_work(elastic, names, 20)  # a bin has many tasks
    row = await jobs.read_job(elastic.state, "changing")
    assert row.lineage == 1, "ranks that divide otherwise begin a lineage of their own"


async def wait_for_emulated_work(elastic: ElasticMesh, names: Sequence[str], least: int) -> None:
    """Wait until each process reports at least this much emulated work."""

    async def all_have() -> bool:
        return all([(await elastic.stats(name)).get("paced", 0) >= least for name in names])

    await elastic.until("all keep a pace", all_have)
