"""Bytes that a worker's instances use of its accelerator, host memory and disk, with admission."""

from __future__ import annotations

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
    """Error raised when an instance has too little room; `usage`: it occupies the bytes already."""

    code = "over_budget"

    def __init__(
        self, message: str, *, where: str = "", fix: str = "", already_used: bool = False
    ) -> None:
        super().__init__(message, where=where, fix=fix)
        self.already_used = already_used


class Budgets:
    """Bytes by process name.

    A move is claimed before it begins, so that two concurrent moves never take the same room.
    """

    def __init__(self, limits: TierBytes, host: Host, directory: Path) -> None:
        """Create budgets; `directory` is on the disk that the disk tier uses."""
        self.limits = limits
        self._host, self._directory = host, directory
        self._usage: dict[str, TierBytes] = {}
        self._claims: dict[str, tuple[Tier, int]] = {}
        self._peak_accelerator_bytes: dict[
            str, int
        ] = {}  # highest accelerator bytes of each process

    def get_usage(self, name: str) -> TierBytes:
        return self._usage.get(name, TierBytes())

    def get_peak_accelerator_bytes(self, name: str) -> int:
        """Return the most accelerator bytes that a process has reported so far."""
        return self._peak_accelerator_bytes.get(name, 0)

    def used_bytes(self, tier: Tier, excluding: str = "") -> int:
        """Return the bytes of a tier that all but `excluding` use or have claimed."""
        field = BUDGET_FIELDS[tier]
        claims = {name: size for name, (to, size) in self._claims.items() if to == tier}
        return sum(
            max(int(getattr(self.get_usage(name), field)), claims.get(name, 0))
            for name in self._usage.keys() | claims.keys()
            if name != excluding
        )

    def stats(self) -> dict[str, int]:
        """Return the bytes used or claimed by tier, and the budget of each tier that has one."""
        found = {str(tier): self.used_bytes(tier) for tier in BUDGET_FIELDS}
        budget = {
            f"{tier}_budget": int(getattr(self.limits, at)) for tier, at in BUDGET_FIELDS.items()
        }
        return found | {name: most for name, most in budget.items() if most}

    def check_start(self, name: str) -> None:
        """Raise OverBudget when other processes use all of the accelerator.

        The bytes that the new process will take are unknown.
        """
        limit, used = self.limits.accelerator, self.used_bytes(Tier.ACCELERATOR, excluding=name)
        if limit and used >= limit:
            raise OverBudget(
                f"{name} needs the accelerator, and other instances use {used} of its {limit} "
                "bytes",
                where="--accelerator-bytes",
                fix="Wait: the worker starts the instance when others free memory",
            )

    def claim(self, name: str, tier: Tier) -> None:
        """Claim the room for a move to a tier until `record_usage` or `cancel_claim`.

        OverBudget, with the numbers, when the budget or the host has too little.
        """
        if tier == Tier.ABSENT:
            return
        # On the accelerator a move takes the peak (an engine's weights are not offloaded below
        # it); elsewhere it takes what is on the accelerator now, or has come from there.
        held, field = self.get_usage(name), BUDGET_FIELDS[tier]
        kept = held.accelerator or max(held.memory, held.disk)
        size = self.get_peak_accelerator_bytes(name) if tier == Tier.ACCELERATOR else kept
        limit = int(getattr(self.limits, field))
        used = self.used_bytes(tier, excluding=name)
        if limit and used + size > limit:
            raise OverBudget(
                f"{name} needs {size} bytes of {tier}, and other instances use {used} of {limit}",
                where=f"--{field}-bytes",
                fix="Move another instance away, or give the worker a larger budget",
            )
        self._check_host(name, tier, size)
        self._claims[name] = (tier, size)

    def record_usage(self, name: str, usage: TierBytes) -> None:
        """Record the bytes that a process reports.

        OverBudget when its accelerator bytes exceed the budget; the usage is recorded all the same,
        until `record_exit`.
        """
        self._claims.pop(name, None)
        self._usage[name] = usage
        self._peak_accelerator_bytes[name] = max(
            usage.accelerator, self._peak_accelerator_bytes.get(name, 0)
        )
        limit, used = self.limits.accelerator, self.used_bytes(Tier.ACCELERATOR)
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
        """Remove a process that has exited. The worker owns what remains of it in memory and on
        disk.
        """
        self._claims.pop(name, None)
        if name in self._usage:
            self._usage[name] = replace(self._usage[name], accelerator=0)

    def remove(self, name: str) -> None:
        for figures in (self._claims, self._usage, self._peak_accelerator_bytes):
            figures.pop(name, None)

    def _check_host(self, name: str, tier: Tier, size_bytes: int) -> None:
        if tier == Tier.ACCELERATOR:
            return
        room = self._host.measure_free_space(self._directory)
        left, spare = (
            (room.memory_bytes, SPARE_MEMORY_BYTES)
            if tier == Tier.MEMORY
            else (room.disk_bytes, SPARE_DISK_BYTES)
        )
        more = max(0, size_bytes - int(getattr(self.get_usage(name), BUDGET_FIELDS[tier])))
        if more and left - more < spare:
            raise OverBudget(
                f"{name} needs {more} bytes of {tier}, and this host has {left} free, of which "
                f"{spare} are reserved",
                where=str(self._directory) if tier == Tier.DISK else "MemAvailable",
                fix="Free some: other processes of this host use the rest",
            )
