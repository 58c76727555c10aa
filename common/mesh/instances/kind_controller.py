"""Tensors of a role process by kind, which its worker moves between tiers.

A kind is on the accelerator, or its memory there is freed. Copies of it may be in host memory and
on disk. A move that fails or is cancelled leaves each kind whole in at least one tier. No kind
moves while a piece of the process computes with it (`KindController.use_kinds`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from meshrl.common.api.calls.role import KindState, KindStates, MoveKinds
from meshrl.common.base.errors import CorruptData, Fenced, Refused, StorageFull
from meshrl.common.base.files.offloaded_tensors import (
    COPIES_BYTES,
    PIECE_BYTES,
    Cancellation,
    Octets,
    OffloadTarget,
)
from meshrl.common.base.files.releasable_memory import ReleasableMemory
from meshrl.common.mesh.instances.offload_storage import OffloadStorage
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.serial_executor import consume_exception
from meshrl.common.state.pool.workers.rows import TensorKind, Tier

COPY_TIERS = (Tier.MEMORY, Tier.DISK)  # the faster one first
COPY_ID = "copy"  # key in the metadata of a copy: its random name
COPIES = "copies"  # key in the metadata of a record: names of the copies by kind

# Runs blocking work where the process computes with the tensors, and returns its result.
RunBlocking = Callable[[Callable[[], Any]], Awaitable[Any]]


@dataclass(frozen=True)
class TensorsOfKind:
    """Source of a kind's tensors in the process that computes with them."""

    collect: Callable[[], ReleasableMemory]  # blocks; not called while the memory is freed
    measure_bytes: Callable[[], int]  # bytes on the accelerator when they are there; any thread
    # Allocates the memory and restores the content without a copy; None: it needs a copy.
    rebuild: Callable[[ReleasableMemory], Awaitable[None]] | None = None
    # returns True if an order to offload it must drop it, because that is cheaper
    prefers_drop: Callable[[], bool] = lambda: False


@dataclass
class _Kind:
    name: str
    tensors: TensorsOfKind
    storage: OffloadStorage
    memory: ReleasableMemory | None = None  # freed memory; None: the tensors are on the accelerator
    # tiers of copies that equal the tensors; other copies are outdated
    equal_tiers: set[Tier] = field(default_factory=set)
    copy_id: str = ""  # of the equal copies

    # bytes and seconds of the last copy to a tier, and of the last one back
    last_save: tuple[int, float] = (0, 0.0)
    last_restore: tuple[int, float] = (0, 0.0)

    def describe(self) -> KindState:
        size = self.memory.total_bytes if self.memory else self.tensors.measure_bytes()
        stored = self.storage.stored_bytes
        return KindState(
            kind=self.name,
            size_bytes=size,
            accelerator_bytes=0 if self.memory else size,
            memory_bytes=stored[Tier.MEMORY],
            disk_bytes=stored[Tier.DISK],
            is_dirty=self.memory is None and size > 0 and not self.equal_tiers,
            can_drop=self.tensors.rebuild is not None,
        )


