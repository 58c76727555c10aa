"""Admission of hosts by the gateway: a token admits its number of hosts, each then has its own
key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.api.calls.call_permissions import HOST_ROLES, PLANNER_ROLE
from meshrl.common.api.gateway import Gateway, HostAdmitted, JoinHost, NoticeReport
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
from meshrl.common.state.pool.scheduling.snapshot import HOST_LEFT, SHUTDOWN_NOTICE, PoolRequest
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.store.host_notices import UNKNOWN_TIME, HostNotice, read_notices
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.registry import RegistryEntry, evict, register
from meshrl.directory.directory_paths import MeshPaths
from meshrl.directory.joined_hosts import JoinedHost, read_joined_hosts
from meshrl.launch.head.host_admission import HostAdmission
from meshrl.launch.hosts import host_drain, membership, preemption_notices
from meshrl.launch.hosts.host_join import drop_stale_membership, write_location
from meshrl.launch.hosts.membership import CA_FILE_NAME, Membership
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.unit.gateway.conftest import GatewayBench, connect

GONE_S = 0.5
HEAD = "here"
OF_MEMBERS: tuple[tuple[Any, Any], ...] = (
    (Gateway.drain, None),
    (Gateway.notice, NoticeReport("EC2", 7.0, "")),
    (Gateway.back, "h"),
    (Gateway.whereabouts, None),
    (Gateway.leave, None),
)
ABOUT = {"redis_url": "rediss://head:1/0", "ca_pem": "PEM", "settings": {"stall_s": 7.0}}


@dataclass
class RedisUsers:
    """Hosts with access to Redis, in place of a server's users."""

    known: dict[str, Mapping[str, str]] = field(default_factory=dict)

    async def admit_host(self, host: AdmittedHost) -> None:
        self.known[host.host] = host.passwords

    async def expel_host(self, host: str) -> bool:
        return self.known.pop(host, None) is not None


@dataclass
class Mesh:
    bench: GatewayBench
    users: RedisUsers
    pairs: dict[str, KeyPair] = field(default_factory=dict)

    def token(self, name: str = "invitation", lasts_s: float = 60.0, uses: int = 1) -> str:
        identity = gateway_identity.read_identity(self.bench.root / "mesh")
        at = identity.address, identity.public
        token, ticket = token_registry.create_token(
            name, lasts_s, time.time(), *at, kind=HOST_TOKEN, uses=uses
        )
        token_registry.add_token(self.bench.file, token)
        return ticket.encoded

    def member(self, token: str, host: str = "gpu1-aa") -> str:
        """Return the token of an admitted host with its own key."""
        return replace(read_token(token), secret=self.pair(host).secret.decode()).encoded

    def membership(self, token: str) -> Membership:
        """Return the membership that the host itself saves."""
        ticket = read_token(self.member(token))
        return Membership("gpu1-aa", ticket.address, ticket.gateway, ticket.secret)

    def pair(self, host: str) -> KeyPair:
        return self.pairs.setdefault(host, KeyPair.generate())

    @property
    def joined(self) -> Mapping[str, JoinedHost]:
        return read_joined_hosts(MeshPaths(self.bench.root))

    @property
    def members(self) -> set[str]:
        return {member.host for member in access_records.read_records(self.bench.file).members}

    async def join(self, token: str, host: str = "gpu1-aa", **fields: Any) -> HostAdmitted:
        public = self.pair(host).public.decode()
        request = replace(JoinHost(host, public, "10.0.0.2", 2, True, read_release()), **fields)
        async with connect(token) as line:
            return await line.call(Gateway.join, request)


