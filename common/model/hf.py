"""Decoders as Hugging Face directories: config.json and safetensors, read and written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.errors import ConfigError
from common.model.config import ModelConfig
from common.model.decoder import Decoder

State = Mapping[str, Tensor]

_WHOLE = {  # our tensor of a layer -> theirs, where one is one
    "attention_norm": "input_layernorm.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "output": "self_attn.o_proj.weight",
    "output_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "down": "mlp.down_proj.weight",
}
_OUTSIDE = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "unembedding": "lm_head.weight",
}
_TOKENIZER_FILES = (  # what may lie beside a tokenizer.json and belongs to it
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def load_model(path: str | Path, dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, Decoder]:
    """The model of a directory (one safetensors file, or shards with their index), on the CPU."""
    directory = Path(path)
    config = load_config(directory)
    decoder = Decoder(config, dtype)
    decoder.load_state_dict(state_from_hf(config, _read_tensors(directory)))
    return config, decoder


def load_config(path: str | Path) -> ModelConfig:
    return ModelConfig.from_hf(json.loads(_present(Path(path) / "config.json").read_text()))


def save_model(
    path: str | Path,
    config: ModelConfig,
    state: State,
    tokenizer_file: str | Path | None = None,
) -> None:
    """Writes a directory that `load_model` and `transformers` read; each file appears whole."""
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    dtype = str(state["embedding"].dtype).removeprefix("torch.")
    _write_json(directory / "config.json", config.to_hf() | {"dtype": dtype, "torch_dtype": dtype})
    if config.eos_ids:
        ids = {"bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids)}
        generation = ids | {"pad_token_id": config.pad_id, "do_sample": True}
        _write_json(directory / "generation_config.json", generation)
    tensors = {  # clones, because safetensors refuses tensors that share memory, as slices do
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in state_to_hf(config, state).items()
    }
    unfinished = directory / "model.safetensors.part"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    os.replace(unfinished, directory / "model.safetensors")
    if tokenizer_file is not None:
        _copy_tokenizer(Path(tokenizer_file), directory, config)


def state_to_hf(config: ModelConfig, state: State) -> dict[str, Tensor]:
    """Hugging Face's names and shapes; fused matrices come apart as views, nothing is copied."""
    theirs = {_OUTSIDE[name]: state[name] for name in _OUTSIDE if name in state}
    for index in range(config.layers):
        ours, prefix = f"layers.{index}.", f"model.layers.{index}."
        for name, target in _WHOLE.items():
            if ours + name in state:
                theirs[prefix + target] = state[ours + name]
        for fused, parts in _fused(config).items():
            if ours + fused in state:
                pieces = torch.split(state[ours + fused], list(parts.values()))
                theirs |= {prefix + part: piece for part, piece in zip(parts, pieces, strict=True)}
    return theirs


def state_from_hf(config: ModelConfig, tensors: State) -> dict[str, Tensor]:
    """A state that `Decoder.load_state_dict` takes; ConfigError when a tensor is missing."""
    ours = {}
    for name, source in _OUTSIDE.items():
        if name != "unembedding" or not config.tie_embeddings:
            ours[name] = _tensor(tensors, source)
    for index in range(config.layers):
        target, prefix = f"layers.{index}.", f"model.layers.{index}."
        for name, source in _WHOLE.items():
            if _has(config, name):
                ours[target + name] = _tensor(tensors, prefix + source)
        for fused, parts in _fused(config).items():
            if _has(config, fused):
                ours[target + fused] = torch.cat([_tensor(tensors, prefix + p) for p in parts])
    return ours


def _fused(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Our fused tensors -> Hugging Face's parts, in row order, with their numbers of rows."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    rows = {"q": queries, "k": keys, "v": keys}
    return {
        "qkv": {f"self_attn.{x}_proj.weight": n for x, n in rows.items()},
        "qkv_bias": {f"self_attn.{x}_proj.bias": n for x, n in rows.items()},
        "gate_up": {f"mlp.{x}_proj.weight": config.ffn_size for x in ("gate", "up")},
    }


def _has(config: ModelConfig, name: str) -> bool:
    if name in ("query_norm", "key_norm"):
        return config.qk_norm
    if name == "qkv_bias":
        return config.attention_bias
    return name != "output_bias" or config.output_bias


def _tensor(tensors: State, name: str) -> Tensor:
    if name not in tensors:
        raise ConfigError(
            f"tensor {name} is missing",
            where="safetensors",
            fix="check that config.json and the weights are of the same model",
        )
    return tensors[name]


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        shards = ["model.safetensors"]
    return {
        name: tensor
        for shard in shards
        for name, tensor in _read_shard(_present(directory / shard))
    }


def _read_shard(file: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
            yield name, tensors.get_tensor(name)


def _present(file: Path) -> Path:
    if not file.is_file():
        raise ConfigError(
            "the file is missing",
            where=str(file),
            fix="name a Hugging Face directory with config.json and safetensors",
        )
    return file


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    unfinished = file.with_name(file.name + ".part")
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(unfinished, file)


def _copy_tokenizer(file: Path, directory: Path, config: ModelConfig) -> None:
    """The tokenizer.json and its companions; without any, one that `AutoTokenizer` needs."""
    if file.resolve() != (directory / "tokenizer.json").resolve():
        shutil.copyfile(file, directory / "tokenizer.json")
    for name in _TOKENIZER_FILES:
        beside = file.parent / name
        if beside.is_file() and beside.resolve() != (directory / name).resolve():
            shutil.copyfile(beside, directory / name)
    if not (directory / "tokenizer_config.json").is_file():
        _write_json(directory / "tokenizer_config.json", _plain_tokenizer_config(file, config))


def _plain_tokenizer_config(file: Path, config: ModelConfig) -> dict[str, Any]:
    from common.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(file)
    ids = {"bos_token": config.bos_id, "pad_token": config.pad_id}
    ids["eos_token"] = next(iter(config.eos_ids), None)
    named = {name: tokenizer.id_to_token(i) for name, i in ids.items() if i is not None}
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return plain | named | {"model_max_length": config.max_positions}
