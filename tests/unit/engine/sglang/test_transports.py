"""Transports of weights to a server: their bytes in memory, deadlines, fallback and requests."""

from __future__ import annotations

import base64
import os
import pickle
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing import reductions

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import RemoteFailure
from meshrl.common.model.files.hf_writer import state_to_hf
from meshrl.common.weights.layout.version_image import ImageTensors
from meshrl.services.engine.measurement.load_deadlines import (
    SLOWEST_BYTES_PER_S,
    Deadline,
    compute_load_deadline_s,
)
from meshrl.services.engine.sglang import v0_5, weight_buckets
from meshrl.services.engine.sglang.http_client import HttpClient
from meshrl.services.engine.sglang.server_tensors import ServerTensors
from meshrl.services.engine.sglang.transport_choice import PushDevices, choose_server_transport
from meshrl.services.engine.sglang.weight_buckets import (
    ALIGNMENT,
    CannotShare,
    fill_shared_bucket,
    lay_out_bucket,
)
from meshrl.services.engine.sglang.weight_push import WeightPush
from meshrl.services.engine.sglang.weight_transports import (
    BucketTransport,
    DiskTransport,
    create_transport,
)
from tests.unit.common.generation.engines_under_test import TINY, decoder

STATE = {
    "a": torch.arange(5, dtype=torch.float32),
    "b": torch.full((2, 3), 7.0, dtype=torch.bfloat16).T,
    "none": torch.empty(0, 4),
    "c": torch.tensor(3),
}


class Answer:
    def __init__(self, http: RecordingHttp, number: int) -> None:
        self.http, self.number = http, number


class RecordingHttp(HttpClient):
    """Server that records calls, and reads tensors when their answer is waited for."""

    def __init__(self) -> None:
        self.url = "http://recorded"
        self.calls: list[tuple[str, Any]] = []
        self.events: list[str] = []
        self.received: dict[str, Tensor] = {}
        self.fails = ""  # path whose calls fail
        self.deadlines: list[float] = []

    def call(self, method: str, path: str, body: Any = None, *, deadline_s: float) -> Any:
        answer = self.start_call(method, path, body, deadline_s=deadline_s)
        return self.wait_for(answer, path, deadline_s)

    def start_call(self, method: str, path: str, body: Any = None, *, deadline_s: float) -> Any:
        self.calls.append((path, body))
        self.deadlines.append(deadline_s)
        self.events.append(f"start {path}")
        return Answer(self, len(self.calls) - 1)

    def wait_for(self, answer: Any, path: str, deadline_s: float) -> Any:
        self.events.append(f"wait {path}")
        if path == self.fails:
            return {"success": False, "message": "it has no room"}
        body = self.calls[answer.number][1]
        if path == v0_5.FROM_DISK:
            self.received = load_file(Path(body["model_path"]) / "model.safetensors")
        if path == v0_5.FROM_TENSORS:
            self.received |= read_bucket(body["serialized_named_tensors"][0])
        return {"success": True}


def read_bucket(handle: str) -> dict[str, Tensor]:
    """Read a bucket as SGLang's `FlattenedTensorBucket.reconstruct_tensors` does."""
    found = pickle.loads(base64.b64decode(handle))
    flat = found["flattened_tensor"]
    return {
        meta.name: flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape).clone()
        for meta in found["metadata"]
    }


def make_deadline(seconds: float = 60.0) -> Deadline:
    return Deadline.after(SystemClock(), seconds)


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


