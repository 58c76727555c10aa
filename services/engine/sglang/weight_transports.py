"""Transports of new weights to a server: a file in memory, shared buckets, or broadcast.

Each takes tensors by Hugging Face names and ends with all weights installed, or with an error.
After an error the server's weights are undefined until another push succeeds. No transport has more
of the weights in memory than a file of them in host memory, or two buckets.
"""

from __future__ import annotations

import contextlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore, distributed_c10d

from meshrl.common.base.errors import MeshError, RemoteFailure
from meshrl.common.hardware.gpus.nccl_environment import set_nccl_environment
from meshrl.common.model.files.safetensors_writer import lay_out_file, view_bytes
from meshrl.common.model.files.tensor_source import batch_by_bytes
from meshrl.services.engine.measurement.load_deadlines import Deadline
from meshrl.services.engine.sglang import v0_5, weight_buckets
from meshrl.services.engine.sglang.http_client import HttpClient, PendingResult
from meshrl.services.engine.sglang.server_tensors import describe_tensors
from meshrl.services.engine.sglang.transport_choice import ServerTransportChoice
from meshrl.services.engine.sglang.weight_buckets import Bucket, CannotShare

JOIN_TIMEOUT_S = 20.0  # for all ranks to join
LEAVE_TIMEOUT_S = 5.0
# Bytes of one message of tensors, of which two are in memory: so many that the fixed cost of a call
# is small, and few beside a model that needs a GPU. A larger tensor is a message of its own.
BUCKET_BYTES = 256 << 20
FLATTENED = "flattened_bucket"  # SGLang's name of the format of buckets

StateDict = Mapping[str, Tensor]


class ServerWeightTransport(Protocol):
    def push(self, state: StateDict, version: int, flush_cache: bool, deadline: Deadline) -> None:
        """Install these weights as `version`; `flush_cache`: drop the cache of the old ones."""

    def close(self) -> None: ...


def create_transport(
    choice: ServerTransportChoice, http: HttpClient, directory: Path, ranks: int
) -> ServerWeightTransport:
    """Create a transport; `ranks`: processes that hold a share of the weights."""
    if choice.transport == "disk":
        return DiskTransport(http, directory)
    if choice.transport == "distributed":
        return DistributedTransport(http, ranks, choice.backend, *choice.gpus)
    return BucketTransport(http, ranks, choice.gpus)


def check_success(answer: Any, path: str) -> None:
    """Raise RemoteFailure if the server's answer reports a failure."""
    if isinstance(answer, dict) and answer.get("success") is False:
        raise RemoteFailure(f"{path} failed: {answer.get('message', answer)}")


class DiskTransport:
    """Safetensors file in memory that disappears with this process, however it exits."""

    def __init__(self, http: HttpClient, directory: Path) -> None:
        self._http, self._directory = http, directory
        directory.mkdir(parents=True, exist_ok=True)

    def push(self, state: StateDict, version: int, flush_cache: bool, deadline: Deadline) -> None:
        file = os.memfd_create("weights", os.MFD_CLOEXEC)
        place = self._directory / "model.safetensors"
        try:
            write_file(file, state)
            place.unlink(missing_ok=True)
            place.symlink_to(f"/proc/{os.getpid()}/fd/{file}")
            body = {
                "model_path": str(self._directory),
                "load_format": "safetensors",
                "flush_cache": flush_cache,
                "weight_version": str(version),
            }
            path, left_s = v0_5.FROM_DISK, deadline.left_s
            check_success(self._http.call("POST", path, body, deadline_s=left_s), path)
        finally:
            place.unlink(missing_ok=True)
            os.close(file)

    def close(self) -> None:
        """Do nothing, because each push removes its file."""


def write_file(descriptor: int, state: StateDict) -> None:
    """Write tensors as a safetensors file, one after the other from where they are."""
    meta_tensors = describe_tensors(state)
    head, offsets = lay_out_file(meta_tensors)
    with open(descriptor, "wb", closefd=False) as stream:
        stream.write(head)
        for name in state:
            if meta_tensors[name].numel():
                stream.seek(offsets[name])
                stream.write(view_bytes(state[name]))


