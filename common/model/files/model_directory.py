"""Model of a directory as its files describe it, without reading weights.

Beside config.json, the headers show if weights are quantized and if embeddings are tied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.weight_files import (
    EMBEDDING,
    FLOAT_DTYPE_BYTES,
    INDEX_FILE,
    NON_WEIGHT_NAME,
    SINGLE_FILE,
    UNEMBEDDING,
    StoredTensor,
    detect_other_format,
    list_weight_files,
    read_header,
)

UNQUANTIZED_FIX = "Use the model's unquantized weights (bfloat16, float16 or float32)"
_COMPARE_BYTES = 1 << 22  # bytes per comparison
_READ_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError)
_QUANTIZER_FILES = ("quantize_config.json", "quant_config.json")  # files of AutoGPTQ and AutoAWQ


def load_config(path: str | Path) -> ModelConfig:
    """Load the shape of a directory's model from config.json and the headers of its weights.

    The headers show if embeddings are tied. Raise ConfigError if there is no model, if it is
    unsupported, quantized or in another format, or if a file is missing or truncated. A directory
    may have a config.json alone: `load_model` then reports missing weights.
    """
    directory = Path(path)
    file = directory / "config.json"
    if not file.is_file():
        has = detect_other_format(directory)
        raise ConfigError(
            f"the file is missing; the directory has {has[0]}" if has else "the file is missing",
            where=str(file),
            fix=has[1] if has else "Use a Hugging Face directory with config.json and safetensors",
        )
    try:
        raw = json.loads(file.read_text("utf-8"))
        config = replace(ModelConfig.from_hf(raw), source_config=raw)
    except _READ_ERRORS as error:
        raise ConfigError(
            f"the model's description cannot be read: {type(error).__name__}: {error}",
            where=str(file),
            fix="Copy the complete file again",
        ) from error
    here = (directory / SINGLE_FILE).is_file() or (directory / INDEX_FILE).is_file()
    alone = not (here or detect_other_format(directory))
    tensors = {} if alone else read_stored_tensors(directory)
    return config if has_tied_embeddings(tensors) else replace(config, tie_embeddings=False)


def read_stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a directory by name, without reading them.

    Raise ConfigError if a file is missing or truncated, or if weights are of 8 bits or integers.
    """
    for name in _QUANTIZER_FILES:
        if (directory / name).is_file():
            raise ConfigError(
                f"the weights are quantized: the directory has {name}",
                where=str(directory / name),
                fix=UNQUANTIZED_FIX,
            )
    found = {
        name: tensor
        for file in list_weight_files(directory)
        for name, tensor in read_header(file).items()
    }
    for name, tensor in found.items():
        if tensor.dtype not in FLOAT_DTYPE_BYTES and not NON_WEIGHT_NAME.search(name):
            raise ConfigError(
                f"the weights are quantized: tensor {name} is of type {tensor.dtype}, not of "
                f"{', '.join(FLOAT_DTYPE_BYTES)}",
                where=str(tensor.file),
                fix=UNQUANTIZED_FIX,
            )
    return found


def has_tied_embeddings(tensors: Mapping[str, StoredTensor]) -> bool:
    """Return True if a model whose config.json ties its embeddings does so in its files.

    If the files have an unembedding with other numbers, `transformers` uses that.
    """
    if EMBEDDING not in tensors or UNEMBEDDING not in tensors:
        return True
    one, other = tensors[EMBEDDING], tensors[UNEMBEDDING]
    if (one.dtype, one.shape, one.end_byte - one.begin_byte) != (
        other.dtype,
        other.shape,
        other.end_byte - other.begin_byte,
    ):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.begin_byte)
        second.seek(other.begin_byte)
        remaining = one.end_byte - one.begin_byte
        while remaining:
            count = min(remaining, _COMPARE_BYTES)
            if first.read(count) != second.read(count):
                return False
            remaining -= count
    return True
