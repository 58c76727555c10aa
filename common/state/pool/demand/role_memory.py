"""Minimum memory of a job's instances by role, from the job's document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import INITIAL, JobConfig
from meshrl.common.job.memory.generation import plan_engine
from meshrl.common.job.memory.plan import JobModels, RoleCounts, count_least_bytes, plan_memory
from meshrl.common.model.architecture.config import ModelConfig

MAX_CACHED_JOBS = 256
MAX_LAYERS = 10_000  # a description may come from another user
# Tables that the memory depends on.
TABLES = (
    *("mesh", "model", "models", "rollout", "training", "algorithm", "optimizer", "lora"),
    "warm_start",
)


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Minimum bytes of each worker's accelerator by role; 0: unknown."""

    core: int = 0  # of each rank; if experts have ranks of their own, of the smaller kind
    # of each rank: all tensors, with what a pass or an update computes; 0: as `core`
    core_pass: int = 0
    core_update: int = 0
    core_moments: int = 0  # of the optimizer, which a pass does not need
    core_state: int = 0  # of all ranks together, while they are offloaded
    hybrid: int = 0
    scoring: int = 0
    engines: Mapping[int, int] = field(default_factory=dict)  # by number of an engine's workers


def derive_role_memory(document: Mapping[str, Any], device: str = "") -> RoleMemory:
    """Return the memory of a job from its document; zeros without the shapes of its models.

    `device` replaces `mesh.device`, as processes compute where their worker does.
    """
    tables = {name: document[name] for name in TABLES if name in document}
    if device:
        tables["mesh"] = {**tables.get("mesh", {}), "device": device}
    models = document.get("bundle", {}).get("models", {})
    if not isinstance(models, Mapping) or not all(isinstance(v, Mapping) for v in models.values()):
        return RoleMemory()
    return _plan_role_memory(json.dumps([tables, models], sort_keys=True))


@lru_cache(MAX_CACHED_JOBS)
def _plan_role_memory(text: str) -> RoleMemory:
    try:
        return _plan_described_models(*json.loads(text))
    except (ArithmeticError, AttributeError, ConfigError, KeyError, TypeError, ValueError):
        return RoleMemory()  # an impossible model, such as one of no heads: its reader reports it


def _plan_described_models(tables: dict[str, Any], described: Mapping[str, Any]) -> RoleMemory:
    config = JobConfig.from_document(tables)
    models = _read_models(config, described)
    if models is None:
        return RoleMemory()
    plan = plan_memory(config, models, RoleCounts(engines=0, hybrids=1))
    assert plan.hybrid is not None
    degrees = config.rollout.tensor_parallel
    engines = {d: plan_engine(config, models.trained, 1, d).least_bytes for d in degrees}
    # A warm start computes passes beside the moments, and ranks of two kinds have different bytes.
    core = plan.core[0]
    has_functions = len(plan.core) == 1 and not config.warm_start.demonstrations
    return RoleMemory(
        core_pass=has_functions * core.count_function_bytes(core.forward_backward),
        core_update=has_functions * core.count_function_bytes(core.optim_step),
        core_moments=has_functions * core.moments,
        core=0 if config.training.zebra.auto else min(one.least_bytes for one in plan.core),
        core_state=sum(one.count * one.state_bytes for one in plan.core),
        hybrid=plan.hybrid.least_bytes,
        scoring=count_least_bytes(plan.frozen),
        engines=engines,
    )


def _read_models(config: JobConfig, described: Mapping[str, Any]) -> JobModels | None:
    """Return the shapes in a bundle's description; None if the trained model's is unknown."""
    given = {role: dict(about) for role, about in described.items()}
    if not config.model.path:
        given.setdefault("trained", config.model.config)
    if "trained" not in given:
        return None
    shapes = {role: ModelConfig.from_hf(about) for role, about in given.items()}
    if max(shape.num_layers for shape in shapes.values()) > MAX_LAYERS:
        return None
    trained = shapes["trained"]
    frozen = {
        role: shapes.get(role, trained)
        for role, model in config.models.models_by_role.items()
        if role in shapes or model.path == INITIAL
    }
    return JobModels(trained, frozen)
