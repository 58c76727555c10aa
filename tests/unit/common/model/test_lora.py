"""LoRA adapters of a frozen decoder: computation, merging and export for PEFT."""

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


def make_base(dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(SHAPE, dtype)
    model.initialise(torch.Generator().manual_seed(3))
    return model


def make_adapted(
    targets: list[str], dtype: torch.dtype = torch.float32, trained: bool = True
) -> Decoder:
    """Return a decoder with adapters, with random weights as after training if `trained`."""
    model = make_base(dtype)
    lora.initialize_adapters(model, LoraConfig(4, 12.0, targets), seed=1)
    if trained:
        generator = torch.Generator().manual_seed(9)
        for name, parameter in lora.get_trainable_parameters(model).items():
            if name.endswith(".b"):
                with torch.no_grad():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def logits(model: Decoder, tokens: Tensor = TOKENS) -> Tensor:
    positions = torch.arange(tokens.shape[-1]).expand_as(tokens)
    return model.compute_logits(model(tokens, positions, causal_attention))


def get_state(model: Decoder) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def test_new_adapters_do_not_change_the_logits() -> None:
    assert torch.equal(logits(make_adapted(ALL, trained=False)), logits(make_base()))


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_merged_weights_give_the_logits_of_the_adapters(targets: list[str]) -> None:
    model = make_adapted(targets, torch.float64)
    merged = make_base(torch.float64)
    merged.load_state_dict(merge_adapters(SHAPE, get_state(model), scale=3.0))
    expected = logits(merged)
    assert torch.allclose(logits(model), expected, atol=1e-6)  # merging uses float32
    assert not torch.allclose(expected, logits(make_base(torch.float64)), atol=1e-2)


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_gradient_is_that_through_the_merged_weights(targets: list[str]) -> None:
    model, base = make_adapted(targets, torch.float64), make_base(torch.float64)
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


def test_base_is_frozen_and_only_adapters_train() -> None:
    model = make_adapted(["q_proj", "v_proj"])
    logits(model).sum().backward()
    base = {n: p for n, p in model.named_parameters() if not is_adapter_tensor(n)}
    assert all(p.grad is None and not p.requires_grad for p in base.values())
    assert base.keys() == get_state(make_base()).keys()
    assert lora.get_trainable_parameters(model).keys() == {
        f"layers.{i}.adapters.{part}_proj.{factor}"
        for i in (0, 1)
        for part in ("q", "v")
        for factor in ("a", "b")
    }


def test_merging_does_not_change_its_input() -> None:
    tensors = {name: tensor.clone() for name, tensor in get_state(make_adapted(ALL)).items()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    merge_adapters(SHAPE, tensors, 3.0)
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    base_state = get_state(make_base())
    assert all(merge_adapters(SHAPE, base_state, 0.0)[n] is base_state[n] for n in base_state)


def test_seed_determines_the_initial_adapters() -> None:
    def initial_weights(seed: int) -> Tensor:
        model = make_base()
        lora.initialize_adapters(model, LoraConfig(2), seed)
        return torch.cat(
            [p.detach().reshape(-1) for p in lora.get_trainable_parameters(model).values()]
        )

    assert torch.equal(initial_weights(1), initial_weights(1)) and not torch.equal(
        initial_weights(1), initial_weights(2)
    )


@pytest.mark.parametrize(
    "path", ["eager", pytest.param("native", marks=pytest.mark.needs("compiler"))]
)
def test_engine_scores_merged_weights_as_the_trainer_does(path: str) -> None:
    model = make_adapted(ALL)
    engine = build_engine(SHAPE, 2, 32, backend=path)
    engine.wake(merge_adapters(SHAPE, get_state(model), 3.0), 1)
    with torch.inference_mode():
        expected = logits(model, TOKENS[:1])[0, :-1].log_softmax(-1)
    chosen = expected.gather(1, TOKENS[0, 1:, None])[:, 0].numpy()
    assert np.abs(engine.score(TOKENS[0].numpy()) - chosen).max() < 1e-4


@pytest.mark.group("transformers")  # imported by one worker for all tests of the group
@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_peft_gives_the_same_logits_from_an_export(tmp_path: Path, targets: list[str]) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    model = make_adapted(targets)
    save_model(tmp_path / "base", SHAPE, get_state(make_base()))
    save_adapter(
        tmp_path / "adapter", SHAPE, get_state(model), alpha=12.0, base=str(tmp_path / "base")
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.inference_mode():
        assert torch.allclose(loaded(TOKENS).logits, logits(model), atol=1e-4)
        assert not torch.allclose(loaded(TOKENS).logits, logits(make_base()), atol=1e-2)


def test_exported_adapter_has_the_names_of_peft(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save_adapter(tmp_path, SHAPE, get_state(make_adapted(["v_proj"])), alpha=12.0, base="somewhere")
    adapter_config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (
        adapter_config["r"],
        adapter_config["lora_alpha"],
        adapter_config["target_modules"],
    ) == (4, 12.0, ["v_proj"])
    assert (
        adapter_config["base_model_name_or_path"] == "somewhere"
        and adapter_config["peft_type"] == "LORA"
    )
    shapes = {
        n: tuple(t.shape) for n, t in load_file(tmp_path / "adapter_model.safetensors").items()
    }
    prefix = "base_model.model.model.layers.{}.self_attn.v_proj.lora_{}.weight"
    assert shapes == {
        prefix.format(i, factor): shape
        for i in (0, 1)
        for factor, shape in (("A", (4, 32)), ("B", (16, 4)))
    }


def test_merged_directory_is_a_plain_model(tmp_path: Path) -> None:
    model = make_adapted(ALL)
    save_model(tmp_path, SHAPE, merge_adapters(SHAPE, get_state(model), 3.0))
    _, loaded = load_model(tmp_path)
    assert torch.allclose(logits(loaded), logits(model), atol=1e-4)


MIXTURE = dataclasses.replace(
    SHAPE, architecture="mixtral", num_experts=4, num_experts_per_token=2, expert_ffn_size=16
)


def test_projection_names_are_resolved_and_invalid_ones_rejected() -> None:
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


def test_all_supported_projections_are_adapted_by_default() -> None:
    assert resolve_targets(SHAPE, []) == resolve_targets(SHAPE, ALL)
    assert resolve_targets(MIXTURE, []) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert LoraConfig().targets == []
    check_adapters(MIXTURE, 2, [])
    model = Decoder(MIXTURE)
    model.initialise(torch.Generator().manual_seed(0))
    lora.initialize_adapters(model, LoraConfig(rank=2), seed=0)
    names = {name.split(".")[-2] for name in lora.get_trainable_parameters(model)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