async def register_agent(state: StateClient, host: str) -> RegistryEntry:
    """Register the agent of a host with a long lease."""
    entry = RegistryEntry(f"node/{host}", "node", host=host, incarnation=host)
    await register(state, entry, 600_000)
    return entry


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    root = tmp_path / "root"
    (root / "mesh/logs").mkdir(parents=True)
    clock = SystemClock()
    bench = GatewayBench(root, open_simulated_state(clock), joinable=True)
    users = RedisUsers()
    admission = HostAdmission(
        MeshPaths(root), bench.state, clock, users, lambda: ABOUT, GONE_S, HEAD
    )
    async with bench.open():
        task = asyncio.create_task(admission.run())
        yield Mesh(bench, users)
        task.cancel()


async def test_admitted_host_gets_its_own_roles_and_a_secret_once(mesh: Mesh) -> None:
    first = await mesh.join(mesh.token())
    assert (first.redis_url, first.ca_pem) == ("rediss://head:1/0", "PEM")
    assert first.settings == {"stall_s": 7.0}
    assert (first.worker_prefix, first.planner) == ("h1w", "planner/2")
    passwords = mesh.users.known["gpu1-aa"]
    assert passwords.keys() == HOST_ROLES | {PLANNER_ROLE}
    admitted = AdmittedHost.from_secret("gpu1-aa", first.secret, passwords, 0.0)
    assert admitted.passwords == passwords
    second = await mesh.join(mesh.token("another"), "gpu2-bb")
    assert (second.worker_prefix, second.planner) == ("h2w", ""), (
        "one planner stands by, no name twice"
    )
    assert mesh.users.known["gpu2-bb"].keys() == HOST_ROLES
    stored_text = "\n".join(p.read_text() for p in mesh.bench.root.rglob("*.json"))
    assert (
        first.secret not in stored_text
        and derive_redis_password(first.secret, "node") not in stored_text
    )
    assert mesh.joined.keys() == {"gpu1-aa", "gpu2-bb"}


async def test_token_admits_one_host(mesh: Mesh) -> None:
    token = mesh.token()
    first = await mesh.join(token)
    assert await mesh.join(token) == first, "its answer may have been lost"
    with pytest.raises(Refused, match=r"has admitted gpu1-aa.*token create --host"):
        await mesh.join(token, "gpu2-bb")
    with pytest.raises(Refused, match="a host named gpu1-aa is already in the mesh"):
        await mesh.join(mesh.token("another"), "gpu1-aa")
    assert mesh.users.known.keys() == mesh.members == {"gpu1-aa"}


async def test_token_admits_its_number_of_hosts(mesh: Mesh) -> None:
    two, any_number = mesh.token("two", uses=2), mesh.token("any", uses=0)
    secrets = {(await mesh.join(two, host)).secret for host in ("gpu1-aa", "gpu2-bb")}
    with pytest.raises(Refused, match=r"all 2 hosts that it permits, gpu2-bb last"):
        await mesh.join(two, "gpu3-cc")
    hosts = [f"cpu{i}-dd" for i in range(5)]
    admitted = await asyncio.gather(*(mesh.join(any_number, host) for host in hosts))
    assert len(secrets | {one.secret for one in admitted}) == 7
    assert mesh.members == mesh.users.known.keys() == {"gpu1-aa", "gpu2-bb", *hosts}


async def test_shared_token_cannot_replace_an_admitted_host(mesh: Mesh) -> None:
    token = mesh.token(uses=0)
    first = await mesh.join(token)
    first_key = mesh.pairs.pop("gpu1-aa")
    with pytest.raises(Refused, match="a host named gpu1-aa is already in the mesh"):
        await mesh.join(token)  # with another key
    key = first_key.public.decode()
    with pytest.raises(Refused, match="a host named gpu1-aa is already in the mesh"):
        await mesh.join(token, "gpu2-bb", key=key)
    with pytest.raises(Refused, match="is not the public key"):
        await mesh.join(token, "gpu2-bb", key="~" * 40)
    own_token = KeyPair.from_secret(read_token(token).secret.encode()).public.decode()
    with pytest.raises(Refused, match="key belongs to a token"):
        await mesh.join(token, "gpu2-bb", key=own_token)
    passwords = AdmittedHost.from_secret(
        "gpu1-aa", first.secret, mesh.users.known["gpu1-aa"], 0.0
    ).passwords
    assert mesh.users.known == {"gpu1-aa": passwords}


