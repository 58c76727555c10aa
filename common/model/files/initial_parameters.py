"""Initial values of a model's parameters by rows: drawn, or read from a Hugging Face directory.

No process so needs to hold a whole model to hold its rows. Whole models are loaded the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.architectures import ARCHITECTURES
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf_writer import (
    GLOBAL_TENSOR_NAMES,
    LAYER_TENSOR_NAMES,
    get_fused_parts,
)
from meshrl.common.model.files.model_directory import load_config
from meshrl.common.model.files.safetensors_writer import DTYPES
from meshrl.common.model.files.weight_files import (
    UNEMBEDDING,
    check_weights,
    list_weight_files,
    not_finite_error,
    read_header,
)
from meshrl.common.model.files.weight_files import StoredTensor as OnDisk
from meshrl.common.model.network.decoder import Decoder, initial_std

_READ_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError)
# Numbers that are drawn or read together: 16 MiB in float32. A multiple of 16, see
# `fill_normal_rows`.
BLOCK_NUMBERS = 1 << 22


class ParameterSource(Protocol):
    """Source of a model's parameters."""

    def fill_rows(self, name: str, shape: torch.Size, first_row: int, out: Tensor) -> None:
        """Fill `out` with rows `first_row` .. `first_row` + len(out) of parameter `name` of
        `shape`.

        It is called once for each parameter, in the model's order, also if there is no row to fill.
        """


def materialize_model(model: Decoder, source: ParameterSource, device: str) -> Decoder:
    """Materialize a model from the `meta` device on `device`, row by row."""
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        source.fill_rows(name, parameter.shape, 0, parameter.detach())
    model.reset_buffers()
    return model


def load_model(path: str | Path) -> tuple[ModelConfig, Decoder]:
    """Load the model of a directory on the CPU, in float32; raise ConfigError if it is unreadable.

    The directory has one safetensors file, or shards with their index.
    """
    directory = Path(path)
    config = load_config(directory)
    with torch.device("meta"):
        decoder = Decoder(config)
    return config, materialize_model(decoder, PretrainedParameters(directory, config), "cpu")


@contextmanager
def convert_read_errors(path: Path) -> Iterator[None]:
    """Convert read errors within the block to ConfigError for the model at `path`."""
    try:
        yield
    except _READ_ERRORS as error:
        raise ConfigError(
            f"the model cannot be read: {type(error).__name__}: {error}",
            where=str(path),
            fix="Copy the complete file again",
        ) from error


