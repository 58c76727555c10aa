"""Random commands, Lua scripts and JSON on a real and a simulated server."""

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

# Few, so that commands of different types hit one key.
KEYS = st.sampled_from(["one", "two", "three"])
FIELDS = st.sampled_from(["f", "g", "é", ""])
TEXTS = st.sampled_from(["", "x", "ü \x00 \n", "12", "-7", "007", "1.5", "0"])
MEMBERS = st.sampled_from(["a", "b", "ab", "9", "10"])
SCORES = st.sampled_from(["1", "2", "2.5", "-3", "1e3", "inf", "-inf", "1750000000000", "x", "nan"])
BOUNDS = st.sampled_from(["-inf", "+inf", "1", "(1", "2", "(2", "2.5", "(-3", "1e3", "(inf", "no"])
PLACES = st.sampled_from(["0", "1", "2", "-1", "-2", "-9", "9", "1.0"])
CALL = "return redis.call(unpack(ARGV))"
PROTECTED_CALL = """local r = redis.pcall(unpack(ARGV))
return type(r) == 'table' and r.err and string.match(r.err, '^%S+') or 'fine'"""
# Return values of a script, and thus replies to a client.
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
# Values that cjson encodes.
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
JSON_ROUND_TRIP = "return cjson.encode(cjson.decode(ARGV[1]))"
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
    # A script that has written anything, deletions included, runs to completion.
    ("EVAL", "redis.call('DEL', 'none'); return redis.call('HSET', 'h', 'g', '2')", 0),
    ("DEL", "text"),
    ("PING",),
]


