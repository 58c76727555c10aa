"""Parts and cases of the check, with their shares of the time. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOTAL_S = 475.0  # of all cases together: eight minutes, with the ends of processes
MIN_CASE_S = 1.0  # deadline of a case when the time is over
TRANSPORTS = ("disk", "tensors", "ipc", "distributed")  # of weights to SGLang; a host may lack some

Figures = dict[str, Any]  # numbers, texts and booleans by name; names end with their units


@dataclass(frozen=True, slots=True)
class Case:
    """Measurement of a part, and the seconds that it may take on a GPU with an idle host."""

    part: str
    name: str
    allowed_s: float


@dataclass(frozen=True, slots=True)
class Settings:
    """Device and options of a run; every case gets them."""

    device: str  # cuda | cpu
    sglang_python: str = ""  # interpreter that has SGLang; empty: none but this one
    deadline_s: float = 60.0  # of the case that runs

    @property
    def is_tiny(self) -> bool:
        """True for sizes that a CPU computes in moments."""
        return self.device == "cpu"


class Skipped(Exception):
    """Reason why this host cannot run a case."""


class NoGpu(Exception):
    """Reason why no case can run on the requested device."""


class Incorrect(Exception):
    """Result of a case that differs too much from the expected one."""


PARTS: Mapping[str, Mapping[str, float]] = {
    "host": {"device": 15},
    "kernels": {
        "build": 60,
        "bucket": 8,
        "paged_write": 8,
        "paged_decode": 8,
        "prefill": 12,
        "logprob": 8,
        "experts": 8,
    },
    "decoding": {"equal_tokens": 20, "batch_1": 15, "batch_32": 15, "batch_256": 20},
    "training": {"equal_gradient": 15, "passes": 15, "step": 15},
    "sleeping": {"pinned_copy": 8, "learner": 15, "engine": 10},
    "sharing": {"alternate": 35},
    "recipe": {"five_steps": 35},
    "sglang": {
        "start": 60,
        **{f"weights_{name}": 12 for name in TRANSPORTS},
        "tokens": 10,
        "sleep": 10,
    },
}
CASES: tuple[Case, ...] = tuple(
    Case(part, name, float(seconds))
    for part, cases in PARTS.items()
    for name, seconds in cases.items()
)


def allot_deadline_s(waiting: Sequence[Case], left_s: float) -> float:
    """Return the deadline of the first of the waiting cases, which share the time that is left.

    Seconds that a case does not use so go to those behind it.
    """
    share = waiting[0].allowed_s / sum(case.allowed_s for case in waiting)
    return max(MIN_CASE_S, left_s * share)
