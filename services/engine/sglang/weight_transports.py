"""Brings new weights to a server in one of three ways: a file in memory, shared memory, broadcast.

Each takes Hugging Face's names and ends with all of the weights in place, or with an error after
which nobody knows what the server holds, until another push succeeds.
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
JOIN_TIMEOUT_S = 20.0  # for all ranks to meet
LEAVE_TIMEOUT_S = 5.0
BUCKET_BYTES = 512 << 20  # bytes of one broadcast or one message of tensors

StateDict = Mapping[str, Tensor]


class ServerWeightTransport(Protocol):
    def push(self, state: StateDict, version: int, flush_cache: bool, deadline_s: float) -> None:
        """Puts these weights in place, as `version`. `flush`: the cache of the old ones goes."""

    def close(self) -> None: ...


def create_transport(
    kind: str, http: HttpClient, directory: Path, ranks: int, device: str
) -> ServerWeightTransport:
    """`ranks`: processes that hold a share of the weights."""
    if kind in ("auto", "disk"):
        return DiskTransport(http, directory)
    if kind == "tensors":
        return TensorTransport(http, ranks)
    if kind == "distributed":
        return DistributedTransport(http, ranks, choose_backend(device))
    raise ConfigError(
        f"there is no transport {kind!r}",
        where="rollout.sglang_weights",
        fix=f"use one of {', '.join(TRANSPORTS)}",
    )


def choose_backend(device: str) -> str:
    """NCCL wants a device for each rank: ours beside the server's."""
    return "nccl" if device == "cuda" and torch.cuda.device_count() > 1 else "gloo"


def check_success(answer: Any, path: str) -> None:
    """RemoteFailure when the server says that it did not do it."""
    if isinstance(answer, dict) and answer.get("success") is False:
        raise RemoteFailure(f"{path}: {answer.get('message', answer)}")


class DiskTransport:
    """A safetensors file that lies in memory and goes with this process, however it ends."""

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
        """Nothing outlives a push."""


class _BucketedTransport(ABC):
    """What transports share that bring weights in parts: nothing holds before the last."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self._update_open = False  # an update that has begun, and of which no end is known

    def push(self, state: StateDict, version: int, flush_cache: bool, deadline_s: float) -> None:
        if self._update_open:
            with contextlib.suppress(RemoteFailure):  # it was not open there after all
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

    That pickle is made here and read by SGLang, through its list of allowed names. It and `inline`
    are the only ones in the product, and only where a job asks for them.
    """

    def __init__(self, http: HttpClient, ranks: int) -> None:
        super().__init__(http)
        self._ranks = ranks
        # The default hands out descriptors through a socket, which the scheduler dies of.
        torch.multiprocessing.set_sharing_strategy("file_system")

    def _send_bucket(self, part: StateDict, flush_cache: bool, deadline_s: float) -> None:
        body = {
            "serialized_named_tensors": pickle_handles(part, self._ranks),
            "flush_cache": flush_cache,
        }
        self._post(v0_5.FROM_TENSORS, body, deadline_s)

    def close(self) -> None:
        """Shared memory goes with its tensors."""


class DistributedTransport(_BucketedTransport):
    """Broadcast from rank 0, which is this process; the server's are the others."""

    def __init__(self, http: HttpClient, ranks: int, backend_name: str) -> None:
        super().__init__(http)
        self._ranks, self._backend = ranks, backend_name
        self._group: Any = None
        self._name = ""

    def push(self, state: StateDict, version: int, flush_cache: bool, deadline_s: float) -> None:
        if self._update_open:  # what a group is good for after a failed broadcast, nobody knows
            self.close()
        if self._group is None:
            self._group = self._join_group(min(deadline_s, JOIN_TIMEOUT_S))
        super().push(state, version, flush_cache, deadline_s)

    def _join_group(self, deadline_s: float) -> Any:
        limit = timedelta(seconds=deadline_s)
        # Port 0: one that is free. The store is rank 0's, so it exists before the others come. By
        # itself it would listen on every interface.
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
        self._name = f"meshrl-{store.port}"  # SGLang takes no name twice
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
        """A group beside torch's default one, with the keys that SGLang's processes look for."""
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
        """Our part of what all ranks do together. The server's reason outranks ours: when it
        refuses, our side only sees that nobody came."""
        try:
            result = run_ours()
        except (RuntimeError, TimeoutError) as error:  # torch's, of a rank that is not there
            check_success(self._http.wait_for(answer, path, deadline_s), path)
            raise RemoteFailure(f"{path}: {error}", where=self._http.url) from error
        check_success(self._http.wait_for(answer, path, deadline_s), path)
        return result

    def close(self) -> None:
        """Both sides leave; a server that has gone has left."""
        if self._group is None:
            return
        with contextlib.suppress(MeshError):
            self._post(v0_5.LEAVE_GROUP, {"group_name": self._name}, LEAVE_TIMEOUT_S)
        torch.distributed.destroy_process_group(self._group)
        self._group = None


def pickle_handles(part: StateDict, ranks: int) -> list[str]:
    """A pickle for each rank. Each handle holds one reference to its shared memory, and who opens
    it gives that one back: a handle that several ranks open takes the memory away from the last.
    """
    tensors = [(name, tensor.contiguous()) for name, tensor in part.items()]
    texts = []
    for _ in range(ranks):
        stream = io.BytesIO()
        ForkingPickler(stream).dump(tensors)
        texts.append(base64.b64encode(stream.getvalue()).decode())
    return texts


def pickle_inline(tensors: StateDict) -> str:
    """SGLang's format of tensors by name, with their contents in it; for what is small."""
    whole = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    return base64.b64encode(pickle.dumps(whole)).decode()


def split_buckets(state: StateDict, max_bytes: int = BUCKET_BYTES) -> list[dict[str, Tensor]]:
    """The tensors in their order, in parts of at most `most` bytes, or of one tensor."""
    return [{name: state[name] for name in names} for names in batch_by_bytes(state, max_bytes)]
