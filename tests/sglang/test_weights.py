"""Weight updates of a real SGLang server in mid-request, by each transport, and failed updates."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from meshrl.common.base.errors import MeshError, PeerLost, Refused, RemoteFailure
from meshrl.common.generation.engine_contract import NO_VERSION, Quarantined
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.services.engine.sglang import v0_5, weight_buckets, weight_transports
from meshrl.services.engine.sglang.control import HealthWatch
from meshrl.services.engine.sglang.engine import SGLangEngine, attach_engine
from meshrl.services.engine.sglang.server import SGLangServer
from meshrl.services.engine.sglang.weight_buckets import fill_shared_bucket
from tests.load import scaled
from tests.sglang import served
from tests.sglang.interpreter import python
from tests.sglang.processes import scheduler_of
from tests.unit.common.generation.engines_under_test import (
    TINY,
    CollectedOutput,
    Listener,
    built_in,
    decoder,
    request,
)

ENDS_S = 60.0  # until a server has exited
TRANSPORTS = ("disk", "tensors", "distributed")
each_transport = pytest.mark.parametrize("weights", TRANSPORTS)


def wait_for_tokens(engine: SGLangEngine, tokens: int) -> None:
    while engine.tokens_generated < tokens and engine.step():
        pass


def run_through_update(engine: SGLangEngine, version: int) -> dict[int, CollectedOutput]:
    """Return three requests of which at least one ran during an update.

    The server decodes by itself. If all requests ended before the update on a busy machine, repeat.
    """
    for _ in range(8):
        engine.submit([request(i, [i, 2], max_new=110, temperature=0.0) for i in range(3)])
        wait_for_tokens(engine, engine.tokens_generated + 30)
        engine.update_weights(decoder(1).state_dict(), version)
        heard = Listener(engine).run()
        if any(0 < h.versions.count(0) < 110 for h in heard.values()):
            return heard
        engine.update_weights(decoder(0).state_dict(), 0)
    pytest.fail("all requests were over before the weights came, eight times")


@each_transport
@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
def test_request_during_an_update_has_tokens_of_both_versions(
    weights: str, kv_on_update: str
) -> None:
    engine = served.engine(weights=weights, kv_on_update=kv_on_update)
    heard = run_through_update(engine, 5)
    assert engine.version == 5 and engine.requests.relabelled_tokens == 0
    for i, h in heard.items():
        old = h.versions.count(0)
        assert h.versions == [0] * old + [5] * (110 - old)
        before = Listener(built_in("eager")).run(request(i, [i, 2], max_new=old, temperature=0.0))
        assert h.tokens[:old] == before[i].tokens
        if kv_on_update == "recompute":
            rest = request(i, [i, 2, *h.tokens[:old]], max_new=110 - old, temperature=0.0)
            assert h.tokens[old:] == Listener(built_in("eager", seed=1)).run(rest)[i].tokens


@each_transport
def test_requests_after_an_update_use_the_new_weights(weights: str) -> None:
    """Repeat the same prompt, which would hit the cache of the old weights if that had no key."""
    engine = served.engine(weights=weights)
    generation_request = request(1, [3] * 40, max_new=30, temperature=0.0)
    Listener(engine).run(generation_request)
    for seed in (1, 2, 1):
        engine.update_weights(decoder(seed).state_dict(), engine.version + 1)
        expected = Listener(built_in("eager", seed=seed)).run(generation_request)[1]
        heard = Listener(engine).run(generation_request)[1]
        assert heard.tokens == expected.tokens
        assert heard.versions == [engine.version] * 30


def test_caches_are_keyed_by_their_weights() -> None:
    engine = served.engine()
    generation_request = request(1, [7] * 50, max_new=1)

    def computed() -> int:
        before = engine.tokens_computed
        Listener(engine).run(generation_request)
        return engine.tokens_computed - before

    assert computed() == 51
    assert computed() == 2  # all but the last token of the prompt were cached
    engine.update_weights(decoder(1).state_dict(), 1)
    assert computed() == 51
    engine.update_weights(decoder(0).state_dict(), 0)  # another lineage may reuse a version number
    assert computed() == 51


def test_updates_during_arrivals_neither_lose_nor_repeat_tokens() -> None:
    engine = served.engine(slots=5)
    listener = Listener(engine)
    for version in range(1, 6):
        engine.submit([request(10 * version + i, max_new=30 + i) for i in range(7)])
        if version % 2:
            engine.step()
        engine.update_weights(decoder(version).state_dict(), version)
        listener.drain()
    heard = listener.run()
    assert len(heard) == 35
    for id, h in heard.items():
        assert len(h.tokens) == 30 + id % 10 and len(h.finish) == 1
        assert h.versions == sorted(h.versions)
    assert engine.requests.relabelled_tokens == 0


def test_mismatched_weights_are_rejected_before_transfer() -> None:
    engine = served.engine()
    state = dict(decoder(1).state_dict())
    state["final_norm"] = state["final_norm"][:-1]
    with pytest.raises(Refused, match="final_norm"):
        engine.update_weights(state, 1)
    generation_request = request(1, max_new=20, temperature=0.0)
    heard = Listener(engine).run(generation_request)[1]
    assert heard.tokens == Listener(built_in("eager")).run(generation_request)[1].tokens
    assert heard.versions == [0] * 20


@pytest.mark.parametrize("bucket_bytes", [1, 2000, 1 << 20])
def test_server_takes_buckets_of_any_size(
    bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_transports, "BUCKET_BYTES", bucket_bytes)
    engine = served.engine(weights="tensors")
    engine.update_weights(decoder(1).state_dict(), 1)
    prompt = request(1, max_new=20, temperature=0.0)
    heard = Listener(engine).run(prompt)[1]
    assert heard.tokens == Listener(built_in("eager", seed=1)).run(prompt)[1].tokens
    assert heard.versions == [1] * 20


READ = """
import json, sys, torch
from torch.multiprocessing import reductions
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

