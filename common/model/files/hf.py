"""Decoders as Hugging Face directories: config.json and safetensors, read and written."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.base.errors import ConfigError
from common.model.architecture.architectures import ARCHITECTURES
from common.model.architecture.config import ModelConfig
from common.model.files.checkpoint import load_config
from common.model.files.checkpoint_files import INDEX, SINGLE, UNEMBEDDING, files, not_finite
from common.model.files.safetensors_file import Unfinished
from common.model.files.source import nbytes
from common.model.network.decoder import Decoder
from common.model.tokens.tokenizer import Tokenizer, companions

StateDict = Mapping[str, Tensor]

WHOLE = {  # our tensor of a layer -> theirs, where one is one
    "attention_norm": "input_layernorm.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "output": "self_attn.o_proj.weight",
    "output_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "down": "mlp.down_proj.weight",
}
OUTSIDE = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "unembedding": "lm_head.weight",
}
SHARD_BYTES = 5 * 10**9  # most in one file of weights, as transformers cuts them
_UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError)
_GENERATION = "generation_config.json"


def load_model(path: str | Path, dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, Decoder]:
    """The model of a directory (one safetensors file, or shards with their index), on the CPU;
    ConfigError when it cannot be read.
    """
    directory = Path(path)
    config = load_config(directory)
    decoder = Decoder(config, dtype)
    with ExitStack() as opening, readable(directory):
        state = state_from_hf(config, _Tensors(directory, opening))
        _check_shapes(decoder.state_dict(), state)
        decoder.load_state_dict(state)
    return config, decoder


def save_model(
    path: str | Path,
    config: ModelConfig,
    state: StateDict,
    tokenizer_file: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    origin: Path | None = None,
) -> None:
    """Writes a directory that `load_model` and `transformers` read; each file appears whole.

    Weights of more than `shard_bytes` are cut into several files, with an index. What is not
    trained is as in `origin`, the directory that the model began from: its generation_config.json,
    or none, and the tokenizer's files.
    """
    writer = ModelWriter(Path(path), config, state, tokenizer_file, shard_bytes, origin)
    for names in by_layer(state):
        writer.add({name: state[name] for name in names})
    writer.finish()


def by_layer(outline: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of tensors that have to be there together: those of a layer; any other one alone."""
    found: dict[str, list[str]] = {}
    for name in outline:
        layer = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name
        found.setdefault(layer, []).append(name)
    return list(found.values())


