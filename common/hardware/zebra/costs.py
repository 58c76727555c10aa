"""What a micro-batch costs on its way through one group of attention and expert ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.zebra.schedule import ScheduledTask, TaskKind

BACKWARD_FACTOR = 2.0  # times a forward: gradients of inputs and of weights
CHECKPOINTED_BACKWARD_FACTOR = 3.0  # the same where activations are computed once more for it
FIX = "give seconds of 0 or more, and one value for each layer or none"


@dataclass(frozen=True, slots=True)
class MicroBatchCosts:
    """Seconds of a micro-batch forward on one rank, by what is computed or sent. Transfers take as
    long where experts are hosted: rows for them leave a rank too, for another attention rank.
    """

    attention: float  # a piece but the last: attention and gate
    experts: float  # of a layer, all that an expert rank holds where nothing is hosted elsewhere
    head: float = 0.0  # the last piece: final norm, head and loss
    dispatch: float = 0.0  # rows from attention ranks to a layer's experts
    combine: float = 0.0  # what became of them, back
    hosted: tuple[float, ...] = ()  # by layer: experts that an attention rank hosts
    kept: tuple[float, ...] = ()  # by layer: share of `experts` that expert ranks keep
    backward: float = BACKWARD_FACTOR  # times what is above
    head_backward: float | None = None  # seconds, where it is not as many times

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for one in value if isinstance(value, tuple) else (value,):
                if one is not None and not 0 <= one < math.inf:
                    raise ConfigError(f"{field.name} is {one}", where="costs of zebra", fix=FIX)

    @property
    def has_hosted_experts(self) -> tuple[bool, ...]:
        """By layer, whether attention ranks host experts of it."""
        return tuple(seconds > 0 for seconds in self.hosted)

    def get_task_s(self, task: ScheduledTask) -> float:
        """Seconds of a task. The last piece is told by its own costs: see `head_of`."""
        times = self.backward if task.backward else 1.0
        if task.kind is TaskKind.ATTENTION:
            return self.attention * times
        if task.kind is TaskKind.EXPERTS:
            return self.experts * times * (self.kept[task.layer] if self.kept else 1.0)
        return self.hosted[task.layer] * times if self.hosted else 0.0

    def get_head_s(self, backward: bool) -> float:
        """Seconds of the last piece."""
        if backward:
            return self.head * self.backward if self.head_backward is None else self.head_backward
        return self.head