async def test_restarted_gateway_repeats_its_answer(mesh: Mesh) -> None:
    token = mesh.token()
    await mesh.join(token)
    await mesh.bench.restart_gateway()
    second = await mesh.join(token)
    admitted = AdmittedHost.from_secret("gpu1-aa", second.secret, mesh.users.known["gpu1-aa"], 0.0)
    assert mesh.users.known == {"gpu1-aa": admitted.passwords}
    assert mesh.joined["gpu1-aa"].worker_prefix == "h1w"


async def test_secret_is_not_repeated_after_the_rejoin_window(mesh: Mesh) -> None:
    token = mesh.token(uses=0)
    await mesh.join(token)
    known = access_records.read_records(mesh.bench.file)
    [member] = known.members
    old_member = replace(member, since_s=member.since_s - 2 * REJOIN_WINDOW_S)
    documents.write(mesh.bench.file, asdict(replace(known, members=[old_member])))
    await mesh.bench.restart_gateway()
    with pytest.raises(Refused, match=r"gpu1-aa joined 12\d\d s ago.*Join again"):
        await mesh.join(token)
    assert mesh.users.known.keys() == mesh.members == {"gpu1-aa"}, "who is in stays in"


async def test_revoked_token_admits_no_host_and_its_hosts_stay(mesh: Mesh) -> None:
    token = mesh.token(uses=0)
    await mesh.join(token)
    token_registry.revoke_tokens(mesh.bench.file, "invitation", time.time())
    with pytest.raises(NotAllowed, match="revoked"):
        await mesh.join(token, "gpu2-bb")
    async with connect(mesh.member(token)) as line:
        assert await line.call(Gateway.membership, None) == "gpu1-aa"
        with pytest.raises(Refused, match="gpu1-aa is already a member"):
            await line.call(Gateway.join, JoinHost("x-1", "k" * 40, "h", 1, False, read_release()))


async def test_invalid_tokens_admit_no_host(mesh: Mesh) -> None:
    with pytest.raises(NotAllowed, match="expired"):
        await mesh.join(mesh.token("late", -1.0))
    with pytest.raises(NotAllowed):
        await mesh.join(mesh.bench.token("alice"))
    with pytest.raises(Refused, match=f"0.0.1.*{read_release()}"):
        await mesh.join(mesh.token("old"), version="0.0.1")
    with pytest.raises(Refused, match="invalid name"):
        await mesh.join(mesh.token("odd"), "a*~&")
    async with connect(mesh.token("curious")) as line:
        with pytest.raises(NotAllowed):
            await line.call(Gateway.jobs, None)
    assert not mesh.users.known


async def test_name_of_the_head_is_rejected(mesh: Mesh) -> None:
    with pytest.raises(Refused, match="here is the name of the head"):
        await mesh.join(mesh.token(), HEAD)
    assert not mesh.members
    # The launcher also rejects it and leaves nothing on record.
    fields = {
        "admitted": asdict(AdmittedHost.from_secret(HEAD, "5e" * 32, HOST_ROLES, 0.0)),
        "address": "10.0.0.2",
        "workers": 1,
        "standby": True,
        "ephemeral": False,
        "key": "key",
    }
    with pytest.raises(Refused, match="here is the head of the mesh"):
        await host_requests.submit_host_request(
            mesh.bench.state, SystemClock(), "q", host_requests.JOIN, fields
        )
    assert not mesh.joined and not mesh.users.known


