"""Engine service over the network: pauses, sleep and updates with requests in flight."""

from __future__ import annotations

import asyncio
import fcntl
import tomllib
from collections.abc import Iterator, Mapping, ValuesView
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from meshrl.common.api.calls.role import SetTier
from meshrl.common.api.engine import Engine
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import ConfigError, CorruptData, Fenced, Refused
from meshrl.common.generation.engine_contract import GenerationRequest, Quarantined
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import TrainedModelConfig
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.weights.chunks.verified_files import RECORD_FILE
from meshrl.services.engine.measurement.update_pauses import MAX_SAMPLES, UpdatePauses
from meshrl.services.engine.weights import engine_weights
from meshrl.services.engine.weights.engine_weights import AdapterVersion
from meshrl.services.engine.weights.version_receiver import (
    RESTAGE_TIMEOUT_S,
    SUPERSEDED_POLL_S,
    VersionReceiver,
)
from meshrl.services.trainer.core.core import TrainerCore
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.initialization.initial_weights import create_learner
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.versions.publishing import VersionIdentity
from tests.stories import story_on
from tests.tokenizers import make_tokenizer
from tests.unit.common.generation.engines_under_test import ManualClock
from tests.unit.rollout.routing.test_router import Bench, run_on_bench
from tests.unit.trainer.steps.groups_under_test import job
from tests.unit.weights.store_bench import JOB, StoreBench, on_store


@story_on(run_on_bench)
async def test_unservable_request_is_aborted(bench: Bench) -> None:
    bench.engine.commands.enqueue(lambda: bench.engine.admit([make_invalid_request()], []))
    await bench.generate(0)


def make_invalid_request() -> GenerationRequest:
    return GenerationRequest(999, np.array([1], np.int32), 5, 1.0, (), 0, -1, top_p=7.0)


def desired_tier(tier: str, epoch: int) -> SetTier:
    return SetTier(tier, epoch, time_sliced=False, segment_owner="", offload_dir="")


@story_on(run_on_bench)
async def test_sleeping_engine_retains_its_requests_and_resumes(bench: Bench) -> None:
    engine, service = bench.rollout.ref("engine/g0"), bench.engine
    await service.weights.update_weights({}, 1, "first")
    for number, tier in enumerate(("memory", "disk")):
        turn = bench.begin(number)
        await bench.clock.sleep(0.05)
        usage = await engine.call(Engine.set_tier, desired_tier(tier, 2 * number + 1))
        assert (usage.accelerator_bytes, usage.memory_bytes, usage.disk_bytes) == (0, 0, 0)
        await bench.clock.sleep(5.0)
        assert not turn.done() and service.weights.is_asleep and service.tiers.tier == tier
        waking = asyncio.create_task(
            engine.call(Engine.set_tier, desired_tier("accelerator", 2 * number + 2))
        )
        await bench.clock.sleep(1.0)
        assert not waking.done(), "it has no weights yet"
        assert (
            service.weights.manifest == "" and service.weights.change_event.is_set()
        )  # `follow` fetches them now
        await service.weights.update_weights({}, 3 + number, "third")
        await waking
        assert service.engine.version == 3 + number
        await turn


@story_on(run_on_bench)
async def test_weights_that_arrive_during_sleep_are_not_loaded(bench: Bench) -> None:
    engine, service = bench.rollout.ref("engine/g0"), bench.engine
    await service.weights.update_weights({}, 1, "first")
    await engine.call(Engine.set_tier, desired_tier("memory", 1))
    await service.weights.update_weights({}, 2, "second")
    assert (service.engine.version, service.weights.manifest) == (1, "")


