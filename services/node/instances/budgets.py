"""How many bytes the residents of a worker take of its accelerator, of the host's memory and of its
disk, and whether one more move fits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshrl.common.base.errors import StorageFull
from meshrl.common.mesh.process.host import Host
from meshrl.common.state.pool.workers.rows import Tier, TierBytes

# Left to everybody else on the host: a move that takes the last of it ends processes that had no
# part in it.
SPARE_MEMORY_BYTES = 256 << 20
SPARE_DISK_BYTES = 256 << 20
BUDGET_FIELDS = {Tier.ACCELERATOR: "accelerator", Tier.MEMORY: "memory", Tier.DISK: "disk"}


class OverBudget(StorageFull):
    """There is too little room for a resident; `held`: it has taken it already."""

    code = "over_budget"

    def __init__(
        self, message: str, *, where: str = "", fix: str = "", already_used: bool = False
    ) -> None:
        super().__init__(message, where=where, fix=fix)
        self.already_used = already_used


class Budgets:
    """Bytes by the name of the process that has them. A move is claimed before it begins, so that
    two that begin together do not take the same room.
    """

    def __init__(self, limits: TierBytes, host: Host, directory: Path) -> None:
        """`directory` is on the disk that the tier of that name uses."""
        self.limits = limits
        self._host, self._directory = host, directory
        self._usage: dict[str, TierBytes] = {}
        self._claims: dict[str, tuple[Tier, int]] = {}
        self._peak_accelerator_bytes: dict[
            str, int
        ] = {}  # that a process has had on the accelerator

    def get_usage(self, name: str) -> TierBytes:
        return self._usage.get(name, TierBytes())

    def get_peak_accelerator_bytes(self, name: str) -> int:
        """The most bytes of the accelerator that a process has told of so far."""
        return self._peak_accelerator_bytes.get(name, 0)

    def used_bytes(self, tier: Tier, excluding: str = "") -> int:
        """Bytes of a tier that all have or are about to take, but for one of them."""
        field = BUDGET_FIELDS[tier]
        claims = {name: size for name, (to, size) in self._claims.items() if to == tier}
        return sum(
            max(int(getattr(self.get_usage(name), field)), claims.get(name, 0))
            for name in self._usage.keys() | claims.keys()
            if name != excluding
        )

    def stats(self) -> dict[str, int]:
        """Bytes that all have or are about to take, by tier, and those of its budget, if any."""
        found = {str(tier): self.used_bytes(tier) for tier in BUDGET_FIELDS}
        budget = {
            f"{tier}_budget": int(getattr(self.limits, at)) for tier, at in BUDGET_FIELDS.items()
        }
        return found | {name: most for name, most in budget.items() if most}

    def check_start(self, name: str) -> None:
        """OverBudget when others have all of the accelerator; what it will take is not known."""
        limit, used = self.limits.accelerator, self.used_bytes(Tier.ACCELERATOR, excluding=name)
        if limit and used >= limit:
            raise OverBudget(
                f"{name} needs the accelerator, of whose {limit} bytes others have {used}",
                where="--accelerator-bytes",
                fix="It is started when they give some back",
            )

    def claim(self, name: str, tier: Tier) -> None:
        """Takes the room for a move to a tier until `settled` or `dropped`; OverBudget, with the
        numbers, when the budget or the host has too little.
        """
        if tier == Tier.ABSENT:
            return
        # On the accelerator a move takes as much as ever (an engine's weights are not kept below
        # it), elsewhere what is on the accelerator now, or has come from there.
        held, field = self.get_usage(name), BUDGET_FIELDS[tier]
        kept = held.accelerator or max(held.memory, held.disk)
        size = self.get_peak_accelerator_bytes(name) if tier == Tier.ACCELERATOR else kept
        limit = int(getattr(self.limits, field))
        used = self.used_bytes(tier, excluding=name)
        if limit and used + size > limit:
            raise OverBudget(
                f"{name} would take {size} bytes of {tier}, and others have {used} of {limit}",
                where=f"--{field}-bytes",
                fix="Move another resident away, or give the worker a larger budget",
            )
        self._check_host(name, tier, size)
        self._claims[name] = (tier, size)

    def record_usage(self, name: str, usage: TierBytes) -> None:
        """A process has told what it takes. OverBudget when it turns out to be more of the
        accelerator than there is: it is on record all the same, until it has `ended`.
        """
        self._claims.pop(name, None)
        self._usage[name] = usage
        self._peak_accelerator_bytes[name] = max(
            usage.accelerator, self._peak_accelerator_bytes.get(name, 0)
        )
        limit, used = self.limits.accelerator, self.used_bytes(Tier.ACCELERATOR)
        if limit and used > limit and usage.accelerator:
            raise OverBudget(
                f"{name} takes {usage.accelerator} bytes of the accelerator, which makes {used} of "
                f"{limit}",
                where="--accelerator-bytes",
                fix="Place it where there is more room, or declare a larger budget",
                already_used=True,
            )

    def cancel_claim(self, name: str) -> None:
        """A move did not happen: what the process has is what it had."""
        self._claims.pop(name, None)

    def record_exit(self, name: str) -> None:
        """A process has ended. What is left of it in memory and on disk is its worker's."""
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
                f"{name} would take {more} bytes of {tier}, and this host has {left} left, of "
                f"which {spare} stay free",
                where=str(self._directory) if tier == Tier.DISK else "MemAvailable",
                fix="Free some: other processes of this host have the rest",
            )