class KindController:
    """Table of a process's kinds, and the orders that move them: one at a time, in their order."""

    def __init__(
        self,
        mesh: Mesh,
        kinds: Mapping[str, TensorsOfKind],
        run: RunBlocking,
        segment_owner: str = "",
        directory: str = "",
        *,
        is_time_sliced: Callable[[], bool] = lambda: True,
    ) -> None:
        """Create a table of `kinds`, whose tensors are on the accelerator.

        Args:
            mesh: The process.
            kinds: Sources of the tensors by name of the kind; in the order of loading.
            run: Runs blocking work on the tensors.
            segment_owner: Worker that owns the copies in memory; "": set by its first request.
            directory: Directory of the copies on disk; "": set by the worker's first request.
            is_time_sliced: Returns False if pieces may compute at any time.
        """
        self._mesh, self.run, self._is_time_sliced = mesh, run, is_time_sliced
        targets = segment_owner, directory
        self._kinds = {
            name: _Kind(name, tensors, OffloadStorage(mesh, *targets, name))
            for name, tensors in kinds.items()
        }
        self._record = OffloadStorage(mesh, *targets)  # of the whole state, see `save_record`
        self._lock = asyncio.Lock()  # a move is in progress
        self._used: Counter[str] = Counter()  # by kind: pieces that compute with its tensors
        self._moving: frozenset[str] = frozenset()  # kinds of the order in progress
        # The process moves or has moved as a whole. Before, a piece that it waits for needs orders.
        self.is_asleep = False
        self.loss: CorruptData | None = None  # reason that the tensors have no valid content
        self._last_order: MoveKinds | None = None
        self._last_number = 0
        self._move: asyncio.Task[None] | None = None
        self._queued: set[asyncio.Task[Any]] = set()  # moves that wait for the lock
        self._cancellation = Cancellation()

    @property
    def _storages(self) -> list[OffloadStorage]:
        return [self._record, *(kind.storage for kind in self._kinds.values())]

    def set_targets(self, segment_owner: str, directory: str) -> None:
        """Set where copies are kept; see `OffloadStorage.set_targets`."""
        for storage in self._storages:
            storage.set_targets(segment_owner, directory)

    def unmap_segment(self, inode: int) -> None:
        """Unmap a memory segment that the worker has freed, which also unpins it."""
        for storage in self._storages:
            storage.unmap(inode)

    def measure_copy_s(self, name: str, size_bytes: int) -> float:
        """Return the seconds to copy so many bytes of a kind away and back; 0: not measured yet."""
        kind = self._kinds[name]
        rates = [size / s for size, s in (kind.last_save, kind.last_restore) if size and s]
        return sum(size_bytes / rate for rate in rates) if len(rates) == 2 else 0.0

    def describe_kinds(self) -> KindStates:
        """Return the state of every kind."""
        return KindStates([kind.describe() for kind in self._kinds.values()])

    @property
    def accelerator_bytes(self) -> int:
        """Bytes of all kinds on the accelerator now."""
        return sum(kind.accelerator_bytes for kind in self.describe_kinds().kinds)

    @property
    def stored_bytes(self) -> dict[Tier, int]:
        """Bytes of all copies by tier."""
        return {
            tier: sum(storage.stored_bytes[tier] for storage in self._storages)
            for tier in COPY_TIERS
        }

    # -- pieces ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def use_kinds(
        self, kinds: Sequence[str] = (), changed: Sequence[str] = ()
    ) -> AsyncIterator[None]:
        """Enter to compute with `kinds` and to change `changed`; these do not move in the block.

        Without `kinds` none moves, and none is loaded. The worker loads the kinds of a time slice
        before. One that is missing all the same, for instance because the process is no longer
        time-sliced, is loaded here.

        Raises:
            CorruptData: The content was lost, and `clear_loss` was not called since.
            Refused: A missing kind does not fit.
        """
        await self.begin_use(kinds, changed)
        try:
            yield
        finally:
            self.end_use(kinds)

    async def begin_use(self, kinds: Sequence[str] = (), changed: Sequence[str] = ()) -> None:
        """Begin a use as `use_kinds` does; `end_use` must follow."""
        used = kinds or list(self._kinds)
        is_missing = any(self._kinds[name].memory is not None for name in kinds)
        is_beside_order = self._moving and self._moving.isdisjoint(used) and not is_missing
        async with contextlib.nullcontext() if is_beside_order else self._lock:
            if self.loss is not None:
                raise self.loss
            for name in kinds:
                await self._load(self._kinds[name], Cancellation())
            self.mark_changed(changed)
            self._used.update(used)

    def end_use(self, kinds: Sequence[str] = ()) -> None:
        """End a use of `begin_use` with the same kinds."""
        self._used.subtract(kinds or list(self._kinds))

    def mark_changed(self, kinds: Sequence[str]) -> None:
        """Record that kinds differ from their copies from now on; call it while nothing moves."""
        for name in kinds:
            self._kinds[name].equal_tiers.clear()

    def forget_tensors(self, name: str) -> None:
        """Record that new tensors have replaced those of a kind; call it within `use_kinds`."""
        kind = self._kinds[name]
        kind.memory = None
        kind.equal_tiers.clear()

    def reset(self) -> None:
        """Record that the process has created its tensors again; copies stay for `resume`."""
        self.forget_all()
        self.is_asleep, self.loss = False, None

    def forget_all(self) -> None:
        """Record that new tensors replace those of all kinds; call it within `use_kinds`."""
        for name in self._kinds:
            self.forget_tensors(name)

    def clear_loss(self) -> None:
        """Let pieces compute again after lost content, because they write it again."""
        self.loss = None

    # -- orders of the worker --------------------------------------------------------------------

    async def move_kinds(self, order: MoveKinds) -> KindStates:
        """Execute an order and return the state of all kinds; see `RoleControl.move_kinds`.

        The order completes even if its requester has exited. A repeated order has its outcome.

        Raises:
            Fenced: A later order has come.
            Refused: The process computes with the kinds or moves as a whole, the order was
                cancelled, or the process cannot execute it.
            StorageFull: The tier has no space.
            CorruptData: A copy has changed, and no other one is left.
        """
        if order.order < self._last_number or (
            order.order == self._last_number and self._last_order not in (None, order)
        ):
            raise Fenced(
                f"order {order.order} came after order {self._last_number}",
                where=self._mesh.name,
                fix="Use a higher number",
            )
        if order.order > self._last_number:
            self._last_number, self._last_order = order.order, order
            self._cancellation = Cancellation()
            execution = self._execute(order, self._cancellation)
            self._move = asyncio.create_task(execution, name=f"{order.action} kinds")
            self._move.add_done_callback(consume_exception)
        if self._last_order is None or self._move is None:
            raise Refused(f"order {order.order} was cancelled before", where=self._mesh.name)
        await asyncio.shield(self._move)
        return self.describe_kinds()

    async def cancel_move(self, number: int) -> KindStates:
        """Cancel an order before it comes, while it waits, or between two chunks; return the state
        of all kinds.
        """
        if number > self._last_number:
            self._last_number, self._last_order = number, None
        elif number == self._last_number:
            await self.stop()
        return self.describe_kinds()

    async def stop(self) -> None:
        """Cancel the last order and wait for its end."""
        if self._move is not None:
            self._cancellation.request()
            if self._move in self._queued:
                self._move.cancel()
            await asyncio.wait([self._move])

    @asynccontextmanager
    async def _lock_for_order(self, cancellation: Cancellation) -> AsyncIterator[None]:
        """Enter in the sequence of the orders; CopyCancelled if the order is cancelled before."""
        cancellation.check()
        task = asyncio.current_task()
        assert task is not None
        self._queued.add(task)
        try:
            await self._lock.acquire()
        except asyncio.CancelledError:
            cancellation.check()
            raise
        finally:
            self._queued.discard(task)
        try:
            yield
        finally:
            self._lock.release()

    async def _execute(self, order: MoveKinds, cancellation: Cancellation) -> None:
        self._check_order(order)
        async with self._lock_for_order(cancellation):
            tier = self._check_order(order)
            if any(self._used[name] for name in order.kinds):
                raise self._refuse("the process computes with them")
            self._moving = frozenset(order.kinds)
            try:
                for kind in [self._kinds[name] for name in order.kinds]:
                    cancellation.check()
                    await self._move_kind(kind, order.action, tier, cancellation)
            finally:
                self._moving = frozenset()

    async def _move_kind(
        self, kind: _Kind, action: str, tier: Tier, cancellation: Cancellation
    ) -> None:
        if action == "load":
            await self._load(kind, cancellation)
        elif action == "drop":
            await self._drop(kind)
        elif action == "write_back":
            await self._write_back(kind, tier, cancellation)
        else:
            await self._offload(kind, tier, cancellation)

    def _check_order(self, order: MoveKinds) -> Tier:
        """Return the order's tier; raise Refused if the order is invalid here."""
        if self.is_asleep:
            raise self._refuse("the process moves as a whole")
        if unknown := [name for name in order.kinds if name not in self._kinds]:
            raise self._refuse(f"there is no kind '{unknown[0]}'")
        if order.action in ("load", "write_back", "drop", "offload"):
            if order.action != "load" and not self._is_time_sliced():
                raise self._refuse("the process computes without time slices")
            if order.action in ("load", "drop"):
                return Tier.ACCELERATOR
            if order.tier in COPY_TIERS:
                return Tier(order.tier)
        raise self._refuse(f"an order cannot {order.action} kinds to tier '{order.tier}'")

    def _refuse(self, reason: str) -> Refused:
        return Refused(f"the kinds stay where they are: {reason}", where=self._mesh.name)

    # -- the whole process -----------------------------------------------------------------------

    async def write_back(self, tier: Tier) -> None:
        """Ensure an equal copy of every kind at a tier, as the process falls asleep."""
        self.is_asleep = True
        async with self._lock:
            for kind in self._kinds.values():
                await self._write_back(kind, tier, Cancellation())

    async def offload(self, tier: Tier) -> None:
        """Move every kind to a tier, as the process falls asleep."""
        self.is_asleep = True
        async with self._lock:
            for kind in self._kinds.values():
                await self._offload(kind, tier, Cancellation())

    async def load(self) -> None:
        """Load every kind; raise the first CorruptData once all others are loaded."""
        async with self._lock:
            found: CorruptData | None = None
            for kind in self._kinds.values():
                try:
                    await self._load(kind, Cancellation())
                except CorruptData as error:
                    found = found or error
            if found is not None:
                raise found

    async def drop(self) -> None:
        """Free all kinds, each of which can be rebuilt, as the process falls asleep."""
        self.is_asleep = True
        async with self._lock:
            for kind in self._kinds.values():
                await self._drop(kind)

    async def drop_copies(self, *, even_if_offloaded: bool = False) -> None:
        """Delete the record, and the copies of the kinds on the accelerator.

        `even_if_offloaded`: of the other kinds, too, which are lost then. Copies of an unavailable
        worker end with it.
        """
        async with self._lock:
            await self._record.drop_all()  # first, as it names the copies
            kinds = [
                kind for kind in self._kinds.values() if even_if_offloaded or kind.memory is None
            ]
            await asyncio.gather(*(kind.storage.drop_all() for kind in kinds))
            for kind in kinds:
                kind.equal_tiers.clear()

    async def save_record(self, tier: Tier, state: Mapping[str, Any]) -> None:
        """Save `state`, and which copies it consists of, so that a later process can resume.

        `write_back` to this tier comes before.

        Raises:
            CorruptData: The content was lost.
        """
        if self.loss is not None:
            raise self.loss
        copied = [kind for kind in self._kinds.values() if tier in kind.equal_tiers]
        size = sum(kind.storage.stored_bytes[tier] for kind in copied)
        copies = {kind.name: kind.copy_id for kind in copied}
        await self._record.save(tier, {**state, COPIES: copies, COPIES_BYTES: size}, _NoTensors())
        for other in COPY_TIERS:
            if other != tier:
                await self._record.drop(other)

    async def move_copies(self, tier: Tier) -> None:
        """Move the record and all copies to a tier, while the process sleeps."""
        await self.offload(tier)
        for other in COPY_TIERS:
            if other != tier and self._record.stored_bytes[other]:
                await self._record.move(other, tier)

    async def find_record(self) -> tuple[Tier, dict[str, Any]] | None:
        """Find the record of the state that an earlier run of this process has saved."""
        found = await self._record.find_copies()
        return (found[0][0], found[0][1].metadata) if found else None

    async def resume(self, record: Mapping[str, Any]) -> None:
        """Restore the kinds that the next step depends on from the copies that a record names.

        Raises:
            Refused: A copy is missing or of another state.
            CorruptData: A copy has changed.
        """
        async with self._lock:
            for name in (TensorKind.PARAMETERS, TensorKind.OPTIMIZER):
                if (kind := self._kinds.get(name)) is None:
                    continue
                expected = record[COPIES].get(name)
                copies = await kind.storage.find_copies()
                tiers = [tier for tier, head in copies if head.metadata[COPY_ID] == expected]
                memory = await self.run(kind.tensors.collect)
                if not tiers and memory.total_bytes:
                    raise self._refuse(f"there is no copy of the saved {name}")
                for tier in tiers[:1]:
                    await kind.storage.restore(tier, memory)

    # -- a kind ----------------------------------------------------------------------------------

    async def _write_back(
        self, kind: _Kind, tier: Tier, cancellation: Cancellation
    ) -> ReleasableMemory | None:
        """Ensure an equal copy at a tier; return the memory that `release` may free, or None."""
        if kind.memory is not None:
            if kind.equal_tiers and tier not in kind.equal_tiers:
                await self._move_copy(kind, tier, cancellation)
            return None
        if self.loss is not None:
            raise self.loss
        memory: ReleasableMemory = await self.run(kind.tensors.collect)
        if not memory.total_bytes:
            return None
        if tier not in kind.equal_tiers:
            copy_id = kind.copy_id if kind.equal_tiers else self._mesh.random.hex_token(8)
            began = self._mesh.clock.monotonic()
            await self._save(kind, tier, copy_id, memory, cancellation)
            copied = sum(memory.sizes_bytes.values())
            kind.last_save = copied, self._mesh.clock.monotonic() - began
            kind.copy_id = copy_id
            await self._drop_other_copies(kind, kind.equal_tiers | {tier})
            kind.equal_tiers.add(tier)
        return memory

    async def _offload(self, kind: _Kind, tier: Tier, cancellation: Cancellation) -> None:
        if kind.memory is None and kind.tensors.prefers_drop():
            await self._drop(kind)
            return
        memory = await self._write_back(kind, tier, cancellation)
        if memory is not None:
            kind.memory = memory
            await self.run(memory.release)
        if kind.equal_tiers:
            await self._drop_other_copies(kind, {tier})
            kind.equal_tiers &= {tier}

    async def _save(
        self,
        kind: _Kind,
        tier: Tier,
        copy_id: str,
        memory: ReleasableMemory,
        cancellation: Cancellation,
    ) -> None:
        """Save a copy; an outdated one stays until then, if there is room for both."""
        save = partial(kind.storage.save, tier, {COPY_ID: copy_id}, memory, cancellation)
        try:
            await save()
        except StorageFull:
            await kind.storage.drop(tier)  # it may be of an earlier run of this process
            await save()

    async def _move_copy(self, kind: _Kind, tier: Tier, cancellation: Cancellation) -> None:
        source = next(one for one in COPY_TIERS if one in kind.equal_tiers)
        await kind.storage.move(source, tier, cancellation)
        kind.equal_tiers = {tier}

    async def _drop_other_copies(self, kind: _Kind, retained: set[Tier]) -> None:
        for tier in COPY_TIERS:
            if tier not in retained and kind.storage.stored_bytes[tier]:
                await kind.storage.drop(tier)

    async def _drop(self, kind: _Kind) -> None:
        memory: ReleasableMemory = kind.memory or await self.run(kind.tensors.collect)
        if not memory.total_bytes:
            return
        if kind.tensors.rebuild is None:
            raise self._refuse(f"the {kind.name} cannot be rebuilt")
        if kind.memory is None:
            kind.memory = memory
            await self.run(memory.release)
        kind.equal_tiers.clear()
        await kind.storage.drop_all()

    async def _load(self, kind: _Kind, cancellation: Cancellation) -> None:
        memory = kind.memory
        if memory is None:
            return
        if not kind.equal_tiers and kind.tensors.rebuild is not None:
            await kind.tensors.rebuild(memory)
            kind.memory = None
            return
        await self.reallocate(memory)
        try:
            await self._restore(kind, memory, cancellation)
            await self.run(memory.refresh)
        except CorruptData as error:
            if kind.tensors.rebuild is None:
                kind.memory, self.loss = None, error
                raise
            await self.run(memory.release)
            await kind.tensors.rebuild(memory)
        except BaseException:
            await self.run(memory.release)
            raise
        kind.memory = None

    async def reallocate(self, memory: ReleasableMemory) -> None:
        """Allocate the memory of a kind again, without content; Refused without enough memory."""
        try:
            await self.run(memory.reallocate)
        except MemoryError as error:
            raise Refused(
                f"cannot allocate {memory.total_bytes} bytes of memory: {error}",
                where=self._mesh.name,
                fix="Free memory, for instance by offloading other instances to disk",
            ) from error

    async def _restore(
        self, kind: _Kind, target: OffloadTarget, cancellation: Cancellation
    ) -> None:
        """Restore a kind from the first copy that has not changed."""
        found = CorruptData(f"no copy of the {kind.name} is left", where=self._mesh.name)
        for tier in [tier for tier in COPY_TIERS if tier in kind.equal_tiers]:
            try:
                began = self._mesh.clock.monotonic()
                await kind.storage.restore(tier, target, cancellation)
                copied = sum(target.sizes_bytes.values())
                kind.last_restore = copied, self._mesh.clock.monotonic() - began
                return
            except CorruptData as error:
                found = error
                kind.equal_tiers.discard(tier)
        raise found


class _NoTensors:
    """Source without tensors: the content of a record is its metadata."""

    def __init__(self) -> None:
        self.sizes_bytes: dict[str, int] = {}
        self.piece_bytes = PIECE_BYTES

    def read_into(self, name: str, start: int, out: Octets) -> None:
        raise KeyError(name)