@story_on(run_on_bench)
async def test_wake_lasts_as_long_as_the_engine_may_start_and_then_ends_the_start(
    bench: Bench,
) -> None:
    tiers, weights, engine = bench.engine.tiers, bench.engine.weights, bench.engine.engine
    await weights.update_weights({}, 1, "first")
    await tiers.set_tier(desired_tier("memory", 1))
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_weights, "LOAD_TIMEOUT_S", 4.0)
        patch.setattr(engine, "wake_limit_s", 16.0, raising=False)
        patch.setattr(engine, "sleep", lambda: calls.append("sleep"))
        waking = asyncio.create_task(tiers.set_tier(desired_tier("accelerator", 2)))
        await bench.clock.sleep(19.0)
        assert not waking.done() and not calls
        with pytest.raises(Refused, match="took longer than 20 s"):
            await waking
    assert calls == ["sleep"] and weights.is_asleep


@story_on(run_on_bench)
async def test_tier_order_of_an_older_epoch_is_rejected_and_a_repeated_one_ignored(
    bench: Bench,
) -> None:
    engine = bench.rollout.ref("engine/g0")
    for _ in range(2):
        await engine.call(Engine.set_tier, desired_tier("memory", 4))
    with pytest.raises(Fenced, match="epoch 3"):
        await engine.call(Engine.set_tier, desired_tier("accelerator", 3))
    with pytest.raises(Fenced):
        await engine.call(Engine.set_tier, desired_tier("disk", 4))
    tier_stats = bench.engine.tiers.stats()
    assert (tier_stats["epoch"], tier_stats["tier"]) == (4, "memory")
    assert tier_stats["sleep_s"] >= 0 and "wake_s" not in tier_stats
    with pytest.raises(Refused, match="no tier 'attic'"):
        await engine.call(Engine.set_tier, desired_tier("attic", 5))


class CorruptVersion(Mapping[str, Tensor]):
    """Weight version with a chunk that is found corrupt when it is read."""

    def __getitem__(self, name: str) -> Tensor:
        raise CorruptData("a chunk does not match its digest")

    def values(self) -> ValuesView[Tensor]:
        return dict[str, Tensor]().values()  # sizes are known before any chunk is read

    def __iter__(self) -> Iterator[str]:
        return iter(["embedding"])

    def __len__(self) -> int:
        return 1


@story_on(run_on_bench)
async def test_requests_wait_for_the_end_of_a_quarantine(bench: Bench) -> None:
    service = bench.engine
    await service.weights.update_weights({}, 1, "first")
    turns = [bench.begin(number) for number in range(3)]
    await bench.clock.sleep(0.05)
    with pytest.raises(Quarantined):
        await service.weights.update_weights(CorruptVersion(), 2, "second")
    await bench.clock.sleep(5.0)
    assert (service.engine.version, service.weights.manifest) == (-1, "")
    assert not any(turn.done() for turn in turns) and service.slice_function == ""
    assert bench.router.links["engine/g0"].load.version == -1
    await service.weights.update_weights({}, 2, "second")
    await asyncio.gather(*turns)
    assert bench.router.links["engine/g0"].load.version == 2
    stats = service.pauses.stats
    assert stats.applied == 3 and stats.engine_step_ms >= 0


@story_on(run_on_bench)
async def test_requests_during_a_quarantine_go_to_another_engine(bench: Bench) -> None:
    other = await bench.add("engine/g1")
    for service in (bench.engine, other):
        await service.weights.update_weights({}, 1, "first")
    await bench.clock.sleep(1.0)
    with pytest.raises(Quarantined):
        await bench.engine.weights.update_weights(CorruptVersion(), 2, "second")
    await bench.clock.sleep(0.5)
    await asyncio.gather(*(bench.begin(number) for number in range(6)))
    assert other.engine.tokens_generated >= 6 * 20 and not bench.engine.engine.tokens_generated


def make_adapter(version: int, model: dict[str, Tensor] | None = None) -> AdapterVersion:
    return AdapterVersion("other", version, {}, 0.5, "base", 0, model)


