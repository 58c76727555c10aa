"""Adapters of an SGLang server, by its LoRA endpoints: each version under a name of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from meshrl.common.base.errors import ConfigError, Refused
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.server import Adapting, HierarchicalCache, Launch
from meshrl.services.engine.sglang.weights import inline
from tests.load import scaled
from tests.sglang import counterpart
from tests.sglang.counterpart import Counterpart
from tests.unit.common.generation.engines_under_test import (
    SCALE,
    Listener,
    adapter,
    decoder,
    request,
    with_adapter,
)
from tests.unit.common.generation.test_torch_engine import expected_logprobs

LEFT_S = 60.0  # until the server has let go of an adapter


class Bench:
    def __init__(self, place: Path) -> None:
        self.server = Counterpart(4, 128)
        self.engine = counterpart.engine(self.server, place, 4, 128)
        self.listener, self.place = Listener(self.engine), place

    def generate(self, tokens: int) -> None:
        until = self.engine.tokens_generated + tokens
        while self.engine.tokens_generated < until:
            self.engine.step()

    def there(self, versions: list[str]) -> None:
        """The server has these, each as name@version, or comes to that."""
        until = time.monotonic() + scaled(LEFT_S)
        while time.monotonic() < until:
            self.engine.step()
            found = sorted(name.partition(".")[0] for name in self.server.run(self.server.named()))
            if found == sorted(versions):
                return
        pytest.fail(f"the server has {found}")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.engine.close()
    made.server.close()


def test_requests_compute_with_their_adapters_without_a_merge(bench: Bench) -> None:
    bench.engine.load_adapter("a", adapter(1), SCALE, 10)
    bench.engine.load_adapter("b", adapter(2), SCALE, 20)
    assert dict(bench.engine.adapters) == {"a": 10, "b": 20}
    names = {1: "a", 2: "b", 3: ""}
    asked = [
        request(i, [3, 4, i], max_new=12, temperature=0.0, adapter=n) for i, n in names.items()
    ]
    heard = bench.listener.run(*asked)
    models = {"a": with_adapter(adapter(1)), "b": with_adapter(adapter(2)), "": decoder()}
    for i, name in names.items():
        expected = expected_logprobs(models[name], [3, 4, i], heard[i].tokens)
        np.testing.assert_allclose(heard[i].logprobs, expected, atol=1e-4)
        assert heard[i].versions == [{"a": 10, "b": 20, "": 0}[name]] * 12
    scored = bench.engine.score(np.array([1, 2, 3, 4]), "b")
    expected = expected_logprobs(models["b"], [1], [2, 3, 4])
    np.testing.assert_allclose(scored, expected, atol=1e-4)


def test_what_runs_ends_with_its_version_which_is_unloaded_then(bench: Bench) -> None:
    bench.engine.load_adapter("a", adapter(1), SCALE, 10)
    bench.engine.submit([request(1, max_new=100, adapter="a")])
    bench.generate(3)
    bench.engine.load_adapter("a", adapter(2), SCALE, 11)
    bench.there(["a@10", "a@11"])
    heard = bench.listener.run(request(2, max_new=5, adapter="a"))
    assert heard[1].versions == [10] * 100 and heard[2].versions == [11] * 5
    bench.there(["a@11"])
    bench.engine.unload_adapter("a")
    bench.there([])


def test_one_in_use_is_not_unloaded_and_an_unknown_one_is_refused(bench: Bench) -> None:
    bench.engine.load_adapter("a", adapter(1), SCALE, 10)
    bench.engine.submit([request(1, max_new=100, adapter="a")])
    with pytest.raises(Refused, match="in use"):
        bench.engine.unload_adapter("a")
    with pytest.raises(Refused, match="not loaded"):
        bench.engine.submit([request(2, adapter="b")])
    bench.engine.abort([1])
    bench.listener.run()
    bench.engine.unload_adapter("a")
    assert not bench.engine.adapters


def test_what_does_not_fit_is_refused_before_the_server_sees_it(bench: Bench) -> None:
    bench.engine.load_adapter("a", adapter(1), SCALE, 10)
    mixed = adapter(1, 4, ["q_proj"]) | adapter(2, 8, ["o_proj"])
    for tensors in ({}, mixed):
        with pytest.raises(Refused):
            bench.engine.load_adapter("a", tensors, SCALE, 11)
    assert dict(bench.engine.adapters) == {"a": 10} and len(bench.server.engine.adapters) == 1


@pytest.mark.parametrize("targets", [["q_proj"], ["k_proj", "up_proj"], ["v_proj", "gate_proj"]])
def test_parts_of_a_matrix_that_are_not_adapted_go_as_zeros(
    bench: Bench, targets: list[str]
) -> None:
    factors = adapter(1, 4, targets)
    bench.engine.load_adapter("a", factors, SCALE, 10)
    heard = bench.listener.run(request(1, [3, 4], max_new=12, temperature=0.0, adapter="a"))[1]
    expected = expected_logprobs(with_adapter(factors), [3, 4], heard.tokens)
    np.testing.assert_allclose(heard.logprobs, expected, atol=1e-4)


def test_a_view_of_a_larger_file_travels_without_the_file() -> None:
    content = torch.zeros(1 << 20)
    assert len(inline({"a": content[:10]})) < 10_000


def test_a_server_that_was_not_started_for_adapters_takes_none(
    bench: Bench, tmp_path: Path
) -> None:
    plain = counterpart.engine(bench.server, tmp_path, 4, 128, adapters=False)
    with pytest.raises(Refused, match=r"lora\.engines"):
        plain.load_adapter("a", adapter(1), SCALE, 10)
    plain.close()


def test_a_server_is_started_for_what_the_job_adapts() -> None:
    plain = Launch("python", Path("m"), 4, 128)
    how = replace(plain, adapters=Adapting(8, ("q_proj", "o_proj")))
    command = " ".join(how.arguments(1))
    wanted = "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj o_proj"
    assert f"{wanted} --lora-backend torch_native" in command
    command = " ".join(replace(how, device="cuda").arguments(1))
    assert wanted in command and "--lora-backend" not in command
    assert "lora" not in " ".join(plain.arguments(1))


def test_a_server_without_the_endpoints_is_known_by_its_description() -> None:
    lacking = v0_5.missing({"paths": {}, "components": {"schemas": {}}}, v0_5.NEEDS_OF_ADAPTERS)
    assert lacking == [v0_5.GENERATE, v0_5.LOAD_ADAPTER, v0_5.UNLOAD_ADAPTER]


def test_a_server_is_started_with_the_tiers_that_the_job_asks_for(tmp_path: Path) -> None:
    plain = Launch("python", Path("m"), 4, 128, device="cuda")
    assert "hicache" not in " ".join(plain.arguments(1))
    memory = replace(plain, tiers=HierarchicalCache(3.6))
    command = " ".join(memory.arguments(1))
    assert "--enable-hierarchical-cache --hicache-size 4" in command and "storage" not in command
    disk = replace(plain, tiers=HierarchicalCache(1.0, tmp_path))
    assert "--hicache-storage-backend file" in " ".join(disk.arguments(1))
    assert disk.environment()["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] == str(tmp_path)
    with pytest.raises(ConfigError, match="on GPUs alone"):
        replace(memory, device="cpu").arguments(1)
