"""Invariants of every run, checked on its final state alone."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.base.digest import compute_digest
from meshrl.common.base.files.corruption import CORRUPTION_EVENT, QUARANTINE_DIRECTORY
from meshrl.sim.mesh.faults.corruption import APPENDED_KINDS, is_named_in, read_without_atime
from meshrl.sim.mesh.faults.state_observer import FinalState

Violations = Iterator[str]
_LEDGER_FRAME = struct.Struct("<IIB")
_LEDGER_HEADER = b"MRLEDGR\x03" + zlib.crc32(b"MRLEDGR\x03").to_bytes(4, "little")
_GROUP_END_EVENTS = {"requeued", "dropped", "filtered"}  # events that end one group


@dataclass(frozen=True)
class InvariantLimits:
    """Limits of the job."""

    steps: int
    max_staleness: int
    keep_checkpoints: int


def check_invariants(final_state: FinalState, limits: InvariantLimits) -> list[str]:
    """Check all invariants; return a line for each violation."""
    every: dict[str, Callable[[FinalState, InvariantLimits], Violations]] = {
        "exactly_once": check_exactly_once,
        "history": check_history,
        "silence": check_corruption_reported,
        "whole_steps": check_steps_contiguous,
        "staleness": check_staleness,
        "gate": check_group_indexes,
        "store": check_store,
        "ledgers": check_ledgers,
        "nothing_left": check_nothing_left,
        "the_end": check_final_phase,
    }
    return [
        f"{name}: {violation}"
        for name, one in every.items()
        for violation in one(final_state, limits)
    ]


def compute_fates(final_state: FinalState) -> tuple[set[int], dict[int, list[str]]]:
    """Compute the opened groups, and the end of each, in the current lineage."""
    opened: set[int] = set()
    ends: dict[int, list[str]] = {}

    def end(group: int, how: str) -> None:
        ends.setdefault(group, []).append(how)

    for kind, fields in final_state.events:
        if kind == "opened":
            opened.update(fields["groups"])
        elif kind == "stale":
            for row in fields["groups"]:
                end(row["group"], "stale")
        elif kind in _GROUP_END_EVENTS:
            end(fields["group"], kind)
        elif kind == "step":
            for row in fields["groups"]:
                end(row["group"], f"step {fields['step']}")
        elif kind == "restored":  # by a resume, after Redis had lost its state
            opened, ends = set(), {}
        elif kind == "lineage":
            for group, hows in ends.items():
                # an older checkpoint does not contain its groups
                lost_through = fields.get("lost_through", 0)
                is_lost = any(
                    _is_later_step(how, fields["version"]) and not _is_later_step(how, lost_through)
                    for how in hows
                )
                remaining = [how for how in hows if not _is_later_step(how, fields["version"])]
                ends[group] = [*remaining, "lost"] if is_lost else remaining
    return opened, {group: hows for group, hows in ends.items() if hows}


def check_history(final_state: FinalState, limits: InvariantLimits) -> Violations:
    """Check that a version of a lineage has one manifest, and a group number is used once.

    Redis may have lost state in between.
    """
    manifests: dict[tuple[int, int], set[str]] = {}
    opened: Counter[int] = Counter()
    for kind, fields in final_state.history:
        if kind == "opened":
            opened.update(fields["groups"])
        elif kind == "step":
            manifests.setdefault((fields["lineage"], fields["step"]), set()).add(fields["manifest"])
    for (lineage, step), digests in sorted(manifests.items()):
        if len(digests) > 1:
            yield f"version {step} of lineage {lineage} has {len(digests)} manifests"
    duplicates = sorted(group for group, times in opened.items() if times > 1)
    if duplicates:
        yield f"{len(duplicates)} groups were opened twice: {duplicates[:5]}"


def check_corruption_reported(final_state: FinalState, limits: InvariantLimits) -> Violations:
    """Check that corruption is reported once the file was read."""
    reports = [str(fields) for kind, fields in final_state.history if kind == CORRUPTION_EVENT]
    reports += [final_state.start_error, str(final_state.job_row.get("error"))]
    for damage in final_state.corruptions:
        if damage.kind in APPENDED_KINDS and not _has_record_after_gap(
            read_without_atime(damage.link)
        ):
            continue  # as after a power cut
        if damage.path in final_state.replaced_files:
            continue  # quarantined when it was written again
        if damage.was_read and not any(is_named_in(damage.path, text) for text in reports):
            yield f"{damage.path} ({damage.method}) was read, but its corruption was not reported"


def _has_record_after_gap(segment: bytes) -> bool:
    """Return True if a complete record follows invalid data."""
    gap = not segment.startswith(_LEDGER_HEADER)
    offset = 0 if gap else len(_LEDGER_HEADER)
    while offset + _LEDGER_FRAME.size <= len(segment):
        length, crc, kind = _LEDGER_FRAME.unpack_from(segment, offset)
        end = offset + _LEDGER_FRAME.size + length
        if length and end <= len(segment) and zlib.crc32(segment[end - length : end], kind) == crc:
            if gap:
                return True
            offset = end
        else:
            gap, offset = True, offset + 1
    return False


def _is_later_step(fate: str, version: int) -> bool:
    return fate.startswith("step ") and int(fate.removeprefix("step ")) > version


def check_exactly_once(final_state: FinalState, limits: InvariantLimits) -> Violations:
    """Check that every opened group has exactly one end, or is in flight."""
    opened, ends = compute_fates(final_state)
    for group, hows in sorted(ends.items()):
        if len(hows) > 1:
            yield f"group {group} ended more than once: {hows}"
        if group not in opened:
            yield f"group {group} ended ({hows}) but was never opened"
        if group in final_state.group_rows:
            yield f"group {group} ended ({hows}) and is in flight"
    for group in sorted(opened - ends.keys() - final_state.group_rows.keys()):
        yield f"group {group} is lost"


def check_steps_contiguous(final_state: FinalState, limits: InvariantLimits) -> Violations:
    """Check that the steps of the current lineage are contiguous up to the current version."""
    steps: list[int] = []
    for kind, fields in final_state.events:
        if kind == "step":
            steps.append(fields["step"])
        elif kind == "restored":
            steps = list(range(1, fields["version"] + 1))
        elif kind == "lineage":
            steps = [step for step in steps if step <= fields["version"]]
    version = int(final_state.job_row.get("version", -1))
    if steps != list(range(1, version + 1)):
        yield f"version {version} consists of the steps {steps}"
    finished = final_state.job_row.get("phase") == "finished"
    if version >= 0 and finished and final_state.job_row["manifest"] not in final_state.chunks:
        yield f"the manifest of version {version} is not stored"


def check_staleness(final_state: FinalState, limits: InvariantLimits) -> Violations:
    """Check that no trained token is staler than the limit, or of a later version.

    With a limit of 0, the weights that a step trains have sampled all of its tokens.
    """
    for kind, fields in final_state.events:
        if kind != "step":
            continue
        for row in fields["groups"]:
            observed = final_state.trained_groups.get(
                (fields["lineage"], fields["step"], row["group"])
            )
            if (fields["lineage"], fields["step"], row["group"]) in final_state.unreadable_groups:
                continue
            if observed is None:
                yield (
                    f"step {fields['step']} trained on group {row['group']}, which was not observed"
                )
                continue
            if row["filtered"] or observed.oldest_version < 0:
                continue
            version, oldest = fields["step"] - 1, observed.oldest_version
            is_foreign = 0 <= observed.abandoned_above < observed.newest_version
            if is_foreign:  # some tokens are of an abandoned lineage: never of these weights
                oldest = min(oldest, observed.abandoned_above)
            age = max(version - oldest, int(is_foreign))
            if age > limits.max_staleness:
                yield f"step {fields['step']} trained on group {row['group']}, {age} versions old"
            if observed.newest_version > version and not is_foreign:
                yield f"step {fields['step']} trained on group {row['group']} of a later version"


def check_group_indexes(final_state: FinalState, limits: InvariantLimits) -> Violations:
    """Check that rows and indexes agree, and that no group blocks the gate forever."""
    counted = Counter(group for groups in final_state.groups_by_state.values() for group in groups)
    for group in sorted(counted.keys() | final_state.group_rows.keys()):
        if counted[group] != 1 or group not in final_state.group_rows:
            where = [
                state for state, groups in final_state.groups_by_state.items() if group in groups
            ]
            yield f"group {group}: row {group in final_state.group_rows}, in the indexes {where}"
        elif group not in final_state.groups_by_state[final_state.group_rows[group]["state"]]:
            yield (
                f"group {group} is {final_state.group_rows[group]['state']}, but not in that index"
            )
    if final_state.groups_by_state.get("leased") and final_state.job_row.get("phase") == "finished":
        yield f"groups {final_state.groups_by_state['leased']} are leased after the last step"


def check_store(final_state: FinalState, limits: InvariantLimits) -> Violations:
    """Check that each chunk matches its digest, and that checkpoints are limited."""
    damaged = {Path(damage.path).name for damage in final_state.corruptions}
    for name, content in final_state.chunks.items():
        if not name.startswith(".") and name not in damaged and compute_digest(content) != name:
            yield f"chunk {name} does not match the digest in its name"
    written = [name for name in final_state.checkpoints if name.endswith(".json")]
    if len(written) > limits.keep_checkpoints + 1:  # the last one expires at the next sweep
        yield f"{len(written)} checkpoints are retained: {written}"
    for name in written:
        if name.removesuffix(".json") not in final_state.checkpoints:
            yield f"checkpoint {name} has no directory"


def check_ledgers(final_state: FinalState, limits: InvariantLimits) -> Violations:
    """Check that segments contain complete records, and at most one torn one at the end."""
    damaged = {damage.path for damage in final_state.corruptions}
    for name, content in final_state.ledgers.items():
        if name in damaged or QUARANTINE_DIRECTORY in Path(name).parts:
            continue
        if (
            content
            and not content.startswith(_LEDGER_HEADER)
            and any(content[: len(_LEDGER_HEADER)])
        ):
            yield f"{name} begins with {content[:8]!r}"
            continue
        offset = len(_LEDGER_HEADER)
        while offset + _LEDGER_FRAME.size <= len(content):
            length, crc, kind = _LEDGER_FRAME.unpack_from(content, offset)
            start = offset + _LEDGER_FRAME.size
            if start + length > len(content):
                break
            if zlib.crc32(content[start : start + length], kind) != crc:
                yield f"{name} has a corrupt record at {offset}"
                break
            offset = start + length


def check_nothing_left(final_state: FinalState, limits: InvariantLimits) -> Violations:
    """Check that the stopped mesh holds no resources, and that no process exited by a defect."""
    for lease in final_state.leases:
        yield f"{lease} is still held"
    yield from final_state.leftovers
    yield from final_state.errors


def check_final_phase(final_state: FinalState, limits: InvariantLimits) -> Violations:
    """Check the end of the job. It has finished in time after the last fault, or it has failed or
    was not restarted with a message that names a corrupt file.
    """
    damaged_paths = final_state.lost_files | {damage.path for damage in final_state.corruptions}
    error = final_state.start_error or str(final_state.job_row.get("error"))
    if final_state.job_row.get("phase") != "finished" or final_state.start_error:
        if not any(is_named_in(path, error) for path in damaged_paths):
            yield f"the job is {final_state.job_row.get('phase')}: {error}"
    elif int(final_state.job_row["version"]) != limits.steps:
        yield f"the job finished at version {final_state.job_row['version']} of {limits.steps}"
    if final_state.finished_late_s:
        yield f"it finished {final_state.finished_late_s:.0f} s late"
