"""Hosts at the gateway's door: a token lets in as many as it was made for, each of which is known
by its own key from then on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.api.calls.call_permissions import HOST_ROLES, PLANNER_ROLE
from meshrl.common.api.gateway import Gateway, HostAdmitted, JoinHost
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import NotAllowed, NotFound, Refused
from meshrl.common.base.files import documents
from meshrl.common.base.host.settings import MeshSettings, derive_redis_password
from meshrl.common.base.release import read_release
from meshrl.common.mesh.access import access_records, gateway_identity, members, token_registry
from meshrl.common.mesh.access.access_records import HOST_TOKEN, digest_key
from meshrl.common.mesh.access.access_token import read_token
from meshrl.common.mesh.access.admitted_hosts import AdmittedHost
from meshrl.common.mesh.access.members import REJOIN_WINDOW_S
from meshrl.common.mesh.transport.keys import KeyPair
from meshrl.common.state import events
from meshrl.common.state.hosts import host_requests
from meshrl.common.state.pool.scheduling.snapshot import SHUTDOWN_NOTICE, PoolRequest
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.registry import RegistryEntry, evict, register
from meshrl.directory.directory_paths import MeshPaths
from meshrl.directory.joined_hosts import JoinedHost, read_joined_hosts
from meshrl.launch.head.host_admission import HostAdmission
from meshrl.launch.hosts import host_drain, membership
from meshrl.launch.hosts.host_join import drop_stale_membership, write_location
from meshrl.launch.hosts.membership import CA_FILE_NAME, Membership
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.unit.gateway.conftest import House, line_to

GONE_S = 0.5
HEAD = "here"
OF_MEMBERS: tuple[tuple[Any, Any], ...] = (
    (Gateway.drain, None),
    (Gateway.back, "h"),
    (Gateway.whereabouts, None),
    (Gateway.leave, None),
)
ABOUT = {"redis_url": "rediss://head:1/0", "authority": "PEM", "settings": {"stall_s": 7.0}}


@dataclass
class RedisUsers:
    """Who may come into Redis, in place of a server's users."""

    known: dict[str, Mapping[str, str]] = field(default_factory=dict)

    async def admit_host(self, host: AdmittedHost) -> None:
        self.known[host.host] = host.passwords

    async def expel_host(self, host: str) -> bool:
        return self.known.pop(host, None) is not None


@dataclass
class Mesh:
    house: House
    users: RedisUsers
    pairs: dict[str, KeyPair] = field(default_factory=dict)

    def token(self, name: str = "invitation", lasts_s: float = 60.0, uses: int = 1) -> str:
        door = gateway_identity.read_identity(self.house.root / "mesh")
        at = door.address, door.public
        token, ticket = token_registry.create_token(
            name, lasts_s, time.time(), *at, kind=HOST_TOKEN, uses=uses
        )
        token_registry.add_token(self.house.file, token)
        return ticket.encoded

    def member(self, token: str, host: str = "gpu1-aa") -> str:
        """The ticket of a host that has joined, by its own key."""
        return replace(read_token(token), secret=self.pair(host).secret.decode()).encoded

    def membership(self, token: str) -> Membership:
        """What the host itself keeps of it."""
        ticket = read_token(self.member(token))
        return Membership("gpu1-aa", ticket.address, ticket.gateway, ticket.secret)

    def pair(self, host: str) -> KeyPair:
        return self.pairs.setdefault(host, KeyPair.generate())

    @property
    def joined(self) -> Mapping[str, JoinedHost]:
        return read_joined_hosts(MeshPaths(self.house.root))

    @property
    def members(self) -> set[str]:
        return {member.host for member in access_records.read_records(self.house.file).members}

    async def join(self, token: str, host: str = "gpu1-aa", **about: Any) -> HostAdmitted:
        public = self.pair(host).public.decode()
        request = replace(JoinHost(host, public, "10.0.0.2", 2, True, read_release()), **about)
        async with line_to(token) as line:
            return await line.call(Gateway.join, request)


