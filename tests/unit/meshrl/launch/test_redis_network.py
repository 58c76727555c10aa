"""Where hosts that join reach the mesh's Redis, and by what it proves itself to them."""

from __future__ import annotations

import datetime
import socket
import stat
from pathlib import Path

import pytest
from cryptography import x509

from meshrl.common.base.errors import ConfigError
from meshrl.common.mesh.access.hosts import AdmittedHost
from meshrl.common.state.redis import embedded
from meshrl.common.state.redis.embedded import Listening
from meshrl.launch.redis.access import certificate
from meshrl.launch.redis.access.network import Network, far_url, is_taken

HEAD = AdmittedHost("head-000001", {}, 0.0)
NOW = datetime.datetime(2026, 11, 23, tzinfo=datetime.UTC)


def authority(directory: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((directory / certificate.AUTHORITY).read_bytes())


def served(directory: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((directory / certificate.CERTIFICATE).read_bytes())


def names(found: x509.Certificate) -> set[str]:
    held = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = {str(one) for one in held.get_values_for_type(x509.IPAddress)}
    return addresses | set(held.get_values_for_type(x509.DNSName))


def test_the_authority_stays_and_the_certificate_is_for_where_it_is_reached_now(
    tmp_path: Path,
) -> None:
    certificate.issue(tmp_path, ["10.0.0.1"], NOW)
    first, before = served(tmp_path), authority(tmp_path)
    certificate.issue(tmp_path, ["gpu1.example", "::1"], NOW + datetime.timedelta(days=30))
    assert authority(tmp_path) == before and served(tmp_path) != first
    assert names(first) == {"10.0.0.1"} and names(served(tmp_path)) == {"gpu1.example", "::1"}
    served(tmp_path).verify_directly_issued_by(before)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_an_authority_that_is_about_to_end_is_replaced(tmp_path: Path) -> None:
    certificate.issue(tmp_path, ["10.0.0.1"], NOW)
    before = authority(tmp_path)
    certificate.issue(tmp_path, ["10.0.0.1"], NOW + certificate.VALID - certificate.SPARE)
    assert authority(tmp_path) != before
    served(tmp_path).verify_directly_issued_by(authority(tmp_path))


def test_an_address_that_nobody_reaches_has_to_be_advertised() -> None:
    for anywhere in ("tcp://0.0.0.0:*", "tcp://*:7000-7099", "[::]:*"):
        with pytest.raises(ConfigError, match="no address at which others reach it"):
            _ = Network(HEAD, anywhere).host
    assert Network(HEAD, "tcp://*:*", "tcp://gpu1.example").host == "gpu1.example"
    assert Network(HEAD, "10.0.0.1:*").host == "10.0.0.1"


def test_the_port_is_the_one_of_before_and_else_the_first_free_one(tmp_path: Path) -> None:
    first = Network(HEAD, "127.0.0.1:*").listening(tmp_path, None)
    assert Network(HEAD, "127.0.0.1:*").listening(tmp_path, None) == first
    with socket.create_server(("127.0.0.1", first.port)):
        assert Network(HEAD, "127.0.0.1:*").listening(tmp_path, None).port != first.port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="no free port"):
            Network(HEAD, f"127.0.0.1:{port}").listening(tmp_path, None)
        assert is_taken(Listening("127.0.0.1", port))


def test_an_address_of_another_machine_is_not_told_as_a_port_that_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1, port 0"):
        Network(HEAD, "192.0.2.1:*").listening(tmp_path, None)
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1, port 7000"):
        is_taken(Listening("192.0.2.1", 7000))


def test_a_server_of_the_users_is_one_that_hosts_reach_by_tls(tmp_path: Path) -> None:
    wide, near = "10.0.0.1:*", "127.0.0.1:*"
    url = "rediss://me:secret@db.example:6390/2?ssl_ca_certs=%2Fca%20s.pem"
    assert far_url(url, wide) == ("rediss://db.example:6390/2", "/ca s.pem")
    for plain in ("redis://me:secret@db.example:6390/0", "redis://db.example"):
        with pytest.raises(ConfigError, match="in the clear") as caught:
            far_url(plain, wide)
        assert "secret" not in str(caught.value)
    for url in ("unix:///run/redis.sock", "rediss://127.0.0.1:6379/0", "redis://localhost:1/0"):
        with pytest.raises(ConfigError, match="cannot reach"):
            far_url(url, wide)
        assert far_url(url, near) == (url, "")


def test_a_url_is_told_without_what_lets_anybody_in() -> None:
    told = {
        "unix://a:b@/run/redis.sock": "unix:///run/redis.sock",
        "unix://a:b@/run/redis.sock?db=1": "unix:///run/redis.sock?db=1",
        "redis://a:b@db:1?db=2": "redis://db:1/2",
        "rediss://:b@[::1]:6379/0": "rediss://[::1]:6379/0",
        "redis://db": "redis://db",
    }
    for url, bare in told.items():
        assert embedded.without_credentials(url) == (bare, "")
