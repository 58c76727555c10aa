"""`meshrl profiles`: measured durations, gaps and bytes of functions, by kind of instance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from meshrl.common.base.errors import NotFound
from meshrl.common.base.files.sealed_documents import read_sealed
from meshrl.common.job.memory.process_memory import describe_bytes
from meshrl.common.state.pool.demand.profiles import FunctionProfile, ProfileKey, TimeStatistics
from meshrl.common.state.pool.store.profile_rows import ProfileRow, decode_profiles, read_profiles
from meshrl.directory.command_target import resolve_mesh
from meshrl.directory.directory_paths import MeshPaths, find_root_pid, format_path
from meshrl.directory.mesh_query import ANSWER_TIMEOUT_S, query_mesh
from meshrl.view.live import console_tables

DIGEST_DIGITS = 8  # of a digest, for people
EMPTY_FIX = "Run a job on this mesh: its processes write their measurements every 30 s"


def print_profiles(target: Path | None, mesh: Path | None, match: str, as_json: bool) -> None:
    """Print profiles as a table or as JSON. Raises NotFound without any."""
    place = resolve_mesh(target, mesh)
    found = read_saved_or_live(place)
    if not found:
        raise NotFound(f"the mesh in {format_path(place.root)} has no profiles yet", fix=EMPTY_FIX)
    selected = [row for row in found if match.lower() in describe_key(row.key).lower()]
    if not selected:
        kinds = "; ".join(describe_key(row.key) for row in found)
        raise NotFound(
            f"no profile matches {match!r}", fix=f"Choose a text of one of these kinds: {kinds}"
        )
    if as_json:
        print(json.dumps([to_document(row) for row in selected]))
        return
    console_tables.print_table(make_profiles_table(selected))


def read_saved_or_live(place: MeshPaths) -> list[ProfileRow]:
    """Return the profiles of a running mesh, or those that a stopped one has saved."""
    if find_root_pid(place):
        return query_mesh(place, read_profiles, ANSWER_TIMEOUT_S)
    try:
        return decode_profiles(read_sealed(place.profiles)["profiles"])
    except NotFound:
        return []


def describe_key(key: ProfileKey) -> str:
    """Return a kind of instances in a line."""
    rows = f"rows {key.dataset[:DIGEST_DIGITS]}" if key.dataset else "no rows"
    ranks = f", {key.ranks} ranks" if key.ranks > 1 else ""
    return (
        f"{key.role} of {key.model}, {key.algorithm}, {rows}, up to {key.max_tokens} tokens, "
        f"on {key.accelerator}{ranks}"
    )


def make_profiles_table(rows: Sequence[ProfileRow]) -> Table:
    """Return a table with a row for each function of each kind."""
    table = console_tables.make_table(
        *("kind", "function", "pieces", "median", "p90", "longest", "gap", "repeats", "bytes"),
        wraps=False,
    )
    for row in rows:
        kind = describe_key(row.key)
        for name, one in row.profile.items():
            took = one.durations
            table.add_row(
                kind,
                name,
                f"{took.count:.0f}",
                *(_format_s(took.compute_quantile_s(share)) for share in (0.5, 0.9)),
                _format_s(took.max_s),
                _format_s(one.gaps.compute_quantile_s(0.5)) if one.gaps.count else "-",
                f"{100 * one.repeats / took.count:.0f} %" if took.count else "-",
                describe_bytes(sum(one.bytes_by_kind.values())) if one.bytes_by_kind else "-",
            )
            kind = ""
    return table


def to_document(row: ProfileRow) -> dict[str, Any]:
    """Return a profile for `--json`."""
    functions = {name: _function_document(one) for name, one in row.profile.items()}
    return {"kind": asdict(row.key), "written_ms": row.written_ms, "functions": functions}


def _function_document(one: FunctionProfile) -> dict[str, Any]:
    return {
        "duration": _statistics_document(one.durations),
        "gap": _statistics_document(one.gaps),
        "repeats": round(one.repeats, 3),
        "bytes_by_kind": one.bytes_by_kind,
    }


def _statistics_document(found: TimeStatistics) -> dict[str, float]:
    return {
        "count": round(found.count, 3),
        "mean_s": found.mean_s,
        "p50_s": found.compute_quantile_s(0.5),
        "p90_s": found.compute_quantile_s(0.9),
        "max_s": found.max_s,
    }


def _format_s(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"
