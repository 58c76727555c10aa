"""Models and tokenizers that are not what they should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from loadtests.mistakes.job import Place
from loadtests.mistakes.mistake import Mistake, config, does

_FILE = "model/model.safetensors"
_LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 4000000000\n".format(
    "0" * 64
)
_QUANTIZED = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def _matrices(dtype: torch.dtype) -> Callable[[Place], AbstractContextManager[None]]:
    """Every matrix of a layer in another type, as quantized checkpoints have them."""

    def change(place: Place) -> None:
        tensors = place.weights()
        layers = {name for name in tensors if ".layers." in name and tensors[name].dim() == 2}
        place.save_weights({n: t.to(dtype) if n in layers else t for n, t in tensors.items()})

    return does(change)


def _truncate(place: Place) -> None:
    file = place.path(_FILE)
    file.write_bytes(file.read_bytes()[:-1000])


def _without_a_shard(place: Place) -> None:
    tensors = place.weights()
    names = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    place.path(_FILE).rename(place.path("model/model-00001-of-00002.safetensors"))
    place.write("model/model.safetensors.index.json", json.dumps({"weight_map": names}))


def _nan(place: Place) -> None:
    tensors = place.weights()
    tensors["model.norm.weight"][3] = float("nan")
    place.save_weights(tensors)


def _drop(place: Place) -> None:
    tensors = place.weights()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    place.save_weights(tensors)


def _reshape(place: Place) -> None:
    place.config(intermediate_size=96)


def _large_tokenizer(place: Place) -> None:
    file = place.path("model/tokenizer.json")
    content = json.loads(file.read_text())
    content["model"]["vocab"]["far"] = 70
    file.write_text(json.dumps(content))


MISTAKES = (
    Mistake("model: no such directory", (r"model\.path", "modle"), set={"model.path": "modle"}),
    Mistake(
        "model: a file", (r"model\.path", "directory|config.json"), set={"model.path": "mine.py"}
    ),
    Mistake("model: no config.json", ("config.json",), files={"model/config.json": None}),
    Mistake(
        "model: config.json that does not parse", ("config.json",), files={"model/config.json": "{"}
    ),
    Mistake("model: no model_type", ("model_type", "config.json"), prepare=config(model_type=None)),
    Mistake(
        "model: another architecture",
        ("gpt2", "llama"),
        prepare=config(model_type="gpt2", architectures=["GPT2LMHeadModel"]),
    ),
    Mistake("model: another activation", ("gelu", "hidden_act"), prepare=config(hidden_act="gelu")),
    Mistake(
        "model: an unknown rope",
        ("longrope", "rope"),
        prepare=config(rope_scaling={"rope_type": "longrope", "factor": 4.0}),
    ),
    Mistake(
        "model: dynamic rope beyond its positions",
        ("max_tokens", "256 positions"),
        set={"rollout.max_tokens": 300},
        prepare=config(
            rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=256
        ),
    ),
    Mistake(
        "model: quantized by its config",
        ("quantiz", "fp8"),
        prepare=config(quantization_config=_QUANTIZED),
    ),
    Mistake(
        "model: FP8 weights",
        ("float8|F8_E4M3|fp8", "layers"),
        prepare=_matrices(torch.float8_e4m3fn),
    ),
    Mistake("model: int8 weights", ("int8|I8", "layers"), prepare=_matrices(torch.int8)),
    Mistake(
        "model: NaN in the weights", ("nan|not finite", "model.norm.weight"), prepare=does(_nan)
    ),
    Mistake(
        "model: a truncated download",
        ("safetensors", "truncated|incomplete|shorter|bytes"),
        prepare=does(_truncate),
    ),
    Mistake("model: a pointer of Git LFS", ("git.lfs", "safetensors"), files={_FILE: _LFS}),
    Mistake("model: a shard is missing", ("model-00002-of-00002",), prepare=does(_without_a_shard)),
    Mistake("model: a tensor is missing", ("layers.1.mlp.up_proj.weight",), prepare=does(_drop)),
    Mistake(
        "model: shapes of another config.json", ("proj.weight", "64", "96"), prepare=does(_reshape)
    ),
    Mistake(
        "model: weights of PyTorch's own format",
        ("safetensors", "pickles of PyTorch", "save_pretrained"),
        files={_FILE: None, "model/pytorch_model.bin": b"PK\x03\x04"},
    ),
    Mistake(
        "model: GGUF", ("safetensors", "gguf"), files={_FILE: None, "model/model.gguf": b"GGUF"}
    ),
    Mistake("tokenizer: none", ("tokenizer.json",), files={"model/tokenizer.json": None}),
    Mistake(
        "tokenizer: another file", ("tokenizer",), files={"model/tokenizer.json": '{"version": 1}'}
    ),
    Mistake(
        "tokenizer: more ids than the model has",
        ("70|71", "64", "token"),
        prepare=does(_large_tokenizer),
    ),
)
