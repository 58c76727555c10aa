"""The summary and the report say what the record says."""

from __future__ import annotations

import html
from html.parser import HTMLParser
from typing import Any

import pytest

from common.job.config import BudgetConfig, JobConfig
from common.state.events import Event
from meshrl.dryrun import to_toml
from meshrl.observe import charts, report, sections
from meshrl.observe.summary import stage_time_moves, summarize
from meshrl.observe.usage import Tally
from meshrl.observe.watch import Evaluation

ACCOUNT = {
    "opened": 512,
    "trained": 400,
    "filtered": 80,
    "stale_requeued": 16,
    "host_lost": 16,
    "typed_drops": 0,
    "in_flight": 0,
    "lost": 0,
    "trained_twice": 0,
    "opened_twice": 0,
    "committed_twice": 0,
}
EVALUATIONS = [
    Evaluation("before", 0, 0.3, 0.02),
    Evaluation("step-10", 10, 0.6, None),
    Evaluation("after", 12, 0.85, 0.9),
]


def move(ms: int, policy: str = "stage_time", to: str = "training") -> Event:
    source = "rollout" if to == "training" else "training"
    fields = {"gang": "g1", "from": source, "to": to, "policy": policy, "started_ms": ms - 5}
    return Event(f"{ms}-0", ms, "move", {**fields, "rollout_s": 1.0, "train_s": 2.0})


def actual(ms: int, role: str, status: str) -> Event:
    return Event(f"{ms}-0", ms, "actual", {"gang": "g1", "role": role, "status": status})


GROUPS = [{"group": 0, "samples": 8, "scored": 6}, {"group": 1, "samples": 8, "scored": 8}]
EVENTS = [
    actual(1000, "rollout", "starting"),
    actual(3000, "rollout", "ready"),
    move(3500),
    Event("4000-0", 4000, "step", {"step": 1, "groups": GROUPS}),
    actual(5000, "rollout", "draining"),
    actual(6000, "training", "ready"),
    move(6010),
    move(7000, policy="user"),
    move(8000, to="idle"),
]
ROWS: list[dict[str, Any]] = [
    {
        "step": step,
        "reward": 0.1 * step,
        "tokens": 120,
        "tokens_trained": 100,
        "logprob_gap": None if step == 1 else 1e-4 * step,
        "length_mean": 40,
        "length_max": 200,
        "staleness": 1.0,
        "train_s": 1.0,
        "wait_s": 0.5,
        "reward_spread": 0.2,
        "entropy": 1.5,
        "kl": 1e-4,
        "grad_norm": 0.5,
        "clipped_high": 0.01,
        "clipped_low": 0.02,
        "wall": 1000.0 + 2.0 * step,
    }
    for step in range(1, 5)
]


def summary() -> dict[str, Any]:
    tally = Tally(cpu={"redis": {"1-1": 1.0, "2-2": 2.5}}, tokens={"rollout/0": {"a": 5, "b": 6}})
    return summarize(
        job="tiny",
        phase="finished",
        seed=3,
        wall_s=61.23,
        warm_start_cached=True,
        rows=ROWS,
        evaluations=EVALUATIONS,
        events=EVENTS,
        tally=tally,
        account=ACCOUNT,
    )


def test_a_summary_has_the_keys_that_are_promised() -> None:
    found = summary()
    assert found["held_out"] == {
        "before": {"sampled": 0.3, "greedy": 0.02},
        "after": {"sampled": 0.85, "greedy": 0.9},
    }
    assert found["cpu_s"] == {"redis": 3.5}
    assert (found["tokens_rolled_out"], found["tokens_trained"]) == (480, 400)
    assert found["tokens_sampled"] == 11
    assert (found["lost"], found["trained_twice"], found["typed_drops"]) == (0, 0, 0)
    assert found["logprob_gap_max"] == pytest.approx(4e-4)
    assert (found["steps"], found["seed"], found["warm_start_cached"]) == (4, 3, True)


def test_only_moves_by_stage_time_after_the_first_step_count() -> None:
    assert [e.ms for e in stage_time_moves(EVENTS)] == [6010]
    assert summary()["workers_moved"] == 1


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "!doctype"):
            self.open.append(tag)
        self.outside += [v or "" for k, v in attrs if k in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return None

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_page_that_needs_nothing_else() -> None:
    document = JobConfig(name="<b>&").document()
    page = report.html(summary(), ROWS, EVALUATIONS, EVENTS, document)
    parsed = _Page()
    parsed.feed(page)
    assert parsed.open == []
    assert parsed.outside == []
    assert "<b>&" not in page
    assert page.count("<svg") == 13


def test_the_health_of_steps_is_charted_from_their_rows_and_events() -> None:
    titles = [title for title, content in sections.health(ROWS, EVENTS) if "<svg" in content]
    assert titles == [
        "Failed trajectories, share",
        "Reward spread",
        "Entropy",
        "KL divergence, nats",
        "Gradient norm",
        "Clipped tokens, share",
        "Tokens a second",
    ]
    assert sections.failures(EVENTS) == [(1.0, 2 / 16)]
    assert sections.per_second(ROWS, "tokens") == [(2.0, 60.0), (3.0, 60.0), (4.0, 60.0)]


def test_what_was_measured_is_told_point_by_point() -> None:
    [_, (title, table)] = sections.learning(ROWS, EVALUATIONS)
    assert title == "Held-out"
    assert all(f"<td class=n>{value:.3f}</td>" in table for value in (0.3, 0.02, 0.6, 0.85, 0.9))


def test_the_defaults_of_a_job_are_folded_away() -> None:
    document = JobConfig(name="mine", budget=BudgetConfig(steps=7)).document()
    shown, folded = sections.job(document).split("<details>")
    assert 'name = "mine"' in html.unescape(shown) and "steps = 7" in shown
    assert "group_size" not in shown and "group_size" in folded


def test_only_the_page_of_a_run_that_goes_on_loads_itself_again() -> None:
    document = JobConfig().document()
    ended = report.html(summary(), ROWS, EVALUATIONS, EVENTS, document)
    live = report.html(summary(), ROWS, EVALUATIONS, EVENTS, document, refresh_s=10)
    assert "http-equiv" not in ended and '<meta http-equiv="refresh" content="10">' in live


def test_the_timeline_has_a_span_for_each_state_of_a_gang() -> None:
    spans = report.spans(EVENTS, 1000, 7.0)
    assert [(s.role, s.state, s.start, s.end) for s in spans] == [
        ("rollout", "starting", 0.0, 2.0),
        ("rollout", "ready", 2.0, 4.0),
        ("rollout", "draining", 4.0, 5.0),
        ("training", "ready", 5.0, 7.0),
    ]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 47.0, [0, 10, 20, 30, 40, 50]),
        (3.0, 3.0, [3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0]),
    ],
)
def test_axes_have_round_ticks(low: float, high: float, expected: list[float]) -> None:
    assert charts.ticks(low, high) == pytest.approx(expected)


def test_a_chart_without_points_says_so() -> None:
    assert "nothing was measured" in charts.lines([charts.Series("x", [])], "step")


def test_the_resolved_job_reads_back_as_it_was() -> None:
    import tomllib

    document = JobConfig().document()
    document["environment"]["tools"] = {"odd name": "a:b"}
    document["model"]["config"] = {"nested": {"x": [1, "two"]}, "eps": 1e-6}
    assert tomllib.loads(to_toml(document)) == document
