"""Bytes that a worker's instances use of its accelerator, host memory and disk, with admission."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from meshrl.common.base.errors import StorageFull
from meshrl.common.mesh.process.host import Host
from meshrl.common.state.pool.workers.rows import Tier, TierBytes

# Left to other programs of the host: a move that takes the last bytes would end processes that
# are not part of it.
SPARE_MEMORY_BYTES = 256 << 20
SPARE_DISK_BYTES = 256 << 20
BUDGET_FIELDS = {Tier.ACCELERATOR: "accelerator", Tier.MEMORY: "memory", Tier.DISK: "disk"}


class OverBudget(StorageFull):
    """Error raised when an instance has too little room.

    `already_used`: the instance occupies the bytes already, so it must end.
    """

    code = "over_budget"

    def __init__(
        self, message: str, *, where: str = "", fix: str = "", already_used: bool = False
    ) -> None:
        super().__init__(message, where=where, fix=fix)
        self.already_used = already_used


class Budgets:
    """Bytes in use and claimed, by process name, against the worker's budgets.

    A move is claimed before it begins, so that two concurrent moves never take the same room.
    """

    def __init__(
        self,
        limits: TierBytes,
        host: Host,
        directory: Path,
        count_unused: Callable[[], int] = lambda: 0,
    ) -> None:
        """Create budgets.

        Args:
            limits: Budgets of the worker.
            host: Its host.
            directory: A directory on the disk that the disk tier uses.
            count_unused: Returns the bytes of memory that segments release on demand.
        """
        self.limits, self._count_unused = limits, count_unused
        self._host, self._directory = host, directory
        self._usage: dict[str, TierBytes] = {}
        self._claims: dict[str, tuple[Tier, int]] = {}
        self._peak_accelerator_bytes: dict[str, int] = {}  # the most of each process
        # Processes whose tensor kinds can leave the accelerator while others compute.
        self._movable: set[str] = set()

    def get_usage(self, name: str) -> TierBytes:
        """Return the last reported bytes of a process name; zeros if none is known."""
        return self._usage.get(name, TierBytes())

    def get_peak_accelerator_bytes(self, name: str) -> int:
        """Return the most accelerator bytes that a process has reported so far."""
        return self._peak_accelerator_bytes.get(name, 0)

    def sum_used_bytes(self, tier: Tier, excluding: str = "") -> int:
        """Return the bytes of a tier that all processes except `excluding` use or have claimed."""
        used = self._list_used_bytes(tier)
        return sum(size_bytes for name, size_bytes in used.items() if name != excluding)

    def stats(self) -> dict[str, int]:
        """Return the bytes used or claimed by tier, and the budget of each tier that has one."""
        used = {str(tier): self.sum_used_bytes(tier) for tier in BUDGET_FIELDS}
        budgets = {
            f"{tier}_budget": int(getattr(self.limits, field))
            for tier, field in BUDGET_FIELDS.items()
        }
        return used | {name: limit_bytes for name, limit_bytes in budgets.items() if limit_bytes}

    def check_room(self, name: str, tier: Tier, size_bytes: int) -> None:
        """Raise OverBudget unless a tier has so many bytes beside what other processes use."""
        field = BUDGET_FIELDS[tier]
        limit, used = int(getattr(self.limits, field)), self.sum_used_bytes(tier, excluding=name)
        if limit and used + size_bytes > limit:
            raise OverBudget(
                f"{name} needs {size_bytes} bytes of {tier}, and other instances use {used} "
                f"of {limit}",
                where=f"--{field}-bytes",
                fix="Move another instance away, or give the worker a larger budget",
            )

    def check_start(self, name: str) -> None:
        """Raise OverBudget when other processes use all of the accelerator.

        The bytes that the new process will take are unknown.
        """
        limit, used = self.limits.accelerator, self.sum_used_bytes(Tier.ACCELERATOR, excluding=name)
        if limit and used >= limit:
            raise OverBudget(
                f"{name} needs the accelerator, and other instances use {used} of its {limit} "
                "bytes",
                where="--accelerator-bytes",
                fix="Wait: the worker starts the instance when others free memory",
            )

    def claim(self, name: str, tier: Tier) -> None:
        """Claim the room for a move to a tier until `record_usage` or `cancel_claim`.

        Raises:
            OverBudget: The budget or the host has too little room.
        """
        if tier == Tier.ABSENT:
            return
        # On the accelerator a move takes the peak (an engine's weights are not offloaded below
        # it), or what is reserved for a process that has not reported yet; elsewhere it takes what
        # is on the accelerator now, or has come from there.
        usage = self.get_usage(name)
        copied_bytes = max(usage.memory, usage.disk)
        offloaded_bytes = usage.accelerator or copied_bytes
        if name in self._movable:  # some kinds are on the accelerator, others are not
            peak_bytes = self.get_peak_accelerator_bytes(name)
            offloaded_bytes = min(peak_bytes, usage.accelerator + copied_bytes)
        if tier == Tier.ACCELERATOR:
            reserved_bytes = self._claims[name][1] if self.has_reservation(name) else 0
            size_bytes = max(reserved_bytes, self.get_peak_accelerator_bytes(name))
        else:
            size_bytes = offloaded_bytes
        self.check_room(name, tier, size_bytes)
        self._check_host(name, tier, size_bytes)
        self._claims[name] = (tier, size_bytes)

    def reserve(self, name: str, size_bytes: int) -> None:
        """Claim accelerator bytes for a process that starts or wakes, for which there is room."""
        self._claims[name] = (Tier.ACCELERATOR, size_bytes)

    def has_reservation(self, name: str) -> bool:
        """Return True while a claim of accelerator bytes holds for the process."""
        return name in self._claims and self._claims[name][0] == Tier.ACCELERATOR

    def record_kinds(self, name: str, usage: TierBytes) -> None:
        """Replace the bytes of a process by those of its tensor kinds; its claim stays."""
        self._movable.add(name)
        self._store_usage(name, usage)

    def record_fixed(self, name: str) -> None:
        """Record that a process has no tensor kinds that can leave the accelerator."""
        self._movable.discard(name)

    def record_usage(self, name: str, usage: TierBytes, *, can_move: bool = False) -> None:
        """Replace the bytes of a process by those that it reports; its claim ends.

        `can_move`: it computes in time slices, so that its kinds can leave the accelerator.

        Raises:
            OverBudget: The accelerator's budget is exceeded, whatever the kinds of other processes
                leave. The usage is recorded nevertheless.
        """
        self._claims.pop(name, None)
        self._store_usage(name, usage)
        if can_move:
            self._movable.add(name)
        limit = self.limits.accelerator
        used = usage.accelerator + sum(
            size_bytes
            for other, size_bytes in self._list_used_bytes(Tier.ACCELERATOR).items()
            if other != name and other not in self._movable
        )
        if limit and used > limit and usage.accelerator:
            raise OverBudget(
                f"{name} uses {usage.accelerator} bytes of the accelerator, which makes {used} "
                f"of {limit}",
                where="--accelerator-bytes",
                fix="Place the instance where more memory is free, or declare a larger budget",
                already_used=True,
            )

    def cancel_claim(self, name: str) -> None:
        """Cancel the claim of a move that did not happen; the process keeps its previous usage."""
        self._claims.pop(name, None)

    def record_exit(self, name: str) -> None:
        """Clear the accelerator bytes and the claim of a process that has exited.

        Its bytes in memory and on disk still count: the worker owns the offloaded state.
        """
        self._claims.pop(name, None)
        if name in self._usage:
            self._usage[name] = replace(self._usage[name], accelerator=0)

    def remove(self, name: str) -> None:
        """Remove a process name with all its bytes, peak and claim."""
        self._movable.discard(name)
        for table in (self._claims, self._usage, self._peak_accelerator_bytes):
            table.pop(name, None)

    def _store_usage(self, name: str, usage: TierBytes) -> None:
        self._usage[name] = usage
        self._peak_accelerator_bytes[name] = max(
            usage.accelerator, self._peak_accelerator_bytes.get(name, 0)
        )

    def _list_used_bytes(self, tier: Tier) -> dict[str, int]:
        """Return the bytes of a tier that each process uses or has claimed."""
        field = BUDGET_FIELDS[tier]
        claims = {name: size for name, (target, size) in self._claims.items() if target == tier}
        return {
            name: max(int(getattr(self.get_usage(name), field)), claims.get(name, 0))
            for name in self._usage.keys() | claims.keys()
        }

    def _check_host(self, name: str, tier: Tier, size_bytes: int) -> None:
        """Raise OverBudget if the host has too little free memory or disk for the tier."""
        if tier == Tier.ACCELERATOR:
            return
        free_space = self._host.measure_free_space(self._directory)
        free_bytes, spare_bytes = (
            (free_space.memory_bytes + self._count_unused(), SPARE_MEMORY_BYTES)
            if tier == Tier.MEMORY
            else (free_space.disk_bytes, SPARE_DISK_BYTES)
        )
        more_bytes = max(0, size_bytes - int(getattr(self.get_usage(name), BUDGET_FIELDS[tier])))
        if more_bytes and free_bytes - more_bytes < spare_bytes:
            raise OverBudget(
                f"{name} needs {more_bytes} bytes of {tier}, and this host has {free_bytes} free, "
                f"of which {spare_bytes} are reserved",
                where=str(self._directory) if tier == Tier.DISK else "MemAvailable",
                fix="Free some: other processes of this host use the rest",
            )
