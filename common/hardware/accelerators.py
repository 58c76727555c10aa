"""Profiles of accelerators: peak performance by kind, and the shares of it that are reached."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PREFILL_SHARE = 0.55  # share of peak arithmetic that prefill reaches
# share of it that training reaches, as reported for dense models of about 10e9 parameters
TRAINING_SHARE = 0.4
READ_SHARE = 0.85  # of peak bandwidth that decoding reaches (Libra's cost model, model.py)
COLLECTIVE_S = 8e-6  # all-reduce of a few bytes between accelerators of a host (the same source)

CPU = "CPU"  # kind whose workers share the host's cores

ACCELERATORS_FILE = Path(__file__).parent / "accelerators.toml"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Kind of accelerator. Bandwidths are of one accelerator, those of links are one way."""

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
        """Bytes a second that are read from its memory."""
        return self.memory_bytes_per_s * self.read_share


BULK_BYTES_PER_S = 1e9  # of one connection of a bulk port, with the digests of its bytes


@cache
def load_accelerators() -> Mapping[str, Accelerator]:
    """Return the declared kinds, by name."""
    tables = tomllib.loads(ACCELERATORS_FILE.read_text(encoding="utf-8"))
    return {
        kind: Accelerator(kind, **{name: float(value) for name, value in table.items()})
        for kind, table in tables.items()
    }


def match_kind(name: str) -> str:
    """Return the kind of an accelerator from its driver's name for it; empty if none is declared.

    Examples are A100 for `NVIDIA A100-SXM4-80GB` and CPU for `cpu:0`.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    return next((kind for kind in load_accelerators() if kind.lower() in words), "")


def predict_gradient_transfer_s(size_bytes: float, kind: str) -> float:
    """Predict the seconds in which a hybrid on an accelerator sends a gradient to another host.

    An unknown kind counts as one whose network is faster than the bulk port.
    """
    on = load_accelerators().get(match_kind(kind))
    network_bytes_per_s = BULK_BYTES_PER_S if on is None else on.network_bytes_per_s
    return size_bytes / min(BULK_BYTES_PER_S, network_bytes_per_s)
