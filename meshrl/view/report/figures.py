"""Figures of a report as data: the page draws them, and so does `meshrl report --png`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from meshrl.common.job.evaluation_plan import LOSS_METRIC, NAMED_APART
from meshrl.common.state.events import Event
from meshrl.view.history.run_snapshot import Evaluation
from meshrl.view.mesh.rates import is_supervised_step
from meshrl.view.report.charts import Figure, Series

Points = list[tuple[float, float]]
# Figures of the policy that samples.
SAMPLING_TITLES = ("Reward spread", "Loss", "KL divergence, nats", "Clipped tokens, share")
METRIC_PREFIXES = ("reward/", "environment/")
MAX_METRIC_FIGURES = 24
StepRows = Sequence[Mapping[str, Any]]


def make_figures(
    rows: StepRows, evaluations: Sequence[Evaluation], events: Sequence[Event]
) -> list[Figure]:
    """Return all figures in the order of the page, except the timeline of gangs."""
    return [
        make_learning_figure(rows, evaluations),
        *make_evaluation_figures(evaluations),
        *make_health_figures(rows, events),
        *make_trajectory_figures(rows),
        make_time_figure(rows),
        *make_metric_figures(rows),
    ]


def make_learning_figure(rows: StepRows, evaluations: Sequence[Evaluation]) -> Figure:
    """Return the figure of reward and held-out reward over the steps, or of a supervised job's
    losses.
    """
    if _is_supervised(rows):
        held_out_losses = extract_column(rows, LOSS_METRIC)
        curves = [Series("of the step", extract_column(rows, "loss"))]
        curves += [Series("held-out", held_out_losses, has_dots=True)] if held_out_losses else []
        return Figure("Loss, nats a token", curves)
    held_out = [
        (float(e.step), e.sampled_reward) for e in evaluations if e.sampled_reward is not None
    ]
    greedy = [(float(e.step), e.greedy_reward) for e in evaluations if e.greedy_reward is not None]
    return Figure(
        "Learning",
        [
            Series("reward of the step", extract_column(rows, "reward")),
            Series("held-out, sampled", held_out, has_dots=True),
            Series("held-out, greedy", greedy, has_dots=True),
        ],
    )


def make_evaluation_figures(evaluations: Sequence[Evaluation]) -> list[Figure]:
    """Return the figures other than the means of the held-out set, if any."""
    names = {n: 0 for e in evaluations for n in e.figures if n not in NAMED_APART}
    curves = [
        Series(
            n, [(float(e.step), e.figures[n]) for e in evaluations if n in e.figures], has_dots=True
        )
        for n in names
    ]
    return [Figure("Evaluation", curves)] if curves else []


def make_health_figures(rows: StepRows, events: Sequence[Event]) -> list[Figure]:
    """Return figures for a job that does not learn: failures first, then the gradient's parts.

    Those of sampling and its policy are left out for a supervised job.
    """
    failed = extract_column(rows, "failed_share") or compute_failure_shares(events)
    spread = "standard deviation of the rewards within a group"
    kl = [Series("from the sampling policy", extract_column(rows, "kl"))]
    for key, label in (("reference_kl", "from the reference"), ("teacher_kl", "from the teacher")):
        if points := extract_column(rows, key):
            kl.append(Series(label, points))
    clipped = [
        Series("raised probability", extract_column(rows, "clipped_high")),
        Series("lowered probability", extract_column(rows, "clipped_low")),
    ]
    speed = [
        Series("read" if _is_supervised(rows) else "rolled out", compute_rates(rows, "tokens")),
        Series("trained", compute_rates(rows, "tokens_trained")),
    ]
    found = [
        Figure("Failed trajectories, share", [Series("of the trajectories of a step", failed)]),
        Figure("Reward spread", [Series(spread, extract_column(rows, "reward_spread"))]),
        Figure("Entropy", [Series("nats a token", extract_column(rows, "entropy"))]),
        Figure("KL divergence, nats", kl),
        Figure("Loss", [Series("of the step", extract_column(rows, "loss"))]),
        Figure("Gradient norm", [Series("before clipping", extract_column(rows, "grad_norm"))]),
        Figure("Clipped tokens, share", clipped),
        Figure("Tokens a second", speed),
    ]
    return [f for f in found if f.title not in SAMPLING_TITLES or not _is_supervised(rows)]


def make_trajectory_figures(rows: StepRows) -> list[Figure]:
    """Return figures of the trajectories of each step."""
    lengths = [
        Series("mean", extract_column(rows, "length_mean")),
        Series("longest", extract_column(rows, "length_max")),
    ]
    length = Figure("Length of trajectories, tokens", lengths)
    if _is_supervised(rows):
        return [length]
    gap = [Series("largest of the step", extract_column(rows, "logprob_gap"))]
    stale = [Series("mean over tokens", extract_column(rows, "staleness"))]
    return [
        length,
        Figure("Staleness, versions", stale),
        Figure("Log-probability gap between engine and trainer", gap),
    ]


def _is_supervised(rows: StepRows) -> bool:
    return any(map(is_supervised_step, rows))


def make_time_figure(rows: StepRows) -> Figure:
    """Return the figure of the time that the job's core spends on training and waiting."""
    waited = Series("waiting for trajectories", extract_column(rows, "wait_s"))
    return Figure("Seconds a step", [Series("training", extract_column(rows, "train_s")), waited])


def make_metric_figures(rows: StepRows) -> list[Figure]:
    """Return a figure for each metric of rewards and environments, such as `reward/format`."""
    names = sorted({key for row in rows for key in row if key.startswith(METRIC_PREFIXES)})
    return [
        Figure(f"Metric {name}", [Series("mean of the step", extract_column(rows, name))])
        for name in names[:MAX_METRIC_FIGURES]
    ]


def extract_column(rows: StepRows, key: str) -> Points:
    """Return (step, value) of the rows that have the key."""
    return [(float(r["step"]), float(r[key])) for r in rows if r.get(key) is not None]


def compute_failure_shares(events: Sequence[Event]) -> Points:
    """Return (step, share of its trajectories that failed by type) of the current lineage."""
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


def compute_rates(rows: StepRows, key: str) -> Points:
    """Return (step, tokens a second) between the commits of two consecutive steps.

    The first step of a session is left out, because its span includes the break before it.
    """
    spans = [(float(b["wall"]) - float(a["wall"]), b) for a, b in pairwise(rows) if "wall" in a]
    usual = sorted(span for span, _ in spans)[len(spans) // 2] if spans else 0.0
    return [
        (float(row["step"]), float(row[key]) / span)
        for span, row in spans
        if 0.0 < span < 20.0 * usual
    ]
