"""The weights' files of a directory: which tensors lie where, read from their headers alone.

A safetensors file begins with eight bytes of length and a JSON header of its tensors' types, shapes
and places (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.model.config import ModelConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"
PLAIN = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # types that can be trained, with their bytes
UNQUANTIZED = "take the model's unquantized weights (bfloat16, float16 or float32)"
POINTER = b"version https://git-lfs.github.com/spec/"  # how a pointer of Git LFS begins
_NO_WEIGHT = re.compile(r"(position_ids|num_batches_tracked|masked_bias|attention\.bias)$")
_MOST_HEADER = 100 << 20  # bytes, as safetensors allows
_CHUNK = 1 << 22  # bytes that are compared at once
# What else a directory may hold: pattern -> what it is, and how it becomes one that is read.
_OTHERS = {
    "*.gguf": ("GGUF files", "take the model's safetensors: GGUF is for llama.cpp"),
    "pytorch_model*.bin": (
        "PyTorch's pickled weights",
        "save it again with transformers (save_pretrained), which writes safetensors",
    ),
    "consolidated*": (
        "weights in their authors' own format",
        "take the conversion for transformers: config.json and model*.safetensors",
    ),
    "adapter_config.json": (
        "adapters without the model that they belong to",
        "merge them into the model (peft's merge_and_unload), and name the result",
    ),
}
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError)
_QUANTIZERS = ("quantize_config.json", "quant_config.json")  # AutoGPTQ's, AutoAWQ's


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    file: Path
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    begin: int  # byte of the file
    end: int


def load_config(path: str | Path) -> ModelConfig:
    """The shape of a directory's model: what its config.json declares, and whether embeddings are
    tied in its weights, of which only headers are read.

    ConfigError if there is no such model, if it is none of ours, quantized or in another format,
    or if a file is missing or cut off. A description may lie there alone: `load_model` then says
    that weights are missing.
    """
    directory = Path(path)
    file = directory / "config.json"
    others = any(any(directory.glob(name)) for name in _OTHERS)
    if not file.is_file():
        raise _nothing_in(directory) if others else _missing(file)
    try:
        config = ModelConfig.from_hf(json.loads(file.read_text("utf-8")))
    except _UNREADABLE as error:
        raise ConfigError(
            f"the model's description cannot be read: {type(error).__name__}: {error}",
            where=str(file),
            fix="copy it there again, as a whole",
        ) from error
    alone = not ((directory / SINGLE).is_file() or (directory / INDEX).is_file() or others)
    tensors = {} if alone else stored_tensors(directory)
    return config if ties(tensors) else replace(config, tie_embeddings=False)


def weight_files(directory: Path) -> list[Path]:
    """The files of a directory's weights, as `transformers` chooses them: the single one before
    those of an index; ConfigError, with what lies there instead, when there is none.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        refuse_pointer(index)
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"the index of the weights cannot be read: {type(error).__name__}: {error}",
                where=str(index),
                fix="copy it there again, as a whole",
            ) from error
        absent = [name for name in names if not (directory / name).is_file()]
        if absent:
            more = f"; so are {len(absent) - 1} more of its {len(names)}" if absent[1:] else ""
            raise ConfigError(
                f"the file is missing, and the index names it{more}",
                where=str(directory / absent[0]),
                fix="copy all files of the model there",
            )
        return [directory / name for name in names]
    raise _nothing_in(directory)


def _nothing_in(directory: Path) -> ConfigError:
    for pattern, (what, fix) in _OTHERS.items():
        if any(directory.glob(pattern)):
            return ConfigError(
                f"the directory holds {what}, and no safetensors", where=str(directory), fix=fix
            )
    return _missing(directory / SINGLE)


def _missing(file: Path) -> ConfigError:
    return ConfigError(
        "the file is missing",
        where=str(file),
        fix="name a Hugging Face directory with config.json and safetensors",
    )


def refuse_pointer(file: Path) -> None:
    """ConfigError if a file is what Git LFS leaves in place of one that it has not fetched."""
    with file.open("rb") as content:
        if content.read(len(POINTER)) == POINTER:
            raise ConfigError(
                "this is a pointer of Git LFS, not the file itself",
                where=str(file),
                fix="run `git lfs pull` in its directory, or download it from the Hub",
            )


def stored_tensors(directory: Path) -> dict[str, Stored]:
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
    found: dict[str, Stored] = {}
    for file in weight_files(directory):
        found |= _header(file)
    for name, tensor in found.items():
        if tensor.dtype not in PLAIN and not _NO_WEIGHT.search(name):
            raise ConfigError(
                f"the weights are quantized: tensor {name} is {tensor.dtype}, not one of "
                f"{', '.join(PLAIN)}",
                where=str(tensor.file),
                fix=UNQUANTIZED,
            )
    return found


def _header(file: Path) -> dict[str, Stored]:
    size = file.stat().st_size
    refuse_pointer(file)
    with file.open("rb") as content:
        start = content.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _MOST_HEADER):
            raise _cut_off(file, f"{size} bytes hold no header")
        try:
            header: Mapping[str, Any] = json.loads(content.read(length))
            begin = 8 + length
            tensors = {
                name: Stored(
                    file,
                    str(about["dtype"]),
                    tuple(about["shape"]),
                    begin + int(about["data_offsets"][0]),
                    begin + int(about["data_offsets"][1]),
                )
                for name, about in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise _cut_off(file, f"its header cannot be read: {error}") from error
    last = max((tensor.end for tensor in tensors.values()), default=begin)
    if last != size:
        raise _cut_off(file, f"{size} bytes of {last}")
    for name, tensor in tensors.items():
        width = PLAIN.get(tensor.dtype)
        if width is not None and tensor.end - tensor.begin != width * math.prod(tensor.shape):
            raise _cut_off(file, f"tensor {name} has another length there than its shape")
    return tensors


def _cut_off(file: Path, what: str) -> ConfigError:
    return ConfigError(
        f"the file is not whole: {what}", where=str(file), fix="copy it there again, as a whole"
    )


def ties(tensors: Mapping[str, Stored]) -> bool:
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
