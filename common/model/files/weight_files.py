"""Validation of a Hugging Face directory's weights: complete by their headers, and finite.

This module does not import torch. The format is Hugging Face's safetensors: eight bytes with the
length of a JSON header, the header with the offsets of the tensors, and the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.architectures import ARCHITECTURES
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.architecture.projections import ATTENTION_MATRICES, build_projections

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"
FLOAT_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
}  # types that are trained, with their bytes
EXPONENT_MASKS: dict[
    str, np.unsignedinteger[Any]
] = {  # exponent bits of each dtype: all are set in NaN and infinite numbers
    "F64": np.uint64(0x7FF0 << 48),
    "F32": np.uint32(0x7F80 << 16),
    "F16": np.uint16(0x7C00),
    "BF16": np.uint16(0x7F80),
}
# Tensors beside the weights: constants and counts that a model makes by itself.
NON_WEIGHT_NAME = re.compile(
    r"(position_ids|num_batches_tracked|masked_bias|attention\.bias|rotary_emb\.inv_freq)$"
)
FINITE_CHECK_BLOCK = 1 << 22  # numbers that are checked together
MAX_HEADER_BYTES = 100_000_000  # limit of safetensors itself
LFS_POINTER_PREFIX = b"version https://git-lfs.github.com/spec/"  # first bytes of a Git LFS pointer
_RESAVE_FIX = "Save it again with transformers (save_pretrained), which writes safetensors"
OTHER_FORMATS = {  # other weight formats: file pattern, name, and fix
    "pytorch_model*.bin": ("pickles of PyTorch", _RESAVE_FIX),
    "*.gguf": ("GGUF of llama.cpp", "Use the model's safetensors: GGUF cannot be trained"),
    "consolidated*": (
        "weights in their authors' own format",
        "Use the model's files for transformers: config.json and model*.safetensors",
    ),
    "*.pth": ("pickles of PyTorch", _RESAVE_FIX),
    "tf_model.h5": ("TensorFlow's weights", _RESAVE_FIX),
    "adapter_config.json": (
        "adapters without the model that they belong to",
        "Merge them into the model (peft's merge_and_unload), and use the result",
    ),
}
_DOWNLOAD_FIX = "Download the complete file again"


@dataclass(frozen=True)
class StoredTensor:
    """Tensor as a header describes it."""

    dtype: str  # safetensors' name: F32, BF16, ...
    shape: tuple[int, ...]
    file: Path
    begin_byte: int  # offset in the file
    end_byte: int


def check_weights(directory: Path, config: ModelConfig) -> None:
    """Raise ConfigError, naming the file, unless the weights are exactly those of the model.

    Every tensor must be complete, in its shape and of a floating-point dtype, and no tensor may be
    unused.
    """
    found: dict[str, StoredTensor] = {}
    for file in list_weight_files(directory):
        found |= read_header(file)
    # tied: both are one tensor, under either name
    if config.tie_embeddings and UNEMBEDDING in found:
        found.setdefault(EMBEDDING, found[UNEMBEDDING])
    for name, shape in iter_expected_tensors(config):
        stored = found.get(name)
        if stored is None:
            raise ConfigError(
                f"tensor {name} is missing",
                where=str(directory),
                fix="Check that config.json and the weights are of the same model and that "
                "no file is missing",
            )
        if stored.dtype not in FLOAT_DTYPE_BYTES:
            raise ConfigError(
                f"tensor {name} is of type {stored.dtype} and cannot be trained",
                where=str(stored.file),
                fix="Use the checkpoint in bfloat16, float16 or float32, not a quantized one",
            )
        if stored.shape != shape:
            raise ConfigError(
                f"tensor {name} is {list(stored.shape)}, not {list(shape)}",
                where=str(stored.file),
                fix="Check that config.json and the weights are of the same model",
            )
    _reject_unused_tensors(found, config)


def _reject_unused_tensors(found: Mapping[str, StoredTensor], config: ModelConfig) -> None:
    """Raise ConfigError for a tensor that no part of the model uses, since the model would
    differ.
    """
    used = {name for name, _ in iter_expected_tensors(config)} | {UNEMBEDDING}
    unused = [name for name in found if name not in used and not NON_WEIGHT_NAME.search(name)]
    if unused:
        more = f" and {len(unused) - 1} more belong" if len(unused) > 1 else " belongs"
        raise ConfigError(
            f"tensor {unused[0]}{more} to no part of the {config.architecture} that config.json "
            "describes",
            where=str(found[unused[0]].file),
            fix="Check that config.json and the weights are of the same model; remove the "
            "tensor from the file if the model does not need it",
        )


def check_finite(directory: Path) -> None:
    """Raise ConfigError, naming the tensor, if a weight is NaN or infinite; read every file."""
    for file in list_weight_files(directory):
        content = np.memmap(file, np.uint8, "r")
        for name, stored in read_header(file).items():
            exponent = EXPONENT_MASKS.get(stored.dtype)
            if exponent is None:
                continue
            bits = content[stored.begin_byte : stored.end_byte].view(exponent.dtype)
            pieces = (
                bits[begin : begin + FINITE_CHECK_BLOCK]
                for begin in range(0, len(bits), FINITE_CHECK_BLOCK)
            )
            broken = sum(int(((piece & exponent) == exponent).sum()) for piece in pieces)
            if broken:
                raise not_finite_error(name, broken, len(bits), str(file))


def not_finite_error(name: str, num_not_finite: int, num_values: int, where: str) -> ConfigError:
    """Create the error of a tensor with `num_not_finite` of `num_values` values not finite."""
    return ConfigError(
        f"tensor {name} has {num_not_finite} of {num_values} weights that are not finite (NaN "
        "or infinite)",
        where=where,
        fix="Use other weights: these were corrupt when they were saved",
    )


def list_weight_files(directory: Path) -> list[Path]:
    """List the safetensors files of a directory: the single one, or those in its index.

    Raise ConfigError if one is missing.
    """
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    index = directory / INDEX_FILE
    if not index.is_file():
        what, fix = detect_other_format(directory) or (
            "",
            "Use a Hugging Face directory with safetensors",
        )
        has = f"; it has {what}" if what else ""
        raise ConfigError(
            f"there is neither {SINGLE_FILE} nor {INDEX_FILE}{has}", where=str(directory), fix=fix
        )
    try:
        reject_lfs_pointer(index)
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the index of the weights cannot be read: {type(error).__name__}: {error}",
            where=str(index),
            fix=_DOWNLOAD_FIX,
        ) from error
    if absent := [name for name in names if not (directory / name).is_file()]:
        raise ConfigError(
            f"{len(absent)} of {len(names)} files of weights are missing: {', '.join(absent[:3])}"
            + (" ..." if len(absent) > 3 else ""),
            where=str(index),
            fix="Finish the download",
        )
    return [directory / name for name in names]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name; raise ConfigError if it is invalid or truncated."""
    try:
        size = file.stat().st_size
        reject_lfs_pointer(file)
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            raw = opened.read(length) if 2 <= length <= min(MAX_HEADER_BYTES, size) else b""
    except OSError as error:
        raise ConfigError(
            f"the weights cannot be read: {error.strerror}",
            where=str(file),
            fix="Check that the path is a file with read permission",
        ) from error
    if len(raw) != length or not raw.startswith(b"{"):
        short = size < 8 + length <= 8 + MAX_HEADER_BYTES
        raise _corrupt_file_error(
            file, f"the file has only {size} bytes" if short else "the file is not safetensors"
        )
    try:
        listed: dict[str, Any] = json.loads(raw)
        listed.pop("__metadata__", None)
        found = {
            name: StoredTensor(
                str(tensor["dtype"]),
                tuple(map(int, tensor["shape"])),
                file,
                8 + length + int(tensor["data_offsets"][0]),
                8 + length + int(tensor["data_offsets"][1]),
            )
            for name, tensor in listed.items()
        }
    except (ValueError, KeyError, TypeError, LookupError) as error:
        raise _corrupt_file_error(
            file, f"its header is invalid: {type(error).__name__}: {error}"
        ) from error
    expected_bytes = max((tensor.end_byte for tensor in found.values()), default=8 + length)
    if size != expected_bytes:
        raise _corrupt_file_error(file, f"the file has {size} of {expected_bytes} bytes")
    for name, stored in found.items():
        width = FLOAT_DTYPE_BYTES.get(stored.dtype)
        if width is not None and stored.end_byte - stored.begin_byte != width * math.prod(
            stored.shape
        ):
            raise _corrupt_file_error(
                file, f"the header's length of tensor {name} does not match its shape"
            )
    return found


