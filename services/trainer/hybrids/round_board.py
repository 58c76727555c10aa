"""Board that assigns the blocks of a step's rounds to the core and its hybrids.

A block is a fixed number of successive rounds, and one process sums its gradients. A round is one
bin for each rank of the core. Both take blocks from the front. Every process computes the same sum
of a block, and blocks are added in their order. So the update does not depend on which hybrids took
part. The board is pure: it has no clock and no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Blocks that may be complete or in progress from the first missing one on. A rank retains its rows
# of each sum until it is added.
MAX_BLOCKS_AHEAD = 16


@dataclass(slots=True)
class BlockLease:
    """Lease of a block by a hybrid."""

    instance: str
    expires_s: float  # seconds; then the core computes the block itself


@dataclass
class RoundBoard:
    """Rounds of one update; more can be added until it is closed."""

    block_rounds: int = 1
    round_count: int = 0
    is_closed: bool = False
    completed_blocks: set[int] = field(default_factory=set)
    # computed by a hybrid, and not yet stored
    _arriving_blocks: set[int] = field(default_factory=set)
    _leases: dict[int, BlockLease] = field(default_factory=dict)
    # by block that the core computes: its next round, and the number of rounds with a result
    _core_rounds: dict[int, int] = field(default_factory=dict)
    _core_results: dict[int, int] = field(default_factory=dict)
    _first_incomplete: int = 0  # index of the first block without a result

    @property
    def block_count(self) -> int:
        """Number of blocks of the rounds so far."""
        return -(-self.round_count // self.block_rounds)

    @property
    def is_complete(self) -> bool:
        """True if the board is closed and every block has its sum."""
        return self.is_closed and len(self.completed_blocks) == self.block_count

    def add_rounds(self, count: int) -> None:
        """Add rounds to the end."""
        self.round_count += count

    def close(self) -> None:
        """Accept no more rounds; the last block may have fewer than the others."""
        self.is_closed = True
        for block in list(self._core_results):
            self._complete_if_computed(block)

    # -- hybrids ---------------------------------------------------------------------------------

    def lease_block(self, instance: str, expires_s: float, sent_block: int = -1) -> int | None:
        """Return the block that a hybrid computes, or lease it the first free one; None: none.

        `sent_block` is another block of the hybrid, which has computed it and sends its sum.
        """
        block = self._find_leased_block(instance, sent_block)
        if block is None:
            block = self._find_free_block()
        if block is not None:
            self._leases[block] = BlockLease(instance, expires_s)
        return block

    def extend_lease(self, block: int, expires_s: float) -> None:
        """Set the time at which a leased block becomes late."""
        self._leases[block].expires_s = expires_s

    def get_round(self, block: int, rounds_done: int) -> int | None:
        """Return the block's next round after `rounds_done` ones; None if there is none yet."""
        index = block * self.block_rounds + rounds_done
        return index if index < self._get_end(block) else None

    def is_last_round(self, block: int, rounds_done: int) -> bool:
        """Return True if no round follows the first `rounds_done` ones of a block."""
        index = block * self.block_rounds + rounds_done
        return rounds_done >= self.block_rounds or (self.is_closed and index >= self.round_count)

    def release_blocks(self, instance: str) -> bool:
        """Free the blocks leased to a hybrid; return True if any was still without a result."""
        leased = [b for b, lease in self._leases.items() if lease.instance == instance]
        for block in leased:
            del self._leases[block]
        return any(not self._is_taken(block) for block in leased)

    def claim_result(self, block: int, instance: str, rounds: int) -> bool:
        """Claim a hybrid's sum of a block; False if it is incomplete, or another computes it."""
        lease = self._leases.get(block)
        if (
            lease is None
            or lease.instance != instance
            or self._is_taken(block)
            or not self.is_last_round(block, rounds)
        ):
            return False
        self._arriving_blocks.add(block)
        return True

    def release_claim(self, block: int) -> None:
        """Free a block whose claimed sum could not be stored."""
        self._arriving_blocks.discard(block)
        self._leases.pop(block, None)

    def complete_block(self, block: int) -> None:
        """Count the sum of a block."""
        self._arriving_blocks.discard(block)
        self._leases.pop(block, None)
        self.completed_blocks.add(block)
        while self._first_incomplete in self.completed_blocks:
            self._first_incomplete += 1

    # -- the core --------------------------------------------------------------------------------

    def take_round(self, now_s: float) -> int | None:
        """Return the next round for the core; None if there is none yet.

        It is of a block that the core has begun, else of one with an expired lease, else of the
        first free one. Late blocks go first, because sums are added in the order of blocks: the
        sums after a late block have to be retained until then.
        """
        begun = [b for b, index in self._core_rounds.items() if index < self._get_end(b)]
        late = [
            block
            for block, lease in self._leases.items()
            if lease.expires_s <= now_s and not self._is_taken(block)
        ]
        block = min(begun) if begun else min(late) if late else self._find_free_block()
        if block is None:
            return None
        index = self._core_rounds.setdefault(block, block * self.block_rounds)
        self._core_rounds[block] += 1
        return index

    def complete_round(self, index: int) -> None:
        """Count a round that the core has computed."""
        block = index // self.block_rounds
        self._core_results[block] = self._core_results.get(block, 0) + 1
        self._complete_if_computed(block)

    def next_expiry(self) -> float | None:
        """Return the earliest expiry of a lease without a result."""
        waiting = [
            lease.expires_s for block, lease in self._leases.items() if not self._is_taken(block)
        ]
        return min(waiting, default=None)

    def _complete_if_computed(self, block: int) -> None:
        if self.is_last_round(block, self._core_results[block]):
            del self._core_results[block], self._core_rounds[block]
            self.complete_block(block)

    def _get_end(self, block: int) -> int:
        """Return the index after the block's last round so far."""
        return min((block + 1) * self.block_rounds, self.round_count)

    def _find_leased_block(self, instance: str, sent_block: int) -> int | None:
        leased = (b for b, lease in self._leases.items() if lease.instance == instance)
        return next((b for b in leased if b != sent_block and not self._is_taken(b)), None)

    def _find_free_block(self) -> int | None:
        first = self._first_incomplete
        for block in range(first, min(self.block_count, first + MAX_BLOCKS_AHEAD)):
            if block not in self._leases and not self._is_taken(block):
                return block
        return None

    def _is_taken(self, block: int) -> bool:
        return (
            block in self.completed_blocks
            or block in self._core_rounds
            or block in self._arriving_blocks
        )
