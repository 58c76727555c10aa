"""Models and settings that would compute other numbers than their author means."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from safetensors.torch import load_file, save_file

from loadtests.mistakes.job import Place
from loadtests.mistakes.mistake import Mistake, config, does

_TOKENIZER = "model/tokenizer.json"


def _further(**tensors: torch.Tensor) -> Callable[[Place], AbstractContextManager[None]]:
    """Further tensors in the file, by names with two underscores for a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return does(lambda place: place.save_weights(place.weights() | named))


def _small_reference(place: Place) -> None:
    """A reference of a head with fewer rows than the tokenizer has ids."""
    shutil.copytree(place.path("model"), place.path("reference"))
    file = place.path("reference/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 40}))
    file = place.path("reference/model.safetensors")
    name = "model.embed_tokens.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name][:40].clone()}, file, metadata={"format": "pt"})


def _hole(place: Place) -> None:
    """A tokenizer that lacks ids below its last one."""
    content = json.loads(place.path(_TOKENIZER).read_text())
    content["model"]["vocab"]["far"] = 60
    place.write(_TOKENIZER, json.dumps(content))


MISTAKES = (
    Mistake(
        "numbers: a config.json with fewer layers than the weights",
        (r"model\.layers\.1\.", "belong to no part", r"config\.json"),
        prepare=config(num_hidden_layers=1),
    ),
    Mistake(
        "numbers: biases that config.json leaves out",
        (r"self_attn\.q_proj\.bias", "belongs to no part", "safetensors"),
        prepare=_further(model__layers__0__self_attn__q_proj__bias=torch.ones(32)),
    ),
    Mistake(
        "numbers: a head that predicts further tokens",
        (r"mtp\.fc\.weight", "belongs to no part"),
        prepare=_further(mtp__fc__weight=torch.ones(32, 32)),
    ),
    Mistake(
        "numbers: norms of heads in a model without them",
        ("use_qk_norm", "llama", r"config\.json"),
        prepare=config(use_qk_norm=True),
    ),
    Mistake(
        "numbers: a multiplier of embeddings",
        ("embedding_multiplier", "12", r"config\.json"),
        prepare=config(embedding_multiplier=12.0),
    ),
    Mistake(
        "numbers: logits that are capped",
        ("final_logit_softcapping", "30", r"config\.json"),
        prepare=config(final_logit_softcapping=30.0),
    ),
    Mistake(
        "numbers: experts that every token goes to, in a dense model",
        ("n_shared_experts", "2", r"config\.json"),
        prepare=config(n_shared_experts=2),
    ),
    Mistake(
        "numbers: half of each head is rotated",
        ("partial_rotary_factor", r"0\.5"),
        prepare=config(partial_rotary_factor=0.5),
    ),
    Mistake(
        "numbers: attention that looks ahead",
        ("is_causal", r"config\.json"),
        prepare=config(is_causal=False),
    ),
    Mistake(
        "numbers: a turn ends with an id without a token",
        ("token 60", "tokenizer lacks", "eos_token_id"),
        set={"rollout.stop": None},
        prepare=config(eos_token_id=60),
    ),
    Mistake(
        "numbers: a reference without rows for all ids of the tokenizer",
        (r"models\.reference", "ids up to 41", "40 rows"),
        set={
            "models.reference.path": "reference",
            "algorithm.kl_coefficient": 0.1,
            "mesh.workers": 3,
        },
        prepare=does(_small_reference),
    ),
    Mistake(
        "numbers: SGLang with a tokenizer that has a hole",
        (r"rollout\.engine", "lacks ids 42 to 59", "built-in"),
        set={"rollout.engine": "sglang"},
        prepare=does(_hole),
    ),
    Mistake(
        "numbers: a discount above 1",
        (r"algorithm\.gae_lambda", r"1\.5"),
        set={"algorithm.name": "ppo", "algorithm.gae_lambda": 1.5},
    ),
)
