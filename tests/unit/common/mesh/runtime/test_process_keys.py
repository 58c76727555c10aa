"""A key for each process: what is known of the keys of others, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from meshrl.common.base.errors import StateUnavailable, WrongKeys
from meshrl.common.mesh.transport.address import endpoint_of, key_text, keyed
from meshrl.common.mesh.transport.keys import KNOWN, SILENT_S, KeyPair, ProcessKeys

HOST = "gpu1-1f3a9c"


@dataclass
class Doors:
    """Whose keys are whose, as Redis would tell."""

    holders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    silent: bool = False
    asked: int = 0
    now: float = 0.0

    def whose(self, keys: Sequence[str]) -> list[tuple[str, ...]]:
        self.asked += 1
        if self.silent:
            raise StateUnavailable("Redis does not answer")
        return [self.holders.get(key, ()) for key in keys]

    def keys(self) -> ProcessKeys:
        return ProcessKeys(self.whose, lambda: self.now)

    def enter(self, role: str) -> bytes:
        """A new key."""
        public = KeyPair.new().public
        self.holders[key_text(public)] = (f"{role}@{HOST}",)
        return public


def test_a_process_answers_and_asks_with_one_pair_that_nobody_else_has() -> None:
    doors = Doors()
    mine, other = doors.keys(), doors.keys()
    assert mine.own != other.own
    assert mine.own.secret.decode() not in repr(mine.own)
    address = other.published("tcp://[::1]:5")
    assert endpoint_of(address) == "tcp://[::1]:5"
    assert mine.asked(address) == other.own.public


@pytest.mark.parametrize("address", ["tcp://a:1", "tcp://a:1#", "tcp://a:1#zz", "tcp://a:1#abcd"])
def test_an_address_without_a_key_is_refused(address: str) -> None:
    with pytest.raises(WrongKeys, match=r"names no key.*`meshrl down`"):
        Doors().keys().asked(address)


def test_a_key_is_looked_up_once_and_a_stranger_each_time() -> None:
    doors = Doors()
    keys, engine, stranger = doors.keys(), doors.enter("engine"), KeyPair.new().public
    assert [keys.role_of(engine) for _ in range(3)] == ["engine"] * 3
    assert doors.asked == 1
    assert keys.role_of(stranger) is None
    doors.holders[key_text(stranger)] = (f"worker@{HOST}",)  # it came a moment too early
    assert keys.role_of(stranger) == "worker"
    assert keys.role_now(keys.user_of(engine, "engine")) == "engine"


def test_while_redis_is_silent_the_known_come_in_and_others_are_to_try_again() -> None:
    doors = Doors()
    keys, known, unknown = doors.keys(), doors.enter("engine"), doors.enter("worker")
    keys.role_of(known)
    doors.silent = True
    assert keys.role_of(known) == "engine"
    for _ in range(5):
        with pytest.raises(StateUnavailable):
            keys.role_of(unknown)
    assert doors.asked == 2, "nobody waits for each of them"
    doors.silent, doors.now = False, SILENT_S
    assert keys.role_of(unknown) == "worker"


def test_a_key_that_was_revoked_is_forgotten_when_the_number_rises() -> None:
    doors, heard = Doors(), []
    keys, one, two = doors.keys(), doors.enter("engine"), doors.enter("worker")
    keys.heed(lambda: heard.append("changed"))
    keys.refresh(0)
    users = [keys.user_of(key, keys.role_of(key) or "") for key in (one, two)]
    before = doors.asked
    keys.refresh(0)
    assert doors.asked == before, "nothing has changed"
    del doors.holders[key_text(one)]
    doors.silent, heard[:] = True, []
    keys.refresh(1)
    assert keys.role_now(users[0]) == "engine" and not heard
    doors.silent = False
    keys.refresh(1)
    assert [keys.role_now(user) for user in users] == ["", "worker"] and heard
    keys.refresh(0)  # an older Redis: what it knows is another thing again
    assert doors.asked == before + 3


def test_in_doubt_a_key_is_asked_for_again_and_nothing_is_forgotten_before_the_answer() -> None:
    doors, heard = Doors(), []
    keys, engine = doors.keys(), doors.enter("engine")
    keys.heed(lambda: heard.append("changed"))
    key = keys.user_of(engine, keys.role_of(engine) or "")
    doors.silent = True
    with pytest.raises(StateUnavailable):
        keys.ask_again(key)
    assert keys.role_now(key) == "engine" and not heard
    doors.silent = False
    assert keys.ask_again(key) == (f"engine@{HOST}",)
    del doors.holders[key]
    assert keys.ask_again(key) == ()
    assert keys.role_now(key) == "" and len(heard) == 2


def test_keys_of_processes_that_have_gone_do_not_fill_the_memory() -> None:
    doors = Doors()
    keys = doors.keys()
    keys.refresh(0)
    for _ in range(KNOWN + 1):
        keys.role_of(doors.enter("rank"))
    doors.holders.clear()
    last = doors.enter("engine")
    keys.role_of(last)
    keys.refresh(0)
    assert len(keys._known) == 1 and keys.role_now(key_text(last)) == "engine"


def test_who_enters_the_key_of_another_takes_nothing_from_it() -> None:
    doors = Doors()
    keys, trainer = doors.keys(), doors.enter("trainer")
    doors.holders[key_text(trainer)] += ("engine@gpu2-77aa01", "trainer@gpu2-77aa01")
    assert keys.role_of(trainer) == keys.role_now(key_text(trainer)) == "engine trainer"


def test_an_address_is_an_endpoint_and_a_key() -> None:
    pair = KeyPair.new()
    assert keyed("tcp://h:1", pair.public) == f"tcp://h:1#{key_text(pair.public)}"
