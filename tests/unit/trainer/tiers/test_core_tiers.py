"""Core that sleeps in memory or on disk between and within steps, and resumes bit by bit."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from meshrl.common.api.calls.role import MoveKinds, TierUsage
from meshrl.common.api.node import AcquireSlice
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import CorruptData, MeshError, RankLost, Refused, StorageFull
from meshrl.common.base.files.offloaded_tensors import BLOCK_BYTES
from meshrl.common.base.host.settings import make_offload_path
from meshrl.common.base.random import Random
from meshrl.common.state.jobs import JobRow
from meshrl.services.trainer.core.core_sleep import COMMIT_TIMEOUT_S
from meshrl.services.trainer.core.position import build_committed_version
from meshrl.services.trainer.versions.publishing import VersionIdentity
from meshrl.sim.virtual_loop import run_virtual
from tests.stories import story_on
from tests.unit.trainer.tiers.bench import Bench

STEPS = 2
TIERS = ("accelerator", "memory", "disk")
KINDS = ("parameters", "gradients", "optimizer")
in_virtual_time = story_on(partial(run_virtual, limit_s=1e6), given=2)


def run_without_sleep(directory: Path, variant: str) -> list[str]:
    found: list[str] = []

    async def main(clock: Clock, random: Random) -> None:
        async with Bench(clock, random, directory, variant) as bench:
            for number in range(1, STEPS + 1):
                await bench.step(number)
                found.append(bench.digest())

    run_virtual(main, limit_s=1e6)
    assert len(set(found)) == STEPS
    return found


@pytest.fixture
def expected(tmp_path: Path) -> list[str]:
    """Return the digests after each step of a core that never sleeps."""
    return run_without_sleep(tmp_path, "plain")


@pytest.mark.rotating(4)
@pytest.mark.parametrize("variant", ["plain", "critic", "adapters", "bfloat16"])
def test_any_sequence_of_tiers_gives_equal_bits(variant: str, tmp_path: Path) -> None:
    expected, found = run_without_sleep(tmp_path, variant), []

    async def main(clock: Clock, random: Random) -> None:
        draw, sequential = random.child("tiers"), asyncio.Lock()
        async with Bench(clock, random, tmp_path, variant) as bench:

            async def change_tiers() -> None:
                async with sequential:
                    await step_with_changing_tiers()

            async def step_with_changing_tiers() -> None:
                while draw.randrange(3):
                    tier = TIERS[draw.randrange(3)]
                    usage = await bench.set_tier(tier)
                    assert bench.core.tiers.stats()["tier"] == tier
                    assert (usage.accelerator_bytes > 0) == (tier == "accelerator")
                    assert (usage.memory_bytes > 0, usage.disk_bytes > 0) == (
                        tier == "memory",
                        tier == "disk",
                    )
                    assert bench.segments.total_bytes == usage.memory_bytes
                await bench.set_tier("accelerator")

            for number in range(1, STEPS + 1):
                await bench.step(number, change_tiers)
                await change_tiers()
                found.append(bench.digest())

    run_virtual(main, limit_s=1e6)
    assert found == expected


@pytest.mark.rotating(3)
@in_virtual_time
async def test_step_is_suspended_while_the_core_sleeps(
    clock: Clock, random: Random, tmp_path: Path, expected: list[str]
) -> None:
    async with Bench(clock, random, tmp_path) as bench:
        await bench.set_tier("disk")
        step = asyncio.create_task(bench.step(1))
        await clock.sleep(5000.0)  # its own deadlines are paused
        assert not step.done()
        assert bench.core.sleep_timer.total_s == pytest.approx(5000.0)
        tensors = bench.learner.get_tensors().values()
        sizes = {tensor.untyped_storage().nbytes() for tensor in tensors}
        assert sizes == {0}, "memory that is not given back"
        await bench.set_tier("accelerator")
        await step
        assert bench.digest() == expected[0]


@pytest.mark.rotating(4)
@pytest.mark.parametrize("variant", ["plain", "critic", "adapters", "bfloat16"])
def test_kinds_moved_between_all_pieces_give_equal_bits(variant: str, tmp_path: Path) -> None:
    expected, found = run_without_sleep(tmp_path, variant), []

    async def main(clock: Clock, random: Random) -> None:
        draw, functions = random.child("moves"), set[str]()
        async with Bench(clock, random, tmp_path, variant) as bench:
            order = itertools.count(1)

            async def move(action: str, kinds: Sequence[str], tier: str = "") -> None:
                await bench.core.kinds.move_kinds(MoveKinds(next(order), action, list(kinds), tier))

            async def prepare(request: AcquireSlice) -> None:
                functions.add(request.function)
                assert set(request.kinds) <= set(KINDS) and request.kinds
                for kind in KINDS:
                    action = ("write_back", "offload", "load")[draw.randrange(3)]
                    tier = TIERS[1 + draw.randrange(2)] if action != "load" else ""
                    await move(action, [kind], tier)
                if draw.randrange(2):  # else the core loads what is missing
                    await move("load", request.kinds)
                    states = {one.kind: one for one in bench.core.kinds.describe_kinds().kinds}
                    for kind in request.kinds:
                        assert states[kind].accelerator_bytes == states[kind].size_bytes

            bench.share(prepare)
            for number in range(1, STEPS + 1):
                await bench.step(number)
                await move("load", KINDS)
                found.append(bench.digest())
            assert {"forward_backward", "optim_step"} <= functions

    run_virtual(main, limit_s=1e6)
    assert found == expected


@in_virtual_time
async def test_failed_sleep_without_space_keeps_the_tier(
    clock: Clock, random: Random, tmp_path: Path, expected: list[str]
) -> None:
    async with Bench(clock, random, tmp_path, budget=1000) as bench:
        for _ in range(2):
            with pytest.raises(StorageFull, match="of the worker's 1000"):
                await bench.set_tier("memory")
            assert bench.core.tiers.stats()["tier"] == "accelerator"
        await bench.step(1)  # it continues to compute
        await bench.set_tier("disk")
        with pytest.raises(StorageFull):
            await bench.set_tier("memory")
        assert bench.core.tiers.stats()["tier"] == "disk"
        usage = await bench.set_tier("accelerator")
        assert usage.disk_bytes == usage.memory_bytes == 0 and not list_files(tmp_path)
        assert bench.digest() == expected[0]


@in_virtual_time
async def test_corrupt_offload_file_is_quarantined_and_the_state_lost_by_type(
    clock: Clock, random: Random, tmp_path: Path
) -> None:
    async with Bench(clock, random, tmp_path) as bench:
        await bench.set_tier("disk")
        file = make_offload_path(tmp_path, bench.core.mesh.name, "parameters")
        with file.open("r+b") as content:
            content.seek(BLOCK_BYTES + 5)  # behind the header
            content.write(b"\xff\x01\xff\x02")
        with pytest.raises(CorruptData):
            await bench.set_tier("accelerator")
        assert list_files(tmp_path / "quarantine")
        assert bench.core.tiers.stats()["tier"] == "accelerator"
        with pytest.raises(RankLost, match="last committed step"):
            await bench.step(1)
        await bench.core.compute.form_group()  # as `_regain` does before it restores a checkpoint
        await bench.core.compute.begin_step()


@in_virtual_time
async def test_tier_change_can_be_cancelled_and_repeated_at_any_await(
    clock: Clock, random: Random, tmp_path: Path, expected: list[str]
) -> None:
    async with Bench(clock, random, tmp_path) as bench:
        for turns in range(40):
            for tier in ("memory", "disk", "accelerator"):
                bench.epoch += 1
                desired_tier = bench.desired_tier(tier, bench.epoch)
                asking = asyncio.create_task(bench.core.tiers.set_tier(desired_tier))
                for _ in range(turns):
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                await bench.core.tiers.set_tier(desired_tier)
                assert bench.core.tiers.stats()["tier"] == tier
        await bench.step(1)
        assert bench.digest() == expected[0]


@in_virtual_time
async def test_removal_can_be_cancelled_at_any_tier(
    clock: Clock, random: Random, tmp_path: Path, expected: list[str]
) -> None:
    async with Bench(clock, random, tmp_path) as bench:
        covered = 0  # its own version
        bench.core.position.checkpointed_version = bench.core.checkpoints.last_step = covered
        await bench.set_tier("absent")
        step = asyncio.create_task(bench.step(1))
        await bench.set_tier("memory")
        await bench.set_tier("accelerator")
        await step
        assert bench.digest() == expected[0]


@in_virtual_time
async def test_later_tier_change_replaces_an_earlier_one(
    clock: Clock, random: Random, tmp_path: Path
) -> None:
    async with Bench(clock, random, tmp_path) as bench:
        tier_change = bench.core.tiers.set_tier
        tier_changes = [
            asyncio.create_task(tier_change(bench.desired_tier(tier, epoch)))
            for epoch, tier in enumerate(("memory", "disk", "accelerator", "memory"), 1)
        ]
        answers = await asyncio.gather(*tier_changes, return_exceptions=True)
        for answer in answers[:-1]:
            assert not isinstance(answer, Exception) or isinstance(answer, MeshError)
        assert isinstance(answers[-1], TierUsage) and answers[-1].memory_bytes > 0
        assert bench.core.tiers.epoch == 4


@in_virtual_time
async def test_restarted_process_resumes_from_its_offloaded_state(
    clock: Clock, random: Random, tmp_path: Path, expected: list[str]
) -> None:
    for tier in ("memory", "disk"):
        async with Bench(clock, random.child(tier), tmp_path) as bench:
            await bench.step(1)
            bench.core.position.weights = VersionIdentity("m1")
            await bench.set_tier(tier)
            closed_core, bench.core = bench.core, bench.start_core()
            await closed_core.mesh.leave()
            await bench.core.mesh.join(None)
            job_progress = JobProgress(
                lineage=0, version=1, manifest="m1", checkpoint=closed_core.checkpoints.last_name
            )
            assert await bench.core.sleeper.try_resume(job_progress)
            assert bench.digest() == expected[0]
            assert bench.core.position.version == 1 and bench.core.position.manifest == "m1"
            assert not bench.segments.total_bytes and not list_files(tmp_path)
            await bench.step(2)
            assert bench.digest() == expected[1]


def list_files(directory: Path) -> list[Path]:
    return list(directory.glob("*.kept*"))


class JobProgress(JobRow):
    """Progress fields of a job's row."""

    def __init__(self, **about: object) -> None:
        vars(self).update({"image": "", "masters": ""} | about)


