"""`meshrl weights`: shows a run's versions and their transports, pins, exports, imports and
compares versions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshrl.client.client import run_request
from meshrl.common.api.stats import SERVER_OF_ENGINE
from meshrl.common.base.errors import ConfigError
from meshrl.common.base.files.json_lines import iterate_rows
from meshrl.common.base.files.remote_directory import is_url
from meshrl.common.state import registry
from meshrl.directory import directory_paths
from meshrl.directory.command_target import RunLocation, may_be_running, resolve_run
from meshrl.directory.mesh_query import ANSWER_TIMEOUT_S, query_mesh
from meshrl.directory.versions_process import build_arguments, run_versions_command
from meshrl.view.live import console_tables

DTYPES = ("float32", "bfloat16")
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # as `name` of a job file
MANIFEST_DIGITS = 8  # digits of a digest that are shown


def print_versions(run: Path | None, mesh: Path | None, token: str | None, as_json: bool) -> None:
    """Print the versions that the store has, the oldest first."""
    found = _request_versions("list", run, mesh, token)
    if as_json:
        print(json.dumps(found))
        return
    table = console_tables.make_table(
        "version", "manifest", "size", "exclusive", "type", "retained as", "note"
    )
    for one in found["versions"]:
        missing = "" if one["whole"] else " (chunks are missing)"
        why = ", ".join(one["why"]) or "to be deleted"
        size, exclusive = _format_bytes(one["bytes"]), _format_bytes(one["alone"])
        digits = one["manifest"][:MANIFEST_DIGITS]
        table.add_row(
            _format_version(one), digits, size, exclusive, one["dtype"], why + missing, one["note"]
        )
    console_tables.print_table(table)
    quota = f" of {_format_bytes(found['quota_bytes'])}" if found["quota_bytes"] else ""
    count = len(found["versions"])
    many = f"{count} version{'s' if count != 1 else ''}"
    print(f"{many} of {found['job']}, {_format_bytes(found['bytes'])}{quota}")


def pin_version(
    run: Path, version: str, note: str, mesh: Path | None, token: str | None, as_json: bool
) -> None:
    found = _request_versions("pin", run, mesh, token, version, note)
    again = "is already pinned" if found["was_pinned"] else "is pinned"
    _print_result(
        found, f"version {_format_version(found['version'])} of {found['job']} {again}", as_json
    )


def unpin_version(
    run: Path, version: str, mesh: Path | None, token: str | None, as_json: bool
) -> None:
    found = _request_versions("unpin", run, mesh, token, version)
    then = f"it is retained as {', '.join(found['why'])}" if found["why"] else "it is to be deleted"
    was = "is unpinned" if found["was_pinned"] else "was not pinned"
    _print_result(
        found,
        f"version {_format_version(found['version'])} of {found['job']} {was}; {then}",
        as_json,
    )


def export_version(run: Path, version: str, out: str, mesh: Path | None, as_json: bool) -> None:
    directory = resolve_run(run, mesh).directory
    place = out or str(directory / f"model-{version.replace('/', '-')}")
    target = place if is_url(place) else str(Path(place).absolute())
    found = run_versions_command("export", f"--out={target}", "--", directory, version)
    _print_result(found, f"version {_format_version(found['version'])}: {out or target}", as_json)


def import_model(directory: Path, out: Path | None, dtype: str, as_json: bool) -> None:
    if dtype not in DTYPES:
        raise ConfigError(
            f"{dtype!r:.60} is not a type of weights", fix=f"Set --dtype to {' or '.join(DTYPES)}"
        )
    name = (out or directory.resolve()).name
    if not JOB_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r:.60} is not a run name",
            fix="Set --out runs/NAME, with letters, digits, '.', '_', '-'",
        )
    run = (out or Path("runs") / name).absolute()
    options = f"--out={run}", f"--name={name}", f"--dtype={dtype}"
    found = run_versions_command("import", *options, "--", directory)
    display_path = directory_paths.format_path(run)
    message = f"{display_path} has {directory} as version 0, {_format_bytes(found['bytes'])}"
    _print_result(
        found,
        f'{message}; to start a job from it, set model.path = "{display_path}/model"',
        as_json,
    )


def diff_versions(
    run: Path,
    first: str,
    second: str,
    other: Path | None,
    limit: int,
    mesh: Path | None,
    as_json: bool,
) -> None:
    directory = resolve_run(run, mesh).directory
    of = [f"--other={resolve_run(other, mesh).directory}"] if other else []
    found = run_versions_command("diff", *of, "--", directory, first, second)
    if as_json:
        print(json.dumps(found))
        return
    table = console_tables.make_table("tensor", "shape", "changed", "largest", "mean", "")
    tensors = found["tensors"]
    first, second = (found[side].removeprefix("0/") for side in ("first", "second"))
    for one in tensors[: limit or None]:
        share = f"{one['changed'] / max(1, one['elements']):.3%}"
        figures = share, f"{one['largest']:.3g}", f"{one['mean']:.3g}"
        table.add_row(one["name"], "x".join(map(str, one["shape"])), *figures, one["note"])
    console_tables.print_table(table)
    if len(tensors) > limit > 0:
        print(f"... and {len(tensors) - limit} more; -n 0 shows all")
    print(
        f"from {first} to {second}: {found['changed']} of {found['elements']} "
        f"elements changed ({found['share']:.3%}), by at most {found['largest']:.3g}"
    )


def _request_versions(
    action: str,
    run: Path | None,
    mesh: Path | None,
    token: str | None,
    version: str = "",
    note: str = "",
) -> dict[str, Any]:
    """Return the answer about this user's run, or with a token about a job of another's mesh."""
    if not token or mesh or (run and (run / "job.json").is_file()):
        location: RunLocation = resolve_run(run, mesh)
        return run_versions_command(*build_arguments(action, location.directory, version, note))
    if run is None:
        raise ConfigError(
            "the job of the token is missing", fix="Name a job: `meshrl status` lists them"
        )
    return run_request(
        lambda c: c.run_versions_command(str(run), action, version, note), token=token
    )


def _print_result(result: dict[str, Any], text: str, as_json: bool) -> None:
    print(json.dumps(result) if as_json else text)


def _format_version(version: dict[str, Any]) -> str:
    """Return the version's number, with the lineage unless that is the first."""
    return (
        str(version["version"])
        if not version["lineage"]
        else f"{version['lineage']}/{version['version']}"
    )