@pytest.mark.parametrize("host", [HEAD, "gpu1-aa"])
async def test_host_without_admission_cannot_drain(mesh: Mesh, host: str) -> None:
    """Start from a failed admission: a record with a key, and no admitted host."""
    token, state = mesh.token(), mesh.bench.state
    [token_record] = access_records.read_records(mesh.bench.file).tokens
    members.admit_member(
        mesh.bench.file, token_record.id, host, mesh.pair(host).public, time.time()
    )
    await pool.set_drain_reason(state, HEAD, SHUTDOWN_NOTICE)
    async with connect(mesh.member(token, host)) as line:
        for method, request in OF_MEMBERS:
            with pytest.raises(
                NotFound, match=r"was not admitted to the mesh|the mesh has no host"
            ):
                await line.call(method, request)
    assert await pool.read_drain_reasons(state) == {HEAD: SHUTDOWN_NOTICE}
    if host != HEAD:  # it requests again with its recorded key
        assert (await mesh.join(token, host)).worker_prefix == "h1w"
        async with connect(mesh.member(token, host)) as line:
            assert await line.call(Gateway.drain, None)


async def test_host_that_left_is_rejected(mesh: Mesh) -> None:
    token = mesh.token(uses=0)
    await mesh.join(token)
    async with connect(token) as line:  # not a host's token
        for method, request in (*OF_MEMBERS, (Gateway.membership, None)):
            with pytest.raises(NotFound, match="no joined host has this key"):
                await line.call(method, request)
    own_token = mesh.member(token)
    async with connect(own_token) as line:
        assert await line.call(Gateway.membership, None) == "gpu1-aa"
        assert await line.call(Gateway.leave, None)
    assert not mesh.users.known and not mesh.joined and not mesh.members
    async with connect(own_token) as line:
        with pytest.raises(NotAllowed, match="revoked"):
            await line.call(Gateway.membership, None)
    for other_token in (token, mesh.token("another")):
        with pytest.raises(Refused, match="or was"):
            await mesh.join(other_token, "gpu1-aa")
    assert digest_key(mesh.pair("gpu1-aa").public) not in mesh.bench.file.read_text()
    again = await mesh.join(mesh.token("third"), "gpu1-bb")
    assert (again.worker_prefix, again.planner) == ("h2w", "planner/2")


async def test_returning_member_receives_the_current_redis_location(mesh: Mesh) -> None:
    token = mesh.token()
    first = await mesh.join(token)
    mesh_paths = MeshPaths(mesh.bench.root / "second")
    old_settings = MeshSettings(first.redis_url, "here", secret=first.secret, authority="old.pem")
    old_settings.to_file(mesh_paths.settings)
    async with connect(mesh.member(token)) as line:
        write_location(mesh_paths, await line.call(Gateway.whereabouts, None))
    current_settings = MeshSettings.from_file(mesh_paths.settings)
    assert (current_settings.redis_url, current_settings.stall_s) == (ABOUT["redis_url"], 7.0)
    assert (
        mesh_paths.directory / CA_FILE_NAME
    ).read_text() == "PEM" and current_settings.secret == first.secret
    assert current_settings.authority == str(mesh_paths.directory / CA_FILE_NAME)


async def test_host_drains_itself_and_is_used_again_after_its_return(mesh: Mesh) -> None:
    state, invitation = mesh.bench.state, mesh.token(uses=0)
    for host in ("gpu1-aa", "gpu2-bb"):
        await mesh.join(invitation, host)
    for name, kind in (("engine/g1.1", "engine"), ("worker/h1w0", "worker")):
        await register(state, RegistryEntry(name, kind, host="gpu1-aa", incarnation=name), 600_000)
    async with connect(mesh.member(invitation)) as line:
        assert await line.call(Gateway.drain, None)
        assert await pool.read_drain_reasons(state) == {"gpu1-aa": SHUTDOWN_NOTICE}
        assert (await line.call(Gateway.remaining, None)).names == ["engine/g1.1"]
        await evict(state, "engine/g1.1", "engine/g1.1")
        assert (await line.call(Gateway.remaining, None)).names == []
        assert await line.call(Gateway.back, "gpu1.example")
        assert await pool.read_drain_reasons(state) == {}
        with pytest.raises(Refused, match="is not the address"):
            await line.call(Gateway.back, "a b")
    assert mesh.joined["gpu1-aa"].address == "gpu1.example"


