"""Names, leases, fencing, elections, events and host keys, the same on every backend."""

from __future__ import annotations

import asyncio

import pytest

from meshrl.common.base.errors import Fenced, Refused
from meshrl.common.state import events, leader, registry
from meshrl.common.state.hosts import credentials
from meshrl.common.state.hosts.credentials import Credential
from meshrl.common.state.redis.client import StateClient, SyncRedisClient
from meshrl.common.state.redis.keys import MESH_PREFIX
from meshrl.common.state.registry import LEASE_MS, LeaseRenewal, RegistryEntry
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.contract.state.state_bench import Bench, HandClock

LONG_MS = 600_000
HOST, OTHER = "gpu1-1f3a9c", "gpu2-77aa01"
KEY, ANOTHER, THIRD = "a1" * 32, "b2" * 32, "c3" * 32
EXPIRY_MS = 600_000


def entry(incarnation: str, name: str = "rollout/0") -> RegistryEntry:
    return RegistryEntry(
        name,
        "rollout",
        address="tcp://127.0.0.1:5",
        bulk="tcp://127.0.0.1:6",
        host="here",
        pid=7,
        start_time=1.25,
        incarnation=incarnation,
        run_root="/runs",
    )


async def test_registered_process_is_found_with_all_its_fields(state: StateClient) -> None:
    token = await registry.register(state, entry("a"), LONG_MS)
    waits = [{"what": "call Weights.stage_version", "on": "weights", "since_ms": 5}]
    stats = {"lag_s": 0.1, "nothing": [], "nested": {"empty": {}}, "text": "naïve ✓"}
    assert registry.renew_lease(state, "rollout/0", token, LONG_MS, stats, waits).is_renewed
    found = await registry.lookup(state, "rollout/0")
    assert found is not None
    assert found.alive and found.token == token and found.incarnation == "a"
    assert (found.address, found.bulk, found.host) == (
        "tcp://127.0.0.1:5",
        "tcp://127.0.0.1:6",
        "here",
    )
    assert (found.pid, found.start_time, found.run_root) == (7, 1.25, "/runs")
    assert found.stats == stats and found.waits == waits
    assert found.expires_ms - found.renewed_ms == LONG_MS


async def test_entries_are_found_by_name_and_by_role(state: StateClient) -> None:
    assert await registry.lookup(state, "rollout/0") is None
    assert await registry.list_entries(state) == []
    await registry.register(state, entry("a"))
    await registry.register(state, RegistryEntry("weights", "weights", incarnation="b"))
    assert [found.name for found in await registry.list_entries(state, "weights")] == ["weights"]
    assert len(await registry.list_entries(state)) == 2


async def test_live_name_belongs_to_one_incarnation(state: StateClient) -> None:
    first = await registry.register(state, entry("a"), LONG_MS)
    assert await registry.register(state, entry("a"), LONG_MS) == first
    with pytest.raises(Refused, match="rollout/0"):
        await registry.register(state, entry("b"), LONG_MS)


async def test_one_of_twenty_contenders_gets_the_name(state: StateClient) -> None:
    names = [str(n) for n in range(20)]
    answers = await asyncio.gather(
        *(registry.register(state, entry(name), LONG_MS) for name in names),
        return_exceptions=True,
    )
    winners = [answer for answer in answers if isinstance(answer, int)]
    assert len(winners) == 1
    assert all(isinstance(answer, Refused) for answer in answers if answer not in winners)


async def test_expired_lease_is_lost_and_its_name_is_free(bench: Bench) -> None:
    state = bench.state
    first = await registry.register(state, entry("a"), 20)
    await bench.pass_ms(50)
    assert not registry.renew_lease(state, "rollout/0", first, LONG_MS, {}, []).is_renewed
    second = await registry.register(state, entry("b"), LONG_MS)
    assert second > first
    assert not registry.renew_lease(state, "rollout/0", first, LONG_MS, {}, []).is_renewed
    assert registry.renew_lease(state, "rollout/0", second, LONG_MS, {}, []).is_renewed


