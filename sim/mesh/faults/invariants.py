"""What must hold after every run, checked on the facts alone."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.base.digest import digest_of
from meshrl.common.base.files.damage import EVENT, QUARANTINE
from meshrl.sim.mesh.faults.damage import APPENDED, named_in, unnoticed
from meshrl.sim.mesh.faults.witness import Facts

Violations = Iterator[str]
_FRAME = struct.Struct("<IIB")
_HEADER = b"MRLEDGR\x03" + zlib.crc32(b"MRLEDGR\x03").to_bytes(4, "little")
_ENDS = {"requeued", "dropped", "filtered"}  # events that end one group


@dataclass(frozen=True)
class MeshTerms:
    """What the job was given."""

    steps: int
    max_staleness: int
    keep_checkpoints: int


def check(facts: Facts, terms: MeshTerms) -> list[str]:
    """A line for each violation."""
    every: tuple[Callable[[Facts, MeshTerms], Violations], ...] = (
        exactly_once,
        history,
        silence,
        whole_steps,
        staleness,
        gate,
        store,
        ledgers,
        nothing_left,
        the_end,
    )
    return [f"{one.__name__}: {told}" for one in every for told in one(facts, terms)]


def fates(facts: Facts) -> tuple[set[int], dict[int, list[str]]]:
    """Groups that were opened, and how each of them ended, in the lineage that stands."""
    opened: set[int] = set()
    ends: dict[int, list[str]] = {}

    def end(group: int, how: str) -> None:
        ends.setdefault(group, []).append(how)

    for kind, told in facts.events:
        if kind == "opened":
            opened.update(told["groups"])
        elif kind == "stale":
            for row in told["groups"]:
                end(row["group"], "stale")
        elif kind in _ENDS:
            end(told["group"], kind)
        elif kind == "step":
            for row in told["groups"]:
                end(row["group"], f"step {told['step']}")
        elif kind == "restored":  # by a resume, after Redis had lost all it had
            opened, ends = set(), {}
        elif kind == "lineage":
            for group, hows in ends.items():
                gone = told.get("lost_through", 0)  # an older checkpoint tells not of its groups
                lost = any(_after(how, told["version"]) and not _after(how, gone) for how in hows)
                kept = [how for how in hows if not _after(how, told["version"])]
                ends[group] = [*kept, "lost"] if lost else kept
    return opened, {group: hows for group, hows in ends.items() if hows}


def history(facts: Facts, terms: MeshTerms) -> Violations:
    """Whatever Redis has lost since: a version of a lineage has one manifest, and a group's number
    is used once.
    """
    manifests: dict[tuple[int, int], set[str]] = {}
    opened: Counter[int] = Counter()
    for kind, told in facts.history:
        if kind == "opened":
            opened.update(told["groups"])
        elif kind == "step":
            manifests.setdefault((told["lineage"], told["step"]), set()).add(told["manifest"])
    for (lineage, step), made in sorted(manifests.items()):
        if len(made) > 1:
            yield f"version {step} of lineage {lineage} has {len(made)} manifests"
    twice = sorted(group for group, times in opened.items() if times > 1)
    if twice:
        yield f"{len(twice)} groups were opened twice: {twice[:5]}"


def silence(facts: Facts, terms: MeshTerms) -> Violations:
    """Damage that somebody has read is told."""
    told = [str(fields) for kind, fields in facts.history if kind == EVENT]
    told += [facts.refused, str(facts.job.get("error"))]
    for damage in facts.damages:
        if damage.kind in APPENDED and not _whole_behind(unnoticed(damage.link)):
            continue  # as after a power cut
        if damage.path in facts.replaced:
            continue  # it was set aside when it was written again
        if damage.read and not any(named_in(damage.path, text) for text in told):
            yield f"{damage.path} ({damage.how}) was read, and nobody said so"


def _whole_behind(segment: bytes) -> bool:
    """Whether a whole record lies behind something that is none."""
    gap = not segment.startswith(_HEADER)
    offset = 0 if gap else len(_HEADER)
    while offset + _FRAME.size <= len(segment):
        length, crc, kind = _FRAME.unpack_from(segment, offset)
        end = offset + _FRAME.size + length
        if length and end <= len(segment) and zlib.crc32(segment[end - length : end], kind) == crc:
            if gap:
                return True
            offset = end
        else:
            gap, offset = True, offset + 1
    return False


def _after(how: str, version: int) -> bool:
    return how.startswith("step ") and int(how.removeprefix("step ")) > version


def exactly_once(facts: Facts, terms: MeshTerms) -> Violations:
    """Every group that was opened has one fate, or is in flight."""
    opened, ends = fates(facts)
    for group, hows in sorted(ends.items()):
        if len(hows) > 1:
            yield f"group {group} ended more than once: {hows}"
        if group not in opened:
            yield f"group {group} ended ({hows}) and was never opened"
        if group in facts.rows:
            yield f"group {group} ended ({hows}) and is in flight"
    for group in sorted(opened - ends.keys() - facts.rows.keys()):
        yield f"group {group} is lost"


def whole_steps(facts: Facts, terms: MeshTerms) -> Violations:
    """The steps of the lineage that stands follow each other up to the current version."""
    steps: list[int] = []
    for kind, told in facts.events:
        if kind == "step":
            steps.append(told["step"])
        elif kind == "restored":
            steps = list(range(1, told["version"] + 1))
        elif kind == "lineage":
            steps = [step for step in steps if step <= told["version"]]
    version = int(facts.job.get("version", -1))
    if steps != list(range(1, version + 1)):
        yield f"version {version} is made of the steps {steps}"
    finished = facts.job.get("phase") == "finished"
    if version >= 0 and finished and facts.job["manifest"] not in facts.chunks:
        yield f"the manifest of version {version} is not stored"


def staleness(facts: Facts, terms: MeshTerms) -> Violations:
    """No stored token that a step trained on is older than it may be."""
    for kind, told in facts.events:
        if kind != "step":
            continue
        for row in told["groups"]:
            seen = facts.trained.get((told["lineage"], told["step"], row["group"]))
            if (told["lineage"], told["step"], row["group"]) in facts.unseen:
                continue
            if seen is None:
                yield f"step {told['step']} trained on group {row['group']}, which nobody saw"
                continue
            oldest = seen.oldest
            if seen.foreign_above >= 0:
                oldest = min(oldest, seen.foreign_above)
            age = told["step"] - 1 - oldest
            if not row["filtered"] and seen.oldest >= 0 and age > terms.max_staleness:
                yield f"step {told['step']} trained on group {row['group']}, {age} versions old"


def gate(facts: Facts, terms: MeshTerms) -> Violations:
    """Rows and indexes agree, and none holds the gate for ever."""
    counted = Counter(group for groups in facts.indexes.values() for group in groups)
    for group in sorted(counted.keys() | facts.rows.keys()):
        if counted[group] != 1 or group not in facts.rows:
            where = [state for state, groups in facts.indexes.items() if group in groups]
            yield f"group {group}: row {group in facts.rows}, in the indexes {where}"
        elif group not in facts.indexes[facts.rows[group]["state"]]:
            yield f"group {group} is {facts.rows[group]['state']} and not in that index"
    if facts.indexes.get("leased") and facts.job.get("phase") == "finished":
        yield f"groups {facts.indexes['leased']} are leased after the last step"


def store(facts: Facts, terms: MeshTerms) -> Violations:
    """Each chunk is what its name says, and checkpoints are few."""
    damaged = {Path(damage.path).name for damage in facts.damages}
    for name, content in facts.chunks.items():
        if not name.startswith(".") and name not in damaged and digest_of(content) != name:
            yield f"chunk {name} is not what its name says"
    written = [name for name in facts.checkpoints if name.endswith(".json")]
    if len(written) > terms.keep_checkpoints + 1:  # the last one expires at the next sweep
        yield f"{len(written)} checkpoints are kept: {written}"
    for name in written:
        if name.removesuffix(".json") not in facts.checkpoints:
            yield f"checkpoint {name} has no directory"


def ledgers(facts: Facts, terms: MeshTerms) -> Violations:
    """Segments hold whole records up to at most one torn one."""
    damaged = {damage.path for damage in facts.damages}
    for name, content in facts.ledgers.items():
        if name in damaged or QUARANTINE in Path(name).parts:
            continue
        if content and not content.startswith(_HEADER) and any(content[: len(_HEADER)]):
            yield f"{name} begins with {content[:8]!r}"
            continue
        offset = len(_HEADER)
        while offset + _FRAME.size <= len(content):
            length, crc, kind = _FRAME.unpack_from(content, offset)
            start = offset + _FRAME.size
            if start + length > len(content):
                break
            if zlib.crc32(content[start : start + length], kind) != crc:
                yield f"{name} holds a record at {offset} that does not add up"
                break
            offset = start + length


def nothing_left(facts: Facts, terms: MeshTerms) -> Violations:
    """The mesh that has ended holds nothing, and no process fell to a defect."""
    for lease in facts.leases:
        yield f"{lease} is still held"
    yield from facts.left
    yield from facts.errors


def the_end(facts: Facts, terms: MeshTerms) -> Violations:
    """The job has finished, in time after the last fault; or it has failed, or was not started
    again, by a message that names a damaged file.
    """
    spoiled = facts.lost | {damage.path for damage in facts.damages}
    error = facts.refused or str(facts.job.get("error"))
    if facts.job.get("phase") != "finished" or facts.refused:
        if not any(named_in(path, error) for path in spoiled):
            yield f"the job is {facts.job.get('phase')}: {error}"
    elif int(facts.job["version"]) != terms.steps:
        yield f"it finished at version {facts.job['version']} of {terms.steps}"
    if facts.finished_late_s:
        yield f"it was {facts.finished_late_s:.0f} s late"
