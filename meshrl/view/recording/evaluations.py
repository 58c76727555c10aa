"""Steps and evaluations of a run that stand, as its events tell."""

from __future__ import annotations

from dataclasses import replace

from common.job.evaluation_plan import AFTER
from common.state import events


def last_standing_step(steps_done: int, new: list[events.Event], job: str) -> int:
    """The last step that stands: later ones were left behind by a new lineage."""
    left = [
        int(event.fields["version"])
        for event in new
        if event.kind in ("lineage", "restored") and event.fields.get("job") == job
    ]
    return max(0, min([steps_done, *left]))


def evaluated(known: list[events.Event], job: str) -> list[events.Event]:
    """The evaluations among events, where they outlive Redis; not those of versions that a new
    lineage has abandoned, and no other one is the best then if one of those was.
    """
    found: list[events.Event] = []
    for event in known:
        if event.fields.get("job") != job:
            continue
        if event.kind == "evaluation":
            found.append(event)
        elif event.kind == "changed" and event.fields.get("extended"):
            found = [_on_the_way(e) if e.fields["tag"] == AFTER else e for e in found]
        elif event.kind == "lineage":
            version = int(event.fields["version"])
            best = next((e for e in reversed(found) if e.fields.get("best")), None)
            found = [e for e in found if int(e.fields["step"]) <= version]
            if best not in found:
                found = [replace(e, fields=e.fields | {"best": False}) for e in found]
    return found


def _on_the_way(after: events.Event) -> events.Event:
    """The evaluation after training of a run that has gone on since."""
    return replace(after, fields=after.fields | {"tag": f"step-{after.fields['step']}"})
