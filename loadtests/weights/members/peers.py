"""Baselines of versions: tensors broadcast by gloo, and a file downloaded by HTTP.

Usage:

    python -m loadtests.weights.members.peers RANK MEETING

Of two such processes, rank 0 has tensors that it broadcasts to rank 1, whose are there already.
The stock server is Python's `http.server`; who downloads is its `http.client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loadtests.weights import contents
from loadtests.weights.members.orders import obey

MEET_S = 60.0


class Broadcasting:
    def __init__(self, rank: int, meeting: str) -> None:
        self._rank, self._meeting = rank, meeting
        self.tensors: contents.Tensors = {}

    def ready(self, size: int, dtype: str = "bfloat16") -> None:
        kind = contents.DTYPES[dtype]
        self.tensors = (contents.empty if self._rank else contents.drawn)(size, kind)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self._meeting}",
            rank=self._rank,
            world_size=2,
            timeout=timedelta(seconds=MEET_S),
        )
        self.broadcast()  # which connects them

    def broadcast(self) -> dict[str, Any]:
        started_s, used = time.monotonic(), time.process_time()
        for tensor in self.tensors.values():
            dist.broadcast(tensor, 0)
        return {"took_s": time.monotonic() - started_s, "cpu_s": time.process_time() - used}


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[tuple[int, int]]:
    """Serve these files by a stock server; yield its pid and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    null = subprocess.DEVNULL
    with subprocess.Popen([*argv, "--directory", str(directory)], stdout=null, stderr=null) as run:
        try:
            until = time.monotonic() + MEET_S
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                if time.monotonic() > until:
                    raise RuntimeError("http.server does not listen")
                time.sleep(0.05)
            yield run.pid, port
        finally:
            run.kill()


def written(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        for tensor in tensors.values():
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def download(port: int, name: str, into: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    started_s, used = time.monotonic(), time.process_time()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=MEET_S)
    try:
        connection.request("GET", f"/{name}")
        response = connection.getresponse()
        for tensor in into.values():
            room = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
            while room:
                read = response.readinto(room)
                if not read:
                    raise ConnectionError("the file is shorter than the tensors")
                room = room[read:]
    finally:
        connection.close()
    return {"took_s": time.monotonic() - started_s, "cpu_s": time.process_time() - used}


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(obey(Broadcasting(int(sys.argv[1]), sys.argv[2])))
    os._exit(0)
