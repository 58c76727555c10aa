"""Changes of a job file that let a job fit into less memory, found by trying them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.change_rules import apply_changes
from meshrl.common.job.config import JobConfig, OptimizerConfig
from meshrl.common.job.memory.process_memory import describe_bytes

RANKS = (2, 4, 8, 16, 32, 64)
ADAPTER_RANK = 32
MIN_TOKENS, MIN_SLOTS = 256, 1


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a job needs at least on a worker, and whether workers have them."""

    size_bytes: int
    fits: bool


MeasureNeed = Callable[[JobConfig], MemoryNeed]  # raises ConfigError for an impossible job


@dataclass(frozen=True)
class Remedy:
    """Changed keys, and the bytes that the job then needs."""

    changes: Mapping[str, Any]
    needed_bytes: int

    def describe(self) -> str:
        """Return the changes as assignments, with the bytes."""
        parts = " and ".join(f"{key} = {_format_value(v)}" for key, v in self.changes.items())
        return f"{parts} ({describe_bytes(self.needed_bytes)})"


def find_remedies(config: JobConfig, measure: MeasureNeed) -> list[Remedy]:
    """Return each change of one key that suffices, in its smallest step.

    If none suffices, return one combination of the changes that each lower the bytes. It is empty
    if that is not enough either.
    """
    found: list[Remedy] = []
    helpful: dict[str, Any] = {}
    before = measure(config).size_bytes
    for key, values in _list_candidates(config):
        least = before
        for value in values:
            need = _measure_changed(config, {key: value}, measure)
            if need is not None and need.fits:
                found.append(Remedy({key: value}, need.size_bytes))
                break
            if need is not None and need.size_bytes < least:
                least, helpful[key] = need.size_bytes, value
    return found or _combine(config, helpful, measure)


def describe_remedies(remedies: list[Remedy]) -> str:
    """Return a fix that names the keys, their values and the bytes."""
    if not remedies:
        return "No key suffices: take accelerators with more memory, or a smaller model"
    return f"Set {', or '.join(remedy.describe() for remedy in remedies)}"


def _combine(config: JobConfig, helpful: Mapping[str, Any], measure: MeasureNeed) -> list[Remedy]:
    """Return the first of these changes that suffice together, without those that do not help."""
    changes: dict[str, Any] = {}
    least = measure(config).size_bytes
    for key, value in helpful.items():
        need = _measure_changed(config, changes | {key: value}, measure)
        if need is None or need.size_bytes >= least:
            continue
        changes, least = changes | {key: value}, need.size_bytes
        if need.fits:
            return [Remedy(changes, least)]
    return []


def _measure_changed(
    config: JobConfig, changes: Mapping[str, Any], measure: MeasureNeed
) -> MemoryNeed | None:
    """Return the need of a changed job; None if the job cannot have these values."""
    document = apply_changes(config.to_document(), changes)
    try:
        return measure(JobConfig.from_document(document))
    except ConfigError:
        return None


def _list_candidates(config: JobConfig) -> Iterator[tuple[str, list[Any]]]:
    """Yield keys with values to try, from the change that costs least to the one that costs most.

    Values of a key are in the order of their effect.
    """
    training, rollout = config.training, config.rollout
    if not training.activation_checkpointing:
        yield "training.activation_checkpointing", [True]
    yield "training.bin_tokens", list(_halve(training.bin_tokens, rollout.max_tokens))
    if rollout.dtype == "float32":
        yield "rollout.dtype", ["bfloat16"]
    if training.dtype == "float32":
        yield "training.dtype", ["bfloat16"]
    for role, frozen in config.models.models_by_role.items():
        if frozen.dtype == "float32":
            yield f"models.{role}.dtype", ["bfloat16"]
    yield "rollout.slots", list(_halve(rollout.slots, MIN_SLOTS))
    if rollout.kv_tokens:
        yield "rollout.kv_tokens", list(_halve(rollout.kv_tokens, rollout.max_tokens))
    yield "mesh.workers", [config.mesh.workers + 1]
    if rollout.engine == "sglang":
        largest = max(rollout.tensor_parallel)
        yield "rollout.tensor_parallel", [[n] for n in RANKS if n > largest]
    if not training.zebra.attention:
        yield "training.ranks", [n for n in RANKS if n > training.ranks]
    if not config.optimizer.muon_lr:
        yield "optimizer.muon_lr", [OptimizerConfig().muon_lr]
    if not config.lora.rank:
        yield "lora.rank", [ADAPTER_RANK]
    yield "rollout.max_tokens", list(_halve(rollout.max_tokens, MIN_TOKENS))


def _halve(value: int, least: int) -> Iterator[int]:
    """Yield halves of `value` down to `least`."""
    while value > least:
        value = max(least, value // 2)
        yield value


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
