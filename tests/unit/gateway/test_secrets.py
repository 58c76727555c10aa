"""Secrets created before their mesh starts are valid in it under any address of its gateway."""

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
from tests.unit.gateway.conftest import GatewayBench, connect, forward_to

ELSEWHERE = "127.0.0.1:1"  # where no process listens


def create_secrets(directory: Path, *options: str) -> Path:
    """Run `meshrl secrets` and return its directory."""
    result = CliRunner().invoke(app, ["secrets", str(directory), "--head", ELSEWHERE, *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return directory


@asynccontextmanager
async def run_gateway(root: Path, secrets: Path) -> AsyncIterator[str]:
    """Run a gateway with these secrets; yield its address."""
    bench = GatewayBench(root, open_simulated_state(SystemClock()), joinable=True)
    (root / "mesh/logs").mkdir(parents=True, exist_ok=True)
    head_secrets.install_head_secrets(MeshPaths(root), secrets / head_secrets.HEAD_FILE)
    async with bench.open():
        yield gateway_identity.read_identity(root / "mesh").address


def read_token_with_address(token: Path, address: str) -> AccessToken:
    return replace(read_token(token), address=address)


async def test_precreated_tokens_stay_valid_over_restarts(
    tmp_path: Path,
) -> None:
    root, secrets = tmp_path / "root", create_secrets(tmp_path / "secrets")
    for _ in range(2):
        async with run_gateway(root, secrets) as own, forward_to(own) as port:
            text = read_token_with_address(secrets / "submit.token", port.address).encoded
            async with Client(token=text) as client:
                assert await client.jobs() == []
            async with connect(
                read_token_with_address(secrets / "join.token", port.address)
            ) as line:
                public = KeyPair.generate().public.decode()
                old = JoinHost("gpu1-aa", public, "10.0.0.2", 1, True, "0.0.1")
                with pytest.raises(Refused, match=f"0.0.1, and the mesh has {read_release()}"):
                    await line.call(Gateway.join, old)
    token_registry.revoke_tokens(
        root / "mesh" / access_records.RECORDS_FILE, "submit.token", time.time()
    )
    async with run_gateway(root, secrets) as own:
        with pytest.raises(NotAllowed, match="revoked"):
            async with Client(token=read_token_with_address(secrets / "submit.token", own).encoded):
                raise AssertionError("taking them over again made it good again")


def test_secrets_are_private_and_created_completely_or_not_at_all(tmp_path: Path) -> None:
    secrets = create_secrets(
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
    join_token, submit_token = read_token(files["join.token"]), read_token(files["submit.token"])
    assert join_token.address == f"tcp://{ELSEWHERE}"
    assert submit_token.address == "tcp://mesh.example.org:7199"
    recorded = head_secrets.read_head_secrets(files["head.json"])
    assert join_token.gateway == submit_token.gateway == recorded.public
    assert [(token.kind, token.uses) for token in recorded.tokens] == [("host", 0), ("person", 1)]
    assert all(86_400 < token.expires_s - time.time() <= 2 * 86_400 for token in recorded.tokens)
    head_text = files["head.json"].read_text()
    assert join_token.secret not in head_text and submit_token.secret not in head_text
    with pytest.raises(Refused, match="already exists"):
        create_secrets(secrets)
    for invalid in (("--redis", "a b"), ("--exposed", "x:99999"), ("--head", "")):
        with pytest.raises(ConfigError, match=invalid[0]):
            create_secrets(tmp_path / "other", *invalid)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["secrets"]


def test_mesh_with_other_secrets_rejects_them(tmp_path: Path) -> None:
    mesh_paths = MeshPaths(tmp_path / "root")
    first, second = (create_secrets(tmp_path / name) / "head.json" for name in ("first", "second"))
    link = tmp_path / "linked.json"  # linked as in Kubernetes
    link.symlink_to(first)
    head_secrets.install_head_secrets(mesh_paths, link)
    head_secrets.install_head_secrets(mesh_paths, first)
    with pytest.raises(Refused, match=r"another gateway key.*secrets file of its first start"):
        head_secrets.install_head_secrets(mesh_paths, second)
    known = gateway_identity.read_identity(mesh_paths.directory)
    assert known.public == head_secrets.read_head_secrets(first).public
    assert (
        len(access_records.read_records(mesh_paths.directory / access_records.RECORDS_FILE).tokens)
        == 2
    )
    first.chmod(0o640)
    with pytest.raises(ConfigError, match="other users can read"):
        head_secrets.install_head_secrets(mesh_paths, first)


def test_invalid_secrets_file_is_rejected(tmp_path: Path) -> None:
    secrets = create_secrets(tmp_path / "secrets")
    file = secrets / "head.json"
    recorded = asdict(head_secrets.read_head_secrets(file))
    other = KeyPair.generate().public.decode()
    for invalid in (
        {"public": other},
        {"secret": "short"},
        {"tokens": [{"id": "x"}]},
        {"tokens": 1},
    ):
        documents.write(file, recorded | invalid)
        with pytest.raises(ConfigError, match=r"no valid secrets of a head.*head\.json"):
            head_secrets.install_head_secrets(MeshPaths(tmp_path / "root"), file)
    for path in (secrets / "join.token", tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"head\.json of `meshrl secrets`"):
            head_secrets.read_head_secrets(path)
    assert not (tmp_path / "root").exists()


def test_gateway_address_has_a_name_and_a_port() -> None:
    assert parse_gateway_address("head", 7199, "--head") == "tcp://head:7199"
    assert parse_gateway_address("[fe80::1]:7", 7199, "--head") == "tcp://[fe80::1]:7"
    for invalid in ("", "a/b", "tcp://a", "a:0", "a:b", "fe80::1", "a:1:2"):
        with pytest.raises(ConfigError, match="--head"):
            parse_gateway_address(invalid, 7199, "--head")