@pytest.mark.parametrize(
    "pending",
    [
        {"lineage": 1},
        {"version": 2},
        {"version": 0},
        {"manifest": "another's"},
        {"checkpoint": "step-000-000001"},
    ],
)
@in_virtual_time
async def test_sleeping_state_of_another_version_is_removed(
    clock: Clock, random: Random, pending: dict[str, object], tmp_path: Path
) -> None:
    async with Bench(clock, random, tmp_path) as bench:
        await bench.step(1)
        bench.core.position.weights = VersionIdentity("m")
        await bench.set_tier("memory")
        closed_core, bench.core = bench.core, bench.start_core()
        await closed_core.mesh.leave()
        await bench.core.mesh.join(None)
        before = bench.digest()
        about = {"lineage": 0, "version": 1, "manifest": "m", "checkpoint": ""} | pending
        assert not await bench.core.sleeper.try_resume(JobProgress(**about))
        assert bench.digest() == before and not bench.segments.total_bytes


@in_virtual_time
async def test_partial_update_belongs_to_no_version(
    clock: Clock, random: Random, tmp_path: Path
) -> None:
    async with Bench(clock, random, tmp_path) as bench:
        assert bench.core.describe_state()["version"] == 0
        bench.core.enter_phase("updating", 1)
        assert bench.core.describe_state()["version"] == -1
        bench.core.position.computed_step = 1
        assert bench.core.describe_state()["version"] == 1
        bench.core.position.version = 1
        assert bench.core.describe_state()["version"] == 1
        bench.core.position.is_complete = False  # during its restore
        assert bench.core.describe_state()["version"] == -1