@story_on(run_on_bench)
async def test_adapters_are_loaded_beside_their_base_and_requests_restart(bench: Bench) -> None:
    service = bench.engine
    await service.weights.update_weights({}, 1, "merged")
    merged_turns = [bench.begin(number) for number in range(3)]
    await bench.clock.sleep(0.05)
    assert not service.weights.has_base("base")
    await service.weights.put_adapter(make_adapter(2, {}), "second", 0)
    assert service.weights.has_base("base") and (
        service.weights.version,
        service.weights.manifest,
    ) == (2, "second")
    for turn in await asyncio.gather(*merged_turns):
        versions = turn.versions[3 : turn.length].tolist()
        assert set(versions) <= {1, 2} and versions == sorted(versions) and versions[-1] == 2
    assert bench.router.links["engine/g0"].load.version == 2
    adapter_turn = bench.begin(5)
    await bench.clock.sleep(0.05)
    await service.weights.put_adapter(make_adapter(3), "third", 0)
    versions = (await adapter_turn).versions[3:].tolist()
    assert set(versions) <= {2, 3} and service.engine.version == 0
    await service.weights.update_weights({}, 4, "merged again")
    assert (service.weights.version, service.weights.base_manifest) == (
        4,
        "",
    ) and not service.engine.adapter_versions
    turn = await bench.generate(6)
    assert set(turn.versions[3 : turn.length].tolist()) == {4}


@story_on(run_on_bench)
async def test_woken_engine_requires_the_base_of_its_adapters_again(bench: Bench) -> None:
    engine, service = bench.rollout.ref("engine/g0"), bench.engine
    await service.weights.put_adapter(make_adapter(2, {}), "second", 0)
    turn = bench.begin(1)
    await bench.clock.sleep(0.05)
    await engine.call(Engine.set_tier, desired_tier("memory", 1))
    waking = asyncio.create_task(engine.call(Engine.set_tier, desired_tier("accelerator", 2)))
    await bench.clock.sleep(1.0)
    assert not service.weights.has_base("base") and not waking.done()
    await service.weights.put_adapter(make_adapter(3, {}), "third", 0)
    await waking
    versions = (await turn).versions[3:].tolist()
    assert set(versions) <= {2, 3} and service.weights.version == 3


class RejectedAdapters(Mapping[str, Tensor]):
    """Adapters that the engine rejects after it loaded their base."""

    def __getitem__(self, name: str) -> Tensor:
        raise Refused("the adapter does not match the model")

    def values(self) -> ValuesView[Tensor]:
        return dict[str, Tensor]().values()  # sizes are known before any chunk is read

    def __iter__(self) -> Iterator[str]:
        return iter(["layers.0.adapters.q_proj.a"])

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("merged", [True, False])
@story_on(run_on_bench)
async def test_base_with_rejected_adapters_serves_no_requests(bench: Bench, merged: bool) -> None:
    service = bench.engine
    if merged:
        await service.weights.update_weights({}, 1, "merged")
    rejected_version = replace(make_adapter(2, {}), tensors=RejectedAdapters())
    with pytest.raises(Quarantined):
        await service.weights.put_adapter(rejected_version, "second", 0)
    turns = [bench.begin(number) for number in range(3)]
    await bench.clock.sleep(5.0)
    assert (service.engine.version, service.weights.version, service.weights.manifest) == (
        -1,
        -1,
        "",
    )
    assert not any(turn.done() for turn in turns) and not service.weights.has_base("base")
    await service.weights.put_adapter(make_adapter(3, {}), "third", 0)
    for turn in await asyncio.gather(*turns):
        assert set(turn.versions[3 : turn.length].tolist()) == {3}


def test_update_pauses_are_measured_over_recent_updates() -> None:
    clock = ManualClock()
    pauses = UpdatePauses(clock)
    assert pauses.stats.pause_p99_ms == pauses.stats.engine_step_ms == 0
    for seconds in (0.001,) * 98 + (0.5, 0.002):
        with pauses.measure_update():
            clock.advance(seconds)
    pauses.add_steps(8, 0.08)
    pauses.add_steps(0, 0.0)
    stats = pauses.stats
    assert stats.applied == 100
    assert stats.pause_ms == pytest.approx(2.0) and stats.pause_p50_ms == pytest.approx(1.0)
    assert 2.0 < stats.pause_p99_ms <= 500.0
    assert stats.engine_step_ms == pytest.approx(10.0)
    for _ in range(MAX_SAMPLES):
        with pauses.measure_update():
            clock.advance(0.004)
    assert pauses.stats.pause_p99_ms == pytest.approx(4.0)