async def alive(state: StateClient, host: str) -> RegistryEntry:
    """The host's agent, as long as nobody ends its lease."""
    entry = RegistryEntry(f"node/{host}", "node", host=host, incarnation=host)
    await register(state, entry, 600_000)
    return entry


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    root = tmp_path / "root"
    (root / "mesh/logs").mkdir(parents=True)
    clock = SystemClock()
    house = House(root, open_simulated_state(clock), joinable=True)
    users = RedisUsers()
    admitting = HostAdmission(
        MeshPaths(root), house.state, clock, users, lambda: ABOUT, GONE_S, HEAD
    )
    async with house.open():
        task = asyncio.create_task(admitting.run())
        yield Mesh(house, users)
        task.cancel()


async def test_a_host_is_let_in_with_roles_of_its_own_and_a_secret_told_once(mesh: Mesh) -> None:
    first = await mesh.join(mesh.token())
    assert (first.redis_url, first.ca_pem) == ("rediss://head:1/0", "PEM")
    assert first.settings == {"stall_s": 7.0}
    assert (first.worker_prefix, first.planner) == ("h1w", "planner/2")
    passwords = mesh.users.known["gpu1-aa"]
    assert passwords.keys() == HOST_ROLES | {PLANNER_ROLE}
    told = AdmittedHost.from_secret("gpu1-aa", first.secret, passwords, 0.0)
    assert told.passwords == passwords
    second = await mesh.join(mesh.token("another"), "gpu2-bb")
    assert (second.worker_prefix, second.planner) == ("h2w", ""), (
        "one planner stands by, no name twice"
    )
    assert mesh.users.known["gpu2-bb"].keys() == HOST_ROLES
    kept = "\n".join(p.read_text() for p in mesh.house.root.rglob("*.json"))
    assert first.secret not in kept and derive_redis_password(first.secret, "node") not in kept
    assert mesh.joined.keys() == {"gpu1-aa", "gpu2-bb"}


async def test_a_token_lets_in_one_host(mesh: Mesh) -> None:
    token = mesh.token()
    first = await mesh.join(token)
    assert await mesh.join(token) == first, "its answer may have been lost"
    with pytest.raises(Refused, match=r"was used by gpu1-aa.*token create --host"):
        await mesh.join(token, "gpu2-bb")
    with pytest.raises(Refused, match="a host called gpu1-aa is in the mesh"):
        await mesh.join(mesh.token("another"), "gpu1-aa")
    assert mesh.users.known.keys() == mesh.members == {"gpu1-aa"}


async def test_a_token_may_let_in_several_or_any_number(mesh: Mesh) -> None:
    two, any_number = mesh.token("two", uses=2), mesh.token("any", uses=0)
    secrets = {(await mesh.join(two, host)).secret for host in ("gpu1-aa", "gpu2-bb")}
    with pytest.raises(Refused, match=r"the 2 hosts that it is good for, gpu2-bb last"):
        await mesh.join(two, "gpu3-cc")
    hosts = [f"cpu{i}-dd" for i in range(5)]
    told = await asyncio.gather(*(mesh.join(any_number, host) for host in hosts))
    assert len(secrets | {one.secret for one in told}) == 7
    assert mesh.members == mesh.users.known.keys() == {"gpu1-aa", "gpu2-bb", *hosts}


async def test_who_has_the_same_token_does_not_take_a_members_place(mesh: Mesh) -> None:
    token = mesh.token(uses=0)
    first = await mesh.join(token)
    mine = mesh.pairs.pop("gpu1-aa")
    with pytest.raises(Refused, match="a host called gpu1-aa is in the mesh"):
        await mesh.join(token)  # by a key of another's
    key = mine.public.decode()
    with pytest.raises(Refused, match="a host called gpu1-aa is in the mesh"):
        await mesh.join(token, "gpu2-bb", key=key)
    with pytest.raises(Refused, match="no public key"):
        await mesh.join(token, "gpu2-bb", key="~" * 40)
    own = KeyPair.from_secret(read_token(token).secret.encode()).public.decode()
    with pytest.raises(Refused, match="key of a token"):
        await mesh.join(token, "gpu2-bb", key=own)
    passwords = AdmittedHost.from_secret(
        "gpu1-aa", first.secret, mesh.users.known["gpu1-aa"], 0.0
    ).passwords
    assert mesh.users.known == {"gpu1-aa": passwords}