@pytest.mark.parametrize(
    ("staged", "committed", "used"), [("", "m2", False), ("m1", "m2", False), ("m1", "m1", True)]
)
@in_virtual_time
async def test_uncommitted_step_counts_if_its_weights_were_committed(
    clock: Clock, random: Random, staged: str, committed: str, used: bool, tmp_path: Path
) -> None:
    async with Bench(clock, random, tmp_path) as bench:
        await bench.step(1)
        core = bench.core
        position = core.position
        position.version, position.weights, position.computed_step = 0, VersionIdentity("m0"), 1
        position.staged_version = (
            (1, VersionIdentity(staged)) if staged else (0, VersionIdentity(""))
        )
        before = bench.digest()
        await bench.set_tier("memory")
        closed_core, bench.core = core, bench.start_core()
        await closed_core.mesh.leave()
        await bench.core.mesh.join(None)
        job_progress = JobProgress(lineage=0, version=1, manifest=committed, checkpoint="")
        assert await bench.core.sleeper.try_resume(job_progress) == used
        assert (bench.digest() == before) == used and not bench.segments.total_bytes


@in_virtual_time
async def test_repeated_step_does_not_count_as_computed(
    clock: Clock, random: Random, tmp_path: Path
) -> None:
    async with Bench(clock, random, tmp_path) as bench:
        core = bench.core
        core.enter_phase("updating", 1)
        core.position.computed_step, core.position.staged_version = 1, (1, VersionIdentity("m1"))
        about = {"born": 0, "checkpoint": "", "checkpoint_step": 0}
        core.resume_from(
            build_committed_version(JobProgress(lineage=0, version=0, manifest="m0"), about)
        )
        core.enter_phase("updating", 1)  # again, with half of its updates made
        assert core.describe_state()["version"] == -1


@in_virtual_time
async def test_step_that_waits_for_its_evaluation_rejects_removal(
    clock: Clock, random: Random, tmp_path: Path, expected: list[str]
) -> None:
    async with Bench(clock, random, tmp_path) as bench:
        core = bench.core
        core.enter_phase("updating", 1)
        core.position.computed_step = 1
        asking = asyncio.create_task(bench.set_tier("absent"))
        await clock.sleep(COMMIT_TIMEOUT_S / 2)
        assert not asking.done()
        await clock.sleep(COMMIT_TIMEOUT_S)
        with pytest.raises(Refused, match="step 1 is not committed"):
            await asking
        assert core.tiers.tier == "accelerator" and core.intake.is_awake.is_set()
        core.position.updating_step = core.position.computed_step = 0
        await bench.step(1)
        assert bench.digest() == expected[0]
