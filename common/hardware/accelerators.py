"""Profiles of accelerators: what a kind can do at most, and which shares of that are reached."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PREFILL_SHARE = 0.55  # share of peak arithmetic that prefill reaches,
TRAINING_SHARE = (
    0.4  # that training reaches, as dense models of some 10e9 parameters are reported to,
)
READ_SHARE = 0.85  # share of peak bandwidth that decoding reaches (Libra's cost model, model.py)
COLLECTIVE_S = 8e-6  # an all-reduce of a few bytes between accelerators of a host (the same)

CPU = "CPU"  # the kind whose workers have no arithmetic of their own: a host's share its cores

ACCELERATORS_FILE = Path(__file__).parent / "accelerators.toml"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A kind of accelerator. Bandwidths are of one accelerator, links' are one way."""

    kind: str
    flops: float  # dense operations a second, in 16 bits
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float  # within a host
    network_bytes_per_s: float  # between hosts
    busy_share: float = PREFILL_SHARE
    train_share: float = TRAINING_SHARE
    read_share: float = READ_SHARE
    collective_s: float = COLLECTIVE_S

    @property
    def prefill_flops_per_s(self) -> float:
        """Operations a second that generation reaches."""
        return self.flops * self.busy_share

    @property
    def training_flops_per_s(self) -> float:
        """Operations a second that training reaches."""
        return self.flops * self.train_share

    @property
    def read_bytes_per_s(self) -> float:
        """Bytes a second that are read of its memory."""
        return self.memory_bytes_per_s * self.read_share


@cache
def load_accelerators() -> Mapping[str, Accelerator]:
    """The kinds that come with this software, by name."""
    tables = tomllib.loads(ACCELERATORS_FILE.read_text(encoding="utf-8"))
    return {
        kind: Accelerator(kind, **{name: float(value) for name, value in table.items()})
        for kind, table in tables.items()
    }


def match_kind(name: str) -> str:
    """The kind of an accelerator with this name of its driver's, as A100 of `NVIDIA
    A100-SXM4-80GB` and CPU of `cpu:0`; empty when none of the declared kinds is in it.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    return next((kind for kind in load_accelerators() if kind.lower() in words), "")
