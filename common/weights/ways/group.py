"""A process group of one sender and those who receive, beside torch's own: it takes no part in what
ranks compute together, and ends with its transfer.

Everything here blocks and belongs on a thread; each wait has a deadline. What torch raises of a
member that is away, late or was killed becomes PeerLost.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from common.api.trainer import BroadcastPlace, Sender
from common.base.errors import PeerLost, Refused
from common.base.host.ports import ANYWHERE, ports
from common.base.host.settings import MeshSettings, advertised_host

AHEAD = 2  # transfers at once: the next one moves while the last is hashed and written
# NCCL's own watch would end the process of an engine for a member that is lost.
QUIET = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}


def place(settings: MeshSettings) -> dict[str, str]:
    """By which interface or address of this host gloo reaches others: what an operator has set in
    the environment or in the host's settings, else the address of `mesh.bind`. Refused where that
    is all of them.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0] or settings.interface
    if chosen:
        return {"interface": chosen}
    host = advertised_host(settings.bind).strip("[]")
    if ports(settings.bind, "mesh.bind")[0] in ANYWHERE:
        raise Refused(
            "it cannot be told by which interface others reach this host",
            where="mesh.bind",
            fix="Set `interface` in mesh.toml, or GLOO_SOCKET_IFNAME",
        )
    return {"hostname": host}


class BroadcastGroup:
    """One member's part. Rank 0 sends."""

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        members: int,
        backend: str,
        where: dict[str, str],
        wait_s: float,
    ) -> None:
        """Meets the others at `store`; PeerLost when they do not come in `wait_s`, which also is
        how long one may keep the others waiting. No two groups have the same name.
        """
        self._limit = timedelta(seconds=wait_s)
        self._device = "cuda" if backend == "nccl" else "cpu"
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = 0, 0
        known = PrefixStore(name, store)
        with _lost(f"the group of {members} did not meet"):
            made: Any = self._nccl if backend == "nccl" else self._gloo
            self._group = made(known, rank, members, where)

    def _gloo(self, store: Store, rank: int, members: int, where: dict[str, str]) -> Any:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(**where)]
        options._timeout = self._limit
        return dist.ProcessGroupGloo(store, rank, members, options)

    def _nccl(self, store: Store, rank: int, members: int, where: dict[str, str]) -> Any:
        os.environ.update(QUIET)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._limit
        return dist.ProcessGroupNCCL(store, rank, members, options)

    def send(self, contents: Iterable[Any]) -> None:
        """Sends buffers, each whole. PeerLost."""
        moving: deque[tuple[Any, torch.Tensor]] = deque()
        for content in contents:
            tensor = torch.frombuffer(content, dtype=torch.uint8).to(self._device)
            moving.append((self._begin(tensor), tensor))
            if len(moving) >= AHEAD:
                self._wait(moving.popleft()[0])
        while moving:
            self._wait(moving.popleft()[0])

    def receive(self, sizes: Iterable[int]) -> Iterator[memoryview]:
        """Yields what is sent, in its order; valid until the next is asked for. PeerLost."""
        moving: deque[tuple[Any, torch.Tensor]] = deque()
        for size in sizes:
            tensor = torch.empty(size, dtype=torch.uint8, device=self._device)
            moving.append((self._begin(tensor), tensor))
            if len(moving) >= AHEAD:
                yield self._arrived(*moving.popleft())
        while moving:
            yield self._arrived(*moving.popleft())

    def _begin(self, tensor: torch.Tensor) -> Any:
        with _lost("a broadcast of weights did not begin"):
            return self._group.broadcast([tensor], self._options)

    def _arrived(self, work: Any, tensor: torch.Tensor) -> memoryview:
        self._wait(work)
        return memoryview(tensor.cpu().numpy().data)

    def _wait(self, work: Any) -> None:
        with _lost("a broadcast of weights ended early"):
            work.wait(self._limit)

    def leave(self) -> None:
        """Ends this member's part, also while it waits for others; from any thread."""
        self._group.abort()


class GroupPart:
    """One member's part in the group of a sender, on a thread; `stop` ends it from any thread."""

    def __init__(self, told: BroadcastPlace, sender: Sender, where: dict[str, str]) -> None:
        self._told, self._sender, self._where = told, sender, where
        self._group: BroadcastGroup | None = None
        self._stopped = False

    def join(self, store: Store) -> BroadcastGroup:
        """Meet the others; PeerLost."""
        told = self._told
        about = told.rank, told.members, told.backend, self._where, told.wait_s
        self._group = BroadcastGroup(store, self._sender.name, *about)
        return self._group

    def check(self) -> None:
        """Raise PeerLost once this part was stopped."""
        if self._stopped:
            raise PeerLost("the broadcast was ended")

    def stop(self) -> None:
        """End this member's part, whatever it is at."""
        self._stopped = True
        if self._group is not None:
            with suppress(RuntimeError):  # it has ended
                self._group.leave()


@contextmanager
def _lost(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's, of whoever is not there; its own types derive from it
        raise PeerLost(f"{what}: {error}", fix="The rest is pulled") from error