async def test_an_answer_that_a_gateway_has_forgotten_is_given_anew(mesh: Mesh) -> None:
    token = mesh.token()
    await mesh.join(token)
    await mesh.house.start_again()
    second = await mesh.join(token)
    told = AdmittedHost.from_secret("gpu1-aa", second.secret, mesh.users.known["gpu1-aa"], 0.0)
    assert mesh.users.known == {"gpu1-aa": told.passwords}
    assert mesh.joined["gpu1-aa"].worker_prefix == "h1w"


async def test_a_host_that_joined_long_ago_is_not_told_its_secret_again(mesh: Mesh) -> None:
    token = mesh.token(uses=0)
    await mesh.join(token)
    known = access_records.read_records(mesh.house.file)
    [member] = known.members
    earlier = replace(member, since_s=member.since_s - 2 * REJOIN_WINDOW_S)
    documents.write(mesh.house.file, asdict(replace(known, members=[earlier])))
    await mesh.house.start_again()
    with pytest.raises(Refused, match=r"gpu1-aa has joined 12\d\d s ago.*Join again"):
        await mesh.join(token)
    assert mesh.users.known.keys() == mesh.members == {"gpu1-aa"}, "who is in stays in"


async def test_a_token_that_is_revoked_lets_nobody_in_and_its_hosts_stay(mesh: Mesh) -> None:
    token = mesh.token(uses=0)
    await mesh.join(token)
    token_registry.revoke_tokens(mesh.house.file, "invitation", time.time())
    with pytest.raises(NotAllowed, match="revoked"):
        await mesh.join(token, "gpu2-bb")
    async with line_to(mesh.member(token)) as line:
        assert await line.call(Gateway.membership, None) == "gpu1-aa"
        with pytest.raises(Refused, match="gpu1-aa is a member already"):
            await line.call(Gateway.join, JoinHost("x-1", "k" * 40, "h", 1, False, read_release()))


async def test_tokens_that_let_nobody_in(mesh: Mesh) -> None:
    with pytest.raises(NotAllowed, match="expired"):
        await mesh.join(mesh.token("late", -1.0))
    with pytest.raises(NotAllowed):
        await mesh.join(mesh.house.token("alice"))
    with pytest.raises(Refused, match=f"0.0.1.*{read_release()}"):
        await mesh.join(mesh.token("old"), version="0.0.1")
    with pytest.raises(Refused, match="cannot be a host"):
        await mesh.join(mesh.token("odd"), "a*~&")
    async with line_to(mesh.token("curious")) as line:
        with pytest.raises(NotAllowed):
            await line.call(Gateway.jobs, None)
    assert not mesh.users.known


async def test_nobody_joins_under_the_name_of_the_head(mesh: Mesh) -> None:
    with pytest.raises(Refused, match="here is the head's own name"):
        await mesh.join(mesh.token(), HEAD)
    assert not mesh.members
    # Nor does the launcher let it in, and leaves nothing of it on record.
    about = {
        "admitted": asdict(AdmittedHost.from_secret(HEAD, "5e" * 32, HOST_ROLES, 0.0)),
        "address": "10.0.0.2",
        "workers": 1,
        "standby": True,
        "ephemeral": False,
        "key": "key",
    }
    with pytest.raises(Refused, match="here is the head of the mesh"):
        await host_requests.submit_host_request(
            mesh.house.state, SystemClock(), "q", host_requests.JOIN, about
        )
    assert not mesh.joined and not mesh.users.known


@pytest.mark.parametrize("host", [HEAD, "gpu1-aa"])
async def test_who_was_not_let_in_so_far_has_nothing_drained(mesh: Mesh, host: str) -> None:
    """As one whose admission has failed in the middle: on file, with a key, and in no book."""
    token, state = mesh.token(), mesh.house.state
    [on_file] = access_records.read_records(mesh.house.file).tokens
    members.admit_member(mesh.house.file, on_file.id, host, mesh.pair(host).public, time.time())
    await pool.set_drain_reason(state, HEAD, SHUTDOWN_NOTICE)
    async with line_to(mesh.member(token, host)) as line:
        for asked, request in OF_MEMBERS:
            with pytest.raises(NotFound, match=r"was not let into the mesh|no host is called"):
                await line.call(asked, request)
    assert await pool.read_drain_reasons(state) == {HEAD: SHUTDOWN_NOTICE}
    if host != HEAD:  # it asks again, by the key that is on file
        assert (await mesh.join(token, host)).worker_prefix == "h1w"
        async with line_to(mesh.member(token, host)) as line:
            assert await line.call(Gateway.drain, None)


