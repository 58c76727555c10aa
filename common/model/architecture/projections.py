"""Mapping of Hugging Face's projections to rows of our fused matrices and to users' names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.config import ModelConfig

FUSED_PROJECTIONS = {  # our matrix of a layer -> Hugging Face's projections, in row order
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
ATTENTION_MATRICES = ("qkv", "output")
_MODULES = {"qkv": "self_attn", "output": "self_attn", "gate_up": "mlp", "down": "mlp"}


@dataclass(frozen=True)
class Projection:
    """Hugging Face projection as rows of one of our matrices."""

    name: str  # q_proj
    fused_name: str  # qkv
    start_row: int
    rows: int
    columns: int

    @property
    def module(self) -> str:
        """Hugging Face's name of the projection within a layer."""
        return f"{_MODULES[self.fused_name]}.{self.name}"


def build_projections(config: ModelConfig) -> dict[str, Projection]:
    """Return the projections of one dense layer, by Hugging Face name."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {
        "qkv": (queries, keys, keys),
        "output": (config.hidden_size,),
        "gate_up": (config.ffn_size, config.ffn_size),
        "down": (config.hidden_size,),
    }
    columns = {
        "qkv": config.hidden_size,
        "output": queries,
        "gate_up": config.hidden_size,
        "down": config.ffn_size,
    }
    found = {}
    for fused, names in FUSED_PROJECTIONS.items():
        start = 0
        for name, count in zip(names, rows[fused], strict=True):
            found[name] = Projection(name, fused, start, count, columns[fused])
            start += count
    return found


def check_adapters(config: ModelConfig, rank: int, targets: Sequence[str]) -> None:
    """Raise ConfigError if adapters of `rank` on `targets` (as `lora.targets`) do not fit the
    model.
    """
    names = resolve_targets(config, targets)
    parts = build_projections(config)
    inside = sorted({parts[name].fused_name for name in names} & {"gate_up", "down"})
    if inside and config.sparse_layers:
        raise ConfigError(
            f"{', '.join(inside)} of a mixture of experts do not support adapters",
            where="lora.targets",
            fix='Remove lora.targets, or set it to ["qkv", "output"]',
        )
    smallest = min(min(parts[name].rows, parts[name].columns) for name in names)
    if rank > smallest:
        raise ConfigError(
            f"adapters of rank {rank} are too large for a projection of width {smallest}",
            where="lora.rank",
            fix=f"Set lora.rank to at most {smallest}, or train the whole model",
        )


def resolve_targets(config: ModelConfig, targets: Sequence[str]) -> list[str]:
    """Resolve `lora.targets` to Hugging Face names, in order; raise ConfigError if unknown.

    Without targets, return all projections that support adapters in a model of this shape.
    """
    known = [name for names in FUSED_PROJECTIONS.values() for name in names]
    chosen: set[str] = set()
    for target in targets or (ATTENTION_MATRICES if config.sparse_layers else FUSED_PROJECTIONS):
        if target not in known and target not in FUSED_PROJECTIONS:
            raise ConfigError(
                f"there is no projection {target!r} to adapt",
                where="lora.targets",
                fix=f"Use any of {', '.join([*FUSED_PROJECTIONS, *known])}",
            )
        chosen |= set(FUSED_PROJECTIONS.get(target, (target,)))
    return [name for name in known if name in chosen]