class ModelWriter:
    """Writes what `save_model` does, for who has some of the tensors at a time."""

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        outline: StateDict,
        tokenizer_file: str | Path | None = None,
        shard_bytes: int = SHARD_BYTES,
        origin: Path | None = None,
    ) -> None:
        """Of `outline` only types and shapes are looked at."""
        self._directory, self._config = directory, config
        self._tokenizer, self._origin = tokenizer_file, origin
        directory.mkdir(parents=True, exist_ok=True)
        dtype = str(outline["embedding"].dtype).removeprefix("torch.")
        described = config.exported() | {"dtype": dtype, "torch_dtype": dtype}
        _write_json(directory / "config.json", described)
        if origin is not None:
            if (origin / _GENERATION).is_file():
                shutil.copyfile(origin / _GENERATION, directory / _GENERATION)
        elif config.eos_ids:
            ids = {"bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids)}
            generation = ids | {"pad_token_id": config.pad_id, "do_sample": True}
            _write_json(directory / _GENERATION, generation)
        theirs = state_to_hf(config, outline)
        shards, self._bytes = _cut(theirs, shard_bytes), sum(map(nbytes, theirs.values()))
        count = len(shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        self._files = [
            (file, Unfinished(directory / file, {name: theirs[name] for name in shard}))
            for file, shard in zip(names if count > 1 else [SINGLE], shards, strict=True)
        ]
        self._shard = {name: index for index, shard in enumerate(shards) for name in shard}

    def add(self, state: StateDict) -> None:
        """Some tensors, whole layers of them: see `by_layer`."""
        for name, tensor in state_to_hf(self._config, state).items():
            self._files[self._shard[name]][1].put(name, tensor)

    def finish(self) -> None:
        """All were added: the files appear, then files of an earlier, other cut are removed."""
        directory, names = self._directory, [name for name, _ in self._files]
        for _, file in self._files:
            file.finish()
        if len(names) > 1:
            weight_map = {name: names[index] for name, index in self._shard.items()}
            index = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
            _write_json(directory / INDEX, index)
        else:
            (directory / INDEX).unlink(missing_ok=True)
        for old in (directory / SINGLE, *directory.glob("model-*-of-*.safetensors")):
            if old.name not in names:
                old.unlink(missing_ok=True)
        if self._tokenizer is not None:
            _add_tokenizer(Path(self._tokenizer), directory, self._config, self._origin)

    def close(self) -> None:
        """What was begun and not finished stays under other names."""
        for _, file in self._files:
            file.close()


def _add_tokenizer(file: Path, directory: Path, config: ModelConfig, origin: Path | None) -> None:
    _copy_tokenizer(file, directory)
    own = origin is not None and _same(file, origin / "tokenizer.json")
    plain = directory / "tokenizer_config.json"
    if not own and not plain.is_file():  # `AutoTokenizer` needs one
        _write_json(plain, _plain_tokenizer_config(file, config))


def state_to_hf(config: ModelConfig, state: StateDict) -> dict[str, Tensor]:
    """Hugging Face's names and shapes; fused matrices come apart as views, nothing is copied."""
    theirs = {OUTSIDE[name]: state[name] for name in OUTSIDE if name in state}
    for index in range(config.layers):
        ours, prefix = f"layers.{index}.", f"model.layers.{index}."
        for name, target in WHOLE.items():
            if ours + name in state:
                theirs[prefix + target] = state[ours + name]
        for fused, parts in fused_parts(config).items():
            if ours + fused in state:
                pieces = torch.split(state[ours + fused], list(parts.values()))
                theirs |= {prefix + part: piece for part, piece in zip(parts, pieces, strict=True)}
        if ours + "experts.router" in state:
            theirs |= _experts_to_hf(config, state, ours + "experts.", prefix)
    return theirs


def state_from_hf(config: ModelConfig, tensors: StateDict) -> dict[str, Tensor]:
    """A state that `Decoder.load_state_dict` takes; ConfigError when a tensor is missing."""
    ours = {}
    for name, source in OUTSIDE.items():
        if name != "unembedding" or not config.tie_embeddings:
            alone = name == "embedding" and config.tie_embeddings and source not in tensors
            ours[name] = _tensor(tensors, UNEMBEDDING if alone else source)
    for index in range(config.layers):
        target, prefix = f"layers.{index}.", f"model.layers.{index}."
        for name, source in WHOLE.items():
            if _has(config, name, index):
                ours[target + name] = _tensor(tensors, prefix + source)
        for fused, parts in fused_parts(config).items():
            if _has(config, fused, index):
                ours[target + fused] = torch.cat([_tensor(tensors, prefix + p) for p in parts])
        if index in config.sparse_layers:
            ours |= _experts_from_hf(config, tensors, target + "experts.", prefix)
    return ours


def _experts_to_hf(
    config: ModelConfig, state: StateDict, ours: str, prefix: str
) -> dict[str, Tensor]:
    """A layer's experts one by one, as views."""
    block, names = _experts_named(config)
    theirs = {f"{prefix}{block}.gate.weight": state[ours + "router"]}
    if config.shared_ffn_size:
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


def _experts_from_hf(
    config: ModelConfig, tensors: StateDict, ours: str, prefix: str
) -> dict[str, Tensor]:
    """A layer's experts as matrices [experts, ..]."""
    block, names = _experts_named(config)
    found = [
        [_tensor(tensors, f"{prefix}{block}.experts.{i}.{name}.weight") for name in names]
        for i in range(config.experts)
    ]
    shared: dict[str, Tensor] = {}
    if config.shared_ffn_size:
        source = f"{prefix}{block}.shared_expert"
        parts = [_tensor(tensors, f"{source}.{part}_proj.weight") for part in ("gate", "up")]
        shared[ours + "shared_gate_up"] = torch.cat(parts)
        shared[ours + "shared_down"] = _tensor(tensors, f"{source}.down_proj.weight")
        shared[ours + "shared_gate"] = _tensor(tensors, f"{source}_gate.weight")
    return shared | {
        ours + "router": _tensor(tensors, f"{prefix}{block}.gate.weight"),
        ours + "gate_up": torch.stack([torch.cat((gate, up)) for gate, up, _ in found]),
        ours + "down": torch.stack([down for _, _, down in found]),
    }


def _experts_named(config: ModelConfig) -> tuple[str, tuple[str, str, str]]:
    """Where a layer has its router, and its experts' gate, up and down."""
    architecture = ARCHITECTURES[config.architecture]
    return architecture.experts, architecture.parts


def fused_parts(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Our fused tensors -> Hugging Face's parts, in row order, with their numbers of rows."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    rows = {"q": queries, "k": keys, "v": keys}
    return {
        "qkv": {f"self_attn.{x}_proj.weight": n for x, n in rows.items()},
        "qkv_bias": {f"self_attn.{x}_proj.bias": n for x, n in rows.items()},
        "gate_up": {f"mlp.{x}_proj.weight": config.ffn_size for x in ("gate", "up")},
    }


def _has(config: ModelConfig, name: str, layer: int) -> bool:
    if name in ("gate_up", "down"):
        return layer not in config.sparse_layers
    if name in ("query_norm", "key_norm"):
        return config.qk_norm
    if name == "qkv_bias":
        return config.attention_bias
    return name != "output_bias" or config.output_bias


def _tensor(tensors: StateDict, name: str) -> Tensor:
    if name not in tensors:
        raise ConfigError(
            f"tensor {name} is missing",
            where="safetensors",
            fix="check that config.json and the weights are of the same model",
        )
    return tensors[name]


class _Tensors(Mapping[str, Tensor]):
    """A directory's tensors, each read when it is asked for; `opening` keeps their files open.
    ConfigError for one with numbers that are none.
    """

    def __init__(self, directory: Path, opening: ExitStack) -> None:
        self._shard: dict[str, Any] = {}
        for file in files(directory):
            opened = opening.enter_context(safe_open(file, framework="pt"))
            self._shard |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._shard[name].get_tensor(name)
        if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            broken = int((~tensor.isfinite()).sum())
            raise not_finite(name, broken, tensor.numel(), "safetensors")
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._shard

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard)

    def __len__(self) -> int:
        return len(self._shard)


def _cut(tensors: StateDict, shard_bytes: int) -> list[list[str]]:
    """Names, in order, in shards of at most so many bytes (a larger tensor has one of its own)."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + nbytes(tensor) > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes(tensor)
    return shards


@contextmanager
def readable(place: Path) -> Iterator[None]:
    """ConfigError, within the block, for what else than a model is at `place`."""
    try:
        yield
    except _UNREADABLE as error:
        raise ConfigError(
            f"the model cannot be read: {type(error).__name__}: {error}",
            where=str(place),
            fix="copy it there again, as a whole",
        ) from error


def _check_shapes(wanted: StateDict, found: StateDict) -> None:
    for name, tensor in found.items():
        if name in wanted and tensor.shape != wanted[name].shape:
            raise ConfigError(
                f"tensor {name} is {list(tensor.shape)}, not {list(wanted[name].shape)}",
                where="safetensors",
                fix="check that config.json and the weights are of the same model",
            )


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    unfinished = file.with_name(file.name + ".part")
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(unfinished, file)


def _copy_tokenizer(file: Path, directory: Path) -> None:
    """The tokenizer.json and what belongs to it, verbatim."""
    for name in (Path(file.name), *companions(file)):
        source, target = file.parent / name, directory / name
        if source.resolve() != target.resolve():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)


def _same(file: Path, other: Path) -> bool:
    return other.is_file() and filecmp.cmp(file, other, shallow=False)


def _plain_tokenizer_config(file: Path, config: ModelConfig) -> dict[str, Any]:
    tokenizer = Tokenizer.load(file)
    ids = {"bos_token": config.bos_id, "pad_token": config.pad_id}
    ids["eos_token"] = next(iter(config.eos_ids), None)
    named = {name: tokenizer.id_to_token(i) for name, i in ids.items() if i is not None}
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return plain | named | {"model_max_length": config.max_positions}