class CountingImage(ImageTensors):
    """Version whose tensors are copies; `peak_bytes`: the most that were in memory at once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
        super().__init__(SimpleNamespace(meta_tensors=meta))  # type: ignore[arg-type]
        self._tensors, self._alive, self.peak_bytes = (
            tensors,
            weakref.WeakSet[torch.UntypedStorage](),
            0,
        )

    def __getitem__(self, name: str) -> Tensor:
        made = self._tensors[name].clone()
        self._alive.add(made.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in self._alive))
        return made


# -- tensors -------------------------------------------------------------------------------------


def test_server_tensors_are_those_of_the_model() -> None:
    state = decoder(1).state_dict()
    tensors = ServerTensors(TINY, state)
    assert_equal(dict(tensors), state_to_hf(TINY, state))
    for name in reversed(list(tensors)):  # in any order
        assert tensors[name].shape == tensors.meta_tensors[name].shape
    assert tensors.size_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_only_a_layer_of_a_version_is_in_memory_at_a_time(tmp_path: Path) -> None:
    state = decoder(1).state_dict()
    layers = [
        sum(t.nbytes for name, t in state.items() if name.startswith(f"layers.{layer}."))
        for layer in range(TINY.num_layers)
    ]
    http = RecordingHttp()
    for transport in (DiskTransport(http, tmp_path), BucketTransport(http, 1)):
        image = CountingImage(state)
        transport.push(ServerTensors(TINY, image), 0, False, make_deadline())
        assert 0 < image.peak_bytes <= max(layers)
        assert_equal(http.received, state_to_hf(TINY, state))


# -- transports ----------------------------------------------------------------------------------


def test_file_has_all_tensors_and_disappears(tmp_path: Path) -> None:
    http = RecordingHttp()
    DiskTransport(http, tmp_path / "weights").push(STATE, 3, True, make_deadline())
    assert_equal(http.received, STATE)
    [(path, body)] = http.calls
    assert (path, body["weight_version"], body["flush_cache"]) == (v0_5.FROM_DISK, "3", True)
    assert not list((tmp_path / "weights").iterdir())
    http.fails = v0_5.FROM_DISK
    with pytest.raises(RemoteFailure, match="no room"):
        DiskTransport(http, tmp_path / "weights").push(STATE, 3, True, make_deadline())
    assert not list((tmp_path / "weights").iterdir())


def test_next_bucket_is_filled_while_the_server_loads() -> None:
    http = RecordingHttp()
    state = {name: torch.full((300,), float(number)) for number, name in enumerate("abcde")}
    BucketTransport(http, 2, bucket_bytes=2500).push(state, 4, True, make_deadline())
    assert_equal(http.received, state)
    sent = [body for path, body in http.calls if path == v0_5.FROM_TENSORS]
    assert [body["flush_cache"] for body in sent] == [False, False, True]
    assert all(len(body["serialized_named_tensors"]) == 2 for body in sent)
    assert {body["load_format"] for body in sent} == {"flattened_bucket"}
    path = v0_5.FROM_TENSORS
    begin, end = f"wait {v0_5.BEGIN_UPDATE}", f"start {v0_5.END_UPDATE}"
    inside = http.events[http.events.index(begin) + 1 : http.events.index(end)]
    assert inside == [f"start {path}", f"wait {path}"] * 3
    assert http.calls[-1] == (v0_5.VERSION, {"new_version": "4", "abort_all_requests": False})


def test_at_most_two_buckets_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    peaks: list[int] = []
    fill = weight_buckets.fill_shared_bucket

    def record(names: Any, state: Any) -> Any:
        bucket = fill(names, state)
        made.append(weakref.ref(bucket.copies[0]))
        peaks.append(sum(one() is not None for one in made))
        return bucket

    monkeypatch.setattr(weight_buckets, "fill_shared_bucket", record)
    state = {str(number): torch.zeros(100) for number in range(6)}
    BucketTransport(RecordingHttp(), 1, bucket_bytes=400).push(state, 0, False, make_deadline())
    assert max(peaks) == 2 and not any(one() is not None for one in made)


def test_failed_update_is_closed_before_the_next() -> None:
    http = RecordingHttp()
    transport = BucketTransport(http, 1)
    http.fails = v0_5.FROM_TENSORS
    with pytest.raises(RemoteFailure, match="no room"):
        transport.push(STATE, 1, False, make_deadline())
    http.fails, http.calls = "", []
    transport.push(STATE, 2, False, make_deadline())
    assert [path for path, _ in http.calls[:2]] == [v0_5.END_UPDATE, v0_5.BEGIN_UPDATE]
    assert_equal(http.received, STATE)


def test_bucket_that_cannot_be_made_ends_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    http, fill = RecordingHttp(), weight_buckets.fill_shared_bucket

    def fill_first(names: Any, state: Any) -> Any:
        if list(names) != ["a"]:
            raise CannotShare("there is no memory")
        return fill(names, state)

    monkeypatch.setattr(weight_buckets, "fill_shared_bucket", fill_first)
    with pytest.raises(CannotShare):
        BucketTransport(http, 1, bucket_bytes=1).push(STATE, 1, False, make_deadline())
    ends = [f"wait {v0_5.FROM_TENSORS}", f"start {v0_5.END_UPDATE}", f"wait {v0_5.END_UPDATE}"]
    assert http.events[-3:] == ends  # nothing is loaded beside the next transport


def test_calls_of_a_push_share_one_deadline() -> None:
    class Clock(SystemClock):
        now = 0.0

        def monotonic(self) -> float:
            Clock.now += 1.0
            return Clock.now

    http = RecordingHttp()
    BucketTransport(http, 1, bucket_bytes=1).push(STATE, 0, False, Deadline(Clock(), 30.0))
    assert http.deadlines == sorted(http.deadlines, reverse=True) and http.deadlines[-1] < 25.0


def test_tensors_in_a_bucket_are_aligned() -> None:
    entries, size = lay_out_bucket(list(STATE), STATE)
    assert all(entry.start_idx % ALIGNMENT == 0 for entry in entries)
    assert [entry.end_idx - entry.start_idx for entry in entries] == [20, 12, 0, 8]
    assert size == entries[-1].end_idx == 48 + 8
    assert_equal(read_bucket(fill_shared_bucket(list(STATE), STATE).make_handles(1)[0]), STATE)


def test_bucket_beyond_the_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    space = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    with pytest.raises(CannotShare, match="shm-size") as caught:
        fill_shared_bucket(["big"], {"big": torch.zeros(2000)})
    assert 'rollout.sglang_weights = "disk"' in caught.value.fix


def test_gpu_handle_names_the_gpu_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the driver's answers, in torch's layout of a handle."""
    names = list(reductions.rebuild_cuda_tensor.__code__.co_varnames[:15])
    assert names[weight_buckets.DEVICE_ARGUMENT] == "storage_device"
    arguments = tuple(range(15))
    monkeypatch.setattr(
        reductions,
        "reduce_tensor",
        lambda tensor: (reductions.rebuild_cuda_tensor, arguments),
    )
    properties = SimpleNamespace(uuid="1234-ab")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    rebuild, found = weight_buckets._GpuHandle(torch.zeros(1)).__reduce__()
    assert rebuild is reductions.rebuild_cuda_tensor
    assert found == (*arguments[:6], "1234-ab", *arguments[7:])