monkey_patch_torch_reductions()
given = json.load(sys.stdin)


def read(handle):
    found = MultiprocessingSerializer.deserialize(handle)
    metadata = [FlattenedTensorMetadata(**vars(one)) for one in found["metadata"]]
    bucket = FlattenedTensorBucket(flattened_tensor=found["flattened_tensor"], metadata=metadata)
    return dict(bucket.reconstruct_tensors())


for handle in given["shared"]:
    tensors = read(handle)
    assert tensors["a"].tolist() == list(range(5)), tensors
    assert tensors["b"].tolist() == [[7.0, 7.0]] * 3 and tensors["b"].dtype == torch.bfloat16
    del tensors  # which gives the references back; the end of a process does not

asked = []
reductions._rebuild_cuda_tensor_original = lambda *a: asked.append(a) or torch.zeros(64, dtype=a[5])
torch.cuda.device_count = lambda: 3
torch.cuda.get_device_properties = lambda n: type("Properties", (), {"uuid": f"gpu-{n}"})
read(given["gpu"])
[arguments] = asked
assert arguments[6] == 2 and arguments[7] == b"handle" and arguments[1] == torch.Size([64])
print("all read")
"""


def test_handles_are_read_by_sglangs_deserializer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read one after the other; each is released before the next arrives.

    The driver's part of a handle of GPU memory is a record in torch's layout.
    """
    part = {"a": torch.arange(5), "b": torch.full((2, 3), 7.0, dtype=torch.bfloat16).T}
    bucket = fill_shared_bucket(list(part), part)
    shared = bucket.make_handles(4)
    kind, rebuild = torch.storage.TypedStorage, torch.multiprocessing.reductions.rebuild_cuda_tensor
    driver = (0, b"handle", 64, 0, False, b"counter", 0, b"event", True)
    arguments = (torch.Tensor, torch.Size([64]), (1,), 0, kind, torch.uint8, *driver)
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.multiprocessing.reductions, "reduce_tensor", lambda t: (rebuild, arguments)
        )
        properties = type("Properties", (), {"uuid": "gpu-2"})
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        handle = weight_buckets._GpuHandle(bucket.copies[0])
        gpu = weight_buckets._dump({"flattened_tensor": handle, "metadata": [*bucket.entries]})
    found = subprocess.run(
        [python(), "-P", "-c", READ],
        input=json.dumps({"shared": shared, "gpu": gpu}),
        capture_output=True,
        text=True,
        timeout=scaled(120),
    )
    assert found.stdout.endswith("all read\n"), found.stderr[-3000:]


# -- updates that fail ---------------------------------------------------------------------------


class Private:
    server: SGLangServer | None = None


@pytest.fixture
def breakable_server() -> Iterator[SGLangServer]:
    """Yield a server that a test may break; the next test gets the same one if it still serves."""
    if Private.server is None:
        Private.server = served.start()
    yield Private.server
    if not is_serving(Private.server):
        served.stop(Private.server)
        Private.server = None


def is_serving(server: SGLangServer) -> bool:
    """Return True if the server answers after an open update was closed."""
    if server.child.poll() is not None:
        return False
    http = server.http
    try:
        with contextlib.suppress(RemoteFailure):  # no update was open
            http.call("POST", v0_5.END_UPDATE, {}, deadline_s=scaled(5.0))
        http.call("POST", v0_5.CONTINUE, {"torch_empty_cache": False}, deadline_s=scaled(5.0))
        http.call("GET", v0_5.INFO, deadline_s=scaled(5.0))
    except MeshError:
        return False
    return True


@pytest.fixture(autouse=True, scope="module")
def exited_server() -> Iterator[None]:
    yield
    if Private.server is not None:
        served.stop(Private.server)


