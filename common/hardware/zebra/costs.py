"""Costs of a micro-batch in one group of attention and expert ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.zebra.schedule import ScheduledTask, TaskKind

BACKWARD_FACTOR = 2.0  # relative to a forward: gradients of inputs and of weights
CHECKPOINTED_BACKWARD_FACTOR = 3.0  # the same with recomputed activations
FIX = "Set seconds of 0 or more, and one value for each layer or none"


@dataclass(frozen=True, slots=True)
class MicroBatchCosts:
    """Seconds of a micro-batch forward on one rank, by computation and transfer.

    Transfers take as long if experts are hosted: rows for these also leave a rank, for another
    attention rank.
    """

    attention_s: float  # any piece but the last: attention and gate
    experts_s: float  # of a layer, all experts of an expert rank if none are hosted
    head_s: float = 0.0  # the last piece: final norm, head and loss
    dispatch_s: float = 0.0  # rows from attention ranks to a layer's experts
    combine_s: float = 0.0  # their results, back
    hosted_s: tuple[float, ...] = ()  # by layer: experts that an attention rank hosts
    expert_rank_shares: tuple[
        float, ...
    ] = ()  # by layer: share of `experts_s` that expert ranks keep
    backward_factor: float = BACKWARD_FACTOR  # relative to the forward times above
    head_backward_s: float | None = (
        None  # seconds, if it differs from `backward_factor` times `head_s`
    )

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for one in value if isinstance(value, tuple) else (value,):
                if one is not None and not 0 <= one < math.inf:
                    raise ConfigError(f"{field.name} is {one}", where="costs of zebra", fix=FIX)

    @property
    def has_hosted_experts(self) -> tuple[bool, ...]:
        """True for each layer whose experts attention ranks host."""
        return tuple(seconds > 0 for seconds in self.hosted_s)

    def get_task_s(self, task: ScheduledTask) -> float:
        """Return the seconds of a task; for the last piece see `get_head_s`."""
        times = self.backward_factor if task.backward else 1.0
        if task.kind is TaskKind.ATTENTION:
            return self.attention_s * times
        if task.kind is TaskKind.EXPERTS:
            return (
                self.experts_s
                * times
                * (self.expert_rank_shares[task.layer] if self.expert_rank_shares else 1.0)
            )
        return self.hosted_s[task.layer] * times if self.hosted_s else 0.0

    def get_head_s(self, backward: bool) -> float:
        """Return the seconds of the last piece."""
        if backward:
            return (
                self.head_s * self.backward_factor
                if self.head_backward_s is None
                else self.head_backward_s
            )
        return self.head_s
