"""Weights are read back from where an engine computes with them: what is not there is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshrl.common.generation.builtin.build import TorchEngine
from meshrl.common.generation.contract import NO_VERSION, Quarantined
from meshrl.common.model.architecture.config import ModelConfig
from tests.unit.common.generation.engines_under_test import BUILT_IN, MOE, TINY, built_in, decoder

KINDS = [
    pytest.param(kind, marks=pytest.mark.needs("compiler") if kind == "native" else ())
    for kind in BUILT_IN
]
ODD = replace(
    TINY, vocab_size=43, ffn_size=40, qk_norm=False, attention_bias=True
)  # nothing fills panels


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def made(path: str, config: ModelConfig, dtype: str = "float32") -> TorchEngine:
    return built_in(path, config=config, dtype=dtype, read_back=True)


@pytest.mark.parametrize("config", [TINY, MOE, ODD], ids=["dense", "experts", "odd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_version_is_found_as_it_is(path: str, config: ModelConfig, dtype: str) -> None:
    engine = made(path, config, dtype)
    engine.swap(decoder(1, config).state_dict(), 1)
    assert engine.version == 1
    engine.sleep()
    engine.wake(decoder(2, config).state_dict(), 2)
    assert engine.version == 2


@pytest.mark.parametrize("config", [TINY, MOE, ODD], ids=["dense", "experts", "odd"])
def test_one_bit_of_any_tensor_that_differs_is_found_and_named(
    path: str, config: ModelConfig
) -> None:
    engine, state = made(path, config), decoder(0, config).state_dict()
    assert engine._compute.differing(state) == []
    for name, tensor in state.items():
        other = tensor.clone()
        other.view(-1).view(torch.int32)[other.numel() // 2] ^= 1
        assert engine._compute.differing({**state, name: other}) == [name]


def test_weights_that_change_while_they_are_taken_put_it_in_quarantine(path: str) -> None:
    """As those of a file that somebody writes to would."""

    class Moving(dict[str, torch.Tensor]):
        looks = 0

        def __getitem__(self, name: str) -> torch.Tensor:
            found = super().__getitem__(name)
            if name == "final_norm":
                self.looks += 1
            return found + 1 if name == "final_norm" and self.looks > 2 else found

        def items(self):  # type: ignore[no-untyped-def]
            return [(name, self[name]) for name in self]

    engine = made(path, TINY)
    with pytest.raises(Quarantined, match="final_norm"):
        engine.swap(Moving(decoder(1).state_dict()), 5)
    assert engine.version == NO_VERSION
    engine.swap(decoder(1).state_dict(), 6)
    assert engine.version == 6
