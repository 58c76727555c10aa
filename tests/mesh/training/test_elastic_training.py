"""The weights of a run do not depend on who helped, who left and who died."""

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
    pytest.mark.group("elastic"),  # they share a mesh, and what one process makes of the job
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def elastic() -> AsyncIterator[ElasticMesh]:
    with tempfile.TemporaryDirectory(prefix="e") as made:  # short: the path of a unix socket is
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
    assert await training.computed() == {"g0"}
    elastic.kill("trainer/alone")
    return weights


def assert_alike(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=0, atol=TOLERANCE, msg=name)


async def come_and_go(training: Training) -> None:
    """STEPS steps, in which hybrids join, leave, and are killed with a round in their hands."""
    elastic, job = training.elastic, training.job
    first, second, third = (f"{job}-h{n}" for n in (1, 2, 3))
    await training.train(2)
    await training.start_hybrid(first, "tests.mesh.still_hybrid")
    await training.start_hybrid(second)
    await training.hybrid_waits(first)  # it got its weights while no step needed it
    await training.hybrid_waits(second)
    steps = 0
    while not elastic.stands_still(f"hybrid/{first}"):
        assert steps < 6, "it was never given a round"
        await training.train(1)
        steps += 1
    elastic.kill(f"hybrid/{first}")
    await training.release(5)
    await training.start_hybrid(third)  # joins while steps run
    leaving = elastic.worker.ref(f"hybrid/{second}")
    await leaving.call(RoleControl.drain, "it is needed elsewhere")
    await training.caught_up()
    await training.hybrid_waits(third)
    await sleep_and_wake(training, [third], ("disk", "accelerator"))
    await training.train(STEPS - 7 - steps)
    assert {"g0", second, third} >= await training.computed() > {"g0"}
    for gang in (second, third):
        elastic.kill(f"hybrid/{gang}")


async def sleep_and_wake(training: Training, hybrids: Sequence[str], tiers: Sequence[str]) -> None:
    """Move all of the job's processes from tier to tier together."""
    elastic, job = training.elastic, training.job
    names = [f"trainer/{job}", *(f"rank/{job}/{n}" for n in range(1, training.ranks))]
    names += [f"hybrid/{gang}" for gang in hybrids]
    files = str(elastic.directory / "kept")
    for epoch, tier in enumerate(tiers, 1):
        wish = SetTier(tier, epoch, False, "", files)
        asked = [settled(elastic, name, wish) for name in names]
        for name, held in zip(names, await asyncio.gather(*asked), strict=True):
            assert (held.accelerator_bytes > 0) == (tier == "accelerator"), name
            assert (held.disk_bytes > 0) == (tier == "disk" and not name.startswith("hybrid")), name


async def settled(elastic: ElasticMesh, name: str, wish: SetTier) -> TierUsage:
    """Repeat the request, as workers do: a rank may refuse a sleep order that comes too early."""
    while True:
        with suppress(Refused):
            return await elastic.worker.ref(name).call(RoleControl.set_tier, wish)
        await asyncio.sleep(0.05)


@pytest.mark.rotating(3)
async def test_any_hybrids_at_any_time_leave_the_weights_of_one_process(
    elastic: ElasticMesh, expected: Mapping[str, Tensor]
) -> None:
    for ranks, host in ((1, "here"), (2, "there")):
        training = Training(elastic, f"ranks{ranks}", ranks, host=host)
        await training.start()
        await come_and_go(training)
        assert_alike(await training.weights(), expected)
        elastic.kill(f"trainer/{training.job}")


@pytest.mark.deep
async def test_a_rank_that_dies_or_hangs_costs_the_step_it_was_in(
    elastic: ElasticMesh, expected: Mapping[str, Tensor]
) -> None:
    training = Training(elastic, "lossy", ranks=2)
    await training.start()
    await training.train(3)
    rank = "rank/lossy/1"

    elastic.kill(rank)
    await training.release(3)
    training.host = "there"  # a gang over two hosts resumes too
    await training.start_rank(1)
    await training.caught_up()
    killed = await elastic.events("rank_lost")
    assert "lossy" in {lost["job"] for lost in killed}

    hung = elastic.children[rank].pid
    elastic.stop(rank)
    await training.release(3)
    within_s = 3 * training.rank_deadline_s
    await elastic.until("the hung rank is lost", lambda: more_than(elastic, len(killed)), within_s)
    await training.start_rank(1)  # takes the name when the lease of the hung one has ended
    await training.caught_up()
    os.kill(hung, signal.SIGCONT)  # it wakes to find that it is another's name
    await training.train(STEPS - 9)
    assert_alike(await training.weights(), expected)


@pytest.mark.rotating(3)
async def test_a_core_gives_up_when_ranks_are_lost_at_one_step_again_and_again(
    elastic: ElasticMesh,
) -> None:
    training = Training(elastic, "hopeless", 2, others="tests.mesh.refusing_rank")
    await training.start()
    await training.release(1)

    async def ended() -> bool:
        return elastic.has_ended("trainer/hopeless")

    await elastic.until("the core has given up", ended)
    lost = [lost for lost in await elastic.events("rank_lost") if lost["job"] == "hopeless"]
    assert len(lost) == 3 and all("never begins" in one["why"] for one in lost)
    assert await training.done() == 0


async def more_than(elastic: ElasticMesh, count: int) -> bool:
    return len(await elastic.events("rank_lost")) > count


@pytest.mark.deep
async def test_a_hybrid_on_another_host_lends_its_gradients_over_its_bulk_port(
    elastic: ElasticMesh, expected: Mapping[str, Tensor]
) -> None:
    training = Training(elastic, "far")
    await training.start()
    await training.start_hybrid("far-h", host="there")
    await training.hybrid_waits("far-h")
    await training.train(STEPS)
    assert await training.computed() == {"g0", "far-h"}
    assert_alike(await training.weights(), expected)
    for name in ("trainer/far", "hybrid/far-h"):
        elastic.kill(name)