def test_failed_update_counts_as_a_pause() -> None:
    clock = ManualClock()
    pauses = UpdatePauses(clock)
    with pytest.raises(OSError, match="torn"), pauses.measure_update():
        clock.advance(0.25)
        raise OSError("torn")
    assert pauses.stats.pause_ms == 250.0


JOBS = Path(__file__).parents[2] / "mesh/jobs"
MISSING = compute_digest(b"a version that the store does not hold")
POLL_S = 100.0


async def poll_receiver(bench: StoreBench, versions: VersionReceiver, seconds: float) -> None:
    for _ in range(int(seconds / POLL_S)):
        assert await versions.receive(MISSING) is None
        await bench.clock.sleep(POLL_S)


@story_on(on_store, "tmp_path")
async def test_missing_version_waits_for_a_trainer_that_can_stage_it(
    bench: StoreBench, tmp_path: Path
) -> None:
    model_config = tomllib.loads((JOBS / "digits.toml").read_text())["model"]["config"]
    config = replace(job("grpo"), model=TrainedModelConfig(config=model_config))
    make_tokenizer(tmp_path)
    data = JobData("other", config, tmp_path, tmp_path)
    trainer, engine = bench.mesh("trainer/other", "trainer"), bench.mesh("engine/g0", "engine")
    seat = Placement("g1", "g1", data.id, 1, core=True)
    core = TrainerCore(
        trainer,
        data,
        seat,
        GangCompute(trainer, data.id, Rank.for_single_rank(create_learner(data))),
    )
    await trainer.join(core)
    await engine.join(None)
    versions = VersionReceiver(engine, "other")
    await poll_receiver(bench, versions, 2 * RESTAGE_TIMEOUT_S)  # the trainer is not ready

    core.is_ready, core.position.weights = True, VersionIdentity(MISSING)
    core.enter_phase("updating", 1)
    await poll_receiver(bench, versions, 2 * RESTAGE_TIMEOUT_S)

    core.position.version = 1  # the weights have changed since, and no process can stage them again
    with pytest.raises(ConfigError, match="cannot be fetched"):
        await poll_receiver(bench, versions, 2 * RESTAGE_TIMEOUT_S)
    for mesh in (engine, trainer):
        await mesh.leave()


@story_on(on_store, "tmp_path")
async def test_superseded_version_is_not_waited_for(bench: StoreBench) -> None:
    await bench.submit()
    newest = await bench.begin()
    engine = bench.mesh("engine/g0", "engine")
    await engine.join(None)
    versions = VersionReceiver(engine, JOB)
    await poll_receiver(
        bench, versions, 2 * RESTAGE_TIMEOUT_S
    )  # no process can write that version again
    image = await versions.receive(newest)
    assert image is not None and JOB in image.tensors
    await engine.leave()


@story_on(on_store, "tmp_path")
async def test_first_version_is_given_up_for_a_newer_one(bench: StoreBench) -> None:
    """Lock a chunk, as a process that hashes it does, so that the version does not arrive."""
    await bench.submit()
    older = await bench.begin()
    engine = bench.mesh("engine/g0", "engine")
    await engine.join(None)
    versions = VersionReceiver(engine, JOB)
    (bench.chunks.directory / RECORD_FILE).unlink()
    [tensor] = (await versions.read_manifest(older)).tensors
    with bench.chunks.chunk_path(tensor.chunk).open("rb") as hashed:
        fcntl.flock(hashed, fcntl.LOCK_EX)
        began = bench.clock.monotonic()
        receiving = asyncio.create_task(versions.receive(older))
        await bench.clock.sleep(SUPERSEDED_POLL_S / 2)
        newer = await bench.step(1, "")
        assert await receiving is None
        assert bench.clock.monotonic() - began < 2 * SUPERSEDED_POLL_S
    assert await versions.receive(newer) is not None
    assert (versions.pulls, versions.superseded) == (1, 1)
    await engine.leave()
