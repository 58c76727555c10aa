"""An engine over the wire: pausing and sleeping, with requests in work."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Iterator, Mapping
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
from meshrl.services.engine.measurement.update_pauses import MAX_SAMPLES, UpdatePauses
from meshrl.services.engine.weights.engine_weights import AdapterVersion
from meshrl.services.engine.weights.version_receiver import RESTAGE_TIMEOUT_S, VersionReceiver
from meshrl.services.trainer.core.core import TrainerCore
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.initialization.initial_weights import create_learner
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.versions.publishing import VersionIdentity
from tests.stories import story_on
from tests.tokenizers import make_tokenizer
from tests.unit.common.generation.engines_under_test import StandingClock
from tests.unit.rollout.routing.test_router import Bench, on_bench
from tests.unit.trainer.steps.groups_under_test import job
from tests.unit.weights.store_bench import JOB, StoreBench, on_store


@story_on(on_bench)
async def test_a_request_that_the_engine_cannot_serve_ends_as_aborted(bench: Bench) -> None:
    bench.engine.commands.enqueue(lambda: bench.engine.admit([impossible()], []))
    await bench.generate(0)


def impossible() -> GenerationRequest:
    return GenerationRequest(999, np.array([1], np.int32), 5, 1.0, (), 0, -1, top_p=7.0)


def wish(tier: str, epoch: int) -> SetTier:
    return SetTier(tier, epoch, time_sliced=False, segment_owner="", offload_dir="")


@story_on(on_bench)
async def test_a_sleeping_engine_keeps_its_requests_and_goes_on(bench: Bench) -> None:
    engine, service = bench.rollout.ref("engine/g0"), bench.engine
    await service.weights.update_weights({}, 1, "first")
    for number, tier in enumerate(("memory", "disk")):
        turn = bench.begin(number)
        await bench.clock.sleep(0.05)
        held = await engine.call(Engine.set_tier, wish(tier, 2 * number + 1))
        assert (held.accelerator_bytes, held.memory_bytes, held.disk_bytes) == (0, 0, 0)
        await bench.clock.sleep(5.0)
        assert not turn.done() and service.weights.is_asleep and service.tiers.tier == tier
        waking = asyncio.create_task(
            engine.call(Engine.set_tier, wish("accelerator", 2 * number + 2))
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


@story_on(on_bench)
async def test_weights_that_come_while_it_falls_asleep_are_left_alone(bench: Bench) -> None:
    engine, service = bench.rollout.ref("engine/g0"), bench.engine
    await service.weights.update_weights({}, 1, "first")
    await engine.call(Engine.set_tier, wish("memory", 1))
    await service.weights.update_weights({}, 2, "second")
    assert (service.engine.version, service.weights.manifest) == (1, "")


@story_on(on_bench)
async def test_a_wish_of_an_older_epoch_is_refused_and_a_repeated_one_idle(bench: Bench) -> None:
    engine = bench.rollout.ref("engine/g0")
    for _ in range(2):
        await engine.call(Engine.set_tier, wish("memory", 4))
    with pytest.raises(Fenced, match="epoch 3"):
        await engine.call(Engine.set_tier, wish("accelerator", 3))
    with pytest.raises(Fenced):
        await engine.call(Engine.set_tier, wish("disk", 4))
    told = bench.engine.tiers.stats()
    assert (told["epoch"], told["tier"]) == (4, "memory")
    assert told["sleep_s"] >= 0 and "wake_s" not in told
    with pytest.raises(Refused, match="no tier 'attic'"):
        await engine.call(Engine.set_tier, wish("attic", 5))


class Torn(Mapping[str, Tensor]):
    """A version of which a chunk is found damaged when it is read."""

    def __getitem__(self, name: str) -> Tensor:
        raise CorruptData("a chunk is not what its name says")

    def __iter__(self) -> Iterator[str]:
        return iter(["embedding"])

    def __len__(self) -> int:
        return 1


@story_on(on_bench)
async def test_shards_learn_of_a_quarantine_and_go_on_when_it_is_over(bench: Bench) -> None:
    service = bench.engine
    await service.weights.update_weights({}, 1, "first")
    turns = [bench.begin(number) for number in range(3)]
    await bench.clock.sleep(0.05)
    with pytest.raises(Quarantined):
        await service.weights.update_weights(Torn(), 2, "second")
    await bench.clock.sleep(5.0)
    assert (service.engine.version, service.weights.manifest) == (-1, "")
    assert not any(turn.done() for turn in turns) and service.slice_function == ""
    assert bench.router.links["engine/g0"].load.version == -1
    await service.weights.update_weights({}, 2, "second")
    await asyncio.gather(*turns)
    assert bench.router.links["engine/g0"].load.version == 2
    stats = service.pauses.stats
    assert stats.applied == 3 and stats.engine_step_ms >= 0


@story_on(on_bench)
async def test_what_comes_while_an_engine_is_in_quarantine_goes_to_another(bench: Bench) -> None:
    other = await bench.add("engine/g1")
    for service in (bench.engine, other):
        await service.weights.update_weights({}, 1, "first")
    await bench.clock.sleep(1.0)
    with pytest.raises(Quarantined):
        await bench.engine.weights.update_weights(Torn(), 2, "second")
    await bench.clock.sleep(0.5)
    await asyncio.gather(*(bench.begin(number) for number in range(6)))
    assert other.engine.tokens_generated >= 6 * 20 and not bench.engine.engine.tokens_generated


def adapter_of(version: int, model: dict[str, Tensor] | None = None) -> AdapterVersion:
    return AdapterVersion("other", version, {}, 0.5, "base", 0, model)


@story_on(on_bench)
async def test_adapters_lie_beside_their_base_and_other_work_begins_anew(bench: Bench) -> None:
    service = bench.engine
    await service.weights.update_weights({}, 1, "merged")
    merged = [bench.begin(number) for number in range(3)]
    await bench.clock.sleep(0.05)
    assert not service.weights.has_base("base")
    await service.weights.put_adapter(adapter_of(2, {}), "second", 0)
    assert service.weights.has_base("base") and (
        service.weights.version,
        service.weights.manifest,
    ) == (2, "second")
    for turn in await asyncio.gather(*merged):
        versions = turn.versions[3 : turn.length].tolist()
        assert set(versions) <= {1, 2} and versions == sorted(versions) and versions[-1] == 2
    assert bench.router.links["engine/g0"].load.version == 2
    beside = bench.begin(5)
    await bench.clock.sleep(0.05)
    await service.weights.put_adapter(adapter_of(3), "third", 0)
    versions = (await beside).versions[3:].tolist()
    assert set(versions) <= {2, 3} and service.engine.version == 0
    await service.weights.update_weights({}, 4, "merged again")
    assert (service.weights.version, service.weights.base_manifest) == (
        4,
        "",
    ) and not service.engine.adapter_versions
    turn = await bench.generate(6)
    assert set(turn.versions[3 : turn.length].tolist()) == {4}


@story_on(on_bench)
async def test_an_engine_that_wakes_wants_the_base_of_its_adapters_again(bench: Bench) -> None:
    engine, service = bench.rollout.ref("engine/g0"), bench.engine
    await service.weights.put_adapter(adapter_of(2, {}), "second", 0)
    turn = bench.begin(1)
    await bench.clock.sleep(0.05)
    await engine.call(Engine.set_tier, wish("memory", 1))
    waking = asyncio.create_task(engine.call(Engine.set_tier, wish("accelerator", 2)))
    await bench.clock.sleep(1.0)
    assert not service.weights.has_base("base") and not waking.done()
    await service.weights.put_adapter(adapter_of(3, {}), "third", 0)
    await waking
    versions = (await turn).versions[3:].tolist()
    assert set(versions) <= {2, 3} and service.weights.version == 3


class Unfit(Mapping[str, Tensor]):
    """Adapters that the engine refuses, after it took their base."""

    def __getitem__(self, name: str) -> Tensor:
        raise Refused("the adapter does not fit the model")

    def __iter__(self) -> Iterator[str]:
        return iter(["layers.0.adapters.q_proj.a"])

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("merged", [True, False])
@story_on(on_bench)
async def test_a_base_whose_adapters_are_refused_answers_nobody(bench: Bench, merged: bool) -> None:
    service = bench.engine
    if merged:
        await service.weights.update_weights({}, 1, "merged")
    refused = replace(adapter_of(2, {}), tensors=Unfit())
    with pytest.raises(Quarantined):
        await service.weights.put_adapter(refused, "second", 0)
    turns = [bench.begin(number) for number in range(3)]
    await bench.clock.sleep(5.0)
    assert (service.engine.version, service.weights.version, service.weights.manifest) == (
        -1,
        -1,
        "",
    )
    assert not any(turn.done() for turn in turns) and not service.weights.has_base("base")
    await service.weights.put_adapter(adapter_of(3, {}), "third", 0)
    for turn in await asyncio.gather(*turns):
        assert set(turn.versions[3 : turn.length].tolist()) == {3}


def test_pauses_are_counted_beside_steps_and_old_ones_forgotten() -> None:
    clock = StandingClock()
    pauses = UpdatePauses(clock)
    assert pauses.stats.pause_p99_ms == pauses.stats.engine_step_ms == 0
    for seconds in (0.001,) * 98 + (0.5, 0.002):
        with pauses.measure_update():
            clock.pass_(seconds)
    pauses.add_steps(8, 0.08)
    pauses.add_steps(0, 0.0)
    stats = pauses.stats
    assert stats.applied == 100
    assert stats.pause_ms == pytest.approx(2.0) and stats.pause_p50_ms == pytest.approx(1.0)
    assert 2.0 < stats.pause_p99_ms <= 500.0
    assert stats.engine_step_ms == pytest.approx(10.0)
    for _ in range(MAX_SAMPLES):
        with pauses.measure_update():
            clock.pass_(0.004)
    assert pauses.stats.pause_p99_ms == pytest.approx(4.0)


def test_an_update_that_fails_has_paused_too() -> None:
    clock = StandingClock()
    pauses = UpdatePauses(clock)
    with pytest.raises(OSError, match="torn"), pauses.measure_update():
        clock.pass_(0.25)
        raise OSError("torn")
    assert pauses.stats.pause_ms == 250.0


JOBS = Path(__file__).parents[2] / "mesh/jobs"
LACKING = compute_digest(b"a version that the store does not hold")
POLL_S = 100.0


async def looks(bench: StoreBench, versions: VersionReceiver, seconds: float) -> None:
    for _ in range(int(seconds / POLL_S)):
        assert await versions.receive(LACKING) is None
        await bench.clock.sleep(POLL_S)


@story_on(on_store, "tmp_path")
async def test_a_trainer_that_replays_or_holds_its_next_version_is_waited_for(
    bench: StoreBench, tmp_path: Path
) -> None:
    described = tomllib.loads((JOBS / "digits.toml").read_text())["model"]["config"]
    config = replace(job("grpo"), model=TrainedModelConfig(config=described))
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
    await looks(bench, versions, 2 * RESTAGE_TIMEOUT_S)  # it is not ready

    core.is_ready, core.position.weights = True, VersionIdentity(LACKING)
    core.enter_phase("updating", 1)
    await looks(bench, versions, 2 * RESTAGE_TIMEOUT_S)

    core.position.version = 1  # nothing has changed the weights since, and they are others
    with pytest.raises(ConfigError, match="cannot be had"):
        await looks(bench, versions, 2 * RESTAGE_TIMEOUT_S)
    for mesh in (engine, trainer):
        await mesh.leave()


@story_on(on_store, "tmp_path")
async def test_a_version_that_the_job_has_gone_on_from_is_not_waited_for(bench: StoreBench) -> None:
    await bench.submit()
    newest = await bench.begin()
    engine = bench.mesh("engine/g0", "engine")
    await engine.join(None)
    versions = VersionReceiver(engine, JOB)
    await looks(bench, versions, 2 * RESTAGE_TIMEOUT_S)  # nobody could write that one again
    image = await versions.receive(newest)
    assert image is not None and JOB in image.tensors
    await engine.leave()