def iter_expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each expected tensor of a model's files: Hugging Face name and shape."""
    hidden, vocab = config.hidden_size, config.vocab_size
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (vocab, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        sparse = index in config.sparse_layers
        for place in build_projections(config).values():
            if sparse and place.fused_name not in ATTENTION_MATRICES:
                continue
            yield f"{prefix}{place.module}.weight", (place.rows, place.columns)
            biased = config.attention_bias if place.fused_name == "qkv" else config.has_output_bias
            if place.fused_name in ATTENTION_MATRICES and biased:
                yield f"{prefix}{place.module}.bias", (place.rows,)
        if config.qk_norm:
            yield f"{prefix}self_attn.q_norm.weight", (config.head_dim,)
            yield f"{prefix}self_attn.k_norm.weight", (config.head_dim,)
        if sparse:
            yield from _iter_expert_tensors(config, prefix)


def _iter_expert_tensors(config: ModelConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    architecture = ARCHITECTURES[config.architecture]
    block, names = architecture.experts_module, architecture.expert_projections
    wide, hidden = config.expert_ffn_size, config.hidden_size
    yield f"{prefix}{block}.gate.weight", (config.num_experts, hidden)
    if shared := config.shared_expert_ffn_size:
        part = f"{prefix}{block}.shared_expert"
        yield f"{part}_gate.weight", (1, hidden)
        yield f"{part}.gate_proj.weight", (shared, hidden)
        yield f"{part}.up_proj.weight", (shared, hidden)
        yield f"{part}.down_proj.weight", (hidden, shared)
    for expert in range(config.num_experts):
        for name, shape in zip(
            names, ((wide, hidden), (wide, hidden), (hidden, wide)), strict=True
        ):
            yield f"{prefix}{block}.experts.{expert}.{name}.weight", shape


def reject_lfs_pointer(file: Path) -> None:
    """Raise ConfigError if a file is a pointer of Git LFS, which was not fetched."""
    with file.open("rb") as opened:
        if opened.read(len(LFS_POINTER_PREFIX)) == LFS_POINTER_PREFIX:
            raise ConfigError(
                "this is a pointer of Git LFS, not the file itself",
                where=str(file),
                fix="Run `git lfs pull` in its directory, or download it from the Hub",
            )


def detect_other_format(directory: Path) -> tuple[str, str] | None:
    """Describe a directory's other weight format and how to convert it."""
    there = (found for pattern, found in OTHER_FORMATS.items() if any(directory.glob(pattern)))
    return next(there, None)


def _corrupt_file_error(file: Path, why: str) -> ConfigError:
    return ConfigError(f"the weights are incomplete: {why}", where=str(file), fix=_DOWNLOAD_FIX)
