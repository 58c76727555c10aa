"""The values that a model's parameters begin with, some rows at a time: drawn, or read from a
Hugging Face directory. So nobody has to hold a model whole to hold its rows.

It is also the way in which whole models are loaded.
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
from meshrl.common.model.files.checkpoint import load_config
from meshrl.common.model.files.checkpoint_files import UNEMBEDDING, check, files, header, not_finite
from meshrl.common.model.files.checkpoint_files import StoredTensor as OnDisk
from meshrl.common.model.files.hf import OUTSIDE, WHOLE, fused_parts
from meshrl.common.model.files.safetensors_file import DTYPES
from meshrl.common.model.network.decoder import Decoder, spread

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
# Numbers that are drawn or read together: 16 MiB in float32. A multiple of 16, see `normal_rows`.
BLOCK = 1 << 22


class Beginning(Protocol):
    """Where a model's parameters come from."""

    def fill(self, name: str, shape: torch.Size, first: int, into: Tensor) -> None:
        """Puts rows first .. first + len(into) of the parameter `name`, which has `shape`, into
        `into`. It is asked for each parameter once, in the model's order, also where there is no
        row to fill.
        """


def begin(model: Decoder, beginning: Beginning, device: str) -> Decoder:
    """A model that was made on the `meta` device, whole, on a device that it goes to row by row."""
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        beginning.fill(name, parameter.shape, 0, parameter.detach())
    model.settle()
    return model


def load_model(path: str | Path) -> tuple[ModelConfig, Decoder]:
    """The model of a directory (one safetensors file, or shards with their index), on the CPU, in
    float32; ConfigError when it cannot be read.
    """
    directory = Path(path)
    config = load_config(directory)
    with torch.device("meta"):
        decoder = Decoder(config)
    return config, begin(decoder, StoredRows(directory, config), "cpu")


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


class Drawn:
    """What `Decoder.initialise` draws from a seed, to the last bit."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._config, self._generator = config, torch.Generator()
        self._generator.manual_seed(seed)

    def fill(self, name: str, shape: torch.Size, first: int, into: Tensor) -> None:
        """See `Beginning`."""
        if len(shape) < 2:
            into.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            std = spread(self._config, name, shape)
            normal_rows(shape, std, self._generator, first, into)


@torch.no_grad()
def normal_rows(
    shape: torch.Size,
    std: float,
    generator: torch.Generator,
    first: int,
    into: Tensor,
    block: int = BLOCK,
) -> None:
    """Fills `into` with rows of what `torch.empty(shape).normal_(std=std, generator=generator)`
    would be on a CPU, and leaves the generator as that would.

    PyTorch draws a number for each element, in order, and makes normal ones of sixteen at a time; a
    last piece that is no multiple of sixteen draws its last sixteen again. Blocks that are one, and
    a last block of at least sixteen, are drawn as the whole is.
    """
    flat, width = into.view(-1), shape[1:].numel()
    begin, end = first * width, first * width + flat.numel()
    starts = range(0, max(shape.numel() - block, 0) + 1, block)
    for start in starts:
        stop = shape.numel() if start == starts[-1] else start + block
        drawn = torch.empty(stop - start).normal_(std=std, generator=generator)
        low, high = max(start, begin), min(stop, end)
        if low < high:
            flat[low - begin : high - begin].copy_(drawn[low - start : high - start])


class StoredRows:
    """The weights of a Hugging Face directory. Files are read, not mapped: what has been read takes
    no memory any more.
    """

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        """ConfigError when they are not whole, or not of this model."""
        check(directory, config)
        self._config, self._parts = config, fused_parts(config)
        self._tensors: dict[str, OnDisk] = {}
        for file in files(directory):
            self._tensors |= header(file)

    @torch.no_grad()
    def fill(self, name: str, shape: torch.Size, first: int, into: Tensor) -> None:
        """See `Beginning`; in any order. ConfigError for rows with numbers that are none, and for a
        file that cannot be read any more.
        """
        layer, _, own = name.removeprefix("layers.").partition(".")
        if not own:
            alone = self._config.tie_embeddings and OUTSIDE[name] not in self._tensors
            source = UNEMBEDDING if name == "embedding" and alone else OUTSIDE[name]
            self._fill_from([(source, shape[0])], first, into)
            return
        prefix = f"model.layers.{layer}."
        if own.startswith("experts."):
            self._fill_experts(own.removeprefix("experts."), prefix, first, into)
        elif own in WHOLE:
            self._fill_from([(prefix + WHOLE[own], shape[0])], first, into)
        else:
            parts = [(prefix + part, rows) for part, rows in self._parts[own].items()]
            self._fill_from(parts, first, into)

    def _fill_experts(self, name: str, prefix: str, first: int, into: Tensor) -> None:
        """Of a matrix for each expert, some experts; of what all share, some rows."""
        config = self._config
        architecture = ARCHITECTURES[config.architecture]
        block, (gate, up, down) = f"{prefix}{architecture.experts}", architecture.parts
        wide, shared = config.expert_ffn_size, config.shared_ffn_size
        if name in ("gate_up", "down"):
            for place, expert in enumerate(range(first, first + len(into))):
                own = (
                    [(gate, wide), (up, wide)] if name == "gate_up" else [(down, len(into[place]))]
                )
                parts = [(f"{block}.experts.{expert}.{part}.weight", rows) for part, rows in own]
                self._fill_from(parts, 0, into[place])
            return
        both = [f"{block}.shared_expert.{part}_proj.weight" for part in ("gate", "up")]
        parts = {
            "router": [(f"{block}.gate.weight", config.experts)],
            "shared_gate": [(f"{block}.shared_expert_gate.weight", 1)],
            "shared_down": [(f"{block}.shared_expert.down_proj.weight", config.hidden_size)],
            "shared_gate_up": [(part, shared) for part in both],
        }[name]
        self._fill_from(parts, first, into)

    def _fill_from(self, parts: list[tuple[str, int]], first: int, into: Tensor) -> None:
        """Rows of tensors that lie below one another."""
        last, start = first + len(into), 0
        for name, rows in parts:
            low, high = max(first, start), min(last, start + rows)
            if low < high:
                self._read(name, low - start, into[low - first : high - first])
            start += rows

    def _read(self, name: str, first: int, into: Tensor) -> None:
        """Rows of one tensor, as many as `into` has, a block at a time."""
        tensor, flat = self._tensors[name], into.view(-1)
        dtype, width = DTYPES[tensor.dtype], into[0].numel()
        with readable(tensor.file), tensor.file.open("rb", buffering=0) as file:
            file.seek(tensor.begin + first * width * dtype.itemsize)
            for start in range(0, flat.numel(), BLOCK):
                target = flat[start : start + BLOCK]
                found = torch.empty(target.numel(), dtype=dtype)
                raw = found.view(torch.uint8).numpy().data
                if file.readinto(raw) != len(raw):
                    raise OSError(f"{name} is cut short")
                if broken := int((~found.isfinite()).sum()):
                    raise not_finite(name, broken, found.numel(), str(tensor.file))
                target.copy_(found)