async def test_dead_names_lapse_when_the_servers_clock_is_set_back(simulated: Bench) -> None:
    """Check that dead names lapse when a server's clock is set back.

    Otherwise their leases would last until the clock catches up; live processes renew theirs.
    """
    state, clock = simulated.state, simulated.clock
    assert isinstance(clock, HandClock)
    dead, living = RegistryEntry("trainer/j", "trainer"), RegistryEntry("engine/g0", "engine")
    dead.incarnation, living.incarnation = "one", "one"
    await registry.register(state, dead, LEASE_MS)
    token = await registry.register(state, living, LEASE_MS)
    await leader.campaign(state, "planner", "dead", LEASE_MS)
    clock.now -= 3600.0
    assert registry.renew_lease(state, "engine/g0", token, LEASE_MS, {}, []).is_renewed
    dead.incarnation = "two"
    assert await registry.register(state, dead, LEASE_MS)
    assert await leader.campaign(state, "planner", "standby", LEASE_MS)
    assert all(entry.alive for entry in await registry.list_entries(state))


async def test_expired_entries_are_still_listed(bench: Bench) -> None:
    await registry.register(bench.state, entry("a"), 20)
    await bench.pass_ms(50)
    [found] = await registry.list_entries(bench.state)
    assert found.name == "rollout/0" and not found.alive


async def test_lease_lasts_six_virtual_seconds_and_its_entry_ten_minutes(
    simulated: Bench,
) -> None:
    state = simulated.state
    token = await registry.register(state, entry("a"))
    for _ in range(20):  # half a virtual minute, renewed in time
        await simulated.pass_ms(1500)
        assert registry.renew_lease(state, "rollout/0", token, 6000, {}, []).is_renewed
    await simulated.pass_ms(5900)
    assert (await registry.list_entries(state))[0].alive
    await simulated.pass_ms(200)
    assert not (await registry.list_entries(state))[0].alive
    await simulated.pass_ms(599_000)
    assert len(await registry.list_entries(state)) == 1
    await simulated.pass_ms(2_000)
    assert await registry.list_entries(state) == []
    assert await registry.lookup(state, "rollout/0") is None


async def test_keys_expire_by_the_clock_of_their_own_simulation() -> None:
    slow, fast = HandClock(), HandClock(now=5.0)
    one, other = open_simulated_state(slow), open_simulated_state(fast)
    for state in (one, other):
        await state.run_command("SET", "key", "value", "PX", 10_000)
    fast.now += 11
    assert await one.run_command("GET", "key") == "value"
    assert await other.run_command("GET", "key") is None
    assert (await one.run_command("TIME"))[0] in (int(slow.now), str(int(slow.now)))
    assert (await other.run_command("TIME"))[0] in (16, "16")
    await one.close()
    await other.close()


async def test_released_lease_frees_its_name_at_once(state: StateClient) -> None:
    token = await registry.register(state, entry("a"), LONG_MS)
    assert await registry.release_lease(state, "rollout/0", token)
    assert not await registry.release_lease(state, "rollout/0", token)
    assert not registry.renew_lease(state, "rollout/0", token, LONG_MS, {}, []).is_renewed
    assert await registry.register(state, entry("b"), LONG_MS) > token


async def test_evict_removes_only_the_given_incarnation(
    state: StateClient,
) -> None:
    token = await registry.register(state, entry("a"), LONG_MS)
    assert not await registry.evict(state, "rollout/0", "b")
    assert registry.renew_lease(state, "rollout/0", token, LONG_MS, {}, []).is_renewed
    assert await registry.evict(state, "rollout/0", "a")
    assert await registry.register(state, entry("b"), LONG_MS) > token


async def test_evicted_incarnation_gets_a_new_token_on_registration(
    state: StateClient,
) -> None:
    token = await registry.register(state, entry("a"), LONG_MS)
    await registry.evict(state, "rollout/0", "a")
    assert await registry.register(state, entry("a"), LONG_MS) > token


async def test_first_renewal_after_an_outage_raises_the_epoch_once(bench: Bench) -> None:
    state = bench.state
    one = await registry.register(state, entry("a", "one"), 20)
    two = await registry.register(state, entry("b", "two"), 20)
    await bench.pass_ms(100)
    renewal = {"away_ms": 60_000, "ttl_ms": LONG_MS, "stats": "{}", "waits": "[]"}
    assert state.run_script_sync("renew", ["{mesh}"], renewal | {"name": "one", "token": one})[
        "is_renewed"
    ]
    assert await state.run_command("GET", f"{MESH_PREFIX}:epoch") == "1"
    # `two` has not renewed yet; the grace period protects its name from other processes.
    with pytest.raises(Refused):
        await registry.register(state, entry("c", "two"))
    assert state.run_script_sync("renew", ["{mesh}"], renewal | {"name": "two", "token": two})[
        "is_renewed"
    ]
    assert await state.run_command("GET", f"{MESH_PREFIX}:epoch") == "1"
    assert [e.kind for e in await events.read_all(state)].count("epoch") == 1


