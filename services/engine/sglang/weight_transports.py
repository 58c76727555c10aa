"""Transports of new weights to a server: a file in memory, shared memory, or broadcast.

Each takes tensors by Hugging Face names and ends with all weights installed, or with an error.
After an error the server's weights are undefined until another push succeeds.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import pickle
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore, distributed_c10d

from meshrl.common.base.errors import ConfigError, MeshError, RemoteFailure
from meshrl.common.model.files.tensor_source import batch_by_bytes
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.http_client import HttpClient, PendingResult

TRANSPORTS = ("auto", "disk", "tensors", "distributed")
JOIN_TIMEOUT_S = 20.0  # for all ranks to join
LEAVE_TIMEOUT_S = 5.0
BUCKET_BYTES = 512 << 20  # bytes of one broadcast or one message of tensors

StateDict = Mapping[str, Tensor]


class ServerWeightTransport(Protocol):
    def push(self, state: StateDict, version: int, flush_cache: bool, deadline_s: float) -> None:
        """Install these weights as `version`; `flush_cache`: drop the cache of the old ones."""

    def close(self) -> None: ...


def create_transport(
    kind: str, http: HttpClient, directory: Path, ranks: int, device: str
) -> ServerWeightTransport:
    """Create a transport; `ranks`: processes that hold a share of the weights."""
    if kind in ("auto", "disk"):
        return DiskTransport(http, directory)
    if kind == "tensors":
        return TensorTransport(http, ranks)
    if kind == "distributed":
        return DistributedTransport(http, ranks, choose_backend(device))
    raise ConfigError(
        f"there is no transport {kind!r}",
        where="rollout.sglang_weights",
        fix=f"Use one of {', '.join(TRANSPORTS)}",
    )


def choose_backend(device: str) -> str:
    """Choose the backend: NCCL requires a device for each rank, ours beside the server's."""
    return "nccl" if device == "cuda" and torch.cuda.device_count() > 1 else "gloo"


def check_success(answer: Any, path: str) -> None:
    """Raise RemoteFailure if the server's answer reports a failure."""
    if isinstance(answer, dict) and answer.get("success") is False:
        raise RemoteFailure(f"{path} failed: {answer.get('message', answer)}")


class DiskTransport:
    """Safetensors file in memory that disappears with this process, however it exits."""

    def __init__(self, http: HttpClient, directory: Path) -> None:
        self._http, self._directory = http, directory
        directory.mkdir(parents=True, exist_ok=True)

    def push(self, state: StateDict, version: int, flush_cache: bool, deadline_s: float) -> None:
        file = os.memfd_create("weights", os.MFD_CLOEXEC)
        place = self._directory / "model.safetensors"
        try:
            with open(file, "wb", closefd=False) as stream:
                stream.write(save({name: t.contiguous() for name, t in state.items()}))
            place.unlink(missing_ok=True)
            place.symlink_to(f"/proc/{os.getpid()}/fd/{file}")
            body = {
                "model_path": str(self._directory),
                "load_format": "safetensors",
                "flush_cache": flush_cache,
                "weight_version": str(version),
            }
            check_success(
                self._http.call("POST", v0_5.FROM_DISK, body, deadline_s=deadline_s), v0_5.FROM_DISK
            )
        finally:
            place.unlink(missing_ok=True)
            os.close(file)

    def close(self) -> None:
        """Do nothing, because each push removes its file."""


