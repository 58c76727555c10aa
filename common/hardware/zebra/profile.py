"""Costs of a mixture on two kinds of accelerators, as needed to divide it between them.

A profile is measured once for a setup, or declared by `declared_profiles.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.zebra.costs import CHECKPOINTED_BACKWARD_FACTOR

WHERE = "profile of mixed generations"


def profile_error(message: str, fix: str) -> ConfigError:
    """Return the error for an invalid profile."""
    return ConfigError(message, where=WHERE, fix=fix)


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds over a length or a number of rows, interpolated linearly.

    The curve starts at 0 seconds for 0. Beyond the last point it continues with the last slope.
    """

    at: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]  # never falling

    def __post_init__(self) -> None:
        fix = "Measure ascending lengths of 1 or more; longer ones must not be faster"
        rising = all(a < b for a, b in zip(self.at, self.at[1:], strict=False))
        if not self.at or len(self.at) != len(self.seconds) or self.at[0] < 1 or not rising:
            raise profile_error(f"a curve over {self.at} has {len(self.seconds)} values", fix)
        if not all(0 <= one < math.inf for one in self.seconds):
            raise profile_error(f"a curve has {self.seconds} seconds", fix)
        if any(a > b for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise profile_error(f"a curve falls: {self.seconds}", fix)

    def interpolate_s(self, x: float) -> float:
        """Return the seconds at a length of 0 or more."""
        at, seconds = (0, *self.at), (0.0, *self.seconds)
        i = min(max(1, bisect_left(at, x)), len(at) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (at[i] - at[i - 1])
        return seconds[i] + slope * (x - at[i])

    def scale_time(self, times: float) -> CostCurve:
        """Return the curve with all times multiplied by `times`."""
        return CostCurve(self.at, tuple(times * one for one in self.seconds))


@dataclass(frozen=True, slots=True)
class AcceleratorCosts:
    """Costs on one kind of accelerator. Times are forward, and of one layer."""

    name: str
    memory_bytes: float  # usable by a model
    experts: CostCurve  # seconds over rows: one expert's FFN; a token is as many rows as experts
    attention: CostCurve | None = None  # seconds over the length of one sequence, with the gate
    head: CostCurve | None = None  # seconds over tokens: the last norm, the head and the loss

    def scale_time(self, times: float) -> AcceleratorCosts:
        """Return the costs with all times multiplied by `times`."""
        return replace(
            self,
            experts=self.experts.scale_time(times),
            attention=self.attention and self.attention.scale_time(times),
            head=self.head and self.head.scale_time(times),
        )


@dataclass(frozen=True, slots=True)
class MixtureProfile:
    """Costs of a mixture on a fast and a slow kind of accelerator.

    Bytes of state are those of weights, gradients and optimizer. If `slow` has no attention,
    alternatives that need it are not predicted.
    """

    fast: AcceleratorCosts
    slow: AcceleratorCosts
    layers: int
    experts: int  # of a layer
    experts_per_token: int
    row_bytes: float  # of a transferred row
    link_bytes_per_s: float  # of a rank, one way
    attention_bytes: float  # state of all parameters except experts
    expert_bytes: float  # state of one expert of one layer
    attention_gradient_bytes: float  # summed by ranks with the same parameters in a step
    expert_gradient_bytes: float
    attention_token_bytes: float  # activations of a token on attention ranks, all layers
    expert_row_bytes: float  # activations of a row in one layer on the rank of its expert
    link_latency_s: float = 0.0  # of a transfer
    backward: float = CHECKPOINTED_BACKWARD_FACTOR  # of layers, relative to a forward

    def __post_init__(self) -> None:
        if self.fast.attention is None or self.fast.head is None:
            raise profile_error(f"{self.fast.name} has no attention", "Measure it on the fast kind")
        for kind in (self.fast, self.slow):
            if not 0 < kind.memory_bytes < math.inf:
                raise profile_error(f"{kind.name} has {kind.memory_bytes} bytes", "Set its memory")

    @property
    def attention(self) -> CostCurve:
        """Attention cost of the fast kind."""
        assert self.fast.attention is not None
        return self.fast.attention

    @property
    def head(self) -> CostCurve:
        """Head cost of the fast kind."""
        assert self.fast.head is not None
        return self.fast.head

    def scale_time(self, times: float) -> MixtureProfile:
        """Return the profile with all times of kinds and links multiplied by `times`."""
        return replace(
            self,
            fast=self.fast.scale_time(times),
            slow=self.slow.scale_time(times),
            link_bytes_per_s=self.link_bytes_per_s / times,
            link_latency_s=self.link_latency_s * times,
        )


def parse_accelerator_costs(table: Any, where: str) -> AcceleratorCosts:
    """Return the costs of a kind from JSON; ConfigError if the table is invalid."""
    values = _check_fields(AcceleratorCosts, table)
    if not isinstance(values["name"], str):
        raise profile_error(f"{where} is called {values['name']!r}", "Set the name of its kind")
    _check_number(values["memory_bytes"], f"memory_bytes of {where}")
    for name in ("experts", "attention", "head"):
        if values.get(name) is not None:
            curve = _check_fields(CostCurve, values[name])
            for axis, many in curve.items():
                what = f"{axis} of {name} of {where}"
                if not isinstance(many, list | tuple):
                    raise profile_error(f"{what} is {many!r}", "Set a list of numbers")
                for one in many:
                    _check_number(one, what)
            values[name] = CostCurve(tuple(curve["at"]), tuple(curve["seconds"]))
    return AcceleratorCosts(**values)


def _check_number(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise profile_error(f"{name} is {value!r}", "give a number")


def _check_fields(cls: type[Any], table: Any) -> dict[str, Any]:
    """Return the fields of a table; ConfigError for a missing or an unknown field."""
    names = [one.name for one in fields(cls)]
    if not isinstance(table, Mapping):
        raise profile_error(f"{cls.__name__} is not a table", f"Set {', '.join(names)}")
    unknown = sorted(set(table) - set(names))
    missing = [one.name for one in fields(cls) if one.default is MISSING and one.name not in table]
    if unknown or missing:
        word = "is not known" if unknown else "is missing"
        raise profile_error(f"{(unknown or missing)[0]} {word}", f"Set {', '.join(names)}")
    return dict(table)
