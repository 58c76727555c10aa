"""Chooser of values for open keys: those of a pretrained model, and the workers of a GPU host.

A key is open if the file lacks it, or has "auto". Open keys of a model from scratch have the
defaults of `JobConfig`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.change_rules import apply_changes
from meshrl.common.job.config import INITIAL, JobConfig
from meshrl.common.job.learning_rates import SUPERVISED_RATE, get_usual_rates
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.job.checks.host.devices import list_devices
from meshrl.job.checks.host.memory import GIB, plan_job_memory
from meshrl.job.job_file import Choice, JobFile
from meshrl.job.model_files import load_shape, load_shape_from

AUTOMATIC = "auto"
FROZEN_DTYPES = tuple(f"models.{role}.dtype" for role in ("reference", "teacher", "reward"))
OPEN_KEYS = (
    "mesh.workers",
    "training.dtype",
    "rollout.dtype",
    *FROZEN_DTYPES,
    "optimizer.adamw_lr",
    "optimizer.muon_lr",
    "warm_start.adamw_lr",
    "warm_start.muon_lr",
    "rollout.max_tokens",
    "training.activation_checkpointing",
)
# Tokens of a trajectory: 512 each for prompt and answer, as by verl's defaults.
PRETRAINED_MAX_TOKENS = 1024
MAX_CORE_SHARE = 0.8  # of a GPU's memory, which leaves room for workspaces and fragmentation
LARGE_MODEL_PARAMETERS = 1_000_000_000  # recomputes activations where no GPU's memory is known


def drop_automatic(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document without open keys that have the value "auto"."""
    found = deepcopy(dict(document))
    for key in OPEN_KEYS:
        *tables, last = key.split(".")
        place: Any = found
        for table in tables:
            place = place.get(table) if isinstance(place, dict) else None
        if isinstance(place, dict) and place.get(last) == AUTOMATIC:
            del place[last]
    return found


def is_stated(document: Mapping[str, Any], key: str) -> bool:
    """Return True if the document has the dotted key."""
    place: Any = document
    for part in key.split("."):
        if not isinstance(place, Mapping) or part not in place:
            return False
        place = place[part]
    return True


def choose_values(job: JobFile) -> JobFile:
    """Return the job with a value for each open key, and with the choices and their reasons.

    A model whose files are unreadable is left to the checks.
    """
    gpu_bytes: list[int] = []
    if job.config.mesh.device == "cuda":
        with suppress(ConfigError):  # the checks of this host explain what is missing
            gpu_bytes = [device.memory_bytes for device in list_devices()]
        if gpu_bytes:
            why = "one for each GPU of this host"
            job = _choose(job, "mesh.workers", len(gpu_bytes), why)
    if not job.config.model.path:
        return job
    try:
        shape = load_shape(job.config)
        shapes = {
            role: shape if frozen.path == INITIAL else load_shape_from(frozen.path, {})
            for role, frozen in job.config.models.models_by_role.items()
        }
    except ConfigError:
        return job
    job = _choose_dtypes(job, shape, shapes)
    job = _choose_rates(job)
    positions = min(one.max_positions for one in (shape, *shapes.values()))
    tokens = min(PRETRAINED_MAX_TOKENS, positions)
    why = f"prompt and answer, within the {positions:,} positions of the model"
    job = _choose(job, "rollout.max_tokens", tokens, why)
    return _choose_checkpointing(job, shape, gpu_bytes)


def describe_choices(choices: Iterable[Choice]) -> str:
    """Return one line with all chosen values; empty without any."""
    values = ", ".join(f"{one.key} = {_format_value(one.value)}" for one in choices)
    return f"chosen: {values}" if values else ""


def _format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _choose(job: JobFile, key: str, value: bool | int | float | str, reason: str) -> JobFile:
    if is_stated(job.raw_document, key):
        return job
    changed = apply_changes(job.config.to_document(), {key: value})
    choices = (*job.choices, Choice(key, value, reason))
    return replace(job, config=JobConfig.from_document(changed), choices=choices)


def _choose_dtypes(job: JobFile, shape: ModelConfig, shapes: dict[str, ModelConfig]) -> JobFile:
    """Return the job with passes, engines and frozen models in the type of each model's files."""
    models = {"training": shape, "rollout": shape}
    models |= {f"models.{role}": frozen for role, frozen in shapes.items()}
    for table, model in models.items():
        stated = model.source_config.get("dtype") or model.source_config.get("torch_dtype")
        dtype, why = "float32", f"config.json has {stated}"
        if stated in ("bfloat16", "float16"):
            dtype = "bfloat16"
        if stated == "float16":
            why += ", which needs loss scaling: bfloat16 has its size and the range of float32"
        elif not stated:
            why = "config.json states no dtype"
        if table == "training" and dtype == "bfloat16":
            why += "; trained parameters stay float32"
        job = _choose(job, f"{table}.dtype", dtype, why)
    return job


def _choose_rates(job: JobFile) -> JobFile:
    config, usual = job.config, get_usual_rates(job.config)
    why = f"{usual.training}: {usual.source}"
    job = _choose(job, "optimizer.adamw_lr", usual.adamw, why)
    why = "a pretrained model was trained by AdamW, and stays with it"
    job = _choose(job, "optimizer.muon_lr", 0.0, why)
    if config.warm_start.demonstrations:
        why_warm = "TRL's rate for supervised training of a pretrained model"
        job = _choose(job, "warm_start.adamw_lr", SUPERVISED_RATE, why_warm)
        job = _choose(job, "warm_start.muon_lr", 0.0, why)
    return job


def _choose_checkpointing(job: JobFile, shape: ModelConfig, gpu_bytes: list[int]) -> JobFile:
    """Return the job with recomputed activations if its core would not fit on a GPU otherwise.

    Without a GPU here, the size of the model decides.
    """
    key = "training.activation_checkpointing"
    if not any(gpu_bytes):
        large = shape.num_parameters >= LARGE_MODEL_PARAMETERS
        bound = "at least" if large else "fewer than"
        why = f"{shape.num_parameters:,} parameters, {bound} a billion; no GPU's memory is known"
        return _choose(job, key, large, why)
    training = replace(job.config.training, activation_checkpointing=False)
    config = replace(job.config, training=training)
    plan = plan_job_memory(config)
    processes = plan.by_worker[0]  # with the core
    room = min(size for size in gpu_bytes if size)
    needed = sum(one.total_bytes for one in processes)
    large = needed > MAX_CORE_SHARE * room
    why = (
        f"without it {' and '.join(one.process for one in processes)} take "
        f"{needed / GIB:.1f} GiB, {'above' if large else 'within'} {MAX_CORE_SHARE:.0%} of a "
        f"GPU's {room / GIB:.0f} GiB"
    )
    return _choose(job, key, large, why)
