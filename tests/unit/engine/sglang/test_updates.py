"""Weight updates of an SGLang server that fail: readback, quarantine and exit of the server."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import (
    ConfigError,
    DeadlineExceeded,
    MeshError,
    PeerLost,
    Refused,
    RemoteFailure,
    StillStarting,
)
from meshrl.common.generation.engine_contract import NO_VERSION, Quarantined
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.model.files.hf_writer import state_to_hf
from meshrl.services.engine.sglang import readback, sleep, v0_5
from meshrl.services.engine.sglang.engine import SGLangEngine
from meshrl.services.engine.sglang.http_client import HttpClient
from meshrl.services.engine.sglang.launch_config import (
    AdapterLimits,
    HierarchicalCache,
    LaunchConfig,
)
from meshrl.services.engine.sglang.ports import PortBlock
from meshrl.services.engine.sglang.server import SGLangServer
from meshrl.services.engine.sglang.weight_buckets import pickle_inline
from meshrl.services.engine.sglang.weight_push import UPDATE_FLOOR_S
from meshrl.services.engine.sglang.weight_transports import DiskTransport
from tests.load import scaled
from tests.sglang import counterpart
from tests.sglang.counterpart import Counterpart
from tests.unit.common.generation.engines_under_test import (
    SCALE,
    TINY,
    Listener,
    adapter,
    built_in,
    decoder,
    request,
    with_adapter,
)
from tests.unit.common.generation.test_builtin_engine import expected_logprobs

UNLOADED_S = 60.0  # until the server has unloaded an adapter
STATE = decoder(1).state_dict()
PORTS = PortBlock(20000)


class Bench:
    def __init__(self, place: Path, about: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.server = Counterpart(4, 128)
        self.server.about |= about or {}
        self.engine: SGLangEngine = counterpart.engine(self.server, place, 4, 128, **options)
        self.listener, self.place = Listener(self.engine), place

    def generate(self, tokens: int) -> None:
        until = self.engine.tokens_generated + tokens
        while self.engine.tokens_generated < until:
            self.engine.step()

    def wait_for_adapters(self, versions: list[str]) -> None:
        """Wait until the server has exactly these adapters, each as name@version."""
        until = time.monotonic() + scaled(UNLOADED_S)
        while time.monotonic() < until:
            self.engine.step()
            adapter_names = sorted(
                name.partition(".")[0] for name in self.server.run(self.server.list_adapters())
            )
            if adapter_names == sorted(versions):
                return
        pytest.fail(f"the server has {adapter_names}")

    def close(self) -> None:
        self.engine.close()
        self.server.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


@pytest.fixture
def readback_bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, read_back=True)
    yield made
    made.close()


# -- read back -----------------------------------------------------------------------------------


def test_readback_finds_one_flipped_bit_of_any_tensor(readback_bench: Bench) -> None:
    for name in state_to_hf(TINY, STATE):
        readback_bench.server.flips = name
        with pytest.raises(Quarantined, match="1 tensors differ from the loaded weights: "):
            readback_bench.engine.update_weights(STATE, 5)
        assert readback_bench.engine.version == NO_VERSION and not readback_bench.engine.step()
    readback_bench.engine.update_weights(STATE, 6)
    heard = readback_bench.listener.run(request(1, max_new=9, temperature=0.0))[1]
    expected = Listener(built_in("eager", seed=1)).run(request(1, max_new=9, temperature=0.0))[1]
    assert heard.versions == [6] * 9 and heard.tokens == expected.tokens


def test_readback_is_off_by_default(bench: Bench) -> None:
    bench.server.flips = "model.norm.weight"
    bench.engine.update_weights(STATE, 5)
    assert bench.engine.version == 5


def test_readback_of_several_ranks_raises() -> None:
    report: dict[str, Any] = {"ranks": [{"checksums": {}}, {"checksums": {}}]}
    with pytest.raises(RemoteFailure, match="2 ranks"):
        readback.find_differing(TINY, report, state_to_hf(TINY, STATE), torch.float32)


class AdvancedClock(SystemClock):
    """Clock that a test advances."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