class _BucketedTransport(ABC):
    """Base of transports that send weights in buckets; no bucket takes effect before the last."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self._update_open = False  # an update has begun and has not ended yet

    def push(self, state: StateDict, version: int, flush_cache: bool, deadline_s: float) -> None:
        if self._update_open:
            with contextlib.suppress(RemoteFailure):  # the update was not open at the server
                self._post(v0_5.END_UPDATE, {}, deadline_s)
        self._update_open = True
        self._post(v0_5.BEGIN_UPDATE, {}, deadline_s)
        parts = split_buckets(state)
        for place, part in enumerate(parts, 1):
            self._send_bucket(part, flush_cache and place == len(parts), deadline_s)
        self._post(v0_5.END_UPDATE, {}, deadline_s)
        self._update_open = False
        label = {"new_version": str(version), "abort_all_requests": False}
        self._post(v0_5.VERSION, label, deadline_s)

    @abstractmethod
    def _send_bucket(self, part: StateDict, flush_cache: bool, deadline_s: float) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def _post(self, path: str, body: Any, deadline_s: float) -> None:
        check_success(self._http.call("POST", path, body, deadline_s=deadline_s), path)


class TensorTransport(_BucketedTransport):
    """SGLang's own format: names and handles of shared memory, which it writes as a pickle.

    This process makes the pickle, and SGLang reads it through its list of allowed names. It and
    `pickle_inline` are the only pickles in the product, and only in use if a job selects them.
    """

    def __init__(self, http: HttpClient, ranks: int) -> None:
        super().__init__(http)
        self._ranks = ranks
        # The default passes descriptors through a socket, which crashes the scheduler.
        torch.multiprocessing.set_sharing_strategy("file_system")

    def _send_bucket(self, part: StateDict, flush_cache: bool, deadline_s: float) -> None:
        body = {
            "serialized_named_tensors": pickle_handles(part, self._ranks),
            "flush_cache": flush_cache,
        }
        self._post(v0_5.FROM_TENSORS, body, deadline_s)

    def close(self) -> None:
        """Do nothing, because shared memory is freed with its tensors."""


class DistributedTransport(_BucketedTransport):
    """Broadcast from rank 0, which is this process, to the server's ranks."""

    def __init__(self, http: HttpClient, ranks: int, backend_name: str) -> None:
        super().__init__(http)
        self._ranks, self._backend = ranks, backend_name
        self._group: Any = None
        self._name = ""

    def push(self, state: StateDict, version: int, flush_cache: bool, deadline_s: float) -> None:
        if self._update_open:  # the group's state is undefined after a failed broadcast
            self.close()
        if self._group is None:
            self._group = self._join_group(min(deadline_s, JOIN_TIMEOUT_S))
        super().push(state, version, flush_cache, deadline_s)

    def _join_group(self, deadline_s: float) -> Any:
        limit = timedelta(seconds=deadline_s)
        # Port 0 selects a free port. The store is rank 0's, so it exists before other ranks join.
        # Without this listener it would listen on every interface.
        listener = socket.create_server(("127.0.0.1", 0))
        store = TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            self._ranks + 1,
            True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._name = f"meshrl-{store.port}"  # SGLang accepts no name twice
        body = {
            "master_address": "127.0.0.1",
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": self._ranks + 1,
            "group_name": self._name,
            "backend": self._backend,
        }
        answer = self._http.start_call("POST", v0_5.JOIN_GROUP, body, deadline_s=deadline_s)
        return self._run_collective(
            answer, v0_5.JOIN_GROUP, lambda: self._create_group(store, limit), deadline_s
        )

    def _create_group(self, store: Any, limit: timedelta) -> Any:
        """Create a second process group with the keys that SGLang's processes expect."""
        group, _ = distributed_c10d._new_process_group_helper(
            self._ranks + 1,
            0,
            [],
            distributed_c10d.Backend(self._backend),
            PrefixStore(self._name, store),
            group_name=self._name,
            timeout=limit,
        )
        distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(self._ranks + 1)}
        return group

    def _send_bucket(self, part: StateDict, flush_cache: bool, deadline_s: float) -> None:
        body = {
            "names": list(part),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in part.values()],
            "shapes": [list(t.shape) for t in part.values()],
            "group_name": self._name,
            "flush_cache": flush_cache,
        }
        answer = self._http.start_call("POST", v0_5.FROM_GROUP, body, deadline_s=deadline_s)
        self._run_collective(
            answer, v0_5.FROM_GROUP, lambda: self._broadcast(part, deadline_s), deadline_s
        )

    def _broadcast(self, part: StateDict, deadline_s: float) -> None:
        device = "cuda" if self._backend == "nccl" else "cpu"
        sent = [t.to(device).contiguous() for t in part.values()]
        works = [torch.distributed.broadcast(t, 0, self._group, async_op=True) for t in sent]
        for work in works:
            work.wait(timedelta(seconds=deadline_s))

    def _run_collective(
        self, answer: PendingResult[Any], path: str, run_ours: Callable[[], Any], deadline_s: float
    ) -> Any:
        """Run this rank's part of a collective operation.

        The server's error takes precedence: after a rejection this rank only observes missing
        peers.
        """
        try:
            result = run_ours()
        except (RuntimeError, TimeoutError) as error:  # torch's errors for a missing rank
            check_success(self._http.wait_for(answer, path, deadline_s), path)
            raise RemoteFailure(f"{path}: {error}", where=self._http.url) from error
        check_success(self._http.wait_for(answer, path, deadline_s), path)
        return result

    def close(self) -> None:
        """Leave the group on both sides; a server that has exited has left already."""
        if self._group is None:
            return
        with contextlib.suppress(MeshError):
            self._post(v0_5.LEAVE_GROUP, {"group_name": self._name}, LEAVE_TIMEOUT_S)
        torch.distributed.destroy_process_group(self._group)
        self._group = None


def pickle_handles(part: StateDict, ranks: int) -> list[str]:
    """Return a pickle for each rank.

    Each handle holds one reference to its shared memory, and the rank that opens it releases that
    reference. A handle that several ranks open would free the memory before the last one is done.
    """
    tensors = [(name, tensor.contiguous()) for name, tensor in part.items()]
    texts = []
    for _ in range(ranks):
        stream = io.BytesIO()
        ForkingPickler(stream).dump(tensors)
        texts.append(base64.b64encode(stream.getvalue()).decode())
    return texts


def pickle_inline(tensors: StateDict) -> str:
    """Pickle tensors by name in SGLang's format with their contents; only for small ones."""
    cpu_tensors = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    return base64.b64encode(pickle.dumps(cpu_tensors)).decode()


def split_buckets(state: StateDict, max_bytes: int = BUCKET_BYTES) -> list[dict[str, Tensor]]:
    """Split the tensors in order into buckets of at most `max_bytes`, or of one tensor."""
    return [{name: state[name] for name in names} for names in batch_by_bytes(state, max_bytes)]
