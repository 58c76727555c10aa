"""Value of `rollout.kv_memory`: the memory that an engine's cache may take."""

from __future__ import annotations

import re
from dataclasses import dataclass

AUTO = "auto"
UNIT_BYTES = {"GiB": 1 << 30, "MiB": 1 << 20}


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Limit of an engine's cache; without a share or a size, the engine chooses the share."""

    share: float = 0.0  # of the memory that is free beside the weights; 0: no share is set
    size_bytes: int = 0  # 0: no size is set


AUTO_MEMORY = CacheMemory()


def parse_cache_memory(value: float | str) -> CacheMemory:
    """Parse `auto`, a share such as 0.8, or a size such as `24 GiB`; raise ValueError otherwise."""
    if value == AUTO:
        return AUTO_MEMORY
    if not isinstance(value, str):
        if 0 < value <= 1:
            return CacheMemory(share=float(value))
        raise ValueError(
            "must be above 0 and at most 1 as a share of free memory; write a size as text, as in "
            '"24 GiB"'
        )
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GiB|MiB)", value)
    if found is None or not float(found[1]):
        raise ValueError('must be "auto", a share such as 0.8, or a size such as "24 GiB"')
    return CacheMemory(size_bytes=int(float(found[1]) * UNIT_BYTES[found[2]]))
