"""Secrets that were handed out before a mesh was there are good in it, under whatever name somebody
reaches it by.
"""

from __future__ import annotations

import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshrl import Client
from meshrl.cli import app
from meshrl.common.api.gateway import Gateway, JoinHost
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, NotAllowed, Refused
from meshrl.common.base.files import documents
from meshrl.common.base.release import read_release
from meshrl.common.mesh.access import access_records, gateway_identity, token_registry
from meshrl.common.mesh.access.access_token import AccessToken, parse_gateway_address, read_token
from meshrl.common.mesh.transport.keys import KeyPair
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.head import head_secrets
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.unit.gateway.conftest import House, forwarded, line_to

ELSEWHERE = "127.0.0.1:1"  # where nobody listens


def made(directory: Path, *words: str) -> Path:
    """What `meshrl secrets` makes."""
    ran = CliRunner().invoke(app, ["secrets", str(directory), "--head", ELSEWHERE, *words])
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    assert ran.exit_code == 0, ran.output
    return directory


@asynccontextmanager
async def running(root: Path, secrets: Path) -> AsyncIterator[str]:
    """A gateway that was handed these; its address."""
    house = House(root, open_simulated_state(SystemClock()), joinable=True)
    (root / "mesh/logs").mkdir(parents=True, exist_ok=True)
    head_secrets.install_head_secrets(MeshPaths(root), secrets / head_secrets.HEAD_FILE)
    async with house.open():
        yield gateway_identity.read_identity(root / "mesh").address


def moved(token: Path, address: str) -> AccessToken:
    return replace(read_token(token), address=address)


async def test_tokens_that_were_handed_out_are_good_before_and_after_a_start(
    tmp_path: Path,
) -> None:
    root, secrets = tmp_path / "root", made(tmp_path / "secrets")
    for _ in range(2):
        async with running(root, secrets) as own, forwarded(own) as port:
            text = moved(secrets / "submit.token", port.address).encoded
            async with Client(token=text) as client:
                assert await client.jobs() == []
            async with line_to(moved(secrets / "join.token", port.address)) as line:
                public = KeyPair.generate().public.decode()
                old = JoinHost("gpu1-aa", public, "10.0.0.2", 1, True, "0.0.1")
                with pytest.raises(Refused, match=f"0.0.1, and the mesh {read_release()}"):
                    await line.call(Gateway.join, old)
    token_registry.revoke_tokens(
        root / "mesh" / access_records.RECORDS_FILE, "submit.token", time.time()
    )
    async with running(root, secrets) as own:
        with pytest.raises(NotAllowed, match="revoked"):
            async with Client(token=moved(secrets / "submit.token", own).encoded):
                raise AssertionError("taking them over again made it good again")


def test_all_is_for_its_readers_eyes_and_made_whole_or_not_at_all(tmp_path: Path) -> None:
    secrets = made(
        tmp_path / "new/secrets", "--exposed", "mesh.example.org", "--redis", "redis", "--days", "2"
    )
    files = {str(path.relative_to(secrets)): path for path in secrets.rglob("*") if path.is_file()}
    names = ("authority.pem", "redis.pem", "redis-key.pem", "users.acl", "url")
    assert files.keys() == {
        *("head.json", "join.token", "submit.token"),
        *(f"redis/{name}" for name in names),
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}
    assert {stat.S_IMODE(d.stat().st_mode) for d in (secrets, secrets / "redis")} == {0o700}
    joining, submitting = read_token(files["join.token"]), read_token(files["submit.token"])
    assert joining.address == f"tcp://{ELSEWHERE}"
    assert submitting.address == "tcp://mesh.example.org:7199"
    held = head_secrets.read_head_secrets(files["head.json"])
    assert joining.gateway == submitting.gateway == held.public
    assert [(token.kind, token.uses) for token in held.tokens] == [("host", 0), ("person", 1)]
    assert all(86_400 < token.expires_s - time.time() <= 2 * 86_400 for token in held.tokens)
    told = files["head.json"].read_text()
    assert joining.secret not in told and submitting.secret not in told
    with pytest.raises(Refused, match="there already"):
        made(secrets)
    for wrong in (("--redis", "a b"), ("--exposed", "x:99999"), ("--head", "")):
        with pytest.raises(ConfigError, match=wrong[0]):
            made(tmp_path / "other", *wrong)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["secrets"]


def test_a_mesh_that_has_others_takes_none(tmp_path: Path) -> None:
    place = MeshPaths(tmp_path / "root")
    first, second = (made(tmp_path / name) / "head.json" for name in ("first", "second"))
    link = tmp_path / "linked.json"  # as Kubernetes has them
    link.symlink_to(first)
    head_secrets.install_head_secrets(place, link)
    head_secrets.install_head_secrets(place, first)
    with pytest.raises(Refused, match=r"key of its own.*file that it was started with first"):
        head_secrets.install_head_secrets(place, second)
    known = gateway_identity.read_identity(place.directory)
    assert known.public == head_secrets.read_head_secrets(first).public
    assert (
        len(access_records.read_records(place.directory / access_records.RECORDS_FILE).tokens) == 2
    )
    first.chmod(0o640)
    with pytest.raises(ConfigError, match="others can read"):
        head_secrets.install_head_secrets(place, first)


def test_what_is_no_file_of_secrets_is_refused(tmp_path: Path) -> None:
    secrets = made(tmp_path / "secrets")
    file = secrets / "head.json"
    held = asdict(head_secrets.read_head_secrets(file))
    other = KeyPair.generate().public.decode()
    for wrong in ({"public": other}, {"secret": "short"}, {"tokens": [{"id": "x"}]}, {"tokens": 1}):
        documents.write(file, held | wrong)
        with pytest.raises(ConfigError, match=r"no secrets of a head.*head\.json"):
            head_secrets.install_head_secrets(MeshPaths(tmp_path / "root"), file)
    for path in (secrets / "join.token", tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"head\.json of `meshrl secrets`"):
            head_secrets.read_head_secrets(path)
    assert not (tmp_path / "root").exists()


def test_an_address_has_a_name_and_a_port() -> None:
    assert parse_gateway_address("head", 7199, "--head") == "tcp://head:7199"
    assert parse_gateway_address("[fe80::1]:7", 7199, "--head") == "tcp://[fe80::1]:7"
    for wrong in ("", "a/b", "tcp://a", "a:0", "a:b", "fe80::1", "a:1:2"):
        with pytest.raises(ConfigError, match="--head"):
            parse_gateway_address(wrong, 7199, "--head")
