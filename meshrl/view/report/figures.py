"""The figures of a report as data: the page draws them, and so does `meshrl report --png`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from meshrl.common.job.evaluation_plan import HELD_OUT
from meshrl.common.state.events import Event
from meshrl.view.history.run_snapshot import Evaluation
from meshrl.view.report.charts import Figure, Series

Points = list[tuple[float, float]]
Rows = Sequence[Mapping[str, Any]]


def every(rows: Rows, evaluations: Sequence[Evaluation], events: Sequence[Event]) -> list[Figure]:
    """All of them, in the order of the page; the timeline of gangs is not among them."""
    return [
        learning(rows, evaluations),
        *evaluated(evaluations),
        *health(rows, events),
        *trajectories(rows),
        times(rows),
    ]


def learning(rows: Rows, evaluations: Sequence[Evaluation]) -> Figure:
    """Reward and held-out over the steps."""
    held = [(float(e.step), e.sampled) for e in evaluations if e.sampled is not None]
    greedy = [(float(e.step), e.greedy) for e in evaluations if e.greedy is not None]
    return Figure(
        "Learning",
        [
            Series("reward of the step", column(rows, "reward")),
            Series("held-out, sampled", held, dots=True),
            Series("held-out, greedy", greedy, dots=True),
        ],
    )


def evaluated(evaluations: Sequence[Evaluation]) -> list[Figure]:
    """The figures of the datasets beside the held-out set, if there are any."""
    names = {n: 0 for e in evaluations for n in e.figures if not n.startswith(f"{HELD_OUT}.")}
    curves = [
        Series(n, [(float(e.step), e.figures[n]) for e in evaluations if n in e.figures], dots=True)
        for n in names
    ]
    return [Figure("Evaluation", curves)] if curves else []


def health(rows: Rows, events: Sequence[Event]) -> list[Figure]:
    """What to look at when it does not learn: failures first, then what the gradient is made of."""
    failed = column(rows, "failed_share") or failures(events)
    spread = "standard deviation of the rewards within a group"
    kl = [Series("from the policy that sampled", column(rows, "kl"))]
    for key, label in (("reference_kl", "from the reference"), ("teacher_kl", "from the teacher")):
        if points := column(rows, key):
            kl.append(Series(label, points))
    clipped = [
        Series("made likelier", column(rows, "clipped_high")),
        Series("made unlikelier", column(rows, "clipped_low")),
    ]
    speed = [
        Series("rolled out", per_second(rows, "tokens")),
        Series("trained", per_second(rows, "tokens_trained")),
    ]
    return [
        Figure("Failed trajectories, share", [Series("of the trajectories of a step", failed)]),
        Figure("Reward spread", [Series(spread, column(rows, "reward_spread"))]),
        Figure("Entropy", [Series("nats a token", column(rows, "entropy"))]),
        Figure("KL divergence, nats", kl),
        Figure("Gradient norm", [Series("before clipping", column(rows, "grad_norm"))]),
        Figure("Clipped tokens, share", clipped),
        Figure("Tokens a second", speed),
    ]


def trajectories(rows: Rows) -> list[Figure]:
    """What the trajectories of each step were like."""
    lengths = [
        Series("mean", column(rows, "length_mean")),
        Series("longest", column(rows, "length_max")),
    ]
    gap = [Series("largest of the step", column(rows, "logprob_gap"))]
    stale = [Series("mean over tokens", column(rows, "staleness"))]
    return [
        Figure("Length of trajectories, tokens", lengths),
        Figure("Staleness, versions", stale),
        Figure("Log-probability gap between engine and trainer", gap),
    ]


def times(rows: Rows) -> Figure:
    """What the core of the job has spent its time on."""
    waited = Series("waiting for trajectories", column(rows, "wait_s"))
    return Figure("Seconds a step", [Series("training", column(rows, "train_s")), waited])


def column(rows: Rows, key: str) -> Points:
    """(step, value) of the rows that have one."""
    return [(float(r["step"]), float(r[key])) for r in rows if r.get(key) is not None]


def failures(events: Sequence[Event]) -> Points:
    """(step, share of its trajectories that failed by type) of the lineage that stands."""
    found: dict[int, tuple[int, int]] = {}
    for event in events:
        if event.kind == "step":
            samples = sum(int(row["samples"]) for row in event.fields["groups"])
            scored = sum(int(row["scored"]) for row in event.fields["groups"])
            found[int(event.fields["step"])] = samples - scored, samples
        elif event.kind in ("lineage", "restored"):
            version = int(event.fields["version"])
            found = {step: share for step, share in found.items() if step <= version}
    return [(float(step), failed / of) for step, (failed, of) in sorted(found.items()) if of]


def per_second(rows: Rows, key: str) -> Points:
    """(step, tokens a second) between the commits of two steps that follow each other; the first
    step of a session, which took the break before it along, is left out.
    """
    spans = [(float(b["wall"]) - float(a["wall"]), b) for a, b in pairwise(rows) if "wall" in a]
    usual = sorted(span for span, _ in spans)[len(spans) // 2] if spans else 0.0
    return [
        (float(row["step"]), float(row[key]) / span)
        for span, row in spans
        if 0.0 < span < 20.0 * usual
    ]
