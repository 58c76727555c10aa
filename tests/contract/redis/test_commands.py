"""Random commands, one after the other, from a client and from a script."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.sim.redis.client import SimulatedSyncRedis
from meshrl.sim.redis.server import RedisServer
from tests.contract.redis.conftest import Pair, outcome
from tests.contract.state.state_bench import HandClock

KEYS = st.sampled_from(["one", "two", "three"])  # few, so that kinds meet
FIELDS = st.sampled_from(["f", "g", "é", ""])
TEXTS = st.sampled_from(["", "x", "ü \x00 \n", "12", "-7", "007", "1.5", "0"])
MEMBERS = st.sampled_from(["a", "b", "ab", "9", "10"])
SCORES = st.sampled_from(["1", "2", "2.5", "-3", "1e3", "inf", "-inf", "1750000000000", "x", "nan"])
BOUNDS = st.sampled_from(["-inf", "+inf", "1", "(1", "2", "(2", "2.5", "(-3", "1e3", "(inf", "no"])
PLACES = st.sampled_from(["0", "1", "2", "-1", "-2", "-9", "9", "1.0"])
PASSED = "return redis.call(unpack(ARGV))"
CAUGHT = """local r = redis.pcall(unpack(ARGV))
return type(r) == 'table' and r.err and string.match(r.err, '^%S+') or 'fine'"""


def words(name: str, *parts: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(st.just(name), *parts)


def many(name: str, *parts: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """The command on a key, with one to three of what it may repeat."""
    repeated = st.lists(st.tuples(*parts), min_size=1, max_size=3)
    return st.builds(lambda key, more: (name, key, *sum(more, ())), KEYS, repeated)


COMMANDS = st.one_of(
    words("GET", KEYS),
    words("SET", KEYS, TEXTS),
    words("SET", KEYS, TEXTS, st.just("NX")),
    words("SET", KEYS, TEXTS, st.just("PX"), st.sampled_from(["600000", "0", "x"])),
    words("INCR", KEYS),
    words("PEXPIRE", KEYS, st.sampled_from(["600000", "x"])),
    words("EXISTS", KEYS, KEYS),
    words("DEL", KEYS, KEYS),
    many("HSET", FIELDS, TEXTS),
    words("HSET", KEYS, FIELDS),
    words("HSETNX", KEYS, FIELDS, TEXTS),
    words("HGET", KEYS, FIELDS),
    words("HEXISTS", KEYS, FIELDS),
    many("HMGET", FIELDS),
    words("HGETALL", KEYS),
    many("HDEL", FIELDS),
    words("HINCRBY", KEYS, FIELDS, st.sampled_from(["1", "-2", "x", "01"])),
    many("RPUSH", TEXTS),
    words("LPOP", KEYS),
    words("LRANGE", KEYS, PLACES, PLACES),
    many("SADD", MEMBERS),
    many("SREM", MEMBERS),
    words("SISMEMBER", KEYS, MEMBERS),
    words("SMEMBERS", KEYS),
    many("ZADD", SCORES, MEMBERS),
    many("ZREM", MEMBERS),
    words("ZCARD", KEYS),
    words("ZRANGE", KEYS, PLACES, PLACES),
    words("ZRANGEBYSCORE", KEYS, BOUNDS, BOUNDS),
    words("ZREMRANGEBYSCORE", KEYS, BOUNDS, BOUNDS),
)
VIA = st.sampled_from(["", "", PASSED, CAUGHT])


def alike(name: str, answer: Any) -> Any:
    """HGETALL and SMEMBERS have no order."""
    if name == "SMEMBERS" and isinstance(answer, list):
        return set(answer)
    if name == "HGETALL" and isinstance(answer, list):
        return dict(zip(answer[::2], answer[1::2], strict=True))
    return answer


@settings(max_examples=60)
@given(commands=st.lists(st.tuples(COMMANDS, VIA), min_size=10, max_size=40))
def test_random_commands_are_answered_alike(pair: Pair, commands: list[Any]) -> None:
    pair.clear()
    for command, script in commands:
        sent = ("EVAL", script, 0, *command) if script else command
        expected, answer = outcome(pair.real, sent), outcome(pair.simulated, sent)
        assert alike(command[0], answer) == alike(command[0], expected), sent


@settings(max_examples=20)
@given(
    added=st.lists(FIELDS, min_size=1, max_size=8),
    ranges=st.lists(
        st.tuples(
            st.sampled_from(["XRANGE", "XREVRANGE"]),
            st.integers(-1, 8),
            st.integers(-1, 8),
            st.sampled_from(["", "("]),
            st.sampled_from([(), ("COUNT", 2), ("COUNT", 100)]),
        ),
        max_size=10,
    ),
)
def test_streams_are_read_alike_by_the_ids_that_each_server_gave(
    pair: Pair, added: list[str], ranges: list[Any]
) -> None:
    pair.clear()

    def read(client: Any) -> list[Any]:
        ids = [client.execute_command("XADD", "s", "*", "f", text) for text in added]
        assert sorted(ids, key=lambda i: tuple(map(int, i.split("-")))) == ids
        seen = []
        for name, low, high, leave_out, count in ranges:
            first = leave_out + ids[low] if 0 <= low < len(ids) else "-"
            last = leave_out + ids[high] if 0 <= high < len(ids) else "+"
            ends = (first, last) if name == "XRANGE" else (last, first)
            rows = outcome(client, (name, "s", *ends, *count))
            seen.append([(ids.index(row_id), fields) for row_id, fields in rows])
        return seen

    assert read(pair.simulated) == read(pair.real)


@settings(max_examples=20)
@given(added=st.integers(1, 8), cuts=st.lists(st.integers(0, 8), max_size=4))
def test_streams_are_trimmed_alike_and_give_no_id_twice(
    pair: Pair, added: int, cuts: list[int]
) -> None:
    pair.clear()

    def trimmed(client: Any) -> list[Any]:
        def add() -> str:
            return str(client.execute_command("XADD", "s", "*", "f", "x"))

        ids = [add() for _ in range(added)]
        seen: list[Any] = []
        for cut in cuts:
            least = ids[cut] if cut < len(ids) else f"{int(ids[-1].split('-')[0]) + 1}"
            seen.append(client.execute_command("XTRIM", "s", "MINID", least))
            seen.append(client.execute_command("XLEN", "s"))
            ids.append(add())
            seen.append([ids.index(i) for i, _ in client.execute_command("XRANGE", "s", "-", "+")])
        assert len(set(ids)) == len(ids)
        return seen

    assert trimmed(pair.simulated) == trimmed(pair.real)


def test_streams_are_read_by_times_and_refuse_what_is_no_id(pair: Pair) -> None:
    pair.clear()
    for word in ("0", "(0-0", "5-1", "x", "1-x", "(-", ""):
        pair.both("XRANGE", "s", word, "+")
    pair.both("XTRIM", "s", "MINID", "5-1")
    pair.both("XTRIM", "s", "MINID", "x")
    pair.both("XLEN", "s")
    pair.both("SET", "s", "no stream")
    pair.both("XLEN", "s")
    pair.both("XTRIM", "s", "MINID", "5")
    pair.both("XADD", "s", "*", "f", "x")
    pair.both("XRANGE", "s", "-", "+")


def test_an_entry_may_be_added_under_an_id_above_all_others(pair: Pair) -> None:
    pair.clear()
    for word in ("5-1", "5-1", "4-9", "5-2", "6-0"):
        pair.both("XADD", "s", word, "f", word)
    pair.both("XRANGE", "s", "-", "+")


def test_what_the_client_makes_of_replies_is_what_redis_py_makes_of_them(pair: Pair) -> None:
    pair.clear()
    for sent in (
        ("PING",),
        ("SET", "a", 1),
        ("SET", "a", 1.5, "NX"),
        ("GET", "a"),
        ("GET", "none"),
        ("DBSIZE",),
        ("HMGET", "none", "f"),
        ("SCRIPT", "LOAD", "return 1"),
        ("EVALSHA", "e0e1f9fabfc9d4800c877a703b823ac0578ff8db", 0),
        ("SCRIPT", "FLUSH"),
        ("EVALSHA", "e0e1f9fabfc9d4800c877a703b823ac0578ff8db", 0),
        ("FLUSHALL",),
    ):
        pair.both(*sent)
    real, simulated = pair.real.execute_command("TIME"), pair.simulated.execute_command("TIME")
    assert [type(part) for part in simulated] == [type(part) for part in real]
    assert simulated == (int(HandClock().wall()), 0)


@settings(max_examples=60)
@given(
    writes=st.lists(
        st.one_of(
            st.tuples(st.just("ZADD"), st.integers(0, 40).map(str), st.integers(0, 30).map(str)),
            st.tuples(st.just("ZREM"), st.integers(0, 30).map(str)),
        ),
        max_size=120,
    )
)
def test_a_sorted_set_keeps_its_order_through_many_writes(
    writes: list[tuple[str, ...]],
) -> None:
    client = SimulatedSyncRedis(RedisServer(HandClock()))
    scores: dict[str, int] = {}
    for name, *rest in writes:
        client.execute_command(name, "z", *rest)
        if name == "ZADD":
            scores[rest[1]] = int(rest[0])
        else:
            scores.pop(rest[0], None)
    expected = sorted(scores, key=lambda member: (scores[member], member))
    assert client.execute_command("ZRANGE", "z", 0, -1) == expected