class _SessionTransport(ABC):
    """Base of transports that send weights in buckets; no bucket takes effect before the last."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self._update_open = False  # an update has begun and has not ended yet

    def push(self, state: StateDict, version: int, flush_cache: bool, deadline: Deadline) -> None:
        if self._update_open:
            self._end_update(deadline)
        self._update_open = True
        self._post(v0_5.BEGIN_UPDATE, {}, deadline)
        try:
            self._send_buckets(state, flush_cache, deadline)
        except CannotShare:  # the server is sound, and another transport may follow
            self._end_update(deadline)
            raise
        self._post(v0_5.END_UPDATE, {}, deadline)
        self._update_open = False
        self._post(
            v0_5.VERSION, {"new_version": str(version), "abort_all_requests": False}, deadline
        )

    def _end_update(self, deadline: Deadline) -> None:
        with contextlib.suppress(RemoteFailure):  # the update was not open at the server
            self._post(v0_5.END_UPDATE, {}, deadline)
        self._update_open = False

    @abstractmethod
    def _send_buckets(self, state: StateDict, flush_cache: bool, deadline: Deadline) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def _post(self, path: str, body: Any, deadline: Deadline) -> None:
        check_success(self._http.call("POST", path, body, deadline_s=deadline.left_s), path)


class BucketTransport(_SessionTransport):
    """Buckets in memory that the server maps: of the host, or of the GPUs of its ranks.

    While the server loads one bucket, the next is filled.
    """

    def __init__(
        self,
        http: HttpClient,
        ranks: int,
        gpus: tuple[int, ...] = (),
        bucket_bytes: int = 0,
    ) -> None:
        """Initialize; `gpus`: GPU of each rank by this process's number, none: host memory."""
        super().__init__(http)
        self._ranks, self._gpus = ranks, gpus
        self._bucket_bytes = bucket_bytes or BUCKET_BYTES

    def _send_buckets(self, state: StateDict, flush_cache: bool, deadline: Deadline) -> None:
        try:
            self._stream_buckets(state, flush_cache, deadline)
        finally:
            if self._gpus:
                weight_buckets.free_gpu_memory()

    def _stream_buckets(self, state: StateDict, flush_cache: bool, deadline: Deadline) -> None:
        batches = batch_by_bytes(describe_tensors(state), self._bucket_bytes)
        loading: tuple[Bucket, PendingResult[Any]] | None = None
        for place, names in enumerate(batches, 1):
            try:
                bucket = self._fill(names, state)
                handles = bucket.make_handles(self._ranks)
            except CannotShare:
                if loading is not None:  # it must not load this beside another transport
                    self._wait_for_answer(loading[1], deadline)
                raise
            body = {
                "serialized_named_tensors": handles,
                "load_format": FLATTENED,
                "flush_cache": flush_cache and place == len(batches),
            }
            if loading is not None:
                self._wait_for_answer(loading[1], deadline)
            path, left_s = v0_5.FROM_TENSORS, deadline.left_s
            # replaces, and so releases, the bucket before
            loading = bucket, self._http.start_call("POST", path, body, deadline_s=left_s)
        if loading is not None:
            self._wait_for_answer(loading[1], deadline)

    def _fill(self, names: Sequence[str], state: StateDict) -> Bucket:
        if self._gpus:
            return weight_buckets.fill_gpu_bucket(names, state, self._gpus)
        return weight_buckets.fill_shared_bucket(names, state)

    def _wait_for_answer(self, loading: PendingResult[Any], deadline: Deadline) -> None:
        path = v0_5.FROM_TENSORS
        check_success(self._http.wait_for(loading, path, deadline.left_s), path)

    def close(self) -> None:
        """Do nothing, because each push releases its buckets."""


class DistributedTransport(_SessionTransport):
    """Broadcast from rank 0, which is this process, to the server's ranks."""

    def __init__(
        self, http: HttpClient, ranks: int, backend_name: str, gpu: int | None = None
    ) -> None:
        """Initialize; `gpu`: this process's own GPU for nccl, which no rank of the server has."""
        super().__init__(http)
        self._ranks, self._backend = ranks, backend_name
        self._device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        self._group: Any = None
        self._name = ""

    def push(self, state: StateDict, version: int, flush_cache: bool, deadline: Deadline) -> None:
        if self._update_open:  # the group's state is undefined after a failed broadcast
            self.close()
        if self._group is None:
            self._group = self._join_group(min(deadline.left_s, JOIN_TIMEOUT_S))
        super().push(state, version, flush_cache, deadline)

    def _join_group(self, deadline_s: float) -> Any:
        if self._backend == "nccl":
            set_nccl_environment()
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
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # NCCL's communicator is of the current GPU
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

    def _send_buckets(self, state: StateDict, flush_cache: bool, deadline: Deadline) -> None:
        batches = batch_by_bytes(describe_tensors(state), BUCKET_BYTES)
        for place, names in enumerate(batches, 1):
            part = {name: state[name] for name in names}
            self._send_bucket(part, flush_cache and place == len(batches), deadline.left_s)

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
        sent = [t.to(self._device).contiguous() for t in part.values()]
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
        path, body = v0_5.LEAVE_GROUP, {"group_name": self._name}
        with contextlib.suppress(MeshError):
            check_success(self._http.call("POST", path, body, deadline_s=LEAVE_TIMEOUT_S), path)
        torch.distributed.destroy_process_group(self._group)
        self._group = None
