"""Costs of a micro-batch in one group of attention and expert ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.zebra.schedule import ScheduledTask, TaskKind

BACKWARD_FACTOR = 2.0  # relative to a forward: gradients of inputs and of weights
CHECKPOINTED_BACKWARD_FACTOR = 3.0  # the same with recomputed activations
FIX = "give seconds of 0 or more, and one value for each layer or none"


@dataclass(frozen=True, slots=True)
class MicroBatchCosts:
    """Seconds of a micro-batch forward on one rank, by computation and transfer.

    Transfers take as long if experts are hosted: rows for these also leave a rank, for another
    attention rank.
    """

    attention: float  # any piece but the last: attention and gate
    experts: float  # of a layer, all experts of an expert rank if none are hosted
    head: float = 0.0  # the last piece: final norm, head and loss
    dispatch: float = 0.0  # rows from attention ranks to a layer's experts
    combine: float = 0.0  # their results, back
    hosted: tuple[float, ...] = ()  # by layer: experts that an attention rank hosts
    kept: tuple[float, ...] = ()  # by layer: share of `experts` that expert ranks keep
    backward: float = BACKWARD_FACTOR  # relative to the forward times above
    head_backward: float | None = None  # seconds, if it differs from `backward` times `head`

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for one in value if isinstance(value, tuple) else (value,):
                if one is not None and not 0 <= one < math.inf:
                    raise ConfigError(f"{field.name} is {one}", where="costs of zebra", fix=FIX)

    @property
    def has_hosted_experts(self) -> tuple[bool, ...]:
        """True for each layer whose experts attention ranks host."""
        return tuple(seconds > 0 for seconds in self.hosted)

    def get_task_s(self, task: ScheduledTask) -> float:
        """Return the seconds of a task; for the last piece see `get_head_s`."""
        times = self.backward if task.backward else 1.0
        if task.kind is TaskKind.ATTENTION:
            return self.attention * times
        if task.kind is TaskKind.EXPERTS:
            return self.experts * times * (self.kept[task.layer] if self.kept else 1.0)
        return self.hosted[task.layer] * times if self.hosted else 0.0

    def get_head_s(self, backward: bool) -> float:
        """Return the seconds of the last piece."""
        if backward:
            return self.head * self.backward if self.head_backward is None else self.head_backward
        return self.head