def _format_bytes(size_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return f"{size_bytes} B"


TRANSPORT_STAT = (
    "weights_way"  # a counter of processes that receive versions, and an event when it changes
)
SERVER_STAT = "server_transport"  # the same of an engine that sends versions to its server
MIB = 1 << 20


def explain_transports(run: Path | None, mesh: Path | None, as_json: bool) -> None:
    """Print the transports of a running mesh's processes, else those in a run's record."""
    found = _read_received_versions(resolve_run(run, mesh))
    if as_json:
        print(json.dumps(found))
        return
    if not found:
        print(
            "no version was transferred: processes on the store's host map its files, and no "
            "process on another host and no SGLang server has received one"
        )
        return
    table = console_tables.make_table("process", "transport", "bytes", "took", "predicted", "why")
    for one in found:
        size, took = f"{one['bytes'] / MIB:.3g} MiB", f"{one['took_s']:.3g} s"
        why = "; ".join(text for text in (one["why"], one["verdict"]) if text)
        predicted = "" if one["predicted_s"] is None else f"{one['predicted_s']:.3g} s"
        table.add_row(one["process"], one["way"], size, took, predicted, why)
    console_tables.print_table(table)
    measured: dict[str, list[float]] = {}  # by way, in bytes a second, of all processes
    for one in found:
        for way, rate in one["rates"].items():
            measured.setdefault(way, []).append(rate)
    for way, rates in sorted(measured.items()):
        print(f"{way}: {sum(rates) / len(rates) / MIB:.3g} MiB/s")


def collect_reports(process: str, stats: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a process's stats report of transports, by receiver: it or its SGLang server."""
    receivers = {process: TRANSPORT_STAT, SERVER_OF_ENGINE.format(process): SERVER_STAT}
    return {receiver: stats[stat] for receiver, stat in receivers.items() if stats.get(stat)}


def _read_received_versions(run: RunLocation) -> list[dict[str, Any]]:
    """Return the last report of each process, by its name."""
    if may_be_running(run.mesh_paths):
        entries = query_mesh(run.mesh_paths, registry.list_entries, ANSWER_TIMEOUT_S)
        reports = {
            receiver: report | {"process": receiver}
            for entry in entries
            for receiver, report in collect_reports(entry.name, entry.stats).items()
        }
    else:
        reports = {
            event["fields"]["process"]: event["fields"]
            for event in iterate_rows(run.directory / "events.jsonl", f'"{TRANSPORT_STAT}"')
            if event["kind"] == TRANSPORT_STAT
        }
    return [reports[name] for name in sorted(reports)]