# -- pushes --------------------------------------------------------------------------------------


class PushClock(SystemClock):
    """Clock that the transport under test advances."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class TimedTransport(DiskTransport):
    """Transport of a declared rate, which records the deadlines of its pushes."""

    def __init__(self, clock: PushClock, bytes_per_s: float) -> None:
        self._clock, self.bytes_per_s = clock, bytes_per_s
        self.limits_s: list[float] = []

    def push(self, state: Any, version: int, flush_cache: bool, deadline: Deadline) -> None:
        self.limits_s.append(deadline.left_s)
        self._clock.now += sum(t.nbytes for t in state.values()) / self.bytes_per_s


def test_deadline_is_by_bytes_then_by_the_measured_rate() -> None:
    clock = PushClock()
    transport = TimedTransport(clock, 1e9)
    push = WeightPush(choose_server_transport(PushDevices()), transport, clock=clock, floor_s=10.0)
    state = {"a": torch.zeros(10**9, dtype=torch.uint8, device="meta")}
    left_s = push.push(state, 0, False)
    assert left_s == pytest.approx(10 + 1e9 / SLOWEST_BYTES_PER_S - 1)
    push.push(state, 1, False)
    assert transport.limits_s == pytest.approx([10 + 1e9 / SLOWEST_BYTES_PER_S, 10 + 4 * 1.0])
    transport.bytes_per_s = 1e8  # ten times slower: later deadlines follow, up to the declared one
    for version in range(2, 20):
        push.push(state, version, False)
    assert transport.limits_s[-1] == pytest.approx(10 + 1e9 / SLOWEST_BYTES_PER_S)
    assert push.last_report is not None
    assert push.last_report["rates"]["disk"] == pytest.approx(1e8, rel=0.02)
    assert push.last_report["why"] == "the server computes on a CPU"


def test_load_deadline_grows_with_the_bytes() -> None:
    assert compute_load_deadline_s(0, 50.0) == 50.0
    assert compute_load_deadline_s(16 * 10**9, 50.0) == 50.0 + 16e9 / SLOWEST_BYTES_PER_S
    assert compute_load_deadline_s(16 * 10**9, 50.0, 8.0) == 82.0
    assert compute_load_deadline_s(10**6, 50.0, 8.0) == 50.0 + 1e6 / SLOWEST_BYTES_PER_S


def test_push_falls_back_to_a_file_where_memory_cannot_be_shared(tmp_path: Path) -> None:
    """Push to the GPU of a host that has none: torch's own error ends the attempt."""
    http = RecordingHttp()
    choice = choose_server_transport(PushDevices(("0",), ("0",)))
    assert choice.transport == "ipc"
    arguments = choice, create_transport(choice, http, tmp_path, 1)
    with pytest.raises(CannotShare):
        WeightPush(*arguments).push(STATE, 1, False)
    http.calls.clear()
    push = WeightPush(*arguments, fallback=DiskTransport(http, tmp_path))
    push.push(STATE, 1, False)
    push.push(STATE, 2, False)
    assert_equal(http.received, STATE)
    files = [v0_5.FROM_DISK] * 2
    assert [path for path, _ in http.calls] == [v0_5.BEGIN_UPDATE, v0_5.END_UPDATE, *files]
    assert push.last_report is not None and push.last_report["way"] == "disk"
    assert push.last_report["why"].startswith("ipc failed: ")
