"""Files of a run, the account of its history, and its contradictions."""

from __future__ import annotations

import json
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

BEGUN_MS = 10_000  # so soon after its admission a group is in the ledger
TERMS = ("opened", "trained", "filtered", "stale_requeued", "host_lost", "typed_drops")
IDS_APART = 1_000_000_000  # of the groups of two lineages, between which Redis was lost
_HEADERS = {2: 8, 3: 12}  # bytes of a segment's header, by format
_FRAME = struct.Struct("<IIB")  # payload bytes, CRC-32 of kind and payload, kind
_TOKENS = struct.Struct("<6BH3Iq")  # format, five widths, experts, rows, tokens, runs, first group
_OPEN, _TOKEN_ROWS, _CLOSE = 1, 2, 7  # kinds of records; others are identified by their first word


@dataclass
class Files:
    job: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    ledger: set[int] = field(default_factory=set)  # groups that it names
    mark: dict[str, Any] = field(default_factory=dict)  # groups in flight at a clean end
    problems: list[str] = field(default_factory=list)


def read(run: Path) -> Files:
    """Read all files of a run; unreadable content is a problem. FileNotFoundError if there is no
    run.
    """
    found = Files(job=str(json.loads((run / "job.json").read_bytes())["job"]))
    found.events = list(_events(run / "events.jsonl", found.problems))
    for path in sorted((run / "checkpoints").glob("step-*.json")):
        try:
            found.checkpoints.append(json.loads(path.read_bytes()))
        except ValueError:
            found.problems.append(f"{path.name} is not JSON")
    for path in sorted((run / "ledger").rglob("*.ledger")):
        found.ledger |= _groups(path, found.problems)
    if (run / "in_flight.json").is_file():
        found.mark = json.loads((run / "in_flight.json").read_bytes())
    return found


