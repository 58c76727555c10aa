"""Memory of each process of a job that has a model, from the job and the models' shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from meshrl.common.job.config import JobConfig
from meshrl.common.job.memory.generation import plan_engine, plan_frozen_model
from meshrl.common.job.memory.process_memory import ProcessMemory
from meshrl.common.job.memory.training import plan_core, plan_hybrid
from meshrl.common.model.architecture.config import ModelConfig


@dataclass(frozen=True)
class JobModels:
    """Shapes of a job's models."""

    trained: ModelConfig
    frozen: Mapping[str, ModelConfig] = field(default_factory=dict)  # by role


@dataclass(frozen=True)
class RoleCounts:
    """Number of the processes of a role; 0: the job has none."""

    engines: int = 1
    engine_degree: int = 1
    hybrids: int = 0
    # Engine and core compute on the same workers by time slices, and both have their memory there.
    shares_core_worker: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a job's processes by role."""

    core: tuple[ProcessMemory, ...]
    engine: ProcessMemory | None = None
    hybrid: ProcessMemory | None = None
    frozen: tuple[ProcessMemory, ...] = ()  # in one process
    shares_core_worker: bool = False

    @property
    def processes(self) -> list[ProcessMemory]:
        """All processes."""
        rest = [one for one in (self.engine, self.hybrid) if one is not None]
        return [*self.core, *rest, *self.frozen]

    @property
    def by_worker(self) -> list[tuple[ProcessMemory, ...]]:
        """Processes that have memory of one worker, for each kind of worker."""
        shared = self.engine is not None and self.shares_core_worker
        found = [(one, self.engine) if shared and self.engine else (one,) for one in self.core]
        rest = [one for one in (self.engine, self.hybrid) if one is not None]
        found += [(one,) for one in rest if one is not self.engine or not shared]
        return found + ([self.frozen] if self.frozen else [])

    @property
    def largest_worker(self) -> tuple[ProcessMemory, ...]:
        """Processes of the worker that needs the most memory."""
        return max(self.by_worker, key=count_least_bytes)

    @property
    def least_host_bytes(self) -> int:
        """Bytes without which all processes do not fit into the memory of one host."""
        return sum(one.count * one.least_bytes for one in self.processes)


def count_least_bytes(processes: Iterable[ProcessMemory]) -> int:
    """Return the bytes without which these processes do not fit beside each other."""
    return sum(one.least_bytes for one in processes)


def plan_memory(config: JobConfig, models: JobModels, counts: RoleCounts) -> MemoryPlan:
    """Return the memory of all processes of a job that have a model."""
    shape = models.trained
    engine = hybrid = None
    if counts.engines:
        engine = plan_engine(config, shape, counts.engines, counts.engine_degree)
    if counts.hybrids:
        hybrid = plan_hybrid(config, shape, counts.hybrids)
    frozen = [plan_frozen_model(config, *pair) for pair in models.frozen.items()]
    frozen[1:] = [replace(one, context=0) for one in frozen[1:]]
    core = tuple(plan_core(config, shape))
    return MemoryPlan(core, engine, hybrid, tuple(frozen), counts.shares_core_worker)
