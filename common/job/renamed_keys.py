"""Renamed keys of job files and of `mesh.toml`. Old names keep working, with a notice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshrl.common.base.errors import ConfigError

# Old dotted keys and their new names; `[]` stands for each table of a list.
RENAMED_JOB_KEYS: Mapping[str, str] = {
    "rollout.path": "rollout.backend",
    "rollout.pace": "rollout.emulate",
    "rollout.read_back": "rollout.verify_weights",
    "rollout.lengths": "rollout.forced_lengths",
    "training.pace": "training.emulate",
    "evaluation.hold_s": "evaluation.max_wait_s",
    "environment.once": "environment.no_retry_tools",
    "reward.judge.patience_s": "reward.judge.retry_timeout_s",
    "lora.engines": "lora.engine_mode",
    "models.reference.engine_path": "models.reference.backend",
    "models.teacher.engine_path": "models.teacher.backend",
    "models.reward.engine_path": "models.reward.backend",
}
RENAMED_POOL_KEYS: dict[str, str] = {
    "pool.turns": "pool.time_slicing",
    "pool.gangs": "pool.gang_scope",
    "pool.move_s": "pool.move_timeout_s",
    "pool.gather_s": "pool.join_grace_s",
    "pool.lost_s": "pool.worker_lost_s",
    "pool.gone_s": "pool.forget_after_s",
    "pool.short_s": "pool.shortage_grace_s",
}


def replace_old_keys(document: dict[str, Any], renamed: Mapping[str, str]) -> dict[str, str]:
    """Move the values of old keys to their new names, in place.

    Return the old keys of the document with their new names. Raise ConfigError if a table has both
    names of a key.
    """
    found: dict[str, str] = {}
    for old, new in renamed.items():
        table, _, old_name = old.rpartition(".")
        new_name = new.rpartition(".")[2]
        for one in _iterate_tables(document, table.split(".")):
            if old_name not in one:
                continue
            if new_name in one:
                raise ConfigError(
                    f"{old} is an old name of {new}, but both are set", fix=f"Delete {old}"
                )
            one[new_name] = one.pop(old_name)
            found[old] = new
    return found


def describe_old_keys(found: Mapping[str, str]) -> list[str]:
    """Return a notice for each old key that `replace_old_keys` has found."""
    return [f"{old} is deprecated: write {new}" for old, new in found.items()]


def _iterate_tables(table: Any, path: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the tables of a path that the document has."""
    if not isinstance(table, dict):
        return
    if not path:
        yield table
        return
    name, is_list = path[0].removesuffix("[]"), path[0].endswith("[]")
    below = table.get(name)
    tables = below if is_list and isinstance(below, list) else [] if is_list else [below]
    for one in tables:
        yield from _iterate_tables(one, path[1:])
