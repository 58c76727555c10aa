"""Checks of `[pool.scaler]` in `mesh.toml` on the head, before a mesh relies on it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from meshrl.common.base.errors import ConfigError
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.launch.scaler.providers import ACCOUNT, find_api_address, parse_workload


@dataclass(frozen=True)
class ScalerProblem:
    """Wrong or missing key of `pool.scaler`, or a provider that this host lacks."""

    key: str
    message: str  # predicate, to follow the key
    fix: str


def find_scaler_problem(pool: PoolSettings) -> ScalerProblem | None:
    """Return the first problem of a pool's scaler on this host; None without one."""
    scaler = pool.scaler
    if not scaler.is_on:
        return None
    if scaler.command and scaler.kubernetes:
        return ScalerProblem("command", "excludes pool.scaler.kubernetes", "Remove one of them")
    if scaler.most_hosts < 1:
        fix = "Set the largest number of spot workers, at least pool.scaler.workers_per_host"
        return ScalerProblem("most", "permits no host", fix)
    if scaler.max_cost_per_hour and not pool.spot_price:
        fix = "Set pool.spot_price, the price of an hour of a spot worker"
        return ScalerProblem("max_cost_per_hour", "has no effect without a price", fix)
    if scaler.kubernetes:
        try:
            parse_workload(scaler.kubernetes)
        except ConfigError as error:
            return ScalerProblem("kubernetes", "names no workload", error.fix)
        if not scaler.dry_run and not (find_api_address() and (ACCOUNT / "token").is_file()):
            fix = "Run the head in a pod with the token of its account, or use pool.scaler.command"
            return ScalerProblem("kubernetes", "needs the API of a cluster", fix)
    if scaler.command and shutil.which(scaler.command[0]) is None:
        fix = "Install it on the head, or write its absolute path"
        return ScalerProblem("command", f"names {scaler.command[0]}, no program here", fix)
    return None
