"""Adapters beside a frozen decoder: what they compute, how they are merged, how PEFT reads them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from meshrl.common.base.errors import ConfigError
from meshrl.common.generation.builtin.engine_builder import build_engine
from meshrl.common.job.config import LoraConfig
from meshrl.common.model.architecture.projections import check_adapters, resolve_targets
from meshrl.common.model.files.hf_writer import save_model
from meshrl.common.model.files.initial_parameters import load_model
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.network.lora import is_adapter_tensor, merge_adapters, save_adapter
from meshrl.services.trainer.models import lora
from tests.attention import causal_attention
from tests.unit.common.generation.engines_under_test import TINY

SHAPE = replace(
    TINY,
    architecture="qwen2",
    vocab_size=64,
    qk_norm=False,
    attention_bias=True,
    tie_embeddings=True,
    max_positions=64,
)
ALL = ["qkv", "output", "gate_up", "down"]
TARGETS = [ALL, ["q_proj", "v_proj"], ["k_proj", "up_proj"], ["down", "output"]]
TOKENS = torch.arange(1, 25).view(2, 12) % 64


def plain(dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(SHAPE, dtype)
    model.initialise(torch.Generator().manual_seed(3))
    return model


def adapted(targets: list[str], dtype: torch.dtype = torch.float32, used: bool = True) -> Decoder:
    """A decoder with adapters, as if they had been trained (`used`)."""
    model = plain(dtype)
    lora.initialize_adapters(model, LoraConfig(4, 12.0, targets), seed=1)
    if used:
        generator = torch.Generator().manual_seed(9)
        for name, parameter in lora.get_trainable_parameters(model).items():
            if name.endswith(".b"):
                with torch.no_grad():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def logits(model: Decoder, tokens: Tensor = TOKENS) -> Tensor:
    positions = torch.arange(tokens.shape[-1]).expand_as(tokens)
    return model.compute_logits(model(tokens, positions, causal_attention))


def state(model: Decoder) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def test_new_adapters_change_nothing() -> None:
    assert torch.equal(logits(adapted(ALL, used=False)), logits(plain()))


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_merged_weights_compute_what_adapters_do(targets: list[str]) -> None:
    model = adapted(targets, torch.float64)
    together = plain(torch.float64)
    together.load_state_dict(merge_adapters(SHAPE, state(model), scale=3.0))
    expected = logits(together)
    assert torch.allclose(logits(model), expected, atol=1e-6)  # merging is in float32
    assert not torch.allclose(expected, logits(plain(torch.float64)), atol=1e-2)


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_the_gradient_is_that_through_the_merged_weights(targets: list[str]) -> None:
    model, base = adapted(targets, torch.float64), plain(torch.float64)
    logits(model).square().sum().backward()
    factors = {
        n: p.detach().clone().requires_grad_()
        for n, p in lora.get_trainable_parameters(model).items()
    }
    weights: dict[str, torch.Tensor] = dict(base.named_parameters())
    parts = {
        **{"q_proj": (0, 32), "k_proj": (32, 48), "v_proj": (48, 64)},
        **{"o_proj": (0, 32), "gate_proj": (0, 48), "up_proj": (48, 96), "down_proj": (0, 32)},
    }
    fused = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "output"}
    fused |= {"gate": "gate_up", "up": "gate_up", "down": "down"}
    for name in [name for name in factors if name.endswith(".a")]:
        layer, _, projection = name.removesuffix(".a").partition(".adapters.")
        target = f"{layer}.{fused[projection.removesuffix('_proj')]}"
        start, end = parts[projection]
        change = torch.zeros_like(weights[target])
        change[start:end] = 3.0 * factors[name.removesuffix("a") + "b"] @ factors[name]
        weights[target] = weights[target] + change
    positions = torch.arange(12).expand_as(TOKENS)
    hidden = functional_call(base, weights, (TOKENS, positions, causal_attention))
    base.compute_logits(hidden).square().sum().backward()
    for name, parameter in lora.get_trainable_parameters(model).items():
        expected = factors[name].grad
        assert parameter.grad is not None and expected is not None
        assert torch.allclose(parameter.grad, expected, rtol=1e-9, atol=1e-11), name


def test_the_base_is_frozen_and_the_adapters_are_all_that_trains() -> None:
    model = adapted(["q_proj", "v_proj"])
    logits(model).sum().backward()
    base = {n: p for n, p in model.named_parameters() if not is_adapter_tensor(n)}
    assert all(p.grad is None and not p.requires_grad for p in base.values())
    assert base.keys() == state(plain()).keys()
    assert lora.get_trainable_parameters(model).keys() == {
        f"layers.{i}.adapters.{part}_proj.{factor}"
        for i in (0, 1)
        for part in ("q", "v")
        for factor in ("a", "b")
    }


def test_merging_leaves_what_it_was_given_as_it_was() -> None:
    tensors = {name: tensor.clone() for name, tensor in state(adapted(ALL)).items()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    merge_adapters(SHAPE, tensors, 3.0)
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    without = state(plain())
    assert all(merge_adapters(SHAPE, without, 0.0)[n] is without[n] for n in without)


def test_the_seed_decides_where_adapters_begin() -> None:
    def begun(seed: int) -> Tensor:
        model = plain()
        lora.initialize_adapters(model, LoraConfig(2), seed)
        return torch.cat(
            [p.detach().reshape(-1) for p in lora.get_trainable_parameters(model).values()]
        )

    assert torch.equal(begun(1), begun(1)) and not torch.equal(begun(1), begun(2))


@pytest.mark.parametrize(
    "path", ["eager", pytest.param("native", marks=pytest.mark.needs("compiler"))]
)
def test_an_engine_scores_merged_weights_as_the_trainer_does(path: str) -> None:
    model = adapted(ALL)
    engine = build_engine(SHAPE, 2, 32, backend=path)
    engine.wake(merge_adapters(SHAPE, state(model), 3.0), 1)
    with torch.inference_mode():
        expected = logits(model, TOKENS[:1])[0, :-1].log_softmax(-1)
    chosen = expected.gather(1, TOKENS[0, 1:, None])[:, 0].numpy()
    assert np.abs(engine.score(TOKENS[0].numpy()) - chosen).max() < 1e-4


@pytest.mark.group("transformers")  # which one worker imports for all
@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_peft_computes_the_same_from_what_was_exported(tmp_path: Path, targets: list[str]) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    model = adapted(targets)
    save_model(tmp_path / "base", SHAPE, state(plain()))
    save_adapter(tmp_path / "adapter", SHAPE, state(model), alpha=12.0, base=str(tmp_path / "base"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.inference_mode():
        assert torch.allclose(loaded(TOKENS).logits, logits(model), atol=1e-4)
        assert not torch.allclose(loaded(TOKENS).logits, logits(plain()), atol=1e-2)


def test_an_exported_adapter_has_pefts_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save_adapter(tmp_path, SHAPE, state(adapted(["v_proj"])), alpha=12.0, base="somewhere")
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["target_modules"]) == (4, 12.0, ["v_proj"])
    assert about["base_model_name_or_path"] == "somewhere" and about["peft_type"] == "LORA"
    shapes = {
        n: tuple(t.shape) for n, t in load_file(tmp_path / "adapter_model.safetensors").items()
    }
    prefix = "base_model.model.model.layers.{}.self_attn.v_proj.lora_{}.weight"
    assert shapes == {
        prefix.format(i, factor): shape
        for i in (0, 1)
        for factor, shape in (("A", (4, 32)), ("B", (16, 4)))
    }


def test_a_merged_directory_is_a_plain_model(tmp_path: Path) -> None:
    model = adapted(ALL)
    save_model(tmp_path, SHAPE, merge_adapters(SHAPE, state(model), 3.0))
    _, loaded = load_model(tmp_path)
    assert torch.allclose(logits(loaded), logits(model), atol=1e-4)


MIXTURE = dataclasses.replace(
    SHAPE, architecture="mixtral", num_experts=4, num_experts_per_token=2, expert_ffn_size=16
)


def test_projections_go_by_either_name_and_what_cannot_be_adapted_is_refused() -> None:
    assert resolve_targets(SHAPE, ["qkv", "down_proj"]) == [
        "q_proj",
        "k_proj",
        "v_proj",
        "down_proj",
    ]
    with pytest.raises(ConfigError, match="no projection 'attention'"):
        resolve_targets(SHAPE, ["attention"])
    with pytest.raises(ConfigError, match="rank 40"):
        check_adapters(SHAPE, 40, ALL)
    with pytest.raises(ConfigError, match="mixture of experts"):
        check_adapters(MIXTURE, 2, ALL)
    check_adapters(MIXTURE, 2, ["qkv", "output"])


def test_without_targets_all_is_adapted_that_can_be() -> None:
    assert resolve_targets(SHAPE, []) == resolve_targets(SHAPE, ALL)
    assert resolve_targets(MIXTURE, []) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert LoraConfig().targets == []
    check_adapters(MIXTURE, 2, [])
    model = Decoder(MIXTURE)
    model.initialise(torch.Generator().manual_seed(0))
    lora.initialize_adapters(model, LoraConfig(rank=2), seed=0)
    names = {name.split(".")[-2] for name in lora.get_trainable_parameters(model)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