class RandomParameters:
    """Parameters that `Decoder.initialise` draws from a seed, bit by bit."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._config, self._generator = config, torch.Generator()
        self._generator.manual_seed(seed)

    def fill_rows(self, name: str, shape: torch.Size, first_row: int, out: Tensor) -> None:
        """Implement `ParameterSource.fill_rows`."""
        if len(shape) < 2:
            out.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            std = initial_std(self._config, name, shape)
            fill_normal_rows(shape, std, self._generator, first_row, out)


@torch.no_grad()
def fill_normal_rows(
    shape: torch.Size,
    std: float,
    generator: torch.Generator,
    first_row: int,
    out: Tensor,
    block: int = BLOCK_NUMBERS,
) -> None:
    """Fill `out` with rows of `torch.empty(shape).normal_(std=std, generator=generator)` on a CPU.

    The generator ends in the same state as after that call. PyTorch draws a number for each
    element, in order, and converts sixteen at a time to normal ones. A last piece that is no
    multiple of sixteen draws its last sixteen again. Blocks of a multiple of sixteen, and a last
    block of at least sixteen, are drawn as in the whole.
    """
    flat, width = out.view(-1), shape[1:].numel()
    begin, end = first_row * width, first_row * width + flat.numel()
    starts = range(0, max(shape.numel() - block, 0) + 1, block)
    for start in starts:
        stop = shape.numel() if start == starts[-1] else start + block
        drawn = torch.empty(stop - start).normal_(std=std, generator=generator)
        low, high = max(start, begin), min(stop, end)
        if low < high:
            flat[low - begin : high - begin].copy_(drawn[low - start : high - start])


class PretrainedParameters:
    """Weights of a Hugging Face directory.

    Files are read, not mapped: data that has been read takes no more memory.
    """

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        """Open the directory; raise ConfigError if its weights are incomplete or of another
        model.
        """
        check_weights(directory, config)
        self._config, self._fused_parts = config, get_fused_parts(config)
        self._tensors: dict[str, OnDisk] = {}
        for file in list_weight_files(directory):
            self._tensors |= read_header(file)

    @torch.no_grad()
    def fill_rows(self, name: str, shape: torch.Size, first_row: int, out: Tensor) -> None:
        """Implement `ParameterSource.fill_rows`, in any order.

        Raise ConfigError for rows with NaN or infinite values, and for a file that has become
        unreadable.
        """
        layer, _, own = name.removeprefix("layers.").partition(".")
        if not own:
            alone = self._config.tie_embeddings and GLOBAL_TENSOR_NAMES[name] not in self._tensors
            source = UNEMBEDDING if name == "embedding" and alone else GLOBAL_TENSOR_NAMES[name]
            self._fill_from_tensors([(source, shape[0])], first_row, out)
            return
        prefix = f"model.layers.{layer}."
        if own.startswith("experts."):
            self._fill_experts(own.removeprefix("experts."), prefix, first_row, out)
        elif own in LAYER_TENSOR_NAMES:
            self._fill_from_tensors([(prefix + LAYER_TENSOR_NAMES[own], shape[0])], first_row, out)
        else:
            parts = [(prefix + part, rows) for part, rows in self._fused_parts[own].items()]
            self._fill_from_tensors(parts, first_row, out)

    def _fill_experts(self, name: str, prefix: str, first: int, into: Tensor) -> None:
        """Fill some experts of a matrix per expert, or some rows of what all experts share."""
        config = self._config
        architecture = ARCHITECTURES[config.architecture]
        block, (gate, up, down) = (
            f"{prefix}{architecture.experts_module}",
            architecture.expert_projections,
        )
        wide, shared = config.expert_ffn_size, config.shared_expert_ffn_size
        if name in ("gate_up", "down"):
            for place, expert in enumerate(range(first, first + len(into))):
                own = (
                    [(gate, wide), (up, wide)] if name == "gate_up" else [(down, len(into[place]))]
                )
                parts = [(f"{block}.experts.{expert}.{part}.weight", rows) for part, rows in own]
                self._fill_from_tensors(parts, 0, into[place])
            return
        both = [f"{block}.shared_expert.{part}_proj.weight" for part in ("gate", "up")]
        parts = {
            "router": [(f"{block}.gate.weight", config.num_experts)],
            "shared_gate": [(f"{block}.shared_expert_gate.weight", 1)],
            "shared_down": [(f"{block}.shared_expert.down_proj.weight", config.hidden_size)],
            "shared_gate_up": [(part, shared) for part in both],
        }[name]
        self._fill_from_tensors(parts, first, into)

    def _fill_from_tensors(self, parts: list[tuple[str, int]], first: int, into: Tensor) -> None:
        """Fill rows from tensors that are stacked along their rows."""
        last, start = first + len(into), 0
        for name, rows in parts:
            low, high = max(first, start), min(last, start + rows)
            if low < high:
                self._read_rows(name, low - start, into[low - first : high - first])
            start += rows

    def _read_rows(self, name: str, first: int, into: Tensor) -> None:
        """Read rows of one tensor into `into`, a block at a time."""
        tensor, flat = self._tensors[name], into.view(-1)
        dtype, width = DTYPES[tensor.dtype], into[0].numel()
        with convert_read_errors(tensor.file), tensor.file.open("rb", buffering=0) as file:
            file.seek(tensor.begin_byte + first * width * dtype.itemsize)
            for start in range(0, flat.numel(), BLOCK_NUMBERS):
                target = flat[start : start + BLOCK_NUMBERS]
                found = torch.empty(target.numel(), dtype=dtype)
                raw = found.view(torch.uint8).numpy().data
                if file.readinto(raw) != len(raw):
                    raise OSError(f"{name} is truncated")
                if broken := int((~found.isfinite()).sum()):
                    raise not_finite_error(name, broken, found.numel(), str(tensor.file))
                target.copy_(found)
