"""Benchmark of the bulk port: a chunk sent to another process in plain, sealed, and by TLS 1.3.

Usage:

    python -m loadtests.bulk [--rounds 7] [--mib 256] [--gib 0]

Both ends are processes of this host, over loopback, and the chunk is in the page cache; the
receiver does not check the data. Per transport, medians of rounds in rotating order: `mb_per_s`,
and `cpu_s_per_gb` of both ends together, as processes count it. `plain` is sent by sendfile; `aes`
and `chacha` are the frames of `meshrl.common.weights.bulk.channel`; `tls` sends pieces of 256 KiB
in records of 16 KiB, with TLS_AES_256_GCM_SHA384. `ratio_*`: CPU over that of `plain`, round by
round. `handshake_ms_*`: to connect and prove keys, by key pairs (`keys`) and by TLS with a
certificate on one side.

With `--gib`, a sparse file of so many GiB is put by parts into a store and fetched into another
file, sealed and checked: `put_*` and `fetch_*`, with hashes and disk.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import json
import os
import socket
import ssl
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from loadtests.measuring.entry import options, report
from loadtests.measuring.processes import cpu_s, served
from loadtests.measuring.rounds import ratio, rotated
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.transport.keys import ProcessKeys
from meshrl.common.weights.bulk.authenticators import KeyAuthenticator
from meshrl.common.weights.bulk.channel import FRAME_BYTES, MAX_PIECE_BYTES
from meshrl.common.weights.bulk.server import BulkServer
from meshrl.common.weights.bulk.session import BulkSession
from meshrl.common.weights.bulk.transfer import FileTransfer
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.chunks.partial_file import PartialFile
from meshrl.common.weights.handshakes.handshake import SUITES_BY_MAGIC, ClientHandshake

AES, CHACHA = SUITES_BY_MAGIC
WAYS = ("plain", "aes", "chacha", "tls")
DEADLINE_S = 600.0
HANDSHAKES = 20
CERTIFICATE = "tls.pem"


def whose(keys: Sequence[str]) -> list[tuple[str, ...]]:
    """Admit every peer as the trainer."""
    return [("trainer@here",)] * len(keys)


# ---------------------------------------------------------------- the serving process


def serve(directory: Path, digest: str) -> None:
    """Serve every transport until the process is killed; print the endpoints and the public key."""
    keys = ProcessKeys(whose, time.monotonic)
    places = {}
    for way, sealed in (("plain", False), ("aes", True)):
        door = KeyAuthenticator(keys, "weights", sealed)
        server = BulkServer(
            ChunkStore(directory), SystemHost(), "tcp://127.0.0.1:*", authenticator=door
        )
        places[way] = server.address.partition("#")[0]
    listener = socket.create_server(("127.0.0.1", 0))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(directory / CERTIFICATE)
    places["chacha"], places["tls"] = places["aes"], f"127.0.0.1:{listener.getsockname()[1]}"
    print(json.dumps({"places": places, "key": keys.bulk_public_key.hex()}), flush=True)
    path = ChunkStore(directory).chunk_path(digest)
    while True:
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with context.wrap_socket(accepted, server_side=True) as connected:
            if connected.recv(1) == b"G":
                room = memoryview(bytearray(FRAME_BYTES))
                with path.open("rb", buffering=0) as file:
                    while read := file.readinto(room):
                        connected.sendall(room[:read])


def certificate(directory: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bulk")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    with os.fdopen(os.open(directory / CERTIFICATE, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(secret + made.public_bytes(serialization.Encoding.PEM))


@contextmanager
def serving(directory: Path, digest: str) -> Iterator[tuple[int, dict[str, str], str]]:
    """Start a serving process; yield its pid, the address of each transport, and its key."""
    with served("loadtests.bulk", "--serve", str(directory), digest) as (pid, line):
        document = json.loads(line)
        yield pid, document["places"], document["key"]


# ---------------------------------------------------------------- the asking one


class ChunkFetcher:
    """Fetcher of a chunk over each transport."""

    def __init__(self, places: dict[str, str], server: str, digest: str, directory: Path) -> None:
        self._places, self._server, self._digest = places, bytes.fromhex(server), digest
        self._own = KeyAuthenticator(
            ProcessKeys(whose, time.monotonic), "trainer", True
        )._keys.bulk_private_key
        self._context = ssl.create_default_context(cafile=str(directory / CERTIFICATE))
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3

    def session(self, way: str) -> BulkSession:
        magic = CHACHA if way == "chacha" else AES
        place = self._places[way]
        proof = ClientHandshake(self._own, self._server, place, way != "plain", magic)
        return BulkSession(place, proof, DEADLINE_S, 1 << 40)

    def get(self, way: str) -> None:
        if way != "tls":
            with self.session(way) as session:
                session.fetch_range(self._digest, 0, 1 << 40, lambda piece: None)
            return
        with self._tls() as connected:
            connected.send(b"G")
            room = memoryview(bytearray(MAX_PIECE_BYTES))
            while connected.recv_into(room):
                pass

    def handshake_ms(self, way: str) -> float:
        found = []
        for _ in range(HANDSHAKES):
            began = time.perf_counter()
            if way == "tls":
                with self._tls() as connected:
                    connected.send(b"-")
            else:
                self.session(way).open().close()
            found.append(1000 * (time.perf_counter() - began))
        return round(statistics.median(found), 2)

    def _tls(self) -> ssl.SSLSocket:
        host, _, port = self._places["tls"].rpartition(":")
        plain = socket.create_connection((host, int(port)), DEADLINE_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._context.wrap_socket(plain, server_hostname=host)


def compare(rounds: int, size: int, directory: Path) -> dict[str, float]:
    digest = ChunkStore(directory).write(os.urandom(size))
    certificate(directory)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    costs: dict[str, list[float]] = {way: [] for way in WAYS}
    with serving(directory, digest) as (server, places, key):
        asking = ChunkFetcher(places, key, digest, directory)
        for number in range(rounds + 1):  # the first is to warm up
            for way in rotated(WAYS, number):
                before, began = cpu_s(os.getpid(), server), time.perf_counter()
                asking.get(way)
                lasted = time.perf_counter() - began
                if number:
                    seconds[way].append(lasted)
                    costs[way].append(cpu_s(os.getpid(), server) - before)
        handshakes = asking.handshake_ms("aes"), asking.handshake_ms("tls")
    gigabytes = size / 1e9
    found: dict[str, float] = {"mib": size >> 20, "rounds": rounds, "cores": os.cpu_count() or 0}
    for way in WAYS:
        found[f"{way}_mb_per_s"] = round(size / 1e6 / statistics.median(seconds[way]))
        found[f"{way}_cpu_s_per_gb"] = round(statistics.median(costs[way]) / gigabytes, 3)
        found[f"ratio_{way}"] = ratio(costs[way], costs["plain"], 2)
    found["handshake_ms_keys"], found["handshake_ms_tls"] = handshakes
    return found


def move(size: int, directory: Path) -> dict[str, float]:
    """Measure a sparse file that is stored by parts and fetched again."""
    (source := directory / "source").touch()
    os.truncate(source, size)
    with source.open("r+b") as file:  # not all alike
        for at in range(0, size - 8, 1 << 30):
            file.seek(at)
            file.write(os.urandom(8))
    certificate(directory)
    found: dict[str, float] = {"file_gib": size / (1 << 30)}
    with serving(directory, "0" * 64) as (server, places, key):
        asking = ChunkFetcher(places, key, "0" * 64, directory)
        digest = ""
        for name in ("put", "fetch"):
            transfer = FileTransfer(lambda: asking.session("aes"))
            before, began = cpu_s(os.getpid(), server), time.perf_counter()
            if name == "put":
                digest = transfer.send(source)
            else:
                with (
                    PartialFile.for_file(directory / "target", digest) as arriving,
                    arriving.take_writer() as writer,
                ):
                    transfer.fetch(writer)
                    assert writer.received_bytes == size
                    writer.verify_and_commit()
            lasted = time.perf_counter() - began
            found[f"{name}_mb_per_s"] = round(size / 1e6 / lasted)
            spent = cpu_s(os.getpid(), server) - before
            found[f"{name}_cpu_s_per_gb"] = round(spent / (size / 1e9), 2)
        for name, pid in (("asking", os.getpid()), ("serving", server)):
            found[f"{name}_rss_mib"] = psutil.Process(pid).memory_info().rss >> 20
    assert (directory / "target").stat().st_size == size
    return found


def main() -> None:
    parser = options(__doc__, rounds=7, mib=256, gib=0.0)
    parser.add_argument("--directory", default=None, help="for files; default: a temporary one")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(Path(chosen.serve[0]), chosen.serve[1])
        return
    with tempfile.TemporaryDirectory(prefix="bulk-", dir=chosen.directory) as made:
        if chosen.gib:
            answer = move(int(chosen.gib * (1 << 30)), Path(made))
        else:
            answer = compare(chosen.rounds, chosen.mib << 20, Path(made))
    report(answer)


if __name__ == "__main__":
    main()