class SlowTransport(DiskTransport):
    """Transport that takes some seconds of a clock."""

    takes_s = 0.0

    def __init__(self, http: HttpClient, directory: Path, clock: AdvancedClock) -> None:
        super().__init__(http, directory)
        self._clock = clock

    def push(self, *arguments: Any) -> None:
        super().push(*arguments)
        self._clock.seconds += self.takes_s


def test_update_and_readback_share_one_deadline(tmp_path: Path) -> None:
    server, clock = Counterpart(4, 128), AdvancedClock()
    transport = SlowTransport(server.http, tmp_path, clock)
    options: dict[str, Any] = {"read_back": True, "clock": clock, "transport": transport}
    engine = counterpart.engine(server, tmp_path, 4, 128, **options)
    transport.takes_s = UPDATE_FLOOR_S + 1.0
    with pytest.raises(Quarantined, match="took longer than"):
        engine.update_weights(STATE, 5)
    transport.takes_s = UPDATE_FLOOR_S / 2
    engine.update_weights(STATE, 6)
    assert engine.version == 6
    engine.close()
    server.close()


def test_readback_compares_in_the_servers_dtype(readback_bench: Bench) -> None:
    half = {name: tensor.bfloat16() for name, tensor in STATE.items()}
    readback_bench.engine.update_weights(half, 5)
    assert readback_bench.engine.version == 5
    arguments = TINY, {"ranks": [{"checksums": compute_digests(half)}]}
    assert readback.find_differing(*arguments, state_to_hf(TINY, STATE), torch.bfloat16) == []
    differing = readback.find_differing(*arguments, state_to_hf(TINY, STATE), torch.float32)
    assert set(differing) == set(compute_digests(STATE))


