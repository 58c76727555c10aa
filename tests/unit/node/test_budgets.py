"""Instances of a worker: the processes of a record and their use of the worker's budget."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.common.api.node import CreateSegment, SegmentLocation
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, NotFound, Refused, StorageFull
from meshrl.common.base.files.offload_media import MemorySegment
from meshrl.common.base.random import Random
from meshrl.common.hardware.gpus.devices import Device
from meshrl.common.mesh.process.diagnosis.host_limits import FreeSpace
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state.pool.workers.rows import Gang, Instance, Role, Tier, TierBytes
from meshrl.services.node.gpus.accelerators import discover_accelerators, list_cpu_slots, list_gpus
from meshrl.services.node.instances.budgets import SPARE_DISK_BYTES, SPARE_MEMORY_BYTES, Budgets
from meshrl.services.node.instances.desired_roles import (
    COMMANDS,
    list_desired_roles,
    override_commands,
)
from meshrl.services.node.instances.segments import POOL_SPARE_BYTES, SPARE_BYTES, MemorySegments
from meshrl.services.node.job_services import service_command
from tests.load import scaled
from tests.simulated_host import SimulatedHost

A, B = "engine/g0.0", "trainer/j"


@pytest.fixture
def host() -> SimulatedHost:
    return SimulatedHost(SystemClock(), Random())


def budgets(host: SimulatedHost, **limits: int) -> Budgets:
    return Budgets(TierBytes(**limits), host, Path())


def test_accelerator_usage_never_exceeds_its_budget(host: SimulatedHost) -> None:
    found = budgets(host, accelerator=100)
    found.record_usage(A, TierBytes(accelerator=60))
    found.check_start(B)
    with pytest.raises(StorageFull, match=r"uses 50 bytes of the accelerator, .* 110 of 100"):
        found.record_usage(B, TierBytes(accelerator=50))
    found.record_exit(B)
    found.claim(A, Tier.MEMORY)
    found.record_usage(A, TierBytes(memory=60))
    found.record_usage(B, TierBytes(accelerator=50))
    with pytest.raises(StorageFull, match=r"needs 60 bytes of accelerator, .* 50 of 100"):
        found.claim(A, Tier.ACCELERATOR)
    found.remove(B)
    found.claim(A, Tier.ACCELERATOR)


def test_reservation_counts_until_the_process_reports_its_bytes(host: SimulatedHost) -> None:
    found = budgets(host, accelerator=100)
    found.reserve(A, 70)
    found.claim(A, Tier.ACCELERATOR)  # the first tier of a process that has started
    assert found.sum_used_bytes(Tier.ACCELERATOR) == 70
    found.record_usage(A, TierBytes(accelerator=60))
    assert found.sum_used_bytes(Tier.ACCELERATOR) == 60


def test_full_accelerator_rejects_further_instances(host: SimulatedHost) -> None:
    found = budgets(host, accelerator=100)
    found.record_usage(A, TierBytes(accelerator=100))
    with pytest.raises(StorageFull, match="other instances use 100"):
        found.check_start(B)
    found.check_start(A)


def test_unused_memory_of_segments_counts_as_free(host: SimulatedHost) -> None:
    host.left = FreeSpace(memory_bytes=SPARE_MEMORY_BYTES, disk_bytes=0)
    unused_bytes = 0
    found = Budgets(TierBytes(), host, Path(), lambda: unused_bytes)
    found.record_usage(A, TierBytes(accelerator=60))
    with pytest.raises(StorageFull, match="needs 60 bytes of memory"):
        found.claim(A, Tier.MEMORY)
    unused_bytes = 60
    found.claim(A, Tier.MEMORY)


def test_concurrent_moves_do_not_claim_the_same_memory(host: SimulatedHost) -> None:
    found = budgets(host, memory=100)
    found.record_usage(A, TierBytes(accelerator=60))
    found.record_usage(B, TierBytes(accelerator=60))
    found.claim(A, Tier.MEMORY)
    with pytest.raises(StorageFull, match="needs 60 bytes of memory, and other instances use 60"):
        found.claim(B, Tier.MEMORY)
    found.cancel_claim(A)
    found.claim(B, Tier.MEMORY)
    found.claim(B, Tier.ABSENT)


def test_memory_and_disk_of_other_processes_are_not_used(host: SimulatedHost) -> None:
    found = budgets(host)
    found.record_usage(A, TierBytes(accelerator=60))
    host.left = FreeSpace(memory_bytes=SPARE_MEMORY_BYTES + 59, disk_bytes=SPARE_DISK_BYTES + 60)
    with pytest.raises(StorageFull, match=r"this host has \d+ free"):
        found.claim(A, Tier.MEMORY)
    found.claim(A, Tier.DISK)
    found.record_usage(A, TierBytes(disk=60))
    host.left = FreeSpace(memory_bytes=SPARE_MEMORY_BYTES + 60, disk_bytes=0)
    found.claim(A, Tier.MEMORY)
    found.claim(A, Tier.DISK)


def test_sleeping_instance_needs_its_full_size_to_wake(host: SimulatedHost) -> None:
    found = budgets(host, accelerator=100)
    found.record_usage(A, TierBytes(accelerator=80))
    found.record_usage(A, TierBytes(memory=10))  # its weights are in the weight store
    found.record_usage(B, TierBytes(accelerator=30))
    with pytest.raises(StorageFull, match="needs 80 bytes of accelerator"):
        found.claim(A, Tier.ACCELERATOR)


def test_stats_report_usage_beside_each_budget(host: SimulatedHost) -> None:
    found = budgets(host, accelerator=100)
    found.record_usage(A, TierBytes(accelerator=60, memory=5))
    expected = {"accelerator": 60, "memory": 5, "disk": 0, "accelerator_budget": 100}
    assert found.stats() == expected


GANG = Gang(
    "g1",
    ("w3", "w1"),
    7,
    (
        Instance("g1.0", "calc", Role.ROLLOUT, ranks=(1,), generation=3, time_sliced=True),
        Instance("g1.1", "calc", Role.TRAINING, core=True, ranks=(0, 1), generation=4),
        Instance("g1.2", "calc", Role.TRAINING, generation=4),
        Instance("g1.3", "calc", Role.SCORING, tier=Tier.ABSENT),
    ),
)


def test_desired_roles_of_a_rank_have_registry_names() -> None:
    first, second = list_desired_roles(GANG, "w3"), list_desired_roles(GANG, "w1")
    assert list(first) == ["trainer/calc", "hybrid/g1.2", "scoring/calc"]
    assert list(second) == ["engine/g1.0", "rank/calc/1"]
    assert first["scoring/calc"].is_absent and not first["hybrid/g1.2"].is_absent
    assert list_desired_roles(GANG, "w0") == {} == list_desired_roles(None, "w3")


def test_command_line_names_instance_and_slice_scheduler() -> None:
    found = list_desired_roles(GANG, "w1")
    assert found["engine/g1.0"].build_argv(COMMANDS) == [
        *[sys.executable, "-m", "meshrl.services.engine", "--gang", "g1", "--instance", "g1.0"],
        *["--job", "calc", "--generation", "3", "--slice-scheduler", "worker/w3", "--time-sliced"],
    ]
    rank = found["rank/calc/1"].build_argv(COMMANDS)
    assert rank[-5:] == ["--core", "--rank", "1", "--ranks", "2"]
    with pytest.raises(ConfigError, match="no command is configured for the role 'rollout'"):
        found["engine/g1.0"].build_argv({})


def test_job_services_receive_their_job() -> None:
    python = [sys.executable, "-m"]
    assert service_command("rollout/calc/2", []) == [
        *[*python, "meshrl.services.rollout", "--job", "calc", "--shard", "2"]
    ]
    sandbox = service_command("sandbox/a/b/0", ["--orphan-s", "3"])
    assert sandbox == [
        *python,
        "meshrl.services.sandbox",
        "--name",
        "sandbox/a/b/0",
        "--orphan-s",
        "3",
    ]


def test_commands_can_be_replaced_by_role() -> None:
    commands = override_commands(["rollout=" + shlex.join(["python", "a b"]), "serving=x"])
    assert commands["rollout"] == ["python", "a b"] and commands["serving"] == ["x"]
    assert commands["training"] == COMMANDS["training"]
    for wrong in ("rollout", "rollout="):
        with pytest.raises(ConfigError):
            override_commands([wrong])


def test_each_worker_sees_one_device_by_uuid() -> None:
    assert [a.name for a in list_cpu_slots(2)] == ["cpu:0", "cpu:1"]
    assert [a.name for a in list_cpu_slots(3, ["A40", "v100"])] == [
        "cpu:0 A40",
        "cpu:1 V100",
        "cpu:2",
    ]
    for mistaken in (["A41"], ["CPU"], ["A40"] * 4):
        with pytest.raises(ConfigError, match="MESHRL_EMULATED_ACCELERATORS"):
            list_cpu_slots(3, mistaken)
    whole = Device("GPU-a", "NVIDIA H200", 1000, 0)
    part = Device("MIG-b", "NVIDIA H200 MIG 1g.18gb", 100, 1, "GPU-b", (7, 0))
    found = list_gpus([whole, part], 0)
    assert [a.name for a in found] == ["cuda:0 NVIDIA H200", "cuda:1/7/0 NVIDIA H200 MIG 1g.18gb"]
    assert [a.env["CUDA_VISIBLE_DEVICES"] for a in found] == ["GPU-a", "MIG-b"]
    assert [a.memory_bytes for a in found] == [1000, 100]
    assert list_gpus([whole, part], 1) == found[:1]
    with pytest.raises(ConfigError, match=r"3 workers are requested, but there are 2 GPUs"):
        list_gpus([whole, part], 3)
    with pytest.raises(ConfigError, match="1 worker, which core and engine share in time slices"):
        list_gpus([whole], 2)  # a MIG instance is used only when there are too few whole GPUs


async def test_gpu_cannot_emulate_another_accelerator() -> None:
    with pytest.raises(ConfigError, match="MESHRL_EMULATED_ACCELERATORS"):
        await discover_accelerators(SystemHost(), "cuda", 0, ["A40"])


PAGE = 4096


def get_free_bytes() -> int:
    return 1 << 40


def write_and_end(path: str) -> None:
    """Write to the segment in another process, which then exits."""
    program = (
        "import sys; from meshrl.common.base.files.offload_media import MemorySegment; "
        f"MemorySegment(sys.argv[1]).open_chunk({PAGE}, 5)[:] = 7"
    )
    subprocess.run([sys.executable, "-c", program, path], check=True, timeout=scaled(60))


def create(segments: MemorySegments, key: str, size_bytes: int) -> SegmentLocation:
    """Create and commit a segment."""
    made = segments.create(CreateSegment(key, size_bytes))
    segments.commit(key)
    return made


def fill(path: str, value: int) -> MemorySegment:
    segment = MemorySegment(path)
    segment.open_chunk(0, segment.size_bytes)[:] = value
    return segment


def read_values(path: str) -> set[int]:
    segment = MemorySegment(path)
    return set(segment.read_chunk(0, segment.size_bytes).tolist())


async def test_segment_content_outlives_the_writing_process() -> None:
    async with MemorySegments(get_free_bytes) as segments:
        made = create(segments, "trainer/sums:optimizer", 3 * PAGE)
        write_and_end(made.path)
        found = segments.find("trainer/sums:optimizer")
        assert found == made
        content = MemorySegment(found.path).read_chunk(PAGE - 1, 7)
        assert content.tolist() == [0, 7, 7, 7, 7, 7, 0]
        assert segments.find("engine/g0.1:optimizer").path == ""


async def test_process_writes_only_to_its_own_segment(
    tmp_path: Path,
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"as it was")
    async with MemorySegments(get_free_bytes) as segments:
        mine = create(segments, "trainer/sums:parameters", PAGE).path
        others = create(segments, "engine/g0.1:parameters", PAGE).path
        assert MemorySegment(mine, "trainer/sums").size_bytes == PAGE
        with file.open("r+b") as opened:
            for path in (others, str(file), f"/proc/self/fd/{opened.fileno()}"):
                with pytest.raises(Refused, match="is not a segment of trainer/sums"):
                    MemorySegment(path, "trainer/sums")
    assert file.read_bytes() == b"as it was"


async def test_segments_end_with_the_worker() -> None:
    async with MemorySegments(get_free_bytes) as segments:
        path = create(segments, "trainer/sums:optimizer", PAGE).path
        assert segments.total_bytes == PAGE and segments.keys == ["trainer/sums:optimizer"]
    assert segments.total_bytes == 0
    with pytest.raises(FileNotFoundError):
        os.stat(path)


async def test_segment_budget_is_shared_and_a_rejection_changes_nothing() -> None:
    async with MemorySegments(get_free_bytes, budget_bytes=10 * PAGE) as segments:
        create(segments, "a", 6 * PAGE)
        with pytest.raises(StorageFull, match=f"{6 * PAGE} of the worker's {10 * PAGE}"):
            segments.create(CreateSegment("b", 5 * PAGE))
        with pytest.raises(StorageFull):  # beside the copy that it would replace
            segments.create(CreateSegment("a", 5 * PAGE))
        assert segments.keys == ["a"]
        create(segments, "b", 4 * PAGE)
        segments.delete("a")
        segments.delete("a")
        assert segments.total_bytes == 4 * PAGE and segments.unused_bytes == 6 * PAGE
        create(segments, "c", 5 * PAGE)
        assert segments.unused_bytes == 0  # unused memory makes room


async def test_memory_taken_by_another_process_is_not_granted() -> None:
    left = SPARE_BYTES + 10 * PAGE
    async with MemorySegments(lambda: left) as segments:
        fill(create(segments, "a", 4 * PAGE).path, 1)
        left = SPARE_BYTES + PAGE
        with pytest.raises(StorageFull, match="the host has"):
            segments.create(CreateSegment("a", 6 * PAGE))
        assert read_values(segments.find("a").path) == {1}


async def test_memory_of_a_granted_but_empty_segment_is_not_granted_twice() -> None:
    async with MemorySegments(lambda: SPARE_BYTES + 10 * PAGE) as segments:
        create(segments, "a", 6 * PAGE)
        with pytest.raises(StorageFull, match=f"the host has {4 * PAGE + SPARE_BYTES}"):
            segments.create(CreateSegment("b", 5 * PAGE))
        create(segments, "b", 4 * PAGE)


async def test_new_copy_replaces_the_earlier_one_at_its_commit() -> None:
    async with MemorySegments(get_free_bytes) as segments:
        fill(create(segments, "a:optimizer", PAGE).path, 1)
        for end in (segments.discard, segments.commit):
            fill(segments.create(CreateSegment("a:optimizer", PAGE)).path, 2)
            assert read_values(segments.find("a:optimizer").path) == {1}
            end("a:optimizer")
        segments.commit("a:optimizer")  # a repeated call changes nothing
        assert read_values(segments.find("a:optimizer").path) == {2}
        assert segments.unused_bytes == PAGE
        with pytest.raises(NotFound):
            segments.commit("b:optimizer")


async def test_unused_memory_serves_only_its_own_process_again() -> None:
    async with MemorySegments(get_free_bytes) as segments:
        made = create(segments, "a:optimizer", 4 * PAGE)
        fill(made.path, 1)
        segments.delete("a:optimizer")
        other = create(segments, "b:optimizer", 4 * PAGE)
        assert other.path != made.path and read_values(other.path) == {0}
        create(segments, "a:parameters", PAGE)  # too small for that memory
        assert create(segments, "a:gradients", 4 * PAGE - 1) == made
        assert segments.unused_bytes == 0


async def test_released_memory_is_free_though_a_process_maps_it() -> None:
    left = 1 << 40
    async with MemorySegments(lambda: left) as segments:
        mapped = fill(create(segments, "a:optimizer", 4 * PAGE).path, 1)
        segments.delete("a:optimizer")
        segments.release_unused()
        assert segments.unused_bytes == 4 * PAGE
        left = POOL_SPARE_BYTES - 1
        segments.release_unused()
        assert segments.unused_bytes == 0 and not mapped.read_chunk(0, 4 * PAGE).any()
        left, mapped = 1 << 40, fill(create(segments, "a:optimizer", PAGE).path, 1)
        segments.delete_process("a")
        assert not segments.keys and not mapped.read_chunk(0, PAGE).any()


async def test_mapped_segment_cannot_be_resized() -> None:
    async with MemorySegments(get_free_bytes) as segments:
        path = create(segments, "a", PAGE).path
        descriptor = os.open(path, os.O_RDWR)
        for size in (0, 2 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        os.close(descriptor)
