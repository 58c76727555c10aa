"""Adapters beside the model of a real SGLang server, and readback of its weights."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from meshrl.common.base.errors import RemoteFailure
from meshrl.common.generation.engine_contract import GenerationRequest
from meshrl.common.model.architecture.projections import resolve_targets
from meshrl.common.model.files.hf_writer import state_to_hf
from meshrl.services.engine.sglang import readback, v0_5
from meshrl.services.engine.sglang.engine import SGLangEngine, attach_engine
from meshrl.services.engine.sglang.launch_config import AdapterLimits
from meshrl.services.engine.sglang.server import SGLangServer
from meshrl.services.engine.sglang.weight_buckets import pickle_inline
from tests.load import scaled
from tests.sglang import served
from tests.unit.common.generation.engines_under_test import (
    SCALE,
    TINY,
    CollectedOutput,
    Listener,
    adapter,
    decoder,
    request,
    with_adapter,
)

UNLOADED_S = 30.0  # until the server has unloaded an adapter
MODELS = "/v1/models"  # file names with adapters
GAP = 1e-4  # between a log-probability and the merged model's, in float32


@pytest.fixture(scope="module")
def server() -> Iterator[SGLangServer]:
    made = served.start(
        adapter_limits=AdapterLimits(8, tuple(resolve_targets(TINY, ()))), read_back=True
    )
    yield made
    served.stop(made)


@pytest.fixture
def engine(server: SGLangServer) -> Iterator[SGLangEngine]:
    made = attach_engine(server, TINY, 4, 128)
    made.wake(decoder().state_dict(), 0)
    yield made
    try:
        for name in list(made.adapter_versions):
            made.unload_adapter(name)
        wait_for_adapters(server, made, [])
    finally:
        made.close()


def wait_for_adapters(
    server: SGLangServer, engine: SGLangEngine, expected_adapters: Sequence[str]
) -> None:
    """Wait until the server has exactly these adapters, each as name@version."""
    found: list[str] = []
    until = time.monotonic() + scaled(UNLOADED_S)
    while time.monotonic() < until:
        engine._unload_unused_adapters()
        reported = server.http.call("GET", MODELS, deadline_s=scaled(20.0))["data"]
        found = sorted(m["id"].rpartition(".")[0] for m in reported if m.get("parent"))
        if found == sorted(expected_adapters):
            return
        time.sleep(0.1)
    pytest.fail(f"the server has {found}")


def make_requests(count: int = 12) -> list[GenerationRequest]:
    """Return requests for two adapters and the bare model, so that batches are mixed."""
    names = ("a", "b", "")
    return [
        request(i, [3, 4, i % 7], max_new=30, temperature=0.0, adapter=names[i % 3])
        for i in range(count)
    ]


def test_mixed_batches_match_merged_models(server: SGLangServer, engine: SGLangEngine) -> None:
    """Compare with log-probabilities of the same tokens by the same server with merged models."""
    factors = {"a": adapter(1), "b": adapter(2, 8)}
    for version, (name, tensors) in enumerate(factors.items(), 10):
        engine.load_adapter(name, tensors, SCALE, version)
    heard = Listener(engine).run(*make_requests())
    versions = {"a": 10, "b": 11, "": 0}
    assert all(heard[r.id].versions == [versions[r.adapter]] * 30 for r in make_requests())
    gaps = []
    for name in versions:
        merged = with_adapter(factors[name]) if name else decoder()
        engine.update_weights(merged.state_dict(), 1)
        for r in make_requests():
            if r.adapter == name:
                scored = engine.score(np.array([*r.tokens, *heard[r.id].tokens], np.int32))
                gaps.append(np.abs(scored[2:] - heard[r.id].logprobs).max())
    print("adapters and merged models:", json.dumps({"logprob_gap_max": float(max(gaps))}))
    assert max(gaps) <= GAP


def test_score_uses_the_adapter(engine: SGLangEngine) -> None:
    engine.load_adapter("a", adapter(1), SCALE, 10)
    row = np.array([1, 2, 3, 4, 5], np.int32)
    beside = engine.score(row, "a")
    engine.update_weights(with_adapter(adapter(1)).state_dict(), 1)
    np.testing.assert_allclose(beside, engine.score(row), atol=GAP)


@pytest.mark.parametrize("targets", [["q_proj"], ["k_proj", "up_proj"], ["v_proj", "gate_proj"]])
def test_unadapted_parts_of_a_fused_matrix_are_unchanged(
    engine: SGLangEngine, targets: list[str]
) -> None:
    factors = adapter(1, 4, targets)
    engine.load_adapter("a", factors, SCALE, 10)
    row = np.array([1, 2, 3, 4, 5], np.int32)
    beside = engine.score(row, "a")
    engine.update_weights(with_adapter(factors).state_dict(), 1)
    np.testing.assert_allclose(beside, engine.score(row), atol=GAP)


def test_running_requests_finish_with_their_adapter_version(
    server: SGLangServer, engine: SGLangEngine
) -> None:
    engine.load_adapter("a", adapter(1), SCALE, 10)
    engine.submit([request(1, max_new=100, adapter="a")])
    while engine.tokens_generated < 3:
        engine.step()
    engine.load_adapter("a", adapter(2), SCALE, 11)
    heard: dict[int, CollectedOutput] = Listener(engine).run(request(2, max_new=5, adapter="a"))
    assert heard[1].versions == [10] * 100 and heard[2].versions == [11] * 5
    wait_for_adapters(server, engine, ["a@11"])


def test_rejected_adapter_keeps_the_previous_one(
    server: SGLangServer, engine: SGLangEngine
) -> None:
    engine.load_adapter("a", adapter(1), SCALE, 10)
    with pytest.raises(RemoteFailure, match="max-lora-rank"):
        engine.load_adapter("a", adapter(2, 16), SCALE, 11)  # the server was started for 8
    assert dict(engine.adapter_versions) == {"a": 10}
    wait_for_adapters(server, engine, ["a@10"])
    heard = Listener(engine).run(request(1, max_new=5, adapter="a"))[1]
    assert heard.versions == [10] * 5


def test_base_is_replaced_below_loaded_adapters(engine: SGLangEngine) -> None:
    engine.load_adapter("a", adapter(1), SCALE, 10)
    engine.update_weights(decoder(3).state_dict(), 5)
    row = np.array([1, 2, 3, 4, 5], np.int32)
    beside = engine.score(row, "a")
    engine.update_weights(with_adapter(adapter(1), 3).state_dict(), 6)
    np.testing.assert_allclose(beside, engine.score(row), atol=GAP)


def test_readback_names_each_differing_tensor(engine: SGLangEngine) -> None:
    state = dict(decoder(1).state_dict())
    engine.update_weights(state, 1)  # this tensor is compared too, and is equal
    assert engine.version == 1
    control = engine._control
    for name, tensor in state.items():
        other = state | {name: tensor.clone()}
        other[name].view(-1)[tensor.numel() // 2] += 0.5
        differing = control.find_differing(TINY, state_to_hf(TINY, other), 50.0)
        expected = dict(readback.to_server_layout(TINY, state_to_hf(TINY, other)))
        assert len(differing) == 1 and differing[0] in expected, name


def test_errors_of_the_server_are_reported(server: SGLangServer, engine: SGLangEngine) -> None:
    body = {"lora_name": "x", "config_dict": {}, "serialized_named_tensors": [pickle_inline({})]}
    with pytest.raises(RemoteFailure):
        server.http.call("POST", v0_5.LOAD_ADAPTER, body, deadline_s=scaled(20.0))
    assert Listener(engine).run(request(1, max_new=3))[1].versions == [0] * 3