def assert_quarantined(engine: SGLangEngine) -> None:
    """Check that the engine serves no request and that new ones wait."""
    engine.submit([request(9)])
    had = engine.tokens_generated
    assert engine.version == NO_VERSION
    assert not engine.step() and not engine.step()
    assert engine.tokens_generated == had and engine.num_waiting


def make_wider_model() -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Return a wider model than the server's.

    Only the server can notice a wrong hidden size. It cuts or pads an MLP of another width
    silently.
    """
    wider = replace(TINY, hidden_size=TINY.hidden_size + 8)
    model = Decoder(wider)
    model.initialise(torch.Generator().manual_seed(0))
    return wider, dict(model.state_dict())


@each_transport
def test_engine_with_a_failed_update_is_quarantined(
    breakable_server: SGLangServer, weights: str
) -> None:
    """Check tensor by tensor from disk, where the server ends at an invalid tensor, and by
    broadcast.
    """
    config, state = make_wider_model()
    engine = attach_engine(breakable_server, config, 4, 128, weights=weights)
    with pytest.raises(Quarantined, match="version 3"):
        engine.wake(state, 3)
    if weights == "distributed":
        assert_quarantined(engine)
        return
    assert engine.version == NO_VERSION
    with pytest.raises(PeerLost):
        within = time.monotonic() + scaled(ENDS_S)
        while time.monotonic() < within:
            assert not engine.step()
    assert engine.tokens_generated == 0


@each_transport
def test_server_that_hangs_in_an_update_is_quarantined_at_the_deadline(
    breakable_server: SGLangServer, weights: str
) -> None:
    engine = attach_engine(breakable_server, TINY, 4, 128, weights=weights)
    engine.wake(decoder(0).state_dict(), 0)
    engine._control.weights.floor_s = 4.0
    scheduler = scheduler_of(breakable_server.pid)
    engine._pause_server()
    os.kill(scheduler, signal.SIGSTOP)
    try:
        with pytest.raises(Quarantined, match="version 1"):
            engine.update_weights(decoder(1).state_dict(), 1)
        assert_quarantined(engine)
    finally:
        os.kill(scheduler, signal.SIGCONT)
    if (
        weights == "distributed"
    ):  # late requests may have been served by others, or have ended with the server
        engine._control.weights.floor_s = 50.0
        engine.update_weights(decoder(2).state_dict(), 2)
        heard = Listener(engine).run(request(10, max_new=20, temperature=0.0))
        whole = Listener(built_in("eager", seed=2)).run(request(10, max_new=20, temperature=0.0))
        assert heard[10].tokens == whole[10].tokens
        assert heard[10].versions == [2] * 20 and set(heard[9].versions) == {2}


def test_server_killed_in_an_update_is_quarantined(breakable_server: SGLangServer) -> None:
    engine = attach_engine(breakable_server, TINY, 4, 128)
    engine.wake(decoder(0).state_dict(), 0)
    engine.submit([request(1, max_new=100)])
    wait_for_tokens(engine, 5)
    engine._pause_server()
    os.kill(
        scheduler_of(breakable_server.pid), signal.SIGSTOP
    )  # the update has started and cannot end
    killer = threading.Timer(1.0, lambda: os.kill(breakable_server.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(Quarantined, match="version 1"):
        engine.update_weights(decoder(1).state_dict(), 1)
    killer.join()
    assert engine.version == NO_VERSION
    with pytest.raises(PeerLost):
        while True:
            engine.step()


def test_exited_server_is_reported_with_its_log(breakable_server: SGLangServer) -> None:
    engine = attach_engine(breakable_server, TINY, 4, 128)
    engine.wake(decoder(0).state_dict(), 0)
    engine.submit([request(1, max_new=100)])
    wait_for_tokens(engine, 5)
    os.kill(scheduler_of(breakable_server.pid), signal.SIGKILL)
    with pytest.raises(PeerLost, match=r"sglang\.log"):
        while True:
            engine.step()


def test_unresponsive_server_is_lost_after_three_checks_outside_of_updates(
    breakable_server: SGLangServer,
) -> None:
    watch = HealthWatch(
        breakable_server.http, breakable_server.get_exit_error, poll_s=0.3, probe_timeout_s=1.0
    )
    scheduler = scheduler_of(breakable_server.pid)
    os.kill(scheduler, signal.SIGSTOP)
    waited = threading.Event()
    with watch.allow_grace():
        assert not waited.wait(6.0)
        assert watch.find_failure() is None
    until = time.monotonic() + scaled(30.0)
    while watch.find_failure() is None and time.monotonic() < until:
        waited.wait(0.1)
    assert isinstance(watch.find_failure(), PeerLost) and "in a row" in str(watch.find_failure())
    watch.close()
    os.kill(scheduler, signal.SIGCONT)
