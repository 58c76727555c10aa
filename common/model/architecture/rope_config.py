"""Rotary embedding of a config.json: `rope_theta` and `rope_scaling`, or the newer
`rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.architectures import is_neutral

_ORIGINAL_POSITIONS = "original_max_position_embeddings"
# Kind of scaling -> required keys and optional keys.
ROPE_TYPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL_POSITIONS), ()),
    "yarn": (
        ("factor", _ORIGINAL_POSITIONS),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
ROPE_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    _ORIGINAL_POSITIONS,
)
_SCALING_KEYS = {key for must, may in ROPE_TYPE_KEYS.values() for key in (*must, *may)}
_OTHER_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}


def parse_rope_config(
    raw: Mapping[str, Any], theta: float, positions: int
) -> tuple[float, dict[str, Any]]:
    """Return base and scaling that a config.json describes; without scaling, an empty one.

    `theta` is the default base, `positions` the default of the original positions. The scaling has
    `rope_type` and the keys of `ROPE_TYPE_KEYS`. Raise ConfigError if it is not supported.
    """
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    found = raw.get(key) or {}
    where = f"config.json: {key}"
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{key} is not an object", where=where, fix="Write it in the format of transformers"
        )
    _reject_partial_rotary(raw.get("partial_rotary_factor"), "config.json: partial_rotary_factor")
    _reject_partial_rotary(found.get("partial_rotary_factor"), f"{where}.partial_rotary_factor")
    base = float(found.get("rope_theta") or raw.get("rope_theta") or theta)
    kind = found.get("rope_type") or found.get("type") or "default"
    nested = [name for name, value in found.items() if isinstance(value, Mapping)]
    if kind not in ROPE_TYPE_KEYS or nested:
        what = f"by layers ({', '.join(nested)})" if nested else repr(kind)
        raise ConfigError(
            f"rotary scaling {what} is not implemented",
            where=where,
            fix=f"Use a model with one of {', '.join(ROPE_TYPE_KEYS)}, the same in all layers",
        )
    unknown = [
        name
        for name, value in found.items()
        if name not in _SCALING_KEYS | _OTHER_KEYS and not is_neutral(name, value)
    ]
    if unknown:
        raise ConfigError(
            f"{unknown[0]} of rotary embeddings is not implemented",
            where=where,
            fix="Use a model without this key",
        )
    if kind == "default":
        return base, {}
    given = dict(found)
    # a base beside the scaling takes precedence over the one in it
    if raw.get(_ORIGINAL_POSITIONS):
        given[_ORIGINAL_POSITIONS] = raw[_ORIGINAL_POSITIONS]
    given.setdefault(_ORIGINAL_POSITIONS, positions)
    must, may = ROPE_TYPE_KEYS[kind]
    for name in must:
        if name not in given:
            raise ConfigError(
                f"{name} is missing",
                where=where,
                fix=f"Add the keys that {kind} scaling needs: {', '.join(must)}",
            )
    if kind == "yarn" and given["factor"] is None:
        given["factor"] = positions / given[_ORIGINAL_POSITIONS]
    scaling: dict[str, Any] = {"rope_type": kind, **{name: float(given[name]) for name in must}}
    if _ORIGINAL_POSITIONS in scaling:
        scaling[_ORIGINAL_POSITIONS] = int(scaling[_ORIGINAL_POSITIONS])
    scaling |= {name: given[name] for name in may if name in given}
    for name in must:
        if not scaling[name] > 0:
            raise ConfigError(f"{name} is {scaling[name]}", where=where, fix="Set it above 0")
    return base, scaling


def _reject_partial_rotary(share: Any, where: str) -> None:
    if share is not None and share != 1:
        raise ConfigError(
            f"rotary embedding of {share} of each head is not implemented",
            where=where,
            fix="Use a model that rotates whole heads",
        )
