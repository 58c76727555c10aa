"""Small server with the Hub's endpoints, for tests and measurements without a network.

It starts as a command of its own, and a client names it as its endpoint:

    python -m tests.unit.meshrl.job.hub_server --root DIR --port 8900
    HF_ENDPOINT=http://127.0.0.1:8900 meshrl run job.toml

A repository is a directory, `DIR/models/OWNER/NAME` or `DIR/datasets/OWNER/NAME`. The directory
`NAME@REVISION` is another branch of it. A commit is the digest of the files, so that a branch moves
when its files change; earlier commits stay available.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE_SUFFIXES = (".safetensors", ".parquet", ".arrow")  # which the Hub redirects to its storage
API_PATH = re.compile(
    r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|refs)(?:/([^/]+))?)?"
)
FILE_PATH = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
STALL_S = 600.0  # longer than any deadline


@dataclass
class Fault:
    """Fault of the next answers whose path matches."""

    pattern: str
    status: int = 0  # answer with this status; 0: cut the connection in the middle of the file
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    is_stall: bool = False  # do not answer at all


@dataclass
class HubServer:
    """Server of the repositories below a directory, in a thread."""

    root: Path
    port: int = 0
    token: str = "hf_secret"  # of a user with access to the gated repositories
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)  # (method, path)
    sent_bytes: int = 0
    claimed_sizes: dict[str, int] = field(default_factory=dict)  # of files, by name
    _commits: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    _blobs: dict[str, bytes] = field(default_factory=dict)

    def __enter__(self) -> HubServer:
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), partial(_Handler, self))
        self._http.daemon_threads = True
        self.port = self._http.server_port
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        """Value of HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage_url(self) -> str:
        """Place of large files: another host, as that of the Hub."""
        return f"http://localhost:{self.port}/storage"

    def write(self, repository: str, files: dict[str, bytes | str]) -> None:
        """Write files of `models/OWNER/NAME` or `datasets/OWNER/NAME`."""
        for name, content in files.items():
            path = self.root / repository / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    def resolve(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return the commit and files of a revision; None without one."""
        if files := self._commits.get((repository, revision)):
            return revision, files
        directory = self.root / (repository if revision == "main" else f"{repository}@{revision}")
        if not directory.is_dir():
            return None
        files = {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }
        digest = hashlib.sha1(usedforsecurity=False)
        for name, content in files.items():
            digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
            self._blobs[hashlib.sha256(content).hexdigest()] = content
        self._commits[repository, digest.hexdigest()] = files
        return digest.hexdigest(), files

    def list_branches(self, repository: str) -> list[str]:
        """Return the names of a repository's branches."""
        place = self.root / repository
        return ["main", *(p.name.partition("@")[2] for p in place.parent.glob(f"{place.name}@*"))]

    def take_fault(self, path: str) -> Fault | None:
        """Return the fault of a request, and count it."""
        for fault in self.faults:
            if fault.times and re.search(fault.pattern, path):
                fault.times -= 1
                return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: HubServer, *args: Any) -> None:
        self.hub = hub
        super().__init__(*args)

    def log_message(self, *_: object) -> None:
        """Write no log."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, path))
        fault = self.hub.take_fault(f"{self.command} {path}")
        if fault and fault.is_stall:
            time.sleep(STALL_S)
        if fault and fault.status:
            self._send(fault.status, b"", fault.headers)
        elif found := API_PATH.fullmatch(path):
            self._answer_api(found[1], found[2], found[3] or "", unquote(found[4] or "main"))
        elif found := FILE_PATH.fullmatch(path):
            kind = "datasets" if found[1] else "models"
            self._answer_file(f"{kind}/{found[2]}", unquote(found[3]), unquote(found[4]), fault)
        elif path.startswith("/storage/"):
            self._send_file(self.hub._blobs[path.rpartition("/")[2]], {}, fault)
        else:
            self._send(404, b"")

    def _answer_api(self, kind: str, name: str, part: str, revision: str) -> None:
        repository = f"{kind}/{name}"
        if not self._has_repository(repository):
            return
        if part == "refs":
            branches = [
                {"name": b, "ref": f"refs/heads/{b}", "targetCommit": "0" * 40}
                for b in self.hub.list_branches(repository)
            ]
            self._send_json({"branches": branches, "tags": [], "converts": []})
            return
        if not (found := self.hub.resolve(repository, revision)):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        commit, files = found
        siblings = [
            {
                "rfilename": n,
                "size": self.hub.claimed_sizes.get(n, len(c)),
                "blobId": _get_etag(c),
            }
            for n, c in files.items()
        ]
        if part == "tree":
            entries = [
                {"type": "file", "path": s["rfilename"], "size": s["size"], "oid": s["blobId"]}
                for s in siblings
            ]
            self._send_json(entries)
            return
        about = {"_id": "1", "id": name, "sha": commit, "private": False, "siblings": siblings}
        self._send_json(about | {"gated": name in self.hub.gated, "tags": [], "downloads": 0})

    def _answer_file(self, repository: str, revision: str, name: str, fault: Fault | None) -> None:
        if not self._has_repository(repository):
            return
        if repository.partition("/")[2] in self.hub.gated and not self._is_authorized():
            status = 403 if self.headers.get("Authorization") else 401
            self._send(status, b"", {"X-Error-Code": "GatedRepo"})
            return
        if not (found := self.hub.resolve(repository, revision)):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        commit, files = found
        if name not in files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        content = files[name]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_get_etag(content)}"'}
        if name.endswith(LARGE_SUFFIXES):
            digest = hashlib.sha256(content).hexdigest()
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            self._send(302, b"", headers | {"Location": f"{self.hub.storage_url}/{digest}"})
        else:
            self._send_file(content, headers, fault)

    def _has_repository(self, repository: str) -> bool:
        """Return True if the repository may be seen; else answer as the Hub does."""
        name = repository.partition("/")[2]
        hidden = name in self.hub.private and not self._is_authorized()
        if (self.hub.root / repository).is_dir() and not hidden:
            return True
        self._send(
            404 if self.headers.get("Authorization") else 401, b"", {"X-Error-Code": "RepoNotFound"}
        )
        return False

    def _is_authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send_file(self, content: bytes, headers: dict[str, str], fault: Fault | None) -> None:
        headers = {"Accept-Ranges": "bytes"} | headers
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            first = int(found[1])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            self._send(206, content[first:], headers, is_cut=fault is not None)
        else:
            self._send(200, content, headers, is_cut=fault is not None)

    def _send(
        self,
        status: int,
        content: bytes,
        headers: dict[str, str] | None = None,
        *,
        is_cut: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_cut:
            content, self.close_connection = content[: len(content) // 2], True
        self.hub.sent_bytes += len(content)
        self.wfile.write(content)


def _get_etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def main() -> None:
    """Serve until the process is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--gated", action="append", default=[], metavar="OWNER/NAME")
    parser.add_argument("--token", default="hf_secret", help="opens the gated repositories")
    parser.add_argument(
        "--cut", action="append", default=[], metavar="REGEX", help="cut one such answer"
    )
    options = parser.parse_args()
    faults = [Fault(pattern) for pattern in options.cut]
    hub = HubServer(options.root, options.port, options.token, set(options.gated), faults=faults)
    with hub:
        print(hub.url, flush=True)
        hub._thread.join()


if __name__ == "__main__":
    main()