def command(name: str, *parts: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(st.just(name), *parts)


def command_with_repeats(
    name: str, *parts: st.SearchStrategy[Any]
) -> st.SearchStrategy[tuple[Any, ...]]:
    """Draw the command on a key, with one to three repetitions of its repeatable part."""
    repeated = st.lists(st.tuples(*parts), min_size=1, max_size=3)
    return st.builds(lambda key, more: (name, key, *sum(more, ())), KEYS, repeated)


COMMANDS = st.one_of(
    command("GET", KEYS),
    command("SET", KEYS, TEXTS),
    command("SET", KEYS, TEXTS, st.just("NX")),
    command("SET", KEYS, TEXTS, st.just("PX"), st.sampled_from(["600000", "0", "x"])),
    command("INCR", KEYS),
    command("PEXPIRE", KEYS, st.sampled_from(["600000", "x"])),
    command("EXISTS", KEYS, KEYS),
    command("DEL", KEYS, KEYS),
    command_with_repeats("HSET", FIELDS, TEXTS),
    command("HSET", KEYS, FIELDS),
    command("HSETNX", KEYS, FIELDS, TEXTS),
    command("HGET", KEYS, FIELDS),
    command("HEXISTS", KEYS, FIELDS),
    command_with_repeats("HMGET", FIELDS),
    command("HGETALL", KEYS),
    command_with_repeats("HDEL", FIELDS),
    command("HINCRBY", KEYS, FIELDS, st.sampled_from(["1", "-2", "x", "01"])),
    command_with_repeats("RPUSH", TEXTS),
    command("LPOP", KEYS),
    command("LRANGE", KEYS, PLACES, PLACES),
    command_with_repeats("SADD", MEMBERS),
    command_with_repeats("SREM", MEMBERS),
    command("SISMEMBER", KEYS, MEMBERS),
    command("SMEMBERS", KEYS),
    command_with_repeats("ZADD", SCORES, MEMBERS),
    command_with_repeats("ZREM", MEMBERS),
    command("ZCARD", KEYS),
    command("ZRANGE", KEYS, PLACES, PLACES),
    command("ZRANGEBYSCORE", KEYS, BOUNDS, BOUNDS),
    command("ZREMRANGEBYSCORE", KEYS, BOUNDS, BOUNDS),
)


VIA = st.sampled_from(["", "", CALL, PROTECTED_CALL])


def normalize_order(name: str, answer: Any) -> Any:
    """Normalize replies of HGETALL and SMEMBERS, which have no order."""
    if name == "SMEMBERS" and isinstance(answer, list):
        return set(answer)
    if name == "HGETALL" and isinstance(answer, list):
        return dict(zip(answer[::2], answer[1::2], strict=True))
    return answer


@settings(max_examples=60)
@given(commands=st.lists(st.tuples(COMMANDS, VIA), min_size=10, max_size=40))
def test_random_commands_get_the_same_replies(pair: Pair, commands: list[Any]) -> None:
    pair.clear()
    for command, script in commands:
        sent = ("EVAL", script, 0, *command) if script else command
        expected, answer = outcome(pair.real, sent), outcome(pair.simulated, sent)
        assert normalize_order(command[0], answer) == normalize_order(command[0], expected), sent


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
def test_stream_ranges_match_relative_to_each_servers_ids(
    pair: Pair, added: list[str], ranges: list[Any]
) -> None:
    pair.clear()

    def add_and_read(client: Any) -> list[Any]:
        ids = [client.execute_command("XADD", "s", "*", "f", text) for text in added]
        assert sorted(ids, key=lambda i: tuple(map(int, i.split("-")))) == ids
        replies = []
        for name, low, high, leave_out, count in ranges:
            first = leave_out + ids[low] if 0 <= low < len(ids) else "-"
            last = leave_out + ids[high] if 0 <= high < len(ids) else "+"
            ends = (first, last) if name == "XRANGE" else (last, first)
            rows = outcome(client, (name, "s", *ends, *count))
            replies.append([(ids.index(row_id), fields) for row_id, fields in rows])
        return replies

    assert add_and_read(pair.simulated) == add_and_read(pair.real)


@settings(max_examples=20)
@given(added=st.integers(1, 8), cuts=st.lists(st.integers(0, 8), max_size=4))
def test_stream_trimming_matches_and_ids_are_unique(
    pair: Pair, added: int, cuts: list[int]
) -> None:
    pair.clear()

    def add_and_trim(client: Any) -> list[Any]:
        def add() -> str:
            return str(client.execute_command("XADD", "s", "*", "f", "x"))

        ids = [add() for _ in range(added)]
        replies: list[Any] = []
        for cut in cuts:
            min_id = ids[cut] if cut < len(ids) else f"{int(ids[-1].split('-')[0]) + 1}"
            replies.append(client.execute_command("XTRIM", "s", "MINID", min_id))
            replies.append(client.execute_command("XLEN", "s"))
            ids.append(add())
            replies.append(
                [ids.index(i) for i, _ in client.execute_command("XRANGE", "s", "-", "+")]
            )
        assert len(set(ids)) == len(ids)
        return replies

    assert add_and_trim(pair.simulated) == add_and_trim(pair.real)


def test_stream_ranges_accept_times_and_reject_invalid_ids(pair: Pair) -> None:
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


def test_stream_entry_ids_must_exceed_all_previous_ids(pair: Pair) -> None:
    pair.clear()
    for word in ("5-1", "5-1", "4-9", "5-2", "6-0"):
        pair.both("XADD", "s", word, "f", word)
    pair.both("XRANGE", "s", "-", "+")


def test_simulated_client_decodes_replies_like_redis_py(pair: Pair) -> None:
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
def test_sorted_set_stays_ordered_through_many_writes(
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


def cases(rows: str) -> list[str]:
    return [case for line in rows.strip("\n").splitlines() for case in line.split(" | ")]


def normalize_json(answer: Any) -> Any:
    """Normalize a reply: decode JSON, as its fields have no order, and treat all errors as
    equal.
    """
    if isinstance(answer, tuple):
        return "an error"
    return json.loads(answer) if isinstance(answer, str) else answer


def assert_same_result(pair: Pair, script: str, *arguments: Any) -> None:
    sent = ("EVAL", script, 0, *arguments)
    assert normalize_json(outcome(pair.simulated, sent)) == normalize_json(
        outcome(pair.real, sent)
    ), sent


@pytest.fixture(autouse=True)
def stored_keys(pair: Pair) -> None:
    pair.clear()
    pair.both("HSET", "h", "f", "1")
    pair.both("SET", "text", "no number")


@pytest.mark.parametrize("returned", cases(REPLIES))
def test_script_returns_the_same_value_as_on_a_real_server(pair: Pair, returned: str) -> None:
    pair.script(f"return {returned}", "argument")


@pytest.mark.parametrize("source", cases(FAILURES))
def test_failing_script_raises_the_same_error_class(pair: Pair, source: str) -> None:
    sent = ("EVAL", f"local x = {source}", 0)
    assert outcome(pair.simulated, sent)[0] is outcome(pair.real, sent)[0]


def test_scripts_cannot_create_globals(pair: Pair) -> None:
    sent = ("EVAL", "made = 1", 0)
    assert outcome(pair.simulated, sent)[0] is outcome(pair.real, sent)[0]
    assert_same_result(
        pair, "return type(rawget) == 'function' and tostring(pcall(function() return made end))"
    )


@pytest.mark.parametrize("value", cases(VALUES))
def test_json_encoding_matches(pair: Pair, value: str) -> None:
    sent = ("EVAL", f"return cjson.encode({value})", 0)
    expected, answer = outcome(pair.real, sent), outcome(pair.simulated, sent)
    if isinstance(expected, tuple):
        assert isinstance(answer, tuple)
        expected, answer = expected[0], answer[0]
    assert answer == expected


@pytest.mark.parametrize("text", [*cases(JSON_TEXTS), ""])
def test_json_decoding_matches(pair: Pair, text: str) -> None:
    assert_same_result(pair, JSON_ROUND_TRIP, text)
    assert_same_result(
        pair,
        "return {type(cjson.decode(ARGV[1])), tostring(cjson.decode(ARGV[1]) == cjson.null)}",
        text,
    )


@pytest.mark.parametrize("depth", [1000, 1001])
def test_json_nesting_limit_matches(pair: Pair, depth: int) -> None:
    pair.script(JSON_ROUND_TRIP, "[" * depth + "]" * depth)


@settings(max_examples=100)
@given(document=documents)
def test_any_document_round_trips_identically(pair: Pair, document: Any) -> None:
    assert_same_result(pair, JSON_ROUND_TRIP, json.dumps(document))
    assert_same_result(pair, JSON_ROUND_TRIP, json.dumps(document, ensure_ascii=False, indent=1))


@settings(max_examples=150)
@given(document=documents, at=st.integers(0), change=st.sampled_from(list('"\\{}[],:0x tu')))
def test_corrupt_documents_are_rejected_or_parsed_identically(
    pair: Pair, document: Any, at: int, change: str
) -> None:
    text = json.dumps({"a": [document]}, separators=(",", ":"))
    at %= len(text)
    assert_same_result(pair, JSON_ROUND_TRIP, text[:at] + change + text[at + 1 :])


@settings(max_examples=100)
@given(number=numbers)
def test_numbers_reach_commands_with_the_same_value(pair: Pair, number: float) -> None:
    """Check only the values of numbers in commands: servers differ in how they write fractions."""
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
def full_pair(pair: Pair) -> Iterator[Pair]:
    pair.clear()
    pair.both("SET", "text", "t")
    pair.both("HSET", "h", "f", "1")
    pair.real.config_set("maxmemory", "1")
    pair.simulated.server.faults.full_resource = FullResource.MEMORY
    yield pair
    pair.real.config_set("maxmemory", "0")
    pair.simulated.server.faults.full_resource = FullResource.NO


def test_server_out_of_memory_rejects_growing_writes(full_pair: Pair) -> None:
    answers = [full_pair.both(*step) for step in STEPS]
    refused = [answer[0] for answer in answers if isinstance(answer, tuple)]
    assert refused == [OutOfMemoryError] * 3
    assert answers[6] == 1
