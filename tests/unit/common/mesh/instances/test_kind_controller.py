"""Kinds of a process's tensors that move between tiers, are cancelled, and are torn."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrl.common.api.calls.role import KindState, MoveKinds
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import CorruptData, Fenced, Refused
from meshrl.common.base.files.offloaded_tensors import CHUNK_BYTES, PIECE_BYTES, Octets
from meshrl.common.base.files.releasable_memory import ReleasableMemory
from meshrl.common.base.host.settings import make_offload_path
from meshrl.common.base.random import Random
from meshrl.common.mesh.instances.kind_controller import (
    KindController,
    TensorsOfKind,
)
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.model.files.tensor_storages import TensorStorages
from meshrl.common.state.pool.workers.rows import Tier
from tests.load import scaled
from tests.meshes import alone

NAME = "trainer/j"
PIECES = 3  # tensors of a kind, each of which is a chunk of a copy in some tests
KIND_PIECES = PIECES * CHUNK_BYTES // PIECE_BYTES  # of a kind of large tensors


class GatedStorages(TensorStorages):
    """Storages whose copy waits at piece `gate_at` until the gate opens."""

    def __init__(self, tensors: dict[str, torch.Tensor], process: Process) -> None:
        super().__init__(tensors)
        self._process = process

    def read_into(self, name: str, start: int, out: Octets) -> None:
        self._process.pass_gate()
        super().read_into(name, start, out)

    def write(self, name: str, start: int, piece: Octets) -> None:
        self._process.pass_gate()
        super().write(name, start, piece)


class Process:
    """Process with the kinds `parameters` and `kv_cache`, of which the latter can be rebuilt."""

    def __init__(self, directory: Path, numbers: int = 64, seed: int = 0) -> None:
        """Create the process; each of its tensors has `numbers` numbers."""
        self.directory = directory
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            kind: {f"{kind}.{i}": torch.randn(numbers, generator=generator) for i in range(PIECES)}
            for kind in ("parameters", "kv_cache")
        }
        self.expected = {
            kind: {name: t.clone() for name, t in group.items()}
            for kind, group in self.tensors.items()
        }
        self.gate_at, self._pieces_left = -1, -1
        self.has_arrived, self.gate = threading.Event(), threading.Event()
        self.rebuilds = 0
        self.is_time_sliced = True
        host = SystemHost()
        mesh = alone(NAME, SystemClock(), Random(1), host)

        async def run(work: Callable[[], object]) -> object:
            return await host.run_blocking(work, deadline_s=scaled(20.0))

        def make_source(kind: str, **options: Any) -> TensorsOfKind:
            tensors = self.tensors[kind]
            size = sum(tensor.nbytes for tensor in tensors.values())
            return TensorsOfKind(lambda: GatedStorages(tensors, self), lambda: size, **options)

        self.kinds = KindController(
            mesh,
            {
                "parameters": make_source("parameters"),
                "kv_cache": make_source("kv_cache", rebuild=self._rebuild),
            },
            run,
            "",
            str(directory),
            is_time_sliced=lambda: self.is_time_sliced,
        )
        self.orders = 0

    async def _rebuild(self, memory: ReleasableMemory) -> None:
        await self.kinds.reallocate(memory)
        for name, tensor in self.tensors["kv_cache"].items():
            tensor.copy_(self.expected["kv_cache"][name])
        self.rebuilds += 1

    def pass_gate(self) -> None:
        if self._pieces_left == 0:
            self.has_arrived.set()
            assert self.gate.wait(scaled(10.0))
        self._pieces_left -= 1

    def close_gate(self, piece: int) -> None:
        self._pieces_left = piece
        self.has_arrived.clear()
        self.gate.clear()

    async def order(self, action: str, *kinds: str) -> dict[str, KindState]:
        self.orders += 1
        tier = "disk" if action in ("offload", "write_back") else ""
        order = MoveKinds(self.orders, action, list(kinds), tier)
        states = await self.kinds.move_kinds(order)
        return {state.kind: state for state in states.kinds}

    def get_file(self, kind: str) -> Path:
        return make_offload_path(self.directory, NAME, kind)

    def assert_equal_bits(self, *kinds: str) -> None:
        for kind in kinds or self.tensors:
            for name, tensor in self.tensors[kind].items():
                assert torch.equal(tensor, self.expected[kind][name]), name


async def test_kinds_move_on_their_own_and_return_bit_by_bit(tmp_path: Path) -> None:
    process = Process(tmp_path)
    size = sum(tensor.nbytes for tensor in process.tensors["parameters"].values())
    found = (await process.order("write_back", "parameters"))["parameters"]
    assert (found.accelerator_bytes, found.is_dirty) == (size, False) and found.disk_bytes > size
    async with process.kinds.use_kinds(("parameters",), ("parameters",)):
        process.tensors["parameters"]["parameters.0"].fill_(7.0)
    process.expected["parameters"]["parameters.0"].fill_(7.0)
    assert process.kinds.describe_kinds().kinds[0].is_dirty
    both = await process.order("offload", "parameters")
    assert (both["parameters"].accelerator_bytes, both["parameters"].size_bytes) == (0, size)
    assert both["kv_cache"].accelerator_bytes == size and both["kv_cache"].can_drop
    both = await process.order("drop", "kv_cache")
    assert process.kinds.accelerator_bytes == 0 and both["kv_cache"].disk_bytes == 0
    both = await process.order("load", "parameters", "kv_cache")
    assert not both["parameters"].is_dirty and process.rebuilds == 1
    process.assert_equal_bits()
    with pytest.raises(Refused, match="the parameters cannot be rebuilt"):
        await process.order("drop", "parameters")


async def test_orders_are_fenced_by_number_and_repeatable(tmp_path: Path) -> None:
    process = Process(tmp_path)
    offload = MoveKinds(2, "offload", ["parameters"], "disk")
    first = await process.kinds.move_kinds(offload)
    written = process.get_file("parameters").stat().st_ino
    assert await process.kinds.move_kinds(offload) == first
    assert process.get_file("parameters").stat().st_ino == written
    for late in (MoveKinds(1, "load", ["parameters"], ""), MoveKinds(2, "load", [], "")):
        with pytest.raises(Fenced, match="came after order 2"):
            await process.kinds.move_kinds(late)
    await process.kinds.cancel_move(4)  # which has not come
    with pytest.raises(Refused, match="was cancelled"):
        await process.kinds.move_kinds(MoveKinds(4, "load", ["parameters"], ""))
    for wrong in (["x"], "offload", "disk"), (["parameters"], "offload", "absent"):
        with pytest.raises(Refused, match="the kinds stay where they are"):
            await process.kinds.move_kinds(MoveKinds(5 + len(wrong[2]), wrong[1], *wrong[::2]))


async def test_kinds_in_use_and_those_of_a_sleeping_process_do_not_move(tmp_path: Path) -> None:
    process = Process(tmp_path)
    async with process.kinds.use_kinds(("parameters",)):
        with pytest.raises(Refused, match="process computes"):
            await process.order("offload", "parameters")
        found = await process.order("offload", "kv_cache")
        assert found["kv_cache"].accelerator_bytes == 0
        process.assert_equal_bits("parameters")
    async with process.kinds.use_kinds():
        with pytest.raises(Refused, match="process computes"):
            await process.order("load", "kv_cache")
    await process.order("load", "kv_cache")
    await process.order("offload", "parameters")
    async with process.kinds.use_kinds(("parameters",)):  # loads the missing kind
        process.assert_equal_bits()
    process.kinds.is_asleep = True
    with pytest.raises(Refused, match="moves as a whole"):
        await process.order("offload", "parameters")
    process.kinds.is_asleep, process.is_time_sliced = False, False
    with pytest.raises(Refused, match="without time slices"):
        await process.order("offload", "parameters")


async def test_use_begins_beside_a_move_of_another_kind(tmp_path: Path) -> None:
    process = Process(tmp_path, numbers=1 << 10)
    process.close_gate(0)
    moving = asyncio.create_task(process.order("offload", "kv_cache"))
    while not process.has_arrived.is_set():
        await asyncio.sleep(0.001)
    async with asyncio.timeout(scaled(10.0)), process.kinds.use_kinds(("parameters",)):
        own_kind = asyncio.create_task(process.kinds.begin_use(("kv_cache",)))
        await asyncio.sleep(0)
        assert not moving.done() and not own_kind.done()
        process.gate.set()
        assert (await moving)["kv_cache"].accelerator_bytes == 0
        await own_kind
        process.assert_equal_bits()
    process.kinds.end_use(("kv_cache",))


async def test_deleting_copies_spares_those_of_offloaded_kinds(tmp_path: Path) -> None:
    process = Process(tmp_path)
    await process.order("offload", "parameters")
    await process.order("write_back", "kv_cache")
    await process.kinds.drop_copies()
    found = await process.order("load", "parameters")
    process.assert_equal_bits()
    assert not found["parameters"].is_dirty and found["kv_cache"].is_dirty


async def test_lost_content_is_never_saved(tmp_path: Path) -> None:
    process = Process(tmp_path)
    await process.order("offload", "parameters")
    content = process.get_file("parameters").read_bytes()
    process.get_file("parameters").write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptData):
        await process.order("load", "parameters")
    with pytest.raises(CorruptData):
        await process.kinds.write_back(Tier.DISK)
    with pytest.raises(CorruptData):
        await process.kinds.save_record(Tier.DISK, {})
    assert await process.kinds.find_record() is None


@pytest.mark.parametrize("piece", [0, KIND_PIECES])  # the first of each kind
@pytest.mark.parametrize("action", ["offload", "load"])
async def test_cancelled_move_leaves_each_kind_whole(
    action: str, piece: int, tmp_path: Path
) -> None:
    process = Process(tmp_path, numbers=CHUNK_BYTES // 4)
    if action == "load":
        await process.order("offload", "parameters", "kv_cache")
    process.close_gate(piece)
    moving = asyncio.create_task(process.order(action, "parameters", "kv_cache"))
    while not process.has_arrived.is_set():
        await asyncio.sleep(0.001)
    cancelling = asyncio.create_task(process.kinds.cancel_move(process.orders))
    await asyncio.sleep(0)
    process.gate.set()
    states = {state.kind: state for state in (await cancelling).kinds}
    with pytest.raises(Refused, match="cancelled"):
        await moving
    is_away = [states[kind].accelerator_bytes == 0 for kind in ("parameters", "kv_cache")]
    moved = [piece > 0, False]
    assert is_away == (moved if action == "offload" else [not one for one in moved])
    process.close_gate(-1)
    await process.order("load", "parameters", "kv_cache")
    process.assert_equal_bits()


@pytest.mark.parametrize("turns_of_the_loop", [1, 3])  # before it waits, and later
async def test_order_that_waits_for_another_move_is_cancelled_at_once(
    turns_of_the_loop: int, tmp_path: Path
) -> None:
    process = Process(tmp_path)
    process.close_gate(0)
    saving = asyncio.create_task(process.order("write_back", "kv_cache"))
    while not process.has_arrived.is_set():
        await asyncio.sleep(0.001)
    waiting = asyncio.create_task(process.order("offload", "parameters"))
    for _ in range(turns_of_the_loop):
        await asyncio.sleep(0)
    states = await process.kinds.cancel_move(process.orders)
    assert not saving.done() and all(state.accelerator_bytes for state in states.kinds)
    with pytest.raises(Refused, match="cancelled"):
        await waiting
    process.gate.set()
    await saving
    await process.order("offload", "parameters")
    await process.order("load", "parameters")
    process.assert_equal_bits()


@pytest.mark.deep
@pytest.mark.parametrize("piece", [0, PIECES - 1, PIECES])
def test_successor_of_a_killed_process_finds_the_saved_state_or_refuses(
    piece: int, tmp_path: Path
) -> None:
    program = [sys.executable, "-m", "tests.unit.common.mesh.instances.killed_mover"]
    ended = subprocess.run([*program, str(tmp_path), str(piece)], check=False, timeout=scaled(60.0))
    assert ended.returncode == -signal.SIGKILL

    async def resume() -> None:
        saved, successor = Process(tmp_path, seed=1), Process(tmp_path, seed=2)
        found = await successor.kinds.find_record()
        assert found is not None and found[1]["version"] == 1
        if piece < PIECES:  # its parameters were not replaced yet
            await successor.kinds.resume(found[1])
            for name, tensor in successor.tensors["parameters"].items():
                assert torch.equal(tensor, saved.expected["parameters"][name])
        else:
            with pytest.raises(Refused, match="no copy of the saved parameters"):
                await successor.kinds.resume(found[1])

    asyncio.run(resume())


async def test_torn_copy_is_rebuilt_or_reported_as_lost(tmp_path: Path) -> None:
    process = Process(tmp_path)
    await process.order("offload", "parameters", "kv_cache")
    for kind in ("parameters", "kv_cache"):
        with process.get_file(kind).open("r+b") as file:
            file.truncate(process.get_file(kind).stat().st_size - 1)
    await process.order("load", "kv_cache")
    process.assert_equal_bits("kv_cache")
    assert process.rebuilds == 1
    with pytest.raises(CorruptData):
        await process.order("load", "parameters")
    with pytest.raises(CorruptData):
        async with process.kinds.use_kinds():
            pass
    process.kinds.clear_loss()
    async with process.kinds.use_kinds(("parameters",), ("parameters",)):
        for name, tensor in process.tensors["parameters"].items():
            tensor.copy_(process.expected["parameters"][name])
    await process.order("offload", "parameters")
    await process.order("load", "parameters")
    process.assert_equal_bits()
