"""Writer of decoders as Hugging Face directories: config.json, safetensors and names."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshrl.common.model.architecture.architectures import ARCHITECTURES
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.safetensors_writer import SafetensorsWriter
from meshrl.common.model.files.tensor_source import batch_by_bytes, count_bytes
from meshrl.common.model.files.weight_files import INDEX_FILE, SINGLE_FILE
from meshrl.common.model.tokens.tokenizer import Tokenizer, list_companion_files

StateDict = Mapping[str, Tensor]

LAYER_TENSOR_NAMES = {  # our tensor of a layer -> Hugging Face's, for tensors that are not fused
    "attention_norm": "input_layernorm.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "output": "self_attn.o_proj.weight",
    "output_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "down": "mlp.down_proj.weight",
}
GLOBAL_TENSOR_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "unembedding": "lm_head.weight",
}
MAX_SHARD_BYTES = 5 * 10**9  # size limit of a weight file, as in transformers
_GENERATION_CONFIG_FILE = "generation_config.json"


def save_model(
    path: str | Path,
    config: ModelConfig,
    state: StateDict,
    tokenizer_file: str | Path | None = None,
    shard_bytes: int = MAX_SHARD_BYTES,
    origin: Path | None = None,
) -> None:
    """Write a directory that `load_model` and `transformers` read; install each file atomically.

    Weights of more than `shard_bytes` are split into several files, with an index. Files that
    training does not change are those of `origin`, the directory that the model began from: its
    generation_config.json, if any, and the tokenizer's files.
    """
    writer = ModelWriter(Path(path), config, state, tokenizer_file, shard_bytes, origin)
    for names in group_by_layer(state):
        writer.write_tensors({name: state[name] for name in names})
    writer.finish()


def group_by_layer(meta_tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Group names of tensors that must be written together: those of a layer; others alone."""
    found: dict[str, list[str]] = {}
    for name in meta_tensors:
        layer = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name
        found.setdefault(layer, []).append(name)
    return list(found.values())