def _events(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Return the events, one per line; the text after the last newline is torn."""
    last = (0, 0)
    content = path.read_bytes() if path.is_file() else b""
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            event = json.loads(line)
            ms, _, count = event["id"].partition("-")
            here = int(ms), int(count)
            event["fields"]["job"] = event["fields"].get("job", "")
        except (ValueError, KeyError, TypeError) as error:
            problems.append(f"{path.name}, line {number} does not read: {error!r}")
            continue
        if here <= last:
            problems.append(f"{path.name}, line {number}: event {event['id']} does not follow")
        last = here
        yield event


def _groups(path: Path, problems: list[str]) -> set[int]:
    """Return the groups in the complete records of a segment."""
    content, found = path.read_bytes(), set[int]()
    if not content:
        return found
    at = _HEADERS.get(content[7], 0) if content.startswith(b"MRLEDGR") and len(content) > 7 else 0
    if not at:
        problems.append(f"{path.name} is no segment that is known")
        return found
    while at + _FRAME.size <= len(content):
        length, crc, kind = _FRAME.unpack_from(content, at)
        payload = content[at + _FRAME.size : at + _FRAME.size + length]
        if len(payload) < length or zlib.crc32(payload, kind) != crc:
            break  # torn
        at += _FRAME.size + length
        found |= _mentioned(kind, payload)
    return found


def _mentioned(kind: int, payload: bytes) -> set[int]:
    if kind & 0x80:
        kind, payload = kind & 0x7F, zlib.decompress(payload, -12)
    if kind == _TOKEN_ROWS:
        _, width, _, _, _, _, _, rows, _, _, first = _TOKENS.unpack_from(payload)
        column = payload[_TOKENS.size : _TOKENS.size + rows * width]
        words = (column[i : i + width] for i in range(0, len(column), width or 1))
        return {first + int.from_bytes(word, "little") for word in words} or {first}
    number = int(msgpack.unpackb(payload, strict_map_key=False)[0])
    return {number if kind in (_OPEN, _CLOSE) else number >> 12}


@dataclass
class Story:
    """History so far, in the current lineage."""

    lineage: int = 0
    version: int = -1
    restored: int = 0  # the lineage in which the job was put back last
    base: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TERMS, 0))
    sizes: dict[int, int] = field(default_factory=dict)  # trajectories of a group
    since: dict[int, int] = field(default_factory=dict)  # when it was opened
    ends: dict[int, list[tuple[str, int, int]]] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    steps: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    paused: int = 0  # time of the pause; 0: not paused
    stood: int = 0  # milliseconds that it stood still

    def stand(self, event: dict[str, Any]) -> None:
        """Record whether this event pauses or resumes the job."""
        if event["kind"] == "admission":
            paused = str(event["fields"]["held"]).startswith("paused")
            if self.paused and not paused:
                self.stood += event["ms"] - self.paused
            self.paused = (self.paused or event["ms"]) if paused else 0

    def went(self, ms: int) -> int:
        """Time of the job by then, without the pauses."""
        return (self.paused or ms) - self.stood

    def end(self, group: int, term: str, trajectories: int, failed: int = 0) -> None:
        self.ends.setdefault(group, []).append((term, trajectories, failed))


def check(run: Path) -> dict[str, Any]:
    """Return the account, and `problems`, which is empty for a correct history."""
    files = read(run)
    problems, story = files.problems, Story()
    ever: Counter[int] = Counter()
    manifests: dict[tuple[int, int], list[str]] = {}
    for event in files.events:
        told = event["fields"]
        if told["job"] != files.job:
            continue
        story.stand(event)
        if event["kind"] == "opened":
            ever.update(told["groups"])
        if event["kind"] in ("step", "initial"):
            known = manifests.setdefault((told["lineage"], told["version"]), [])
            if told["manifest"] not in known:
                known.append(told["manifest"])
        story = _after(story, event, problems)
    found = _account(story, files)
    twice = [group for group, times in ever.items() if times > 1]
    found["opened_twice"] = sum(times - 1 for times in ever.values())
    found["committed_twice"] = sum(len(known) - 1 for known in manifests.values())
    if twice:
        problems.append(f"{len(twice)} groups were opened twice, group {min(twice)} first")
    for (lineage, version), known in manifests.items():
        if len(known) > 1:
            problems.append(f"version {version} of lineage {lineage} is {' and '.join(known)}")
    if found["lost"]:
        problems.append(f"{found['lost']} trajectories are lost")
    problems += _checkpoints(files, manifests)
    problems += _ledger(files, story, set(ever))
    return found | {"lineage": story.lineage, "version": story.version, "problems": problems}


def _after(story: Story, event: dict[str, Any], problems: list[str]) -> Story:
    told, kind = event["fields"], event["kind"]
    if kind == "opened":
        for group in told["groups"]:
            story.sizes[group], story.since[group] = told["samples"], story.went(event["ms"])
    elif kind == "ready":
        story.ready.add(told["group"])
    elif kind == "requeued":
        story.end(told["group"], "host_lost", told["samples"])
    elif kind == "dropped":
        story.end(told["group"], "typed_drops", told["samples"])
    elif kind == "filtered":
        story.end(told["group"], "filtered", told["samples"], told["failed"])
    elif kind == "stale":
        for row in told["groups"]:
            story.end(row["group"], "stale_requeued", row["samples"])
    elif kind == "initial":
        story.version = 0
    elif kind == "step":
        if (told["lineage"], told["step"]) != (story.lineage, story.version + 1):
            problems.append(
                f"step {told['step']} of lineage {told['lineage']} follows version "
                f"{story.version} of lineage {story.lineage}"
            )
        story.version = told["step"]
        story.steps[told["step"]] = told["groups"]
    elif kind in ("lineage", "restored"):
        if told["lineage"] <= story.lineage:
            problems.append(f"lineage {told['lineage']} follows lineage {story.lineage}")
        if kind == "restored":
            new = Story(told["lineage"], told["version"], told["lineage"], dict(told["counts"]))
            new.paused, new.stood = story.paused, story.stood
            return new
        story.lineage, story.version = told["lineage"], told["version"]
        gone = {n: rows for n, rows in story.steps.items() if n > told["version"]}
        story.steps = {n: rows for n, rows in story.steps.items() if n not in gone}
        if "lost_through" in told:  # back behind what covered steps: their groups are in no row
            for rows in (rows for n, rows in gone.items() if n <= told["lost_through"]):
                for row in rows:
                    story.end(row["group"], "host_lost", 0)  # counted as one, by what is told
            stands = _by_term(story)
            story.base["host_lost"] += told["host_lost"]
            for term, count in told["counts"].items():
                story.base[term] += count - stands[term]
    return story


def _by_term(story: Story) -> Counter[str]:
    """Count trajectories by outcome, in the committed steps and outside of them."""
    found = Counter(story.base)
    for ends in story.ends.values():
        for term, trajectories, failed in ends:
            found[term] += trajectories
            found["typed_drops"] += failed
    for rows in story.steps.values():
        for row in rows:
            found["filtered" if row["filtered"] else "trained"] += row["scored"]
            found["typed_drops"] += row["samples"] - row["scored"]
    return found


def _account(story: Story, files: Files) -> dict[str, Any]:
    """Return the trajectories by outcome; a group that ends twice is a problem."""
    found = dict(_by_term(story))
    ends = {group: [term for term, _, _ in hows] for group, hows in story.ends.items()}
    trained: Counter[int] = Counter()
    for number, rows in story.steps.items():
        for row in rows:
            trained[row["group"]] += not row["filtered"]
            ends.setdefault(row["group"], []).append("filtered" if row["filtered"] else "trained")
            if row["group"] not in story.sizes:
                files.problems.append(f"step {number} took group {row['group']}: nobody opened it")
    for group, terms in ends.items():
        if len(terms) > 1:
            files.problems.append(f"group {group} ended more than once: {' and '.join(terms)}")
    found["opened"] += sum(story.sizes.values())
    found["in_flight"] = _in_flight(story, files, story.sizes.keys() - ends.keys())
    found["lost"] = found["opened"] - sum(found[term] for term in (*TERMS[1:], "in_flight"))
    by_group = {row["group"]: row["scored"] for rows in story.steps.values() for row in rows}
    found["trained_twice"] = sum(by_group[group] for group, n in trained.items() if n > 1)
    return found


def _clean(files: Files) -> bool:
    """Return True if the run was stopped in order, so that its groups in flight are recorded."""
    return bool(files.events) and files.mark.get("event") == files.events[-1]["id"]


def _in_flight(story: Story, files: Files, without_end: set[int]) -> int:
    if _clean(files):
        return int(files.mark["samples"])
    last = story.went(files.events[-1]["ms"]) if files.events else 0
    return sum(
        story.sizes[group]
        for group in without_end
        if group in story.ready or group in files.ledger or last - story.since[group] < BEGUN_MS
    )


def _checkpoints(files: Files, manifests: dict[tuple[int, int], list[str]]) -> list[str]:
    """Check checkpoints: one may hold an uncommitted step, but only weights of a known version."""
    found = []
    for held in files.checkpoints:
        committed = manifests.get((held["lineage"], held["step"]), [held["weights"]])
        if held["weights"] not in committed:
            found.append(
                f"the checkpoint of version {held['step']} of lineage {held['lineage']} holds "
                f"{held['weights']}, and {' and '.join(committed)} was committed"
            )
    return found


def _ledger(files: Files, story: Story, opened: set[int]) -> list[str]:
    """Check that the ledger's groups were opened since the job was last restored.

    The record may lack older groups that Redis lost, and after a crash the last moment.
    """
    if not _clean(files):
        return []
    least = story.restored * IDS_APART
    strange = {group for group in files.ledger - opened if group >= least}
    return [f"the ledger tells of group {group}: nobody opened it" for group in sorted(strange)]
