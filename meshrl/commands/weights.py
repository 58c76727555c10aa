"""`meshrl weights`: shows a run's versions and how each process got the last one, pins, exports,
imports and compares versions.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from meshrl.client.client import request
from meshrl.common.base.errors import ConfigError
from meshrl.common.base.files.at_url import is_url
from meshrl.common.base.files.lines import whole
from meshrl.common.state import registry
from meshrl.directory import places
from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.target import Run, may_live, run_of
from meshrl.directory.versions import asked, words
from meshrl.view.live import printing

TYPES = ("float32", "bfloat16")
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # as `name` of a job file
MANIFEST = 8  # digits of a digest that are shown


def show(run: Path | None, mesh: Path | None, token: str | None, as_json: bool) -> None:
    """Prints the versions that the store has, the oldest first."""
    found = _told("list", run, mesh, token)
    if as_json:
        print(json.dumps(found))
        return
    table = printing.table("version", "manifest", "size", "alone", "type", "kept as", "note")
    for one in found["versions"]:
        gone = "" if one["whole"] else " (chunks are missing)"
        why = ", ".join(one["why"]) or "goes soon"
        size, alone = _shown(one["bytes"]), _shown(one["alone"])
        digits = one["manifest"][:MANIFEST]
        table.add_row(_name(one), digits, size, alone, one["dtype"], why + gone, one["note"])
    printing.show(table)
    quota = f" of {_shown(found['quota_bytes'])}" if found["quota_bytes"] else ""
    count = len(found["versions"])
    many = f"{count} version{'s' if count != 1 else ''}"
    print(f"{many} of {found['job']}, {_shown(found['bytes'])}{quota}")


def pin(
    run: Path, version: str, note: str, mesh: Path | None, token: str | None, as_json: bool
) -> None:
    found = _told("pin", run, mesh, token, version, note)
    again = "was pinned already" if found["was_pinned"] else "is pinned"
    _say(found, f"version {_name(found['version'])} of {found['job']} {again}", as_json)


def unpin(run: Path, version: str, mesh: Path | None, token: str | None, as_json: bool) -> None:
    found = _told("unpin", run, mesh, token, version)
    then = f"it stays as {', '.join(found['why'])}" if found["why"] else "it goes soon"
    was = "is pinned no more" if found["was_pinned"] else "was not pinned"
    _say(found, f"version {_name(found['version'])} of {found['job']} {was}; {then}", as_json)


def export(run: Path, version: str, out: str, mesh: Path | None, as_json: bool) -> None:
    directory = run_of(run, mesh).directory
    place = out or str(directory / f"model-{version.replace('/', '-')}")
    target = place if is_url(place) else str(Path(place).absolute())
    found = asked("export", f"--out={target}", "--", directory, version)
    _say(found, f"version {_name(found['version'])}: {out or target}", as_json)


def import_(directory: Path, out: Path | None, dtype: str, as_json: bool) -> None:
    if dtype not in TYPES:
        raise ConfigError(f"{dtype!r:.60} is no type of weights", fix=f"Take {' or '.join(TYPES)}")
    name = (out or directory.resolve()).name
    if not JOB_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r:.60} is no name of a run",
            fix="Name another: --out runs/NAME, of letters, digits, '.', '_', '-'",
        )
    run = (out or Path("runs") / name).absolute()
    options = f"--out={run}", f"--name={name}", f"--dtype={dtype}"
    found = asked("import", *options, "--", directory)
    shown = places.shown(run)
    said = f"{shown} has {directory} as version 0, {_shown(found['bytes'])}"
    _say(found, f'{said}; a job begins from it by model.path = "{shown}/model"', as_json)


def diff(
    run: Path,
    first: str,
    second: str,
    other: Path | None,
    most: int,
    mesh: Path | None,
    as_json: bool,
) -> None:
    directory = run_of(run, mesh).directory
    of = [f"--other={run_of(other, mesh).directory}"] if other else []
    found = asked("diff", *of, "--", directory, first, second)
    if as_json:
        print(json.dumps(found))
        return
    table = printing.table("tensor", "shape", "changed", "largest", "mean", "")
    tensors = found["tensors"]
    first, second = (found[which].removeprefix("0/") for which in ("first", "second"))
    for one in tensors[: most or None]:
        share = f"{one['changed'] / max(1, one['elements']):.3%}"
        figures = share, f"{one['largest']:.3g}", f"{one['mean']:.3g}"
        table.add_row(one["name"], "x".join(map(str, one["shape"])), *figures, one["note"])
    printing.show(table)
    if len(tensors) > most > 0:
        print(f"... and {len(tensors) - most} more; -n 0 shows all")
    print(
        f"from {first} to {second}: {found['changed']} of {found['elements']} "
        f"elements changed ({found['share']:.3%}), by {found['largest']:.3g} at most"
    )


def _told(
    act: str,
    run: Path | None,
    mesh: Path | None,
    token: str | None,
    version: str = "",
    note: str = "",
) -> dict[str, Any]:
    """The answer about a run of this user's, or with a token about a job of another's mesh."""
    if not token or mesh or (run and (run / "job.json").is_file()):
        meant: Run = run_of(run, mesh)
        return asked(*words(act, meant.directory, version, note))
    if run is None:
        raise ConfigError("with a token, which job?", fix="Name one: `meshrl status` lists them")
    return request(lambda c: c.on_versions(str(run), act, version, note), token=token)


def _say(found: dict[str, Any], text: str, as_json: bool) -> None:
    print(json.dumps(found) if as_json else text)


def _name(one: dict[str, Any]) -> str:
    """The number, which tells the lineage where that is not the first."""
    return str(one["version"]) if not one["lineage"] else f"{one['lineage']}/{one['version']}"


def _shown(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


WAY = "weights_way"  # a counter of processes that receive versions, and an event when it changes
MIB = 1 << 20


def explain(run: Path | None, mesh: Path | None, as_json: bool) -> None:
    """Prints it of the processes of a mesh that runs, else what a run has on record."""
    found = _received(run_of(run, mesh))
    if as_json:
        print(json.dumps(found))
        return
    if not found:
        print(
            "no version had to be brought anywhere: on the store's own host its files are mapped, "
            "and no process of another host has received one"
        )
        return
    table = printing.table("process", "way", "bytes", "took", "predicted", "why")
    for one in found:
        size, took = f"{one['bytes'] / MIB:.3g} MiB", f"{one['took_s']:.3g} s"
        why = "; ".join(text for text in (one["why"], one["verdict"]) if text)
        predicted = "" if one["predicted_s"] is None else f"{one['predicted_s']:.3g} s"
        table.add_row(one["process"], one["way"], size, took, predicted, why)
    printing.show(table)
    measured: dict[str, list[float]] = {}  # by way, in bytes a second, of all processes
    for one in found:
        for way, rate in one["rates"].items():
            measured.setdefault(way, []).append(rate)
    for way, rates in sorted(measured.items()):
        print(f"{way}: {sum(rates) / len(rates) / MIB:.3g} MiB/s")


def _received(run: Run) -> list[dict[str, Any]]:
    """What each process told last, by its name."""
    if may_live(run.place):
        entries = ask(run.place, registry.entries, ANSWER_S)
        told = {e.name: e.stats[WAY] | {"process": e.name} for e in entries if e.stats.get(WAY)}
    else:
        told = {
            event["fields"]["process"]: event["fields"]
            for event in whole(run.directory / "events.jsonl", f'"{WAY}"')
            if event["kind"] == WAY
        }
    return [told[name] for name in sorted(told)]