class ModelWriter:
    """Incremental form of `save_model`, for callers that have some of the tensors at a time."""

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        meta_tensors: StateDict,
        tokenizer_file: str | Path | None = None,
        shard_bytes: int = MAX_SHARD_BYTES,
        origin: Path | None = None,
    ) -> None:
        """Create the writer; of `meta_tensors` only dtypes and shapes are used."""
        self._directory, self._config = directory, config
        self._tokenizer, self._origin = tokenizer_file, origin
        directory.mkdir(parents=True, exist_ok=True)
        dtype = str(meta_tensors["embedding"].dtype).removeprefix("torch.")
        described = config.export_hf() | {"dtype": dtype, "torch_dtype": dtype}
        _write_json(directory / "config.json", described)
        if origin is not None:
            if (origin / _GENERATION_CONFIG_FILE).is_file():
                shutil.copyfile(
                    origin / _GENERATION_CONFIG_FILE, directory / _GENERATION_CONFIG_FILE
                )
        elif config.eos_ids:
            ids = {"bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids)}
            generation = ids | {"pad_token_id": config.pad_id, "do_sample": True}
            _write_json(directory / _GENERATION_CONFIG_FILE, generation)
        theirs = state_to_hf(config, meta_tensors)
        shards, self._total_bytes = (
            batch_by_bytes(theirs, shard_bytes),
            sum(map(count_bytes, theirs.values())),
        )
        count = len(shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        self._files = [
            (file, SafetensorsWriter(directory / file, {name: theirs[name] for name in shard}))
            for file, shard in zip(names if count > 1 else [SINGLE_FILE], shards, strict=True)
        ]
        self._shard_of_tensor = {
            name: index for index, shard in enumerate(shards) for name in shard
        }

    def write_tensors(self, state: StateDict) -> None:
        """Write some tensors, whole layers of them: see `group_by_layer`."""
        for name, tensor in state_to_hf(self._config, state).items():
            self._files[self._shard_of_tensor[name]][1].write_tensor(name, tensor)

    def finish(self) -> None:
        """Install the files after all tensors, then remove files of an earlier sharding."""
        directory, names = self._directory, [name for name, _ in self._files]
        for _, file in self._files:
            file.finish()
        if len(names) > 1:
            weight_map = {name: names[index] for name, index in self._shard_of_tensor.items()}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            _write_json(directory / INDEX_FILE, index)
        else:
            (directory / INDEX_FILE).unlink(missing_ok=True)
        for old in (directory / SINGLE_FILE, *directory.glob("model-*-of-*.safetensors")):
            if old.name not in names:
                old.unlink(missing_ok=True)
        if self._tokenizer is not None:
            _add_tokenizer(Path(self._tokenizer), directory, self._config, self._origin)

    def close(self) -> None:
        """Close the writer; unfinished files stay under other names."""
        for _, file in self._files:
            file.close()


def _add_tokenizer(file: Path, directory: Path, config: ModelConfig, origin: Path | None) -> None:
    for name in (Path(file.name), *list_companion_files(file)):
        source, target = file.parent / name, directory / name
        if source.resolve() != target.resolve():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)
    theirs = origin / "tokenizer.json" if origin is not None else None
    own = theirs is not None and theirs.is_file() and filecmp.cmp(file, theirs, shallow=False)
    described = directory / "tokenizer_config.json"
    if not own and not described.is_file():  # `AutoTokenizer` requires this file
        tokenizer = Tokenizer.load(file)
        ids = {"bos_token": config.bos_id, "pad_token": config.pad_id}
        ids["eos_token"] = next(iter(config.eos_ids), None)
        named = {name: tokenizer.id_to_token(i) for name, i in ids.items() if i is not None}
        plain: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        plain |= {"clean_up_tokenization_spaces": False, "model_max_length": config.max_positions}
        _write_json(described, plain | named)


def state_to_hf(config: ModelConfig, state: StateDict) -> dict[str, Tensor]:
    """Convert tensors to Hugging Face's names and shapes; fused matrices are split into views."""
    theirs = {
        GLOBAL_TENSOR_NAMES[name]: state[name] for name in GLOBAL_TENSOR_NAMES if name in state
    }
    for index in range(config.num_layers):
        ours, prefix = f"layers.{index}.", f"model.layers.{index}."
        for name, target in LAYER_TENSOR_NAMES.items():
            if ours + name in state:
                theirs[prefix + target] = state[ours + name]
        for fused, parts in get_fused_parts(config).items():
            if ours + fused in state:
                pieces = torch.split(state[ours + fused], list(parts.values()))
                theirs |= {prefix + part: piece for part, piece in zip(parts, pieces, strict=True)}
        if ours + "experts.router" in state:
            theirs |= _experts_to_hf(config, state, ours + "experts.", prefix)
    return theirs


def _experts_to_hf(
    config: ModelConfig, state: StateDict, ours: str, prefix: str
) -> dict[str, Tensor]:
    architecture = ARCHITECTURES[config.architecture]
    block, names = architecture.experts_module, architecture.expert_projections
    theirs = {f"{prefix}{block}.gate.weight": state[ours + "router"]}
    if config.shared_expert_ffn_size:
        gate, up = state[ours + "shared_gate_up"].chunk(2)
        shared = f"{prefix}{block}.shared_expert"
        theirs[f"{shared}.gate_proj.weight"], theirs[f"{shared}.up_proj.weight"] = gate, up
        theirs[f"{shared}.down_proj.weight"] = state[ours + "shared_down"]
        theirs[f"{shared}_gate.weight"] = state[ours + "shared_gate"]
    both = zip(state[ours + "gate_up"].unbind(), state[ours + "down"].unbind(), strict=True)
    for expert, (gate_up, down) in enumerate(both):
        for name, part in zip(names, (*gate_up.chunk(2), down), strict=True):
            theirs[f"{prefix}{block}.experts.{expert}.{name}.weight"] = part
    return theirs


def get_fused_parts(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Return our fused tensors -> Hugging Face's parts, in row order, with their row counts."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"q": queries, "k": keys, "v": keys}
    return {
        "qkv": {f"self_attn.{x}_proj.weight": n for x, n in rows.items()},
        "qkv_bias": {f"self_attn.{x}_proj.bias": n for x, n in rows.items()},
        "gate_up": {f"mlp.{x}_proj.weight": config.ffn_size for x in ("gate", "up")},
    }


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    unfinished = file.with_name(file.name + ".part")
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(unfinished, file)
