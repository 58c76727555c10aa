"""Kinds of durable files of a run, with their paths and readers, and the ways to corrupt one."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.common.api.transfer.bulk_permissions import GROUPS

DIGEST = re.compile(rb"[0-9a-f]{64}")
LAUNCHER = "launcher"  # reads the files that only a resume reads
HARMS = ("flip", "truncate", "empty", "delete", "older")
HEAD_BYTES = 8


def harm(how: str, path: Path, older: Path | None, at_head: bool) -> str:
    """Corrupt the file; return the reason if that is impossible, otherwise an empty text."""
    try:
        content = path.read_bytes()
        match how:
            case "flip":
                if not content:
                    return "it is empty"
                at = min(HEAD_BYTES, len(content)) - 1 if at_head else len(content) // 2
                _overwrite(path, content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
            case "truncate":
                if len(content) < 2:
                    return "it is too short"
                _overwrite(path, content[: HEAD_BYTES // 2 if at_head else len(content) // 2])
            case "empty":
                _overwrite(path, b"")
            case "delete":
                path.unlink()
            case "older":
                if older is None or older.read_bytes() == content:
                    return "there is no older one that differs"
                stamped = path.with_name(path.name + ".older")
                shutil.copyfile(older, stamped)
                stamped.replace(path)
            case _:
                raise ValueError(how)
    except FileNotFoundError:  # nothing needs it any more
        return "it has gone"
    return ""


def _overwrite(path: Path, content: bytes) -> None:
    """Overwrite a file in place, as a disk would: processes that have the file open see it too."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


@dataclass(frozen=True)
class Kind:
    """Files of one kind: `found` lists them, first the next to be read; `readers` read them."""

    name: str
    found: Callable[[Path], list[Path]]
    readers: tuple[str, ...]
    at_head: bool = False  # the byte that is flipped lies in its first bytes, else in the middle
    recovers: bool = True  # there is a second copy, or it can be made again
    # Uses of a file that no running process needs: unread corruption need not be reported.
    unneeded: tuple[str, ...] = ()


def _events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the recorded events of these kinds, from the readable lines."""
    found = []
    for line in (run / "events.jsonl").read_bytes().splitlines():
        if any(kind.encode() in line for kind in kinds):
            with contextlib.suppress(ValueError):  # the last one is half there
                event = json.loads(line)
                if event["kind"] in kinds:
                    found.append(event)
    return found


def _newest(run: Path) -> list[Path]:
    """Return the manifests of checkpoints, first the one that a resume loads."""
    found = sorted((run / "checkpoints").glob("step-*.json"), reverse=True)
    named = [event["fields"]["checkpoint"] for event in _events(run, "step")][-1:]
    return sorted(found, key=lambda path: path.stem not in named)


def _beside(pattern: str, run: Path) -> list[Path]:
    return [path for named in _newest(run) for path in named.with_suffix("").glob(pattern)]


_states, _exported = partial(_beside, "state/*"), partial(_beside, "model.safetensors")


def _stored(store: Path, digests: Iterable[str]) -> list[Path]:
    """Return the existing files of a store by digest."""
    paths = (store / digest[:2] / digest for digest in digests)
    return [path for path in paths if path.is_file()]


def _manifests(run: Path) -> list[Path]:
    """Return the manifests of the checkpoints' weights, the newest first."""
    found = []
    for path in _newest(run):
        with contextlib.suppress(ValueError, KeyError):
            found.append(str(json.loads(path.read_text())["weights"]))
    return _stored(run / "store", found)


def _weights(run: Path) -> list[Path]:
    named = {digest for path in _manifests(run)[:1] for digest in DIGEST.findall(path.read_bytes())}
    return _stored(run / "store", (digest.decode() for digest in sorted(named)))


def _groups(run: Path) -> list[Path]:
    """Return the finished untrained groups, then those that a replay requests."""
    ready: dict[int, str] = {}
    trained: set[int] = set()
    for event in _events(run, "ready", "step"):
        fields = event["fields"]
        if event["kind"] == "ready":
            ready[fields["group"]] = fields["digest"]
        else:
            trained |= {row["group"] for row in fields["groups"]}
    waiting = [digest for group, digest in sorted(ready.items()) if group not in trained]
    again = [digest for group, digest in sorted(ready.items(), reverse=True) if group in trained]
    return _stored(run / "store" / GROUPS, waiting + again)


def _ledgers(run: Path) -> list[Path]:
    found = [path for path in run.glob("ledger/*/*.ledger") if path.stat().st_size > 64]
    return sorted(found, reverse=True)


def _matching(pattern: str) -> Callable[[Path], list[Path]]:
    return lambda run: sorted(path for path in run.glob(pattern) if path.is_file())


APPEND_ONLY = "mesh/redis/appendonlydir/"
KINDS: tuple[Kind, ...] = (
    Kind("checkpoint manifest", _newest, ("weights", "trainer")),
    Kind("optimizer state", _states, ("trainer",)),
    Kind("exported weights", _exported, ("trainer",), unneeded=HARMS),
    Kind("weights manifest", _manifests, ("weights", "trainer")),
    Kind("weights", _weights, ("trainer",)),
    Kind("group", _groups, ("trainer",)),
    Kind("store record", _matching("store/jobs/*.json"), ("weights",)),
    Kind("ledger header", _ledgers, ("rollout",), at_head=True),
    Kind("ledger", _ledgers, ("rollout",)),
    Kind("redis log", _matching(f"{APPEND_ONLY}*.incr.aof"), ("redis",)),
    Kind("redis snapshot", _matching(f"{APPEND_ONLY}*.base.*"), ("redis",)),
    Kind("redis manifest", _matching(f"{APPEND_ONLY}*.manifest"), ("redis",)),
    Kind("dataset", _matching("bundle/*/data/train.jsonl"), ("rollout",), recovers=False),
    Kind("tokenizer", _matching("bundle/*/tokenizer/tokenizer.json"), ("rollout",), recovers=False),
    Kind("code", _matching("bundle/*/modules/*.py"), ("sandbox",), recovers=False),
    Kind("job", _matching("job.json"), (LAUNCHER,)),
    Kind("events", _matching("events.jsonl"), (LAUNCHER,)),
    Kind("metrics", _matching("metrics.jsonl"), (LAUNCHER,)),
    Kind("usage", _matching("usage.json"), (LAUNCHER,), unneeded=("older",)),
    Kind("shape", _matching("mesh/shape.json"), (LAUNCHER,), unneeded=HARMS),
)