async def test_a_host_that_left_is_let_in_no_more(mesh: Mesh) -> None:
    token = mesh.token(uses=0)
    await mesh.join(token)
    async with line_to(token) as line:  # which is no host's
        for asked, request in (*OF_MEMBERS, (Gateway.membership, None)):
            with pytest.raises(NotFound, match="no host that has joined"):
                await line.call(asked, request)
    own = mesh.member(token)
    async with line_to(own) as line:
        assert await line.call(Gateway.membership, None) == "gpu1-aa"
        assert await line.call(Gateway.leave, None)
    assert not mesh.users.known and not mesh.joined and not mesh.members
    async with line_to(own) as line:
        with pytest.raises(NotAllowed, match="revoked"):
            await line.call(Gateway.membership, None)
    for asking in (token, mesh.token("another")):
        with pytest.raises(Refused, match="or was"):
            await mesh.join(asking, "gpu1-aa")
    assert digest_key(mesh.pair("gpu1-aa").public) not in mesh.house.file.read_text()
    again = await mesh.join(mesh.token("third"), "gpu1-bb")
    assert (again.worker_prefix, again.planner) == ("h2w", "planner/2")


async def test_a_member_that_comes_back_is_told_where_redis_is_now(mesh: Mesh) -> None:
    token = mesh.token()
    first = await mesh.join(token)
    place = MeshPaths(mesh.house.root / "second")
    here = MeshSettings(first.redis_url, "here", secret=first.secret, authority="old.pem")
    here.to_file(place.settings)
    async with line_to(mesh.member(token)) as line:
        write_location(place, await line.call(Gateway.whereabouts, None))
    now = MeshSettings.from_file(place.settings)
    assert (now.redis_url, now.stall_s) == (ABOUT["redis_url"], 7.0)
    assert (place.directory / CA_FILE_NAME).read_text() == "PEM" and now.secret == first.secret
    assert now.authority == str(place.directory / CA_FILE_NAME)


async def test_a_host_has_itself_drained_and_is_used_again_when_it_is_back(mesh: Mesh) -> None:
    state, invitation = mesh.house.state, mesh.token(uses=0)
    for host in ("gpu1-aa", "gpu2-bb"):
        await mesh.join(invitation, host)
    for name, kind in (("engine/g1.1", "engine"), ("worker/h1w0", "worker")):
        await register(state, RegistryEntry(name, kind, host="gpu1-aa", incarnation=name), 600_000)
    async with line_to(mesh.member(invitation)) as line:
        assert await line.call(Gateway.drain, None)
        assert await pool.read_drain_reasons(state) == {"gpu1-aa": SHUTDOWN_NOTICE}
        assert (await line.call(Gateway.remaining, None)).names == ["engine/g1.1"]
        await evict(state, "engine/g1.1", "engine/g1.1")
        assert (await line.call(Gateway.remaining, None)).names == []
        assert await line.call(Gateway.back, "gpu1.example")
        assert await pool.read_drain_reasons(state) == {}
        with pytest.raises(Refused, match="no address"):
            await line.call(Gateway.back, "a b")
    assert mesh.joined["gpu1-aa"].address == "gpu1.example"


