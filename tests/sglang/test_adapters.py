"""Adapters beside the model of a real SGLang, and what it tells of its weights."""

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
from meshrl.services.engine.sglang.server import AdapterLimits, SGLangServer
from meshrl.services.engine.sglang.weight_transports import pickle_inline
from tests.load import scaled
from tests.sglang import served
from tests.unit.common.generation.engines_under_test import (
    SCALE,
    TINY,
    Heard,
    Listener,
    adapter,
    decoder,
    request,
    with_adapter,
)

LEFT_S = 30.0  # until the server has let go of an adapter
MODELS = "/v1/models"  # which name the adapters too
GAP = 1e-4  # of a log-probability from the merged model's, in float32


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
        there(server, made, [])
    finally:
        made.close()


def there(server: SGLangServer, engine: SGLangEngine, wanted: Sequence[str]) -> None:
    """The server has these, each as name@version, or comes to that."""
    found: list[str] = []
    until = time.monotonic() + scaled(LEFT_S)
    while time.monotonic() < until:
        engine._unload_unused_adapters()
        told = server.http.call("GET", MODELS, deadline_s=scaled(20.0))["data"]
        found = sorted(m["id"].rpartition(".")[0] for m in told if m.get("parent"))
        if found == sorted(wanted):
            return
        time.sleep(0.1)
    pytest.fail(f"the server has {found}")


def asked(count: int = 12) -> list[GenerationRequest]:
    """Several for each of two adapters and the bare model, so that batches are mixed."""
    names = ("a", "b", "")
    return [
        request(i, [3, 4, i % 7], max_new=30, temperature=0.0, adapter=names[i % 3])
        for i in range(count)
    ]


def test_mixed_batches_are_as_the_merged_models(server: SGLangServer, engine: SGLangEngine) -> None:
    """The same server computes with each model merged; its log-probabilities of the same tokens."""
    factors = {"a": adapter(1), "b": adapter(2, 8)}
    for version, (name, tensors) in enumerate(factors.items(), 10):
        engine.load_adapter(name, tensors, SCALE, version)
    heard = Listener(engine).run(*asked())
    versions = {"a": 10, "b": 11, "": 0}
    assert all(heard[r.id].versions == [versions[r.adapter]] * 30 for r in asked())
    gaps = []
    for name in versions:
        merged = with_adapter(factors[name]) if name else decoder()
        engine.update_weights(merged.state_dict(), 1)
        for r in asked():
            if r.adapter == name:
                scored = engine.score(np.array([*r.tokens, *heard[r.id].tokens], np.int32))
                gaps.append(np.abs(scored[2:] - heard[r.id].logprobs).max())
    print("adapters and merged models:", json.dumps({"logprob_gap_max": float(max(gaps))}))
    assert max(gaps) <= GAP


def test_a_score_is_of_the_adapter(engine: SGLangEngine) -> None:
    engine.load_adapter("a", adapter(1), SCALE, 10)
    row = np.array([1, 2, 3, 4, 5], np.int32)
    beside = engine.score(row, "a")
    engine.update_weights(with_adapter(adapter(1)).state_dict(), 1)
    np.testing.assert_allclose(beside, engine.score(row), atol=GAP)


@pytest.mark.parametrize("targets", [["q_proj"], ["k_proj", "up_proj"], ["v_proj", "gate_proj"]])
def test_parts_of_a_matrix_that_are_not_adapted_stay_as_they_are(
    engine: SGLangEngine, targets: list[str]
) -> None:
    factors = adapter(1, 4, targets)
    engine.load_adapter("a", factors, SCALE, 10)
    row = np.array([1, 2, 3, 4, 5], np.int32)
    beside = engine.score(row, "a")
    engine.update_weights(with_adapter(factors).state_dict(), 1)
    np.testing.assert_allclose(beside, engine.score(row), atol=GAP)


def test_what_runs_ends_with_its_version_which_is_unloaded_then(
    server: SGLangServer, engine: SGLangEngine
) -> None:
    engine.load_adapter("a", adapter(1), SCALE, 10)
    engine.submit([request(1, max_new=100, adapter="a")])
    while engine.tokens_generated < 3:
        engine.step()
    engine.load_adapter("a", adapter(2), SCALE, 11)
    heard: dict[int, Heard] = Listener(engine).run(request(2, max_new=5, adapter="a"))
    assert heard[1].versions == [10] * 100 and heard[2].versions == [11] * 5
    there(server, engine, ["a@11"])


def test_an_adapter_that_the_server_refuses_leaves_the_one_before(
    server: SGLangServer, engine: SGLangEngine
) -> None:
    engine.load_adapter("a", adapter(1), SCALE, 10)
    with pytest.raises(RemoteFailure, match="max-lora-rank"):
        engine.load_adapter("a", adapter(2, 16), SCALE, 11)  # it was started for 8
    assert dict(engine.adapter_versions) == {"a": 10}
    there(server, engine, ["a@10"])
    heard = Listener(engine).run(request(1, max_new=5, adapter="a"))[1]
    assert heard.versions == [10] * 5


def test_the_base_is_exchanged_below_adapters_that_stay(engine: SGLangEngine) -> None:
    engine.load_adapter("a", adapter(1), SCALE, 10)
    engine.update_weights(decoder(3).state_dict(), 5)
    row = np.array([1, 2, 3, 4, 5], np.int32)
    beside = engine.score(row, "a")
    engine.update_weights(with_adapter(adapter(1), 3).state_dict(), 6)
    np.testing.assert_allclose(beside, engine.score(row), atol=GAP)


def test_each_tensor_that_differs_is_found_and_named(engine: SGLangEngine) -> None:
    state = dict(decoder(1).state_dict())
    engine.update_weights(state, 1)  # which is compared, and is right
    assert engine.version == 1
    control = engine._control
    for name, tensor in state.items():
        other = state | {name: tensor.clone()}
        other[name].view(-1)[tensor.numel() // 2] += 0.5
        odd = control.find_differing(TINY, state_to_hf(TINY, other), 50.0)
        expected = dict(readback.to_server_layout(TINY, state_to_hf(TINY, other)))
        assert len(odd) == 1 and odd[0] in expected, name


def test_the_servers_refusals_are_said(server: SGLangServer, engine: SGLangEngine) -> None:
    body = {"lora_name": "x", "config_dict": {}, "serialized_named_tensors": [pickle_inline({})]}
    with pytest.raises(RemoteFailure):
        server.http.call("POST", v0_5.LOAD_ADAPTER, body, deadline_s=scaled(20.0))
    assert Listener(engine).run(request(1, max_new=3))[1].versions == [0] * 3