async def test_shutdown_notice_overrides_an_earlier_report(mesh: Mesh) -> None:
    """Publish the drain notice again after a late report that the host is back."""
    state, token = mesh.bench.state, mesh.token()
    await mesh.join(token)
    await register(
        state, RegistryEntry("engine/g1.1", "engine", host="gpu1-aa", incarnation="a"), 600_000
    )
    known = mesh.membership(token)
    limit_s = scaled(60.0)
    drain = asyncio.create_task(host_drain.drain_host(known, SystemClock(), limit_s, lambda: ""))
    async with asyncio.timeout(scaled(60)):
        for _ in range(2):
            while await pool.read_drain_reasons(state) != {"gpu1-aa": SHUTDOWN_NOTICE}:
                await asyncio.sleep(0.05)
            await pool.set_drain_reason(state, "gpu1-aa", "")
        announced = (await read_notices(state))["gpu1-aa"]
        left_s = (announced.preempt_at_s or 0.0) - time.time()
        assert announced.source == "its stop order" and 0 < left_s <= limit_s
        await evict(state, "engine/g1.1", "a")
        assert await drain
    assert await pool.read_drain_reasons(state) == {"gpu1-aa": SHUTDOWN_NOTICE}, (
        "it is empty, and stays so"
    )


async def test_host_drains_while_there_is_a_preemption_notice(
    mesh: Mesh,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(preemption_notices, "POLL_S", 0.02)
    state, token, notice = mesh.bench.state, mesh.token(), tmp_path / "notice"
    await mesh.join(token)
    member, about = mesh.membership(token), f"file:{notice}"
    task = asyncio.create_task(
        preemption_notices.follow_notices(member, SystemClock(), about, "10.0.0.2")
    )
    source, at_s = f"the file {notice}", datetime(2126, 11, 30, 12, tzinfo=UTC).timestamp()
    async with asyncio.timeout(scaled(60)):
        for _ in range(2):
            notice.write_text("2126-11-30T12:00:00Z")
            while await pool.read_drain_reasons(state) != {"gpu1-aa": SHUTDOWN_NOTICE}:
                await asyncio.sleep(0.02)
            assert await read_notices(state) == {"gpu1-aa": HostNotice(source, at_s)}
            await pool.set_drain_reason(state, "gpu1-aa", "")  # a late report of its return
            while await pool.read_drain_reasons(state) != {"gpu1-aa": SHUTDOWN_NOTICE}:
                await asyncio.sleep(0.02)
            notice.unlink()
            while await pool.read_drain_reasons(state):
                await asyncio.sleep(0.02)
            assert await read_notices(state) == {}
        notice.mkdir()  # cannot be read
        while "gpu1-aa" not in (known := await read_notices(state)):
            assert not task.done()
            await asyncio.sleep(0.02)
        assert known["gpu1-aa"].failure.startswith(f"file:{notice}: IsADirectoryError")
        assert not known["gpu1-aa"].source and not await pool.read_drain_reasons(state)
        notice.rmdir()
        while await read_notices(state):  # it can be read again
            await asyncio.sleep(0.02)
        notice.write_text("soon")
        while (await read_notices(state)) != {"gpu1-aa": HostNotice(source, UNKNOWN_TIME)}:
            await asyncio.sleep(0.02)
        notice.unlink()
        notice.mkdir()  # the notice stays in force while its source cannot be read
        while not (found := (await read_notices(state))["gpu1-aa"]).failure:
            await asyncio.sleep(0.02)
        assert found.source == source and await pool.read_drain_reasons(state)
        assert "failed, again" in capsys.readouterr().out
        async with connect(mesh.member(token)) as line:
            await line.call(Gateway.leave, None)
        notice.rmdir()
        notice.write_text("")
        await task  # the mesh has removed it
    assert await pool.read_drain_reasons(state) == {"gpu1-aa": HOST_LEFT}
    assert await read_notices(state) == {}


async def test_requested_drain_outlasts_the_hosts_own_drain(mesh: Mesh) -> None:
    state, token = mesh.bench.state, mesh.token()
    await mesh.join(token)
    async with connect(mesh.member(token)) as line:
        await line.call(Gateway.drain, None)
        await pool.submit_request(state, PoolRequest("op", "drain", host="gpu1-aa"))
        assert not await line.call(Gateway.back, "10.0.0.2")
        assert not await line.call(Gateway.drain, None)
    assert await pool.read_drain_reasons(state) == {"gpu1-aa": "asked for"}


async def test_absent_ephemeral_host_is_removed(mesh: Mesh) -> None:
    state, token = mesh.bench.state, mesh.token(uses=0)
    present, away, departed = "gpu1-aa", "gpu2-bb", "gpu3-cc"
    entries = {host: await register_agent(state, host) for host in (present, departed)}
    for host in (present, away, departed):
        await mesh.join(token, host, ephemeral=host != away)
    await evict(state, f"node/{departed}", entries[departed].incarnation)
    async with asyncio.timeout(scaled(60)):
        while departed in mesh.users.known:
            await asyncio.sleep(0.05)
        while departed in mesh.members:
            await asyncio.sleep(0.05)
        while not [e for e in await events.read_all(state) if e.kind == "host_left"]:
            await asyncio.sleep(0.05)
    assert mesh.users.known.keys() == mesh.members == {present, away}
    assert mesh.joined.keys() == {present, away}
    [departure] = [e for e in await events.read_all(state) if e.kind == "host_left"]
    assert departure.fields["host"] == departed and departure.fields["away_s"] > GONE_S
    async with connect(mesh.member(token, departed)) as line:  # it returns at this moment
        with pytest.raises(NotAllowed):
            await line.call(Gateway.membership, None)


async def test_restart_of_a_process_does_not_end_the_drain(
    mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    token = mesh.token(uses=0)
    await mesh.join(token)
    member = mesh.membership(token)
    reasons = ["node/gpu1-aa is down"]
    drained = host_drain.drain_host(
        member, SystemClock(), scaled(60.0), lambda: reasons.pop() if reasons else ""
    )
    assert await drained and not reasons
    entry = RegistryEntry("engine/g1.1", "engine", host="gpu1-aa", incarnation="g1")
    await register(mesh.bench.state, entry, 600_000)
    assert not await host_drain.drain_host(
        member, SystemClock(), scaled(60.0), lambda: "node/gpu1-aa is down"
    )
    assert "stops draining, because its own processes have ended" in capsys.readouterr().out


async def test_removed_host_drops_its_membership_and_joins_again(
    mesh: Mesh, tmp_path: Path
) -> None:
    """Start a container again with the files of its first run."""
    token = mesh.token(uses=0)
    await mesh.join(token)
    mesh_paths = MeshPaths(tmp_path / "host")
    mesh_paths.directory.mkdir(parents=True)
    known = mesh.membership(token)
    known.write(mesh_paths)
    assert (
        await asyncio.to_thread(drop_stale_membership, mesh_paths, known) == known
    )  # it was not admitted yet
    mesh_paths.settings.write_text("{}")
    assert await asyncio.to_thread(drop_stale_membership, mesh_paths, known) == known
    async with connect(mesh.member(token)) as line:
        assert await line.call(Gateway.leave, None)
    assert await asyncio.to_thread(drop_stale_membership, mesh_paths, known) is None
    assert not mesh_paths.settings.exists() and membership.read_membership(mesh_paths) is None