async def test_expired_incarnation_recovers_its_unclaimed_name(bench: Bench) -> None:
    state = bench.state
    token = await registry.register(state, entry("a"), 20)
    await bench.pass_ms(50)
    assert await registry.register(state, entry("a"), LONG_MS) == token


async def test_election_has_one_leader_among_twenty(state: StateClient) -> None:
    tokens = await asyncio.gather(
        *(leader.campaign(state, "planner", f"p{n}", LONG_MS) for n in range(20))
    )
    [leader_token] = [token for token in tokens if token]
    owner, token = await leader.read_leader(state, "planner")
    assert token == leader_token and owner == f"p{tokens.index(leader_token)}"
    assert await leader.campaign(state, "planner", owner, LONG_MS) == leader_token


async def test_standby_leads_once_the_leaders_lease_expires(bench: Bench) -> None:
    state = bench.state
    old = await leader.campaign(state, "planner", "a", 20)
    await bench.pass_ms(50)
    assert await leader.read_leader(state, "planner") == ("", 0)
    assert not leader.renew_leadership(state, "planner", old, LONG_MS)
    new = await leader.campaign(state, "planner", "b", LONG_MS)
    assert new > old
    assert not leader.renew_leadership(state, "planner", old, LONG_MS)
    assert leader.renew_leadership(state, "planner", new, LONG_MS)


async def test_lapsed_leader_leads_again_under_a_new_token(bench: Bench) -> None:
    old = await leader.campaign(bench.state, "planner", "a", 20)
    await bench.pass_ms(50)
    assert await leader.campaign(bench.state, "planner", "a", LONG_MS) > old


async def test_events_are_read_in_order_and_in_pages(state: StateClient) -> None:
    for n in range(5):
        await events.append(state, "ticked", {"n": n, "none": None, "list": [], "map": {}})
    first = await events.read_page(state, count=3)
    rest = await events.read_page(state, first[-1].id)
    assert [event.fields["n"] for event in first + rest] == [0, 1, 2, 3, 4]
    assert first[0].fields == {"n": 0, "none": None, "list": [], "map": {}}
    assert await events.read_all(state) == first + rest


async def test_event_id_is_above_a_given_id_that_no_longer_exists(state: StateClient) -> None:
    """Check that the new id is above both the given id and the stream's last one."""
    await events.append(state, "now", {})
    now_ms = (await events.read_all(state))[0].ms
    for last_ms in (now_ms + 90_000, now_ms + 10_000, now_ms - 1):
        await events.append(state, "above", {"seen": last_ms}, after_id=f"{last_ms}-3")
    first, *appended = await events.read_all(state)
    assert [event.fields["seen"] - now_ms for event in appended] == [90_000, 10_000, -1]
    assert appended[0].ms > now_ms + 90_000 and first.kind == "now"


async def test_scripts_are_reloaded_after_the_server_flushed_them(state: StateClient) -> None:
    for _ in range(2):
        await events.append(state, "before", {}, "its own operation")
    await state.run_command("SCRIPT", "FLUSH")
    await events.append(state, "after", {})
    assert [event.kind for event in await events.read_all(state)] == ["before", "after"]


async def test_script_sent_twice_under_one_operation_acts_once(state: StateClient) -> None:
    args = {"op": "same", "kind": "once", "fields": "{}"}
    assert await state.run_script("append", ["{mesh}"], args) == await state.run_script(
        "append", ["{mesh}"], args
    )
    assert len(await events.read_all(state)) == 1


async def test_fenced_event_needs_the_lease_and_is_appended_once(bench: Bench) -> None:
    token = await bench.seat("trainer/job")
    for _ in range(2):
        await events.append_fenced_event(
            bench.state, "trainer/job", token, "told", {"empty": []}, "op"
        )
    with pytest.raises(Fenced):
        await events.append_fenced_event(bench.state, "trainer/job", token + 1, "told", {}, "other")
    fields = [e.fields for e in await events.read_all(bench.state) if e.kind == "told"]
    assert fields == [{"empty": []}]


