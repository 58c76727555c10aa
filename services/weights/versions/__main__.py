"""`python -m meshrl.services.weights.versions COMMAND RUN ...`: prints what it did or found as
JSON, for `meshrl weights` to show; of an error its code and text, and exits 1.
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
from meshrl.common.weights.layout.manifest import unpacked
from meshrl.services.weights.keeping.pins import Pin, pin, sizes, unpin
from meshrl.services.weights.keeping.quotas import GIB
from meshrl.services.weights.making import check_model, check_out, trouble
from meshrl.services.weights.versions.known import RunVersions

Answer = dict[str, Any]


def listed(asked: argparse.Namespace) -> Answer:
    run = RunVersions.of(asked.run)
    table = run.document.get("weights", {})
    manifests = [unpacked(run.chunks.read(one.manifest)) for one in run.versions]
    return {
        "run": str(asked.run),
        "job": run.job,
        "versions": [asdict(one) for one in run.versions],
        "bytes": sum(sizes(manifests).values()),  # a chunk that several have counts once
        "quota_bytes": int(table.get("quota_gb", 0.0) * GIB),
    }


def pinned(asked: argparse.Namespace) -> Answer:
    run = RunVersions.of(asked.run)
    one = run.meant(asked.version)
    before = run.pins.get(one.manifest)
    note = asked.note or (before.note if before else "")
    made = Pin(str(asked.run.resolve()), one.lineage, one.version, note, SystemClock().wall())
    pin(run.chunks, run.job, one.manifest, made)
    return {"job": run.job, "version": asdict(one), "note": note, "was_pinned": before is not None}


def unpinned(asked: argparse.Namespace) -> Answer:
    run = RunVersions.of(asked.run)
    one = run.meant(asked.version)
    was = unpin(run.chunks.directory, run.job, one.manifest)
    left = [why for why in one.why if why != "pinned"]
    return {"job": run.job, "version": asdict(one), "was_pinned": was, "why": left}


def compared(asked: argparse.Namespace) -> Answer:
    run = RunVersions.of(asked.run)
    other = RunVersions.of(asked.other) if asked.other else run
    first, second = run.meant(asked.first), other.meant(asked.second)
    from meshrl.services.weights.export import read_tensors
    from meshrl.services.weights.versions.comparing import compare

    before = read_tensors(run.chunks, first.manifest)
    after = read_tensors(other.chunks, second.manifest)
    names = {"first": first.name, "second": second.name, "other": str(asked.other or "")}
    return {"run": str(asked.run), "job": run.job} | names | compare(before, after)


def exported(asked: argparse.Namespace) -> Answer:
    run = RunVersions.of(asked.run)
    one = run.meant(asked.version)
    check_out(asked.out)  # what loads the model takes seconds
    from meshrl.services.weights.versions.exporting import to

    return {"version": asdict(one), "out": asked.out, "bytes": to(run, one, asked.out)}


def copied(asked: argparse.Namespace) -> Answer:
    """Copies versions one after the other. Of each a line is printed as soon as it is there, or as
    it has failed, which keeps no other from its copy.
    """
    from meshrl.services.weights.versions.exporting import copy

    run = RunVersions.of(asked.run)
    done, failed = [], []
    for manifest in asked.manifests or [one.manifest for one in run.for_good()]:
        try:
            told: Answer = {"copied": copy(run, run.meant(manifest), asked.to)}
            done += [told["copied"]] if told["copied"] else []
        except (MeshError, OSError) as error:
            told = {"error": _told(error)}
            failed.append({"manifest": manifest, "error": told["error"]})
        print(json.dumps({"manifest": manifest} | told), flush=True)
    return {"copied": done, "failed": failed}


def imported(asked: argparse.Namespace) -> Answer:
    check_model(asked.run, asked.out)
    from meshrl.services.weights.versions import importing

    return importing.imported(asked.run, asked.out, asked.name, asked.dtype)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)

    def command(name: str, does: Callable[[argparse.Namespace], Answer], *words: str) -> Any:
        made = commands.add_parser(name)
        made.set_defaults(does=does)
        made.add_argument("run", type=Path)
        for word in words:
            made.add_argument(word)
        return made

    command("list", listed)
    command("pin", pinned, "version").add_argument("--note", default="")
    command("unpin", unpinned, "version")
    command("diff", compared, "first", "second").add_argument("--other", type=Path)
    command("export", exported, "version").add_argument("--out", required=True)
    copy = command("copy", copied)
    copy.add_argument("manifests", nargs="*")
    copy.add_argument("--to", required=True)
    make = command("import", imported)
    make.add_argument("--out", type=Path, required=True)
    make.add_argument("--name", required=True)
    make.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    return parser


def answered(words: Sequence[str]) -> Answer:
    asked = _parser().parse_args(words)
    try:
        found: Answer = asked.does(asked)
    except OSError as error:
        raise trouble(error) from error
    return found


def main() -> None:
    try:
        print(json.dumps(answered(sys.argv[1:])))
    except MeshError as error:
        print(json.dumps({"error": _told(error)}))
        sys.exit(1)


def _told(error: MeshError | OSError) -> dict[str, str]:
    code, text = to_wire(trouble(error) if isinstance(error, OSError) else error)
    return {"code": code, "text": text}


if __name__ == "__main__":
    main()
