"""Low-rank adapters of a decoder's projections (LoRA, arXiv 2106.09685).

Adapters are added in training, merged for engines, and written in PEFT's layout. A matrix W of
[rows, columns] acts as W + scale * B A, with A [rank, columns] and B [rows, rank]. Each of Hugging
Face's projections has adapters of its own, also where ours are one matrix, so that PEFT can read
them: `layers.3.adapters.q_proj.a`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.architecture.projections import build_projections

StateDict = Mapping[str, Tensor]

_ADAPTER_INFIX = ".adapters."  # part of the name of every adapter tensor
_ADAPTER_NAME = re.compile(r"layers\.(\d+)\.adapters\.(\w+)\.([ab])")


class LoraFactors(nn.Module):
    """Factors of one projection's change; `b` starts at zero, so the initial change is zero."""

    def __init__(self, rank: int, rows: int, columns: int, like: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(like.new_empty(rank, columns))
        self.b = nn.Parameter(like.new_zeros(rows, rank))


class LoraAdapters(nn.Module):
    """Adapters of one layer.

    Base matrices are frozen: their gradient, a third of the arithmetic of a full pass, is not
    computed.
    """

    def __init__(
        self, config: ModelConfig, names: Collection[str], rank: int, scale: float, like: Tensor
    ) -> None:
        """Create adapters of the projections `names`, with `like`'s dtype and device; `a` is
        unset.
        """
        super().__init__()
        self._scale = scale
        self._fused: dict[str, list[tuple[int, LoraFactors | None]]] = {}
        for part in build_projections(config).values():
            own = None
            if part.name in names:
                own = LoraFactors(rank, part.rows, part.columns, like)
                self.add_module(part.name, own)
            self._fused.setdefault(part.fused_name, []).append((part.rows, own))

    def apply_lora(self, fused_name: str, x: Tensor, y: Tensor) -> Tensor:
        """Return `y`, which is `x` through our matrix `fused_name`, plus the adapters' change."""
        parts = self._fused[fused_name]
        present: list[Tensor] = [own.a for _, own in parts if own is not None]
        if not present:
            return y
        narrow = linear(x, present[0] if len(present) == 1 else torch.cat(present)) * self._scale
        pieces = iter(narrow.chunk(len(present), -1))
        changes = [
            y.new_zeros(*y.shape[:-1], rows) if own is None else linear(next(pieces), own.b)
            for rows, own in parts
        ]
        return y + (changes[0] if len(changes) == 1 else torch.cat(changes, -1))


def is_adapter_tensor(name: str) -> bool:
    """Return True if a tensor of a model belongs to an adapter."""
    return _ADAPTER_INFIX in name


@dataclass(frozen=True)
class AdapterTensorName:
    """Parts of the name of an adapter's tensor."""

    layer: int
    projection: str  # q_proj
    factor: str  # a | b


def parse_adapter_tensor_name(name: str) -> AdapterTensorName | None:
    """Parse `layers.3.adapters.q_proj.a`; return None for other tensors."""
    found = _ADAPTER_NAME.fullmatch(name)
    return AdapterTensorName(int(found[1]), found[2], found[3]) if found else None


def merge_adapters(config: ModelConfig, tensors: StateDict, scale: float) -> dict[str, Tensor]:
    """Merge base and adapters into the plain decoder's tensors, summed in float32.

    `tensors` does not change. Without adapters, return the same tensors.
    """
    plain = {name: tensor for name, tensor in tensors.items() if not is_adapter_tensor(name)}
    parts = build_projections(config)
    sums: dict[str, Tensor] = {}
    for name in tensors:
        layer, is_part, rest = name.partition(_ADAPTER_INFIX)
        if not is_part or not rest.endswith(".a"):
            continue
        part = parts[rest.removesuffix(".a")]
        target = f"{layer}.{part.fused_name}"
        merged = sums.setdefault(target, plain[target].to(torch.float32, copy=True))
        a, b = tensors[name].float(), tensors[name.removesuffix("a") + "b"].float()
        merged[part.start_row : part.start_row + part.rows].addmm_(b, a, alpha=scale)
    return plain | {name: merged.to(plain[name].dtype) for name, merged in sums.items()}


def to_peft(config: ModelConfig, tensors: StateDict) -> dict[str, Tensor]:
    """Return the adapters among `tensors` under PEFT's names."""
    parts = build_projections(config)
    found = {}
    for name, tensor in tensors.items():
        layer, is_part, rest = name.partition(_ADAPTER_INFIX)
        if is_part:
            projection, _, factor = rest.rpartition(".")
            target = f"base_model.model.model.{layer}.{parts[projection].module}"
            found[f"{target}.lora_{factor.upper()}.weight"] = tensor
    return found


def save_adapter(
    path: str | Path, config: ModelConfig, tensors: StateDict, alpha: float, base: str
) -> None:
    """Write a directory that `peft.PeftModel.from_pretrained` reads.

    It has adapter_config.json and adapter_model.safetensors. `base`: location of the base model, a
    directory or a published name.
    """
    theirs = to_peft(config, tensors)
    if not theirs:
        raise ConfigError(
            "the weights contain no adapters", fix="Train them with lora.rank above 0"
        )
    names = {name.split(".lora_")[0].rpartition(".")[2] for name in theirs}
    rank = next(tensor.shape[0] for name, tensor in theirs.items() if ".lora_A." in name)
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(names),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n")
    unfinished = directory / "adapter_model.safetensors.part"
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in theirs.items()},
        unfinished,
        metadata={"format": "pt"},
    )
    os.replace(unfinished, directory / "adapter_model.safetensors")


def load_adapter(path: str | Path, config: ModelConfig, like: StateDict) -> dict[str, Tensor]:
    """Load the adapters that `save_adapter` wrote, under the names of `like`."""
    theirs = load_file(Path(path) / "adapter_model.safetensors")
    return {name: theirs[key] for name, key in zip(like, to_peft(config, like), strict=True)}
