"""`python -m meshrl.services.weights.versions COMMAND RUN ...`: print the result as JSON.

`meshrl weights` displays it. An error is printed with code and text, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import MeshError, to_wire
from meshrl.common.weights.layout.manifest import decode_manifest
from meshrl.services.weights.atomic_directories import (
    check_export_target,
    check_import,
    convert_os_error,
)
from meshrl.services.weights.retention.pins import (
    VersionPin,
    compute_chunk_sizes,
    pin_version,
    unpin_version,
)
from meshrl.services.weights.retention.quotas import GIB
from meshrl.services.weights.versions.run_versions import RunVersions

Answer = dict[str, Any]


def run_list(arguments: argparse.Namespace) -> Answer:
    run = RunVersions.read(arguments.run)
    table = run.document.get("weights", {})
    manifests = [decode_manifest(run.chunks.read(one.manifest)) for one in run.versions]
    return {
        "run": str(arguments.run),
        "job": run.job,
        "versions": [asdict(one) for one in run.versions],
        "bytes": sum(compute_chunk_sizes(manifests).values()),  # shared chunks count once
        "quota_bytes": int(table.get("quota_gb", 0.0) * GIB),
    }


def run_pin(arguments: argparse.Namespace) -> Answer:
    run = RunVersions.read(arguments.run)
    one = run.resolve(arguments.version)
    before = run.pins.get(one.manifest)
    note = arguments.note or (before.note if before else "")
    pin = VersionPin(
        str(arguments.run.resolve()), one.lineage, one.version, note, SystemClock().wall()
    )
    pin_version(run.chunks, run.job, one.manifest, pin)
    return {"job": run.job, "version": asdict(one), "note": note, "was_pinned": before is not None}


def run_unpin(arguments: argparse.Namespace) -> Answer:
    run = RunVersions.read(arguments.run)
    one = run.resolve(arguments.version)
    was = unpin_version(run.chunks.directory, run.job, one.manifest)
    remaining_reasons = [why for why in one.why if why != "pinned"]
    return {"job": run.job, "version": asdict(one), "was_pinned": was, "why": remaining_reasons}


def run_diff(arguments: argparse.Namespace) -> Answer:
    run = RunVersions.read(arguments.run)
    other = RunVersions.read(arguments.other) if arguments.other else run
    first, second = run.resolve(arguments.first), other.resolve(arguments.second)
    from meshrl.services.weights.export import read_tensors
    from meshrl.services.weights.versions.comparison import compare_versions

    before = read_tensors(run.chunks, first.manifest)
    after = read_tensors(other.chunks, second.manifest)
    names = {"first": first.name, "second": second.name, "other": str(arguments.other or "")}
    return {"run": str(arguments.run), "job": run.job} | names | compare_versions(before, after)


def run_export(arguments: argparse.Namespace) -> Answer:
    run = RunVersions.read(arguments.run)
    one = run.resolve(arguments.version)
    check_export_target(arguments.out)  # check early: loading the model takes seconds
    from meshrl.services.weights.versions.export_targets import export_to

    return {
        "version": asdict(one),
        "out": arguments.out,
        "bytes": export_to(run, one, arguments.out),
    }


def run_copy(arguments: argparse.Namespace) -> Answer:
    """Copy versions one after the other, and print a line for each copy or failure.

    A failure does not stop the other copies.
    """
    from meshrl.services.weights.versions.export_targets import copy_version

    run = RunVersions.read(arguments.run)
    done, failed = [], []
    for manifest in arguments.manifests or [one.manifest for one in run.list_permanent()]:
        try:
            outcome: Answer = {"copied": copy_version(run, run.resolve(manifest), arguments.to)}
            done += [outcome["copied"]] if outcome["copied"] else []
        except (MeshError, OSError) as error:
            outcome = {"error": _encode_error(error)}
            failed.append({"manifest": manifest, "error": outcome["error"]})
        print(json.dumps({"manifest": manifest} | outcome), flush=True)
    return {"copied": done, "failed": failed}


def run_import(arguments: argparse.Namespace) -> Answer:
    check_import(arguments.run, arguments.out)
    from meshrl.services.weights.versions import model_import

    return model_import.import_model(arguments.run, arguments.out, arguments.name, arguments.dtype)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)

    def command(name: str, does: Callable[[argparse.Namespace], Answer], *words: str) -> Any:
        subparser = commands.add_parser(name)
        subparser.set_defaults(does=does)
        subparser.add_argument("run", type=Path)
        for word in words:
            subparser.add_argument(word)
        return subparser

    command("list", run_list)
    command("pin", run_pin, "version").add_argument("--note", default="")
    command("unpin", run_unpin, "version")
    command("diff", run_diff, "first", "second").add_argument("--other", type=Path)
    command("export", run_export, "version").add_argument("--out", required=True)
    copy = command("copy", run_copy)
    copy.add_argument("manifests", nargs="*")
    copy.add_argument("--to", required=True)
    make = command("import", run_import)
    make.add_argument("--out", type=Path, required=True)
    make.add_argument("--name", required=True)
    make.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    return parser


def run_command(argv: Sequence[str]) -> Answer:
    arguments = _make_parser().parse_args(argv)
    try:
        found: Answer = arguments.does(arguments)
    except OSError as error:
        raise convert_os_error(error) from error
    return found


def main() -> None:
    try:
        print(json.dumps(run_command(sys.argv[1:])))
    except MeshError as error:
        print(json.dumps({"error": _encode_error(error)}))
        sys.exit(1)


def _encode_error(error: MeshError | OSError) -> dict[str, str]:
    code, text = to_wire(convert_os_error(error) if isinstance(error, OSError) else error)
    return {"code": code, "text": text}


if __name__ == "__main__":
    main()
