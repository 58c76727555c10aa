"""Elastic training: final weights do not depend on hybrids that join, leave or die."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from torch import Tensor

from meshrl.common.api.calls.role import RoleControl, SetTier, TierUsage
from meshrl.common.base.errors import Refused
from tests.mesh.elastic import STEPS, ElasticMesh, Training

TOLERANCE = 1e-5  # float32 sums of a step in another order, 20 times


pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.group("elastic"),  # they share a mesh, and the result of one process
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def elastic() -> AsyncIterator[ElasticMesh]:
    with tempfile.TemporaryDirectory(
        prefix="e"
    ) as made:  # short: it contains the path of a unix socket
        mesh = ElasticMesh(Path(made))
        await mesh.open()
        try:
            yield mesh
        finally:
            await mesh.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(elastic: ElasticMesh) -> Mapping[str, Tensor]:
    """Return the result of the job on one process."""
    training = Training(elastic, "alone")
    await training.start()
    await training.train(STEPS)
    weights = await training.weights()
    assert await training.list_computing_gangs() == {"g0"}
    elastic.kill("trainer/alone")
    return weights


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=0, atol=TOLERANCE, msg=name)


async def come_and_go(training: Training) -> None:
    """Train STEPS steps while hybrids join, leave, and are killed with a leased round."""
    elastic, job = training.elastic, training.job
    first, second, third = (f"{job}-h{n}" for n in (1, 2, 3))
    await training.train(2)
    await training.start_hybrid(first, "tests.mesh.stopped_hybrid")
    await training.start_hybrid(second)
    await training.wait_for_hybrid(first)  # it received its weights while no step needed it
    await training.wait_for_hybrid(second)
    steps = 0
    while not elastic.is_stopped(f"hybrid/{first}"):
        assert steps < 6, "it was never given a round"
        await training.train(1)
        steps += 1
    elastic.kill(f"hybrid/{first}")
    await training.release(5)
    await training.start_hybrid(third)  # joins while steps run
    leaving = elastic.worker.ref(f"hybrid/{second}")
    await leaving.call(RoleControl.drain, "it is needed elsewhere")
    await training.wait_for_released_steps()
    await training.wait_for_hybrid(third)
    await sleep_and_wake(training, [third], ("disk", "accelerator"))
    await training.train(STEPS - 7 - steps)
    assert {"g0", second, third} >= await training.list_computing_gangs() > {"g0"}
    for gang in (second, third):
        elastic.kill(f"hybrid/{gang}")


async def sleep_and_wake(training: Training, hybrids: Sequence[str], tiers: Sequence[str]) -> None:
    """Move all processes of the job from tier to tier together."""
    elastic, job = training.elastic, training.job
    names = [f"trainer/{job}", *(f"rank/{job}/{n}" for n in range(1, training.ranks))]
    names += [f"hybrid/{gang}" for gang in hybrids]
    files = str(elastic.directory / "kept")
    for epoch, tier in enumerate(tiers, 1):
        tier_order = SetTier(tier, epoch, False, "", files)
        tier_changes = [set_tier_with_retries(elastic, name, tier_order) for name in names]
        for name, usage in zip(names, await asyncio.gather(*tier_changes), strict=True):
            assert (usage.accelerator_bytes > 0) == (tier == "accelerator"), name
            assert (usage.disk_bytes > 0) == (tier == "disk" and not name.startswith("hybrid")), (
                name
            )


async def set_tier_with_retries(elastic: ElasticMesh, name: str, tier_order: SetTier) -> TierUsage:
    """Repeat the tier order, as workers do: a rank may reject a sleep order that comes too
    early.
    """
    while True:
        with suppress(Refused):
            return await elastic.worker.ref(name).call(RoleControl.set_tier, tier_order)
        await asyncio.sleep(0.05)


@pytest.mark.rotating(3)
async def test_weights_do_not_depend_on_hybrids(
    elastic: ElasticMesh, expected: Mapping[str, Tensor]
) -> None:
    for ranks, host in ((1, "here"), (2, "there")):
        training = Training(elastic, f"ranks{ranks}", ranks, host=host)
        await training.start()
        await come_and_go(training)
        assert_close(await training.weights(), expected)
        elastic.kill(f"trainer/{training.job}")


@pytest.mark.deep
async def test_lost_or_hung_rank_repeats_only_its_step(
    elastic: ElasticMesh, expected: Mapping[str, Tensor]
) -> None:
    training = Training(elastic, "lossy", ranks=2)
    await training.start()
    await training.train(3)
    rank = "rank/lossy/1"

    elastic.kill(rank)
    await training.release(3)
    training.host = "there"  # a gang over two hosts also resumes
    await training.start_rank(1)
    await training.wait_for_released_steps()
    killed = await elastic.events("rank_lost")
    assert "lossy" in {lost["job"] for lost in killed}

    hung = elastic.children[rank].pid
    elastic.stop(rank)
    await training.release(3)
    within_s = 3 * training.rank_deadline_s
    await elastic.until(
        "the hung rank is lost", lambda: create_extra_training(elastic, len(killed)), within_s
    )
    await training.start_rank(1)  # takes the name when the lease of the hung process has expired
    await training.wait_for_released_steps()
    os.kill(hung, signal.SIGCONT)  # it wakes up and finds its name taken
    await training.train(STEPS - 9)
    assert_close(await training.weights(), expected)


@pytest.mark.rotating(3)
async def test_repeated_rank_losses_at_one_step_fail_the_job(
    elastic: ElasticMesh,
) -> None:
    training = Training(elastic, "hopeless", 2, others="tests.mesh.rejecting_rank")
    await training.start()
    await training.release(1)

    async def has_ended() -> bool:
        return elastic.has_ended("trainer/hopeless")

    await elastic.until("the core has given up", has_ended)
    lost = [lost for lost in await elastic.events("rank_lost") if lost["job"] == "hopeless"]
    assert len(lost) == 3 and all("never begins" in one["why"] for one in lost)
    assert await training.count_committed_steps() == 0


async def create_extra_training(elastic: ElasticMesh, count: int) -> bool:
    return len(await elastic.events("rank_lost")) > count


@pytest.mark.deep
async def test_hybrid_on_another_host_transfers_gradients_by_its_bulk_port(
    elastic: ElasticMesh, expected: Mapping[str, Tensor]
) -> None:
    training = Training(elastic, "far")
    await training.start()
    await training.start_hybrid("far-h", host="there")
    await training.wait_for_hybrid("far-h")
    await training.train(STEPS)
    assert await training.list_computing_gangs() == {"g0", "far-h"}
    assert_close(await training.weights(), expected)
    for name in ("trainer/far", "hybrid/far-h"):
        elastic.kill(name)