def compute_digests(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    layout = readback.to_server_layout(TINY, state_to_hf(TINY, state))
    return {name: readback.compute_digest(tensor) for name, tensor in layout}


def test_readback_uses_the_servers_tensor_layout() -> None:
    layout = dict(readback.to_server_layout(TINY, state_to_hf(TINY, STATE)))
    assert torch.equal(layout["model.layers.0.self_attn.qkv_proj.weight"], STATE["layers.0.qkv"])
    gate, up = STATE["layers.1.gate_up"].chunk(2)
    inner = layout["model.layers.1.mlp.gate_up_proj.weight"]
    assert torch.equal(inner[:48], gate) and torch.equal(inner[64:112], up)
    assert len(inner) == 128 and not inner[48:64].any() and not inner[112:].any()
    assert layout["model.layers.1.mlp.down_proj.weight"].shape == (32, 64)
    assert len(layout["lm_head.weight"]) == 64 and not layout["lm_head.weight"][40:].any()
    biased = {f"model.layers.0.self_attn.{x}_proj.bias": torch.ones(2) for x in "qkv"}
    assert [*dict(readback.to_server_layout(TINY, biased))] == [
        "model.layers.0.self_attn.qkv_proj.bias"
    ]


def test_readback_of_a_tensor_parallel_server_is_rejected(bench: Bench) -> None:
    launch = LaunchConfig("python", Path("m"), 4, 128, read_back=True)
    server = SGLangServer(launch, bench.server.http, "mine", "key", SystemHost(), SystemClock())
    bench.server.about = {"served_model_name": "mine", "version": "0.5.23", "tp_size": 2}
    with pytest.raises(ConfigError, match="2 processes of SGLang share the model"):
        bench.server.run(server._check_server("disk"))
    server.launch_config = replace(launch, read_back=False)
    with pytest.raises(RemoteFailure, match="openapi"):  # the next request of the check
        bench.server.run(server._check_server("disk"))


# -- quarantine ----------------------------------------------------------------------------------


def test_quarantined_server_pauses_until_a_complete_version(bench: Bench) -> None:
    """Quarantine the server as when a base was loaded and its adapters were not."""
    bench.server.takes_steps = 20  # it does not end during the update
    bench.engine.submit([request(1, max_new=90, temperature=0.0)])
    bench.generate(5)
    assert not bench.server.stands
    bench.engine.quarantine()
    assert bench.server.stands and bench.engine.version == NO_VERSION
    bench.server.takes_steps = math.inf
    bench.listener.drain()
    generated = bench.engine.tokens_generated
    bench.engine.submit([request(2, max_new=7)])
    for _ in range(20):
        assert not bench.engine.step() and bench.engine.drain_outputs() is None
    assert bench.engine.tokens_generated == generated
    bench.engine.update_weights(STATE, 7)
    heard = bench.listener.run()
    assert len(heard[1].tokens) == 90 and heard[2].versions == [7] * 7
    old = heard[1].versions.count(0)
    assert 5 <= old < 90 and heard[1].versions == [0] * old + [7] * (90 - old)


def test_server_that_cannot_be_paused_gets_no_requests(bench: Bench) -> None:
    bench.server.takes_steps = 20
    bench.engine.submit([request(1, max_new=120, temperature=0.0)])
    bench.generate(5)
    bench.server.deaf = True
    bench.engine.quarantine()
    bench.server.takes_steps = math.inf
    bench.listener.drain()
    heard = bench.listener.get_output(1)
    assert not heard.finish and 5 <= (old := len(heard.tokens)) < 120
    assert not bench.engine.step() and bench.engine.num_waiting == 1
    bench.server.deaf = False
    bench.engine.update_weights(STATE, 7)
    again = bench.listener.run(request(2, max_new=9))
    assert again[2].versions == [7] * 9
    assert again[1].versions == [0] * old + [7] * (120 - old)


def test_server_that_exits_during_an_update_is_lost(bench: Bench) -> None:
    bench.engine.submit([request(1, max_new=120, temperature=0.0)])
    bench.generate(5)
    bench.server.ends, bench.server.fails_at = True, 3
    with pytest.raises(Quarantined, match="version 5"):
        bench.engine.update_weights(STATE, 5)
    assert bench.engine.version == NO_VERSION
    with pytest.raises(PeerLost, match="has ended"):
        bench.engine.step()
    with pytest.raises(PeerLost, match="has ended"):
        bench.engine.update_weights(STATE, 6)


def test_requests_compute_with_their_adapters_without_a_merge(bench: Bench) -> None:
    bench.engine.load_adapter("a", adapter(1), SCALE, 10)
    bench.engine.load_adapter("b", adapter(2), SCALE, 20)
    assert dict(bench.engine.adapter_versions) == {"a": 10, "b": 20}
    names = {1: "a", 2: "b", 3: ""}
    requests = [
        request(i, [3, 4, i], max_new=12, temperature=0.0, adapter=n) for i, n in names.items()
    ]
    heard = bench.listener.run(*requests)
    models = {"a": with_adapter(adapter(1)), "b": with_adapter(adapter(2)), "": decoder()}
    for i, name in names.items():
        expected = expected_logprobs(models[name], [3, 4, i], heard[i].tokens)
        np.testing.assert_allclose(heard[i].logprobs, expected, atol=1e-4)
        assert heard[i].versions == [{"a": 10, "b": 20, "": 0}[name]] * 12
    scored = bench.engine.score(np.array([1, 2, 3, 4]), "b")
    expected = expected_logprobs(models["b"], [1], [2, 3, 4])
    np.testing.assert_allclose(scored, expected, atol=1e-4)


def test_running_requests_finish_with_their_adapter_version(bench: Bench) -> None:
    bench.engine.load_adapter("a", adapter(1), SCALE, 10)
    bench.engine.submit([request(1, max_new=100, adapter="a")])
    bench.generate(3)
    bench.engine.load_adapter("a", adapter(2), SCALE, 11)
    bench.wait_for_adapters(["a@10", "a@11"])
    heard = bench.listener.run(request(2, max_new=5, adapter="a"))
    assert heard[1].versions == [10] * 100 and heard[2].versions == [11] * 5
    bench.wait_for_adapters(["a@11"])
    bench.engine.unload_adapter("a")
    bench.wait_for_adapters([])


def test_adapter_in_use_or_unknown_is_rejected(bench: Bench) -> None:
    bench.engine.load_adapter("a", adapter(1), SCALE, 10)
    bench.engine.submit([request(1, max_new=100, adapter="a")])
    with pytest.raises(Refused, match="in use"):
        bench.engine.unload_adapter("a")
    with pytest.raises(Refused, match="not loaded"):
        bench.engine.submit([request(2, adapter="b")])
    bench.engine.abort([1])
    bench.listener.run()
    bench.engine.unload_adapter("a")
    assert not bench.engine.adapter_versions


def test_invalid_adapter_is_rejected_before_it_is_sent(bench: Bench) -> None:
    bench.engine.load_adapter("a", adapter(1), SCALE, 10)
    mixed = adapter(1, 4, ["q_proj"]) | adapter(2, 8, ["o_proj"])
    for tensors in ({}, mixed):
        with pytest.raises(Refused):
            bench.engine.load_adapter("a", tensors, SCALE, 11)
    assert (
        dict(bench.engine.adapter_versions) == {"a": 10}
        and len(bench.server.engine.adapter_versions) == 1
    )


@pytest.mark.parametrize("targets", [["q_proj"], ["k_proj", "up_proj"], ["v_proj", "gate_proj"]])
def test_fused_matrix_parts_without_adapter_are_zeros(bench: Bench, targets: list[str]) -> None:
    factors = adapter(1, 4, targets)
    bench.engine.load_adapter("a", factors, SCALE, 10)
    heard = bench.listener.run(request(1, [3, 4], max_new=12, temperature=0.0, adapter="a"))[1]
    expected = expected_logprobs(with_adapter(factors), [3, 4], heard.tokens)
    np.testing.assert_allclose(heard.logprobs, expected, atol=1e-4)


def test_view_of_a_larger_tensor_is_pickled_alone() -> None:
    content = torch.zeros(1 << 20)
    assert len(pickle_inline({"a": content[:10]})) < 10_000


def test_server_started_without_adapters_rejects_them(bench: Bench, tmp_path: Path) -> None:
    plain = counterpart.engine(bench.server, tmp_path, 4, 128, adapters=False)
    with pytest.raises(Refused, match=r"lora\.engine_mode"):
        plain.load_adapter("a", adapter(1), SCALE, 10)
    plain.close()


def test_server_arguments_contain_the_adapter_limits() -> None:
    plain = LaunchConfig("python", Path("m"), 4, 128)
    options = replace(plain, adapter_limits=AdapterLimits(8, ("q_proj", "o_proj")))
    command = " ".join(options.build_arguments(PORTS))
    expected_options = "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj o_proj"
    assert f"{expected_options} --lora-backend torch_native" in command
    command = " ".join(replace(options, device="cuda").build_arguments(PORTS))
    assert expected_options in command and "--lora-backend" not in command
    assert "lora" not in " ".join(plain.build_arguments(PORTS))


def test_missing_endpoints_are_found_in_the_api_description() -> None:
    missing = v0_5.find_missing({"paths": {}, "components": {"schemas": {}}}, v0_5.ADAPTER_FIELDS)
    assert missing == [v0_5.GENERATE, v0_5.LOAD_ADAPTER, v0_5.UNLOAD_ADAPTER]


def test_server_arguments_contain_the_kv_tiers_of_the_job(tmp_path: Path) -> None:
    plain = LaunchConfig("python", Path("m"), 4, 128, device="cuda")
    assert "hicache" not in " ".join(plain.build_arguments(PORTS))
    memory = replace(plain, hierarchical_cache=HierarchicalCache(3.6))
    command = " ".join(memory.build_arguments(PORTS))
    assert "--enable-hierarchical-cache --hicache-size 4" in command and "storage" not in command
    disk = replace(plain, hierarchical_cache=HierarchicalCache(1.0, tmp_path))
    assert "--hicache-storage-backend file" in " ".join(disk.build_arguments(PORTS))
    assert disk.build_environment()["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] == str(tmp_path)
    with pytest.raises(ConfigError, match="only on GPUs"):
        replace(memory, device="cpu").build_arguments(PORTS)


# -- withdrawn requests --------------------------------------------------------------------------


def bodies(bench: Bench, path: str) -> list[Any]:
    return [body for called, body in bench.server.calls if called == path]


@pytest.mark.parametrize(("interval", "recompute"), [(1, True), (8, False)])
def test_update_withdraws_requests_with_all_their_tokens(
    tmp_path: Path, interval: int, recompute: bool
) -> None:
    """Check that no token of before an update counts for the version after it, in any batch."""
    bench = Bench(tmp_path, stream_interval=interval, recompute=recompute)
    bench.server.takes_steps = 12  # it does not end during the update
    first = [request(i, [i, 2], max_new=30, temperature=0.0) for i in (1, 2)]
    bench.engine.submit(first)
    bench.generate(10)
    bench.engine.update_weights(STATE, 7)
    assert bench.engine.num_waiting == 0 and bench.engine.num_running == 2  # they were sent again
    bench.server.takes_steps = math.inf
    heard, before = bench.listener.run(), Listener(built_in("eager")).run(*first)
    old = {i: h.versions.count(0) for i, h in heard.items()}
    rest = [
        request(i, [i, 2, *heard[i].tokens[:n]], max_new=30 - n, temperature=0.0)
        for i, n in old.items()
    ]
    after = Listener(built_in("eager", seed=1)).run(*rest)
    for i, n in old.items():
        assert heard[i].versions == [0] * n + [7] * (30 - n) and 0 < n < 30
        assert heard[i].tokens == before[i].tokens[:n] + after[i].tokens
    keys = [body["extra_key"] for body in bodies(bench, v0_5.GENERATE)]
    assert len(keys) == 4 and keys[0] == keys[1] and keys[2] == keys[3]
    assert (keys[0] != keys[2]) == recompute  # the key of the caches that they may use
    first_load, update = (body["flush_cache"] for body in bodies(bench, v0_5.FROM_DISK))
    assert first_load and update == recompute  # an earlier engine may have used the same keys
    bench.close()


def test_pause_leaves_no_request_at_the_server(bench: Bench) -> None:
    bench.server.takes_steps = 12
    bench.engine.submit([request(i, max_new=30, temperature=0.0) for i in range(6)])  # 4 slots
    bench.generate(9)
    bench.engine.pause()
    assert not bench.server.engine.num_running and not bench.server.engine.num_waiting
    assert bench.engine.num_running == 0 and bench.engine.num_waiting == 6
    bench.listener.drain()
    bench.engine.abort([0, 5])
    bench.listener.drain()
    aborted = bench.listener.get_output(0)
    assert aborted.finish == [FinishReason.ABORTED] and aborted.tokens
    bench.engine.resume()
    bench.server.takes_steps = math.inf
    heard = bench.listener.run()
    expected = Listener(built_in("eager")).run(request(1, max_new=30, temperature=0.0))[1]
    assert heard[1].tokens == expected.tokens and len(heard[4].tokens) == 30


def test_stop_token_in_the_step_of_an_abort_ends_the_request(bench: Bench) -> None:
    """Report an abort although the last token ends the request, as SGLang does."""
    bench.server.takes_steps = 0
    bench.engine.submit([request(1, max_new=9, stop_ids=(5,)), request(2, max_new=2)])
    for sent, tokens in zip(bench.engine.requests.started_requests, ([7, 5], [7, 8]), strict=True):
        sent.is_withdrawn = True
        meta = {
            "completion_tokens": 2,
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
            "finish_reason": {"type": "abort"},
        }
        bench.engine.requests._process_event(sent.rid, {"meta_info": meta})
    bench.listener.drain()
    assert bench.listener.get_output(1).finish == [FinishReason.STOP]
    assert bench.listener.get_output(2).finish == [FinishReason.LENGTH]
    assert bench.engine.num_waiting == 0


def test_retractions_are_counted_for_each_sending(bench: Bench) -> None:
    bench.server.takes_steps = 0
    bench.engine.submit([request(1, max_new=30)])
    for finish in ({"type": "abort"}, None):
        [sent] = bench.engine.requests.started_requests
        sent.is_withdrawn = True
        meta = {
            "completion_tokens": 1,
            "output_token_logprobs": [[-1.0, 7, None]],
            "num_retractions": 2,
            "finish_reason": finish,
        }
        bench.engine.requests._process_event(sent.rid, {"meta_info": meta})
        bench.engine._send_waiting()
    assert bench.engine.num_preempted == 4


def test_withdrawal_that_the_server_does_not_answer_is_undone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.server.takes_steps = 5
    bench.engine.submit([request(1, max_new=30, temperature=0.0)])
    bench.generate(1)
    monkeypatch.setattr("meshrl.services.engine.sglang.engine.CONTROL_TIMEOUT_S", 0.0)
    with pytest.raises(DeadlineExceeded, match="did not end 1 aborted requests"):
        bench.engine.pause()
    monkeypatch.undo()
    bench.server.takes_steps = math.inf
    heard = bench.listener.run()[1]
    expected = Listener(built_in("eager")).run(request(1, max_new=30, temperature=0.0))[1]
    assert heard.tokens == expected.tokens


# -- sleep ---------------------------------------------------------------------------------------


def test_sleep_releases_weights_and_cache_but_no_graphs(bench: Bench) -> None:
    bench.server.takes_steps = 12
    bench.engine.submit([request(1, max_new=20, temperature=0.0)])
    bench.generate(4)
    bench.engine.sleep()
    bench.server.takes_steps = math.inf
    assert bodies(bench, v0_5.RELEASE) == [{"tags": ["weights", "kv_cache"]}]
    bench.engine.resume()
    bench.engine.wake(STATE, 3)
    assert bodies(bench, v0_5.RESUME) == [{"tags": ["weights", "kv_cache"]}]
    heard = bench.listener.run()[1]
    assert len(heard.tokens) == 20 and set(heard.versions) == {0, 3}
    assert v0_5.ENVIRONMENT["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "0"


def test_memory_is_restored_once_if_an_answer_is_lost(bench: Bench) -> None:
    """SGLang crashes if weights are loaded into released memory, or memory is restored twice."""
    for loses, released, restored in ((v0_5.RELEASE, 1, 1), (v0_5.RESUME, 2, 2)):
        bench.server.loses = loses
        with pytest.raises(PeerLost):
            bench.engine.sleep()
            bench.engine.wake(STATE, 3)
        bench.server.loses = ""
        bench.engine.wake(STATE, 3)
        paths = [path for path, _ in bench.server.calls]
        assert (paths.count(v0_5.RELEASE), paths.count(v0_5.RESUME)) == (released, restored)
        last_load = len(paths) - paths[::-1].index(v0_5.FROM_DISK)
        assert paths.index(v0_5.RESUME) < last_load
    assert bench.listener.run(request(1, max_new=3))[1].versions == [3] * 3


def test_sleep_after_a_lost_restoration_releases_the_memory(bench: Bench) -> None:
    bench.engine.sleep()
    bench.engine.sleep()
    bench.server.loses = v0_5.RESUME
    with pytest.raises(PeerLost):
        bench.engine.wake(STATE, 3)
    bench.engine.sleep()
    calls = [path for path, _ in bench.server.calls if path in (v0_5.RELEASE, v0_5.RESUME)]
    assert calls == [v0_5.RELEASE, v0_5.RESUME, v0_5.RELEASE]
    bench.server.loses = ""


SLIDING = {"internal_states": [{"memory_usage": {"token_capacity_swa": 4096}}]}


@pytest.mark.parametrize(
    ("about", "tags"),
    [
        ({"version": "0.5.23"}, v0_5.SLEEP_TAGS),
        ({"version": "0.5.9", "internal_states": []}, v0_5.SLEEP_TAGS),
        ({"version": "0.5.23", "uses_mamba_radix_cache": True}, ()),
        ({"version": "0.5.22"} | SLIDING, ()),
        ({"version": "0.5.23.post1"} | SLIDING, v0_5.SLEEP_TAGS),
    ],
)
def test_sleep_tags_depend_on_version_and_caches(
    about: dict[str, Any], tags: tuple[str, ...]
) -> None:
    assert v0_5.choose_sleep_tags(about) == tags


class Restartable:
    """Process of a counterpart, which sleeps by ending."""

    def __init__(self, server: Counterpart) -> None:
        self.http, self.server, self.start_text = server.http, server, "capturing graphs"
        self.may_start = asyncio.Event()
        self.history: list[str] = []
        self.end_error: MeshError | None = None

    async def end(self) -> None:
        self.history.append("end")
        if self.end_error is not None:
            raise self.end_error

    async def launch(self) -> None:
        self.history.append("launch")
        try:
            await self.may_start.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # it waits for its process
            self.history.append("cancelled")
            raise
        self.server.stands = False  # a new process is not paused


def test_server_that_cannot_release_its_memory_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Counterpart(4, 128)
    process = Restartable(server)
    monkeypatch.setattr(sleep, "RESTART_POLL_S", 0.01)
    memory = sleep.RestartedMemory(process)
    engine = counterpart.engine(server, tmp_path, 4, 128, adapters=False, memory=memory)
    server.takes_steps = 12
    engine.submit([request(1, max_new=20, temperature=0.0)])
    while engine.tokens_generated < 4:
        engine.step()
    engine.sleep()
    server.takes_steps = math.inf
    assert process.history == ["end"] and not engine.step()
    assert v0_5.RELEASE not in [path for path, _ in server.calls]
    engine.resume()
    with pytest.raises(StillStarting, match="restarts after a sleep: capturing graphs"):
        engine.wake(STATE, 3)
    server.loop.call_soon_threadsafe(process.may_start.set)
    monkeypatch.undo()
    engine.wake(STATE, 3)
    assert process.history == ["end", "launch"]
    heard = Listener(engine).run()[1]
    assert set(heard.versions) == {0, 3} and len(heard.tokens) == 20
    engine.close()
    server.close()


def test_sleep_during_a_restart_ends_it(tmp_path: Path) -> None:
    server = Counterpart(4, 128)
    process = Restartable(server)
    memory = sleep.RestartedMemory(process)
    engine = counterpart.engine(server, tmp_path, 4, 128, adapters=False, memory=memory)
    engine.sleep()
    engine.resume()  # a wake begins
    engine.sleep()
    assert process.history == ["end", "launch", "cancelled", "end"]
    server.loop.call_soon_threadsafe(process.may_start.set)
    engine.wake(STATE, 3)
    assert process.history[4:] == ["launch"] and engine.version == 3
    engine.close()
    server.close()


def test_server_restarts_with_health_checks_after_an_end_that_failed(tmp_path: Path) -> None:
    server = Counterpart(4, 128)
    process = Restartable(server)
    memory = sleep.RestartedMemory(process)
    engine = counterpart.engine(server, tmp_path, 4, 128, adapters=False, memory=memory)
    process.end_error = DeadlineExceeded("it has not exited")
    with pytest.raises(DeadlineExceeded, match="has not exited"):
        engine.sleep()
    server.loop.call_soon_threadsafe(process.may_start.set)
    engine.wake(STATE, 3)
    assert process.history == ["end", "launch"]
    assert not engine._control._watch.is_suspended
    engine.close()
    server.close()


class ClosingTransport(DiskTransport):
    def __init__(self, http: HttpClient, directory: Path) -> None:
        super().__init__(http, directory)
        self.closed: list[bool] = []

    def close(self) -> None:
        self.closed.append(True)


def test_transport_leaves_a_server_that_ends_for_a_sleep(tmp_path: Path) -> None:
    """Check that the old group is left, which would fail the first push after the sleep."""
    server = Counterpart(4, 128)
    transport = ClosingTransport(server.http, tmp_path)
    memory = sleep.RestartedMemory(Restartable(server))
    engine = counterpart.engine(
        server, tmp_path, 4, 128, adapters=False, memory=memory, transport=transport
    )
    assert transport.closed == []
    engine.sleep()
    assert transport.closed == [True]
    engine.close()
    server.close()


def test_restart_for_sleep_is_rejected_with_adapters(tmp_path: Path) -> None:
    server = Counterpart(4, 128)
    memory = sleep.RestartedMemory(Restartable(server))
    engine = counterpart.engine(server, tmp_path, 4, 128, memory=memory)
    with pytest.raises(Refused, match="lose its adapters"):
        engine.sleep()
    engine.close()
    server.close()
