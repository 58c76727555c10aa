"""A directory's model as its files describe it: what can be told without reading weights.

Beside config.json that is whether its weights are quantized, and whether its embeddings are tied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.checkpoint_files import (
    EMBEDDING,
    FLOATING,
    INDEX,
    NO_WEIGHT,
    SINGLE,
    UNEMBEDDING,
    StoredTensor,
    files,
    header,
    others,
)

UNQUANTIZED = "take the model's unquantized weights (bfloat16, float16 or float32)"
_CHUNK = 1 << 22  # bytes that are compared at once
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError)
_QUANTIZERS = ("quantize_config.json", "quant_config.json")  # AutoGPTQ's, AutoAWQ's


def load_config(path: str | Path) -> ModelConfig:
    """The shape of a directory's model: what its config.json declares, and whether embeddings are
    tied in its weights, of which only headers are read.

    ConfigError if there is no such model, if it is none of ours, quantized or in another format,
    or if a file is missing or cut off. A description may lie there alone: `load_model` then says
    that weights are missing.
    """
    directory = Path(path)
    file = directory / "config.json"
    if not file.is_file():
        has = others(directory)
        raise ConfigError(
            f"the file is missing; the directory has {has[0]}" if has else "the file is missing",
            where=str(file),
            fix=has[1] if has else "name a Hugging Face directory with config.json and safetensors",
        )
    try:
        raw = json.loads(file.read_text("utf-8"))
        config = replace(ModelConfig.from_hf(raw), source=raw)
    except _UNREADABLE as error:
        raise ConfigError(
            f"the model's description cannot be read: {type(error).__name__}: {error}",
            where=str(file),
            fix="copy it there again, as a whole",
        ) from error
    here = (directory / SINGLE).is_file() or (directory / INDEX).is_file()
    alone = not (here or others(directory))
    tensors = {} if alone else stored_tensors(directory)
    return config if ties(tensors) else replace(config, tie_embeddings=False)


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a directory by name, none of them read.

    ConfigError when a file is missing or cut off, or when weights are of 8 bits or integers.
    """
    for name in _QUANTIZERS:
        if (directory / name).is_file():
            raise ConfigError(
                f"the weights are quantized: there is a {name}",
                where=str(directory / name),
                fix=UNQUANTIZED,
            )
    found = {name: tensor for file in files(directory) for name, tensor in header(file).items()}
    for name, tensor in found.items():
        if tensor.dtype not in FLOATING and not NO_WEIGHT.search(name):
            raise ConfigError(
                f"the weights are quantized: tensor {name} is of type {tensor.dtype}, not of "
                f"{', '.join(FLOATING)}",
                where=str(tensor.file),
                fix=UNQUANTIZED,
            )
    return found


def ties(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a model whose config.json ties its embeddings does so in its files: not if there is
    an unembedding of other numbers, which `transformers` then takes.
    """
    if EMBEDDING not in tensors or UNEMBEDDING not in tensors:
        return True
    one, other = tensors[EMBEDDING], tensors[UNEMBEDDING]
    if (one.dtype, one.shape, one.end - one.begin) != (
        other.dtype,
        other.shape,
        other.end - other.begin,
    ):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        left = one.end - one.begin
        while left:
            count = min(left, _CHUNK)
            if first.read(count) != second.read(count):
                return False
            left -= count
    return True