async def test_a_notice_outlasts_what_the_host_said_before(mesh: Mesh) -> None:
    """That it is back, for instance, which somebody may have been slow to tell."""
    state, token = mesh.house.state, mesh.token()
    await mesh.join(token)
    await register(
        state, RegistryEntry("engine/g1.1", "engine", host="gpu1-aa", incarnation="a"), 600_000
    )
    known = mesh.membership(token)
    emptying = asyncio.create_task(
        host_drain.drain_host(known, SystemClock(), scaled(60.0), lambda: "")
    )
    async with asyncio.timeout(scaled(60)):
        for _ in range(2):
            while await pool.read_drain_reasons(state) != {"gpu1-aa": SHUTDOWN_NOTICE}:
                await asyncio.sleep(0.05)
            await pool.set_drain_reason(state, "gpu1-aa", "")
        await evict(state, "engine/g1.1", "a")
        assert await emptying
    assert await pool.read_drain_reasons(state) == {"gpu1-aa": SHUTDOWN_NOTICE}, (
        "it is empty, and stays so"
    )


async def test_a_drain_that_a_person_asked_for_outlasts_the_hosts_own(mesh: Mesh) -> None:
    state, token = mesh.house.state, mesh.token()
    await mesh.join(token)
    async with line_to(mesh.member(token)) as line:
        await line.call(Gateway.drain, None)
        await pool.submit_request(state, PoolRequest("op", "drain", host="gpu1-aa"))
        assert not await line.call(Gateway.back, "10.0.0.2")
        assert not await line.call(Gateway.drain, None)
    assert await pool.read_drain_reasons(state) == {"gpu1-aa": "asked for"}


async def test_an_ephemeral_host_that_stays_away_is_forgotten(mesh: Mesh) -> None:
    state, token = mesh.house.state, mesh.token(uses=0)
    there, stays, goes = "gpu1-aa", "gpu2-bb", "gpu3-cc"
    entries = {host: await alive(state, host) for host in (there, goes)}
    for host in (there, stays, goes):
        await mesh.join(token, host, ephemeral=host != stays)
    await evict(state, f"node/{goes}", entries[goes].incarnation)
    async with asyncio.timeout(scaled(60)):
        while goes in mesh.users.known:
            await asyncio.sleep(0.05)
        while goes in mesh.members:
            await asyncio.sleep(0.05)
        while not [e for e in await events.read_all(state) if e.kind == "host_left"]:
            await asyncio.sleep(0.05)
    assert mesh.users.known.keys() == mesh.members == {there, stays}
    assert mesh.joined.keys() == {there, stays}
    [left] = [e for e in await events.read_all(state) if e.kind == "host_left"]
    assert left.fields["host"] == goes and left.fields["away_s"] > GONE_S
    async with line_to(mesh.member(token, goes)) as line:  # it comes back at this moment
        with pytest.raises(NotAllowed):
            await line.call(Gateway.membership, None)


async def test_a_process_between_two_starts_does_not_end_the_drain(
    mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    token = mesh.token(uses=0)
    await mesh.join(token)
    member = mesh.membership(token)
    looks = ["node/gpu1-aa is down"]
    drained = host_drain.drain_host(
        member, SystemClock(), scaled(60.0), lambda: looks.pop() if looks else ""
    )
    assert await drained and not looks
    entry = RegistryEntry("engine/g1.1", "engine", host="gpu1-aa", incarnation="g1")
    await register(mesh.house.state, entry, 600_000)
    assert not await host_drain.drain_host(
        member, SystemClock(), scaled(60.0), lambda: "node/gpu1-aa is down"
    )
    assert "cannot wait, as what runs here has ended" in capsys.readouterr().out


async def test_a_host_that_was_forgotten_forgets_the_mesh_to_join_as_another(
    mesh: Mesh, tmp_path: Path
) -> None:
    """A container that is started again has the files of before, however long it was away."""
    token = mesh.token(uses=0)
    await mesh.join(token)
    place = MeshPaths(tmp_path / "host")
    place.directory.mkdir(parents=True)
    known = mesh.membership(token)
    known.write(place)
    assert (
        await asyncio.to_thread(drop_stale_membership, place, known) == known
    )  # it was not answered yet
    place.settings.write_text("{}")
    assert await asyncio.to_thread(drop_stale_membership, place, known) == known
    async with line_to(mesh.member(token)) as line:
        assert await line.call(Gateway.leave, None)
    assert await asyncio.to_thread(drop_stale_membership, place, known) is None
    assert not place.settings.exists() and membership.read_membership(place) is None
