"""Account of trajectories: detects lost and twice trained ones from events and group rows.

The formula, all in trajectories, is `lost = opened - (trained + filtered + stale_requeued +
host_lost + typed_drops + in_flight)`. Each term is counted from its own events, none by
subtraction. Only steps of the current lineage count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from meshrl.common.state.events import Event

# Counts that are 0 in a correct run, and their descriptions.
VIOLATIONS = {
    "lost": "opened trajectories that are accounted for nowhere",
    "trained_twice": "trajectories in more than one step",
    "opened_twice": "groups whose number was assigned twice",
    "committed_twice": "versions of a lineage that were committed with different weights",
}
TERMS = ("opened", "trained", "filtered", "stale_requeued", "host_lost", "typed_drops")


def compute_account(events: Iterable[Event], in_flight: int, job: str = "") -> dict[str, int]:
    """Return the terms, and the counts of `VIOLATIONS`.

    `events` are all of the mesh in order, of which those of `job` count (all, when empty);
    `in_flight` is the number of trajectories in groups that are open, ready or leased
    (`groups.count_in_flight(...).samples`).
    """
    terms = dict.fromkeys(TERMS, 0)
    steps: dict[int, list[dict[str, Any]]] = {}
    opened: set[int] = set()  # in all lineages: ids of groups are never reused
    committed: dict[tuple[int, int], set[str]] = {}
    repeated = 0
    for event in events:
        fields = event.fields
        if job and fields.get("job") != job:
            continue
        match event.kind:
            case "opened":
                terms["opened"] += fields["samples"] * len(fields["groups"])
                repeated += len(opened.intersection(fields["groups"]))
                opened.update(fields["groups"])
            case "stale":
                terms["stale_requeued"] += sum(row["samples"] for row in fields["groups"])
            case "requeued":
                terms["host_lost"] += fields["samples"]
            case "dropped":
                terms["typed_drops"] += fields["samples"]
            case "filtered":
                terms["filtered"] += fields["samples"]
                terms["typed_drops"] += fields["failed"]
            case "step":
                steps[fields["step"]] = fields["groups"]
                version = fields.get("lineage", 0), fields["step"]
                committed.setdefault(version, set()).add(fields.get("manifest", ""))
            case "lineage":
                steps = {step: rows for step, rows in steps.items() if step <= fields["version"]}
                if "lost_through" in fields:  # it returned to before the covered steps
                    terms["host_lost"] += fields["host_lost"]
                    standing = _add_steps(dict.fromkeys(TERMS, 0), steps, 0)
                    for term, count in fields["counts"].items():
                        terms[term] = count - standing[term]
            case "restored":
                terms, steps = {term: fields["counts"][term] for term in TERMS}, {}
            case "history_lost":  # the counts of Redis' rows replace those of the trimmed events
                terms = {term: fields["counts"][term] for term in TERMS}
                steps = {row["step"]: row["groups"] for row in fields["steps"]}
    others = sum(len(manifests) - 1 for manifests in committed.values())
    found = _add_steps(terms, steps, in_flight)
    return found | {"opened_twice": repeated, "committed_twice": others}


def format_violations(account: Mapping[str, int | None]) -> str:
    """Return the violations of an account as text; empty if there are none."""
    bad = {key: account.get(key) for key in VIOLATIONS if account.get(key)}
    return ", ".join(f"{key} = {number} ({VIOLATIONS[key]})" for key, number in bad.items())


def _add_steps(
    terms: dict[str, int], steps: dict[int, list[dict[str, Any]]], in_flight: int
) -> dict[str, int]:
    times: Counter[int] = Counter()
    scored: dict[int, int] = {}
    for rows in steps.values():
        for row in rows:
            terms["filtered" if row["filtered"] else "trained"] += row["scored"]
            terms["typed_drops"] += row["samples"] - row["scored"]
            if not row["filtered"]:
                times[row["group"]] += 1
                scored[row["group"]] = row["scored"]
    lost = terms["opened"] - sum(terms[term] for term in TERMS[1:]) - in_flight
    twice = sum(scored[group] for group, n in times.items() if n > 1)
    return terms | {"in_flight": in_flight, "lost": lost, "trained_twice": twice}
