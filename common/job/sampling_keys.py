"""Keys of `[rollout]` that change the distribution from which tokens are sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Values that change nothing.
FILTERS: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "min_tokens": 0}
ALL = {**FILTERS, **PENALTIES, "logit_bias": {}}


def list_changed(rollout: Mapping[str, Any], neutral_values: Mapping[str, Any] = ALL) -> list[str]:
    """Return the names of keys by which engines do not sample from the trained policy itself."""
    return [name for name, value in neutral_values.items() if rollout.get(name, value) != value]
