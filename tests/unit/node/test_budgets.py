"""What residents of a worker take is accounted; a move without room is refused by its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import StorageFull
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.ends.limits import Room
from meshrl.common.state.pool.workers.rows import Budget, Tier
from meshrl.services.node.residents.budgets import SPARE_DISK, SPARE_MEMORY, Budgets
from tests.simulated_host import SimulatedHost

A, B = "engine/g0.0", "trainer/j"


@pytest.fixture
def host() -> SimulatedHost:
    return SimulatedHost(SystemClock(), Random())


def budgets(host: SimulatedHost, **limits: int) -> Budgets:
    return Budgets(Budget(**limits), host, Path())


def test_no_two_hold_more_of_the_accelerator_at_once_than_there_is(host: SimulatedHost) -> None:
    found = budgets(host, accelerator=100)
    found.settled(A, Budget(accelerator=60))
    found.check_start(B)
    with pytest.raises(StorageFull, match=r"takes 50 bytes of the accelerator, .* 110 of 100"):
        found.settled(B, Budget(accelerator=50))
    found.ended(B)
    found.claim(A, Tier.MEMORY)
    found.settled(A, Budget(memory=60))
    found.settled(B, Budget(accelerator=50))
    with pytest.raises(StorageFull, match=r"would take 60 bytes of accelerator, .* 50 of 100"):
        found.claim(A, Tier.ACCELERATOR)
    found.dropped(B)
    found.claim(A, Tier.ACCELERATOR)


def test_a_full_accelerator_takes_nobody_more(host: SimulatedHost) -> None:
    found = budgets(host, accelerator=100)
    found.settled(A, Budget(accelerator=100))
    with pytest.raises(StorageFull, match="others have 100"):
        found.check_start(B)
    found.check_start(A)


def test_two_moves_that_begin_together_do_not_take_the_same_room(host: SimulatedHost) -> None:
    found = budgets(host, memory=100)
    found.settled(A, Budget(accelerator=60))
    found.settled(B, Budget(accelerator=60))
    found.claim(A, Tier.MEMORY)
    with pytest.raises(StorageFull, match="would take 60 bytes of memory, and others have 60"):
        found.claim(B, Tier.MEMORY)
    found.unclaimed(A)
    found.claim(B, Tier.MEMORY)
    found.claim(B, Tier.ABSENT)


def test_memory_and_disk_that_others_of_the_host_have_are_not_taken(host: SimulatedHost) -> None:
    found = budgets(host)
    found.settled(A, Budget(accelerator=60))
    host.left = Room(memory=SPARE_MEMORY + 59, disk=SPARE_DISK + 60)
    with pytest.raises(StorageFull, match=r"this host has \d+ left"):
        found.claim(A, Tier.MEMORY)
    found.claim(A, Tier.DISK)
    found.settled(A, Budget(disk=60))
    host.left = Room(memory=SPARE_MEMORY + 60, disk=0)
    found.claim(A, Tier.MEMORY)
    found.claim(A, Tier.DISK)


def test_what_has_slept_needs_all_that_it_had_when_it_wakes(host: SimulatedHost) -> None:
    found = budgets(host, accelerator=100)
    found.settled(A, Budget(accelerator=80))
    found.settled(A, Budget(memory=10))  # its weights are in the store
    found.settled(B, Budget(accelerator=30))
    with pytest.raises(StorageFull, match="would take 80 bytes of accelerator"):
        found.claim(A, Tier.ACCELERATOR)


def test_what_is_held_of_each_tier_is_told_beside_its_budget(host: SimulatedHost) -> None:
    found = budgets(host, accelerator=100)
    found.settled(A, Budget(accelerator=60, memory=5))
    told = {"accelerator": 60, "memory": 5, "disk": 0, "accelerator_budget": 100}
    assert found.stats() == told