@pytest.fixture
async def key_client(state: StateClient) -> SyncRedisClient:
    """Return the client that threads use to look up keys, in a mesh with one host."""
    await credentials.admit_host(state, HOST)
    return state._sync_client


async def test_registered_key_identifies_role_and_host(
    state: StateClient, key_client: SyncRedisClient
) -> None:
    assert credentials.lookup_owners(key_client, [KEY]) == [()]
    assert (
        await credentials.register_key(state, Credential("engine", HOST, KEY, "engine/g0.0")) == 0
    )
    assert credentials.lookup_owners(key_client, [KEY]) == [(f"engine@{HOST}",)]
    assert credentials.lookup_owners(key_client, [ANOTHER, KEY]) == [(), (f"engine@{HOST}",)]
    await credentials.withdraw_key(state, Credential("engine", HOST, KEY, "engine/g0.0"))
    assert credentials.lookup_owners(key_client, [KEY]) == [()]
    assert await credentials.list_credentials(state) == []


async def test_host_that_was_not_admitted_cannot_register_keys(
    state: StateClient, key_client: SyncRedisClient
) -> None:
    with pytest.raises(Refused, match=OTHER):
        await credentials.register_key(state, Credential("engine", OTHER, KEY, "engine/g0.0"))
    # the host can write to its own credential row, without effect
    await state.run_command("HSET", f"{MESH_PREFIX}:credentials:engine:{OTHER}", KEY, "engine/g0.0")
    assert credentials.lookup_owners(key_client, [KEY]) == [()]


async def test_duplicate_registration_of_a_key_takes_nothing_from_its_owner(
    state: StateClient, key_client: SyncRedisClient
) -> None:
    await credentials.admit_host(state, OTHER)
    await credentials.register_key(state, Credential("engine", HOST, KEY, "engine/g0.0"))
    await credentials.register_key(state, Credential("worker", HOST, ANOTHER, "worker/w0"))
    # with its own permissions, a host can do no more than this
    for role in ("engine", "rollout"):
        await state.run_command(
            "HSET", f"{MESH_PREFIX}:credentials:{role}:{OTHER}", KEY, "engine/g0.0"
        )
    assert credentials.lookup_owners(key_client, [ANOTHER, KEY, THIRD]) == [
        (f"worker@{HOST}",),
        (f"engine@{HOST}", f"engine@{OTHER}", f"rollout@{OTHER}"),
        (),
    ]
    await credentials.revoke_host(state, OTHER)
    assert credentials.lookup_owners(key_client, [KEY]) == [(f"engine@{HOST}",)]


async def test_expelled_host_loses_its_keys_and_cannot_register_any(
    state: StateClient, key_client: SyncRedisClient
) -> None:
    await credentials.admit_host(state, OTHER)
    await credentials.register_key(state, Credential("engine", OTHER, KEY, "engine/g0.0"))
    number = await credentials.register_key(
        state, Credential("engine", HOST, ANOTHER, "engine/g1.0")
    )
    assert await credentials.revoke_host(state, OTHER)
    assert not await credentials.revoke_host(state, OTHER)
    assert credentials.lookup_owners(key_client, [KEY, ANOTHER]) == [(), (f"engine@{HOST}",)]
    with pytest.raises(Refused, match="expelled"):
        await credentials.register_key(state, Credential("engine", OTHER, THIRD, "engine/g0.0"))
    assert (
        await credentials.register_key(state, Credential("worker", HOST, THIRD, "worker/w0"))
        > number
    )


async def test_revoked_key_stays_invalid_even_if_its_host_writes_it_again(
    state: StateClient, key_client: SyncRedisClient
) -> None:
    await credentials.register_key(state, Credential("engine", HOST, KEY, "engine/g0.0"))
    assert await credentials.revoke_key(state, KEY)
    assert not await credentials.revoke_key(state, KEY)
    await state.run_command("HSET", f"{MESH_PREFIX}:credentials:engine:{HOST}", KEY, "engine/g0.0")
    assert credentials.lookup_owners(key_client, [KEY]) == [()]
    with pytest.raises(Refused, match=KEY[:8]):
        await credentials.register_key(state, Credential("engine", HOST, KEY, "engine/g0.0"))


