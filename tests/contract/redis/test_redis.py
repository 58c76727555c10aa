"""Random commands, and Lua with its numbers, replies and JSON, on each server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import OutOfMemoryError

from meshrl.sim.redis.client import SimulatedSyncRedisClient
from meshrl.sim.redis.server import FullResource, SimulatedRedisServer
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
# What a script returns, and so what a client gets.
REPLIES = r"""
3.99 | -3.99 | 0 | -1 | 1e15 | true | false | nil | 'x' | 12345678901 | {} | {1,2.7,'x'}
{1,nil,3} | {false,1,true} | {{1,{}},'a'} | {ok='fine'} | {err='ERR_not fine'} | {a=1}
redis.status_reply('A') | redis.error_reply('CODE text')
redis.error_reply('-CODE text') | redis.error_reply('text') | cjson.null | math.floor
tonumber('0x10') | tonumber('1e3') | tostring(1e15) | 2^53 .. '' | 0.1 .. '' | 1e14 .. ''
100000000000000 .. '' | 12345678901234567 .. '' | tostring(-0.0) | tostring(1/0) | #ARGV | #KEYS
string.format('%.17g', 0.1) | string.match('ab12', '%d+') | 1 < 2 | unpack({1, 2}) | ARGV[1]
redis.call('GET') | redis.call('HSET', 'h', 'f', 'x', 'g') | redis.call('INCR', 'text')
#redis.call('TIME') | redis.call('GET', true) | redis.call() | redis.call('GET', {})
type(redis.pcall('INCR', 'text').err) | select('#', redis.call('HMGET', 'h', 'f', 'g'))
type(redis.call('GET', 'none')) | redis.call('SET', 'k', 'v').ok | type(redis.call('LPOP', 'none'))
type(redis.call('HMGET', 'none', 'f')[1]) | type(redis.call('SET', 'text', 'x', 'NX'))
"""
FAILURES = r"""
undefined | 1 + nil | error('mine') | error({err='MY error'}) | undefined() | ('x').y.z | #nil
"""
# What cjson encodes.
VALUES = r"""
{} | {1,2,3} | {[1]=1,[3]=3} | {[1]=1,[10]=2} | {[1]=1,[11]=2} | {[1]=1,[100]=2} | {a=1} | {[0]=1}
{[1.5]=1} | {1,2,a=3} | {[-1]=1} | 0.1 | 1/3 | 1e14 | 12345678901234 | 1e100 | 1/0 | 0/0 | 5
-7.25 | 1750000000123 | 3.0 | 'plain' | 'quo"te\\/' | '\t\n\r\b\f\1\31\127' | 'é' | '\0' | true
false | nil | cjson.null | {cjson.null,1} | {nil,2} | {a={b={}}} | {{},{}} | {a=false} | print
{math.floor} | {[math.floor]=1} | {[true]=1} | {x={[2]=1}} | {'a','b',[4]='d'} | cjson.decode('[]')
"""
JSON_TEXTS = r"""
null | [null] | {"a":null} | [1,2.5,-3e2,1E+2] |  [ 1 , 2 ]  | 0 | -0 | 1e5x | --1 | -
"\u00e9\ud83d\ude00\u0041\u007f\u0000" | "\ud83d" | "\ude00" | "\u12g4" | "\x" | "a | "\\" | "\\\""
"a\\" | ["\\","b"] | {"a\\":"\"b\\"} | "\/\b\f\n\r\t" | "\\u0041" | "\\\u0041" | { | [ | [1,] | [,1]
{"a" 1} | {"a":1,} | {1:2} | nul | tru | nullx | 1 2 | ] | {"a":1,"a":2} | {"1":2} | {"a":[{}]}
12345678901234567890 | 0.30000000000000004 | "tab	here" | truefalse | [1}
"""
ROUND = "return cjson.encode(cjson.decode(ARGV[1]))"
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
documents = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
STEPS: list[tuple[Any, ...]] = [
    ("GET", "text"),
    ("SET", "text", "x"),
    ("HSET", "h", "f", "2"),
    ("EVAL", "return redis.call('HGET', 'h', 'f')", 0),
    ("EVAL", "return redis.call('HSET', 'h', 'f', '2') + 0", 0),
    ("EVAL", "return redis.pcall('HSET', 'h', 'f', '2').err", 0),
    # A script that has written, deletions included, runs to its end.
    ("EVAL", "redis.call('DEL', 'none'); return redis.call('HSET', 'h', 'g', '2')", 0),
    ("DEL", "text"),
    ("PING",),
]


def words(name: str, *parts: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(st.just(name), *parts)


def many(name: str, *parts: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Draw the command on a key, with one to three repetitions of its repeatable part."""
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
    client = SimulatedSyncRedisClient(SimulatedRedisServer(HandClock()))
    scores: dict[str, int] = {}
    for name, *rest in writes:
        client.execute_command(name, "z", *rest)
        if name == "ZADD":
            scores[rest[1]] = int(rest[0])
        else:
            scores.pop(rest[0], None)
    expected = sorted(scores, key=lambda member: (scores[member], member))
    assert client.execute_command("ZRANGE", "z", 0, -1) == expected


def cases(listed: str) -> list[str]:
    return [case for line in listed.strip("\n").splitlines() for case in line.split(" | ")]


def told(answer: Any) -> Any:
    """Normalise an answer: JSON is decoded, as its fields have no order, and all errors are
    equal.
    """
    if isinstance(answer, tuple):
        return "an error"
    return json.loads(answer) if isinstance(answer, str) else answer


def runs_alike(pair: Pair, script: str, *arguments: Any) -> None:
    sent = ("EVAL", script, 0, *arguments)
    assert told(outcome(pair.simulated, sent)) == told(outcome(pair.real, sent)), sent


@pytest.fixture(autouse=True)
def some_keys(pair: Pair) -> None:
    pair.clear()
    pair.both("HSET", "h", "f", "1")
    pair.both("SET", "text", "no number")


@pytest.mark.parametrize("returned", cases(REPLIES))
def test_a_script_returns_what_it_returns_on_a_real_server(pair: Pair, returned: str) -> None:
    pair.script(f"return {returned}", "argument")


@pytest.mark.parametrize("source", cases(FAILURES))
def test_a_script_that_fails_is_an_error_of_the_same_class(pair: Pair, source: str) -> None:
    sent = ("EVAL", f"local x = {source}", 0)
    assert outcome(pair.simulated, sent)[0] is outcome(pair.real, sent)[0]


def test_a_script_makes_no_globals(pair: Pair) -> None:
    sent = ("EVAL", "made = 1", 0)
    assert outcome(pair.simulated, sent)[0] is outcome(pair.real, sent)[0]
    runs_alike(
        pair, "return type(rawget) == 'function' and tostring(pcall(function() return made end))"
    )


@pytest.mark.parametrize("value", cases(VALUES))
def test_json_is_written_alike(pair: Pair, value: str) -> None:
    sent = ("EVAL", f"return cjson.encode({value})", 0)
    expected, answer = outcome(pair.real, sent), outcome(pair.simulated, sent)
    if isinstance(expected, tuple):
        assert isinstance(answer, tuple)
        expected, answer = expected[0], answer[0]
    assert answer == expected


@pytest.mark.parametrize("text", [*cases(JSON_TEXTS), ""])
def test_json_is_read_alike(pair: Pair, text: str) -> None:
    runs_alike(pair, ROUND, text)
    runs_alike(
        pair,
        "return {type(cjson.decode(ARGV[1])), tostring(cjson.decode(ARGV[1]) == cjson.null)}",
        text,
    )


@pytest.mark.parametrize("depth", [1000, 1001])
def test_json_of_many_levels_is_read_up_to_the_same_one(pair: Pair, depth: int) -> None:
    pair.script(ROUND, "[" * depth + "]" * depth)


@settings(max_examples=100)
@given(document=documents)
def test_any_document_passes_through_alike(pair: Pair, document: Any) -> None:
    runs_alike(pair, ROUND, json.dumps(document))
    runs_alike(pair, ROUND, json.dumps(document, ensure_ascii=False, indent=1))


@settings(max_examples=150)
@given(document=documents, at=st.integers(0), change=st.sampled_from(list('"\\{}[],:0x tu')))
def test_a_broken_document_is_refused_or_read_alike(
    pair: Pair, document: Any, at: int, change: str
) -> None:
    text = json.dumps({"a": [document]}, separators=(",", ":"))
    at %= len(text)
    runs_alike(pair, ROUND, text[:at] + change + text[at + 1 :])


@settings(max_examples=100)
@given(number=numbers)
def test_numbers_reach_commands_as_the_same_number(pair: Pair, number: float) -> None:
    """Check the values of numbers in commands: servers differ in how they write fractions."""
    passed = "redis.call('SET', 'n', tonumber(ARGV[1])); return redis.call('GET', 'n')"
    for arguments in ((repr(number),), (repr(int(number)),)):
        expected = outcome(pair.real, ("EVAL", passed, 0, *arguments))
        answer = outcome(pair.simulated, ("EVAL", passed, 0, *arguments))
        assert float(answer) == float(expected)
        if 0 < abs(float(expected)) < 1e15 and float(expected).is_integer():
            assert answer == expected
    pair.script("return ARGV[1] + 0 < 2^52 and ARGV[1] + 0 > -2^52 and ARGV[1] + 0", repr(number))
    pair.script("return tonumber(ARGV[1]) .. ' ' .. tostring(ARGV[1] / 3)", repr(number))


@pytest.fixture
def full(pair: Pair) -> Iterator[Pair]:
    pair.clear()
    pair.both("SET", "text", "t")
    pair.both("HSET", "h", "f", "1")
    pair.real.config_set("maxmemory", "1")
    pair.simulated.server.faults.full_resource = FullResource.MEMORY
    yield pair
    pair.real.config_set("maxmemory", "0")
    pair.simulated.server.faults.full_resource = FullResource.NO


def test_a_server_without_memory_refuses_what_grows(full: Pair) -> None:
    answers = [full.both(*step) for step in STEPS]
    refused = [answer[0] for answer in answers if isinstance(answer, tuple)]
    assert refused == [OutOfMemoryError] * 3
    assert answers[6] == 1