async def test_bulk_key_is_valid_only_with_its_processs_main_key(
    state: StateClient, key_client: SyncRedisClient
) -> None:
    await credentials.admit_host(state, OTHER)
    bulk, other = (f"bulk:{digit * 64}" for digit in "de")
    engine = Credential("engine", HOST, KEY, "engine/g0.0", bulk)
    await credentials.register_key(state, engine)
    assert credentials.lookup_owners(key_client, [bulk, KEY, "d" * 64]) == [
        (f"engine@{HOST}",)
    ] * 2 + [()]
    assert [row.public_key for row in await credentials.list_credentials(state)] == [KEY], (
        "one process, one row"
    )
    # a host that registers another's bulk key beside its own takes nothing from it when revoked
    await credentials.register_key(state, Credential("worker", OTHER, ANOTHER, "worker/w0", bulk))
    assert await credentials.revoke_key(state, ANOTHER)
    assert credentials.lookup_owners(key_client, [bulk, ANOTHER]) == [(f"engine@{HOST}",), ()]
    await state.run_command(
        "HSET", f"{MESH_PREFIX}:credentials:worker:{OTHER}", other, f"1 {ANOTHER}"
    )
    assert credentials.lookup_owners(key_client, [other]) == [()]
    await credentials.withdraw_key(state, engine)
    assert credentials.lookup_owners(key_client, [bulk, KEY]) == [(), ()]


async def test_credentials_are_listed_with_their_process_names(
    state: StateClient, key_client: SyncRedisClient
) -> None:
    await credentials.register_key(state, Credential("worker", HOST, ANOTHER, "worker/w0"))
    await credentials.register_key(state, Credential("engine", HOST, KEY, "engine/g0.0"))
    assert await credentials.list_credentials(state) == [
        Credential("engine", HOST, KEY, "engine/g0.0"),
        Credential("worker", HOST, ANOTHER, "worker/w0"),
    ]


async def test_mesh_of_one_host_admits_no_other_host(
    state: StateClient, key_client: SyncRedisClient
) -> None:
    await credentials.admit_if_first(state, OTHER)  # one host is admitted already
    assert await credentials.list_admitted_hosts(state) == [HOST]
    await credentials.admit_host(state, OTHER)
    await credentials.register_key(state, Credential("worker", OTHER, KEY, "worker/w0"))
    await credentials.admit_only(state, HOST)
    assert await credentials.list_admitted_hosts(state) == [HOST] and credentials.lookup_owners(
        key_client, [KEY]
    ) == [()]
    await credentials.admit_if_first(state, OTHER)
    with pytest.raises(Refused):
        await credentials.register_key(state, Credential("worker", OTHER, KEY, "worker/w0"))


async def test_keys_of_exited_processes_expire(simulated: Bench) -> None:
    state = simulated.state
    await credentials.admit_host(state, HOST)
    await credentials.register_key(state, Credential("engine", HOST, KEY, "engine/g0.0"))
    await simulated.pass_ms(EXPIRY_MS - 1000)
    await credentials.register_key(state, Credential("engine", HOST, ANOTHER, "engine/g1.0"))
    assert len(await credentials.list_credentials(state)) == 2, "one that is late is not gone"
    await simulated.pass_ms(2000)
    await credentials.register_key(state, Credential("engine", HOST, THIRD, "engine/g2.0"))
    assert [row.public_key for row in await credentials.list_credentials(state)] == [ANOTHER, THIRD]


async def test_renewal_registers_the_key_again_and_reports_revocations(
    state: StateClient, key_client: SyncRedisClient
) -> None:
    row = Credential("engine", HOST, KEY, "engine/g0.0")
    token = await registry.register(
        state, RegistryEntry(row.process, "engine", incarnation="a"), 60_000
    )

    def renew() -> LeaseRenewal:
        return registry.renew_lease(state, row.process, token, 60_000, {}, [], row)

    number = await credentials.register_key(state, row)
    assert renew() == LeaseRenewal(True, number)
    await state.run_command("DEL", f"{MESH_PREFIX}:credentials:engine:{HOST}")
    assert renew().is_renewed, "a Redis that has forgotten it is shown it again"
    assert credentials.lookup_owners(key_client, [KEY]) == [(f"engine@{HOST}",)]
    await credentials.revoke_key(state, ANOTHER)
    assert renew() == LeaseRenewal(True, number + 1)
    await credentials.revoke_key(state, KEY)
    assert not renew().is_renewed and "revoked" in renew().loss_reason
    assert credentials.lookup_owners(key_client, [KEY]) == [()]
