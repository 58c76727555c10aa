"""Reports of a run: charts and tables made from its record alone, as pages and as files."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.errors import NotFound
from meshrl.common.base.files.json_lines import encode_row
from meshrl.common.job.config import BudgetConfig, JobConfig
from meshrl.common.state.events import Event
from meshrl.common.state.jobs import Phase
from meshrl.directory.directory_paths import read_json, write_json
from meshrl.job.toml.writer import to_toml
from meshrl.view.history.decisions import extract_decisions
from meshrl.view.history.run_snapshot import Evaluation
from meshrl.view.history.worker_timeline import (
    RoleSpan,
    TimelineMark,
    WorkerTimeline,
    build_spans,
    list_moves,
)
from meshrl.view.recording.job_usage import JobUsage
from meshrl.view.recording.run_record import read_events
from meshrl.view.report import charts, figures, png, redraw, timeline
from meshrl.view.report import report_page as report_page
from meshrl.view.report.charts import Figure, Series
from meshrl.view.report.report import RunResult, list_planned_moves, summarize
from meshrl.view.report.report_page import render_page
from meshrl.view.report.summary_table import list_facts
from meshrl.view.report.trajectory_table import select_report_samples
from tests.load import scaled

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


def move(ms: int, policy: str = "stage_time", to: str = "training", undone: bool = False) -> Event:
    source = "rollout" if to == "training" else "training"
    fields = {"gang": "g1", "from": source, "to": to, "policy": policy, "started_ms": ms - 5}
    fields |= {"resident": f"g1.{ms}", "undone": undone, "job": "tiny"}
    return Event(f"{ms}-0", ms, "move", {**fields, "rollout_s": 1.0, "train_s": 2.0})


def desired(ms: int, instance: str, role: str, *workers: str, **more: Any) -> Event:
    fields = {"gang": "g1", "resident": instance, "job": "tiny", "role": role, "core": False}
    fields |= {"tier": "accelerator", "reason": "share", "workers": list(workers)}
    return Event(f"{ms}-0", ms, "desired", fields | more)


def actual(ms: int, instance: str, role: str, status: str, tier: str = "accelerator") -> Event:
    fields = {"gang": "g1", "resident": instance, "job": "tiny", "role": role}
    return Event(f"{ms}-0", ms, "actual", fields | {"status": status, "tier": tier})


def admission(ms: int, held: str, rule: str) -> Event:
    fields = {"job": "tiny", "held": held, "rule": rule, "idle": 1, "needed": 2}
    return Event(f"{ms}-0", ms, "admission", fields)


GROUPS = [{"group": 0, "samples": 8, "scored": 6}, {"group": 1, "samples": 8, "scored": 8}]
EVENTS = [
    admission(0, "waiting: it needs 2 workers, and 1 is idle", "floor"),
    admission(1000, "", "floor"),
    desired(1000, "g1.0", "rollout", "w1", entitled=2.5),
    actual(1000, "g1.0", "rollout", "starting"),
    actual(3000, "g1.0", "rollout", "ready"),
    move(3500),
    Event("4000-0", 4000, "step", {"step": 1, "groups": GROUPS}),
    desired(4500, "g1.0", "idle", "w1", from_role="rollout"),
    desired(4500, "g1.1", "training", "w1", tier="memory"),
    actual(5000, "g1.0", "rollout", "draining"),
    actual(5500, "g1.0", "idle", "gone"),
    actual(6000, "g1.1", "training", "ready", "memory"),
    move(6010),
    move(6015),
    move(6020, undone=True),
    move(7000, policy="user"),
    admission(7500, "paused: job big has priority 1", "preempt"),
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
        "loss": -0.1,
        "grad_norm": 0.5,
        "clipped_high": 0.01,
        "clipped_low": 0.02,
        "wall": 1000.0 + 2.0 * step,
    }
    for step in range(1, 5)
]


def summary() -> dict[str, Any]:
    tally = JobUsage(
        cpu={"trainer/tiny": {"1-1": 1.0, "2-2": 2.5}},
        tokens={"rollout/tiny/0": {"a": 5, "b": 6}},
        shared={"redis": 0.75},
        accelerator_s=90.0,
        cost=0.25,
        warm_start_cached=True,
    )
    end = RunResult("tiny", Phase.FINISHED, 3, 61.23, ACCOUNT)
    return summarize(end, ROWS, EVALUATIONS, EVENTS, tally)


def test_summary_has_the_documented_keys() -> None:
    found = summary()
    assert found["held_out"] == {
        "before": {"sampled": 0.3, "greedy": 0.02},
        "after": {"sampled": 0.85, "greedy": 0.9},
    }
    assert found["cpu_s"] == {"redis": 0.75, "trainer/tiny": 3.5}
    assert (found["cpu_total_s"], found["cpu_shared_s"], found["accelerator_s"]) == (4.2, 0.8, 90.0)
    assert (found["cost"], found["cost_per_million_tokens"]) == (0.25, 625.0)
    assert (found["waiting_s"], found["paused_s"]) == (1.0, 0.5)
    assert (found["tokens_rolled_out"], found["tokens_trained"]) == (480, 400)
    assert found["tokens_sampled"] == 11
    assert (found["lost"], found["trained_twice"], found["typed_drops"]) == (0, 0, 0)
    assert found["logprob_gap_max"] == pytest.approx(4e-4)
    assert (found["steps"], found["seed"], found["warm_start_cached"]) == (4, 3, True)


def test_summary_and_table_have_the_time_slices() -> None:
    counts = {"generate": 30.0, "turn_wait_s": 4.0, "slice_switch_s": 10.0}
    moved = {"slice_loaded_bytes": 1.0, "slice_hidden_bytes": 3.0}
    end = RunResult("tiny", Phase.FINISHED, 3, 61.23, ACCOUNT)
    found = summarize(end, ROWS, EVALUATIONS, EVENTS, JobUsage(slices={"i": counts | moved}))
    assert found["slices"]["by_function_s"] == {"generate": 30.0}
    [text] = [text for name, text in list_facts(found) if name == "time slices"]
    assert text == (
        "generate 30.0 s; switches 10.0 s (25.0 %), 75 % of the loaded bytes prefetched"
    )
    assert "time slices" not in dict(list_facts(summary()))


def test_only_moves_for_faster_steps_are_counted() -> None:
    assert [e.ms for e in list_planned_moves(EVENTS)] == [6010, 6015]
    assert summary()["workers_moved"] == 2


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.elements: list[dict[str, str]] = []  # attributes, with the name as `tag`

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "!doctype", "input"):
            self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names)
        self.outside += [v or "" for k, v in attrs if k in ("src", "href")]
        self.elements.append({name: value or "" for name, value in attrs} | {"tag": tag})

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_is_one_self_contained_page() -> None:
    document = JobConfig(name="<b>&").to_document()
    page = render_page(summary(), ROWS, EVALUATIONS, EVENTS, document, kept_samples=SAMPLES)
    parsed = _Page()
    parsed.feed(page)
    assert parsed.open == []
    assert parsed.outside == []
    assert not re.search(r"https?://|@import|url\(", page)
    assert "<b>&" not in page
    assert page.count("<svg") == 14
    ids = [element["id"] for element in parsed.elements if "id" in element]
    assert sorted(ids) == sorted(set(ids))
    variables = set(re.findall(r"(--\w+)", page))
    assert variables == set(re.findall(r"(--\w+):", page)), "every colour is defined"
    assert re.findall(r'name="viewport" content="[^"]+"', page) and "prefers-color-scheme" in page


def test_charts_carry_the_values_that_the_pointer_shows() -> None:
    chart = _Page()
    values = [Series("<a>", [(1.0, 0.12345), (2.0, float("nan")), (3.0, -1e9)])]
    chart.feed(charts.draw_line_chart([*values, Series("none", [])], "step"))
    [line] = [element for element in chart.elements if element["tag"] == "polyline"]
    assert (line["data-x"], line["data-y"], line["data-name"]) == ("1 3", "0.1235 -1e+09", "<a>")
    assert len(line["points"].split()) == 2
    single = charts.draw_line_chart([Series("one", [(1.0, 0.5)])], "step")
    assert single.count("<circle") == 1  # a line of one point is invisible


def sample(step: int, reward: float | None, group: int = 0, **more: Any) -> dict[str, Any]:
    turns = [{"role": "model", "text": "<b>4", "stop": "]"}]
    found = {"at": float(step), "step": step, "group": group, "member": 1, "why": ["best"]}
    found |= {"reward": reward, "ending": "done", "error": "", "tokens": 9, "sampled": 4}
    found |= {"versions": [step], "staleness": 0, "row": {}, "prompt": "2 <+> 2", "turns": turns}
    return found | {"set": "train"} | more


EVALUATED: dict[str, Any] = {"evaluation": "before", "set": "held_out.greedy"}
SAMPLES = [sample(0, 0.5, (1 << 40) + 7, **EVALUATED), sample(1, None), sample(2, 0.25)]


def test_trajectories_are_the_last_section_newest_first_and_filterable() -> None:
    page = render_page(summary(), ROWS, [], EVENTS, JobConfig().to_document(), 0, SAMPLES)
    title, table = page.split("<h2>")[-1].split("</h2>")
    parsed = _Page()
    parsed.feed(table.split("<script>")[0])
    rows = [element for element in parsed.elements if "data-reward" in element]
    assert title == "Trajectories"
    assert [(r["data-step"], r["data-reward"], r["data-set"]) for r in rows] == [
        ("2", "0.25", "train"),
        ("1", "", "train"),
        ("0", "0.5", "before, held_out.greedy"),
    ]
    assert {r["data-outcome"] for r in rows} == {"done"}
    assert "held_out.greedy, row 7.1" in table and str(1 << 40)[:6] not in table
    assert "2 &lt;+&gt; 2" in table and "<b>4" not in table
    names = {e["name"] for e in parsed.elements if e["tag"] in ("input", "select")}
    assert names == {"text", "set", "outcome"} | {
        f"{what}_{side}" for what in ("step", "reward") for side in ("from", "to")
    }
    assert names <= set(re.findall(r"wanted\.(\w+)", report_page.SCRIPT)), "the script reads them"


def test_table_has_the_first_and_last_evaluations_and_some_of_all_training() -> None:
    evaluated = [sample(n, 1.0, **EVALUATED | {"evaluation": f"step-{n}"}) for n in range(5)]
    found = select_report_samples([*(sample(n, 0.0) for n in range(1001)), *evaluated])
    assert {s["evaluation"] for s in found if "evaluation" in s} == {"step-0", "step-3", "step-4"}
    trained = [s["step"] for s in found if "evaluation" not in s]
    assert 100 <= len(trained) <= 201 and (trained[0], trained[-1]) == (0, 1000)
    assert [s["at"] for s in found] == sorted(s["at"] for s in found)
    assert "no trajectory" in render_page(summary(), [], [], EVENTS, JobConfig().to_document())


def test_report_names_what_keeps_a_run_from_learning(tmp_path: Path) -> None:
    rows = [row | {"sequences": 0} for row in ROWS]
    end = RunResult("tiny", Phase.FINISHED, 3, 61.23, ACCOUNT)
    found = summarize(end, rows, EVALUATIONS, EVENTS, JobUsage())
    assert [finding["rule"] for finding in found["health"]] == ["all_filtered"]
    page = render_page(found, rows, EVALUATIONS, EVENTS, JobConfig().to_document())
    assert "<h2>Health</h2><ul><li>no learning (all_filtered)" in page
    assert "the run cannot have learned: all_filtered" in page
    running = RunResult("tiny", Phase.TRAINING, 3, 61.23, ACCOUNT)
    assert summarize(running, rows, EVALUATIONS, EVENTS, JobUsage())["health"] == []


def test_step_health_is_charted_from_rows_and_events() -> None:
    charted = report_page.render_figures(figures.make_health_figures(ROWS, EVENTS))
    titles = [title for title, content in charted if "<svg" in content]
    assert titles == [
        "Failed trajectories, share",
        "Reward spread",
        "Entropy",
        "KL divergence, nats",
        "Loss",
        "Gradient norm",
        "Clipped tokens, share",
        "Tokens a second",
    ]
    assert figures.compute_failure_shares(EVENTS) == [(1.0, 2 / 16)]
    assert figures.compute_rates(ROWS, "tokens") == [(2.0, 60.0), (3.0, 60.0), (4.0, 60.0)]


def test_supervised_run_is_charted_and_summarized_by_its_losses() -> None:
    rows = [r | {"model_tokens": 9, "ratio_max": None, "loss": 2.0 / r["step"]} for r in ROWS]
    rows[1]["held_out_loss"] = 1.25
    shown = figures.make_figures(rows, EVALUATIONS, EVENTS)
    titles = [figure.title for figure in shown]
    assert titles[0] == "Loss, nats a token" and not {"Reward spread", *titles[1:]} <= set(titles)
    assert [len(series.points) for series in shown[0].series] == [4, 1]
    end = RunResult("tiny", Phase.FINISHED, 3, 61.23, ACCOUNT)
    found = summarize(end, rows, [], [], JobUsage())
    assert found["loss"] == {"first": 2.0, "last": 0.5, "held_out": 1.25}
    facts = dict(list_facts(found))
    assert " read, " in facts["tokens"]
    assert facts["loss"] == "2.0000 in the first step, 0.5000 in the last; held-out 1.2500"
    assert "held-out before" not in facts and summary()["loss"] is None


def test_evaluations_have_a_table_of_their_values() -> None:
    [_, (title, table)] = report_page.render_learning(ROWS, EVALUATIONS)
    assert title == "Held-out"
    assert all(f"<td class=n>{value:.3f}</td>" in table for value in (0.3, 0.02, 0.6, 0.85, 0.9))
    better = [replace(e, is_best=True) for e in EVALUATIONS[:2]]  # each the best so far
    [_, (_, table)] = report_page.render_learning(ROWS, [*better, EVALUATIONS[2]])
    assert table.count("(best)") == 1 and "10 (best)" in table


def test_default_settings_are_folded() -> None:
    document = JobConfig(name="mine", budget=BudgetConfig(steps=7)).to_document()
    shown, folded = report_page.render_job(document).split("<details>")
    assert 'name = "mine"' in unescape(shown) and "steps = 7" in shown
    assert "group_size" not in shown and "group_size" in folded


def test_only_the_page_of_a_running_job_refreshes() -> None:
    document = JobConfig().to_document()
    ended = render_page(summary(), ROWS, EVALUATIONS, EVENTS, document)
    live = render_page(summary(), ROWS, EVALUATIONS, EVENTS, document, refresh_s=10)
    refresh = '<noscript><meta http-equiv="refresh" content="10"></noscript>'
    assert "http-equiv" not in ended and refresh in live
    assert "data-reload" not in ended and '<body data-reload="10">' in live


def test_timeline_has_a_span_for_each_state_of_an_instance() -> None:
    lost = Event("6500-0", 6500, "lost", {"worker": "w1", "reason": "gone"})
    shown = build_spans([*EVENTS, lost], 1000, 7.0)
    assert [(s.worker_names, s.role, s.state, s.start_s, s.end_s) for s in shown] == [
        ("w1", "rollout", "starting", 0.0, 2.0),
        ("w1", "rollout", "ready", 2.0, 3.5),
        ("w1", "rollout", "leaving", 3.5, 4.0),
        ("w1", "rollout", "draining", 4.0, 4.5),
        ("w1", "training", "ready, memory", 5.0, 5.5),
    ]


def test_removed_instance_drains_until_its_successor_or_the_gangs_end() -> None:
    first = desired(0, "g1.0", "rollout", "w1"), actual(1000, "g1.0", "rollout", "ready")
    removed = desired(2000, "g1.0", "idle", "w1", from_role="rollout")
    second = desired(2000, "g1.1", "training", "w1"), actual(2500, "g1.1", "training", "ready")
    shown = build_spans([*first, removed, *second], 0, 60.0)
    assert [(s.instance, s.state, s.start_s, s.end_s) for s in shown] == [
        ("g1.0", "ready", 1.0, 2.0),
        ("g1.0", "leaving", 2.0, 2.5),
        ("g1.1", "ready", 2.5, 60.0),
    ]
    dissolved = Event("4000-0", 4000, "gang", {"gang": "g1", "dissolved": True, "workers": ["w1"]})
    assert build_spans([*first, removed, dissolved], 0, 60.0)[-1].end_s == 4.0
    assert build_spans([*first, removed], 0, 60.0)[-1].end_s == 12.0


def test_worker_row_has_a_lane_for_each_concurrent_span() -> None:
    wide = RoleSpan("w9 w10", "training", "ready", 0.0, 9.0, "g1.0", "tiny")
    beside = RoleSpan("w10", "rollout", "ready", 4.0, 6.0, "g2.0", "tiny")
    after = RoleSpan("w10", "rollout", "draining", 6.0, 8.0, "g2.0", "tiny")
    marks = [TimelineMark(5.0, "g2 <moved>", ("w10",))]
    found = WorkerTimeline([wide, beside, after], marks, [], 9.0)
    assert found.list_workers == ["w9", "w10"]
    assert [
        (lane, lanes) for lane, lanes, _ in timeline.assign_lanes([wide, beside, after], "w10")
    ] == [
        (0, 2),
        (1, 2),
        (1, 2),
    ]
    drawn = timeline.draw_timeline(found)
    assert drawn.count("<rect") == 4 and drawn.count("<polygon") == 1
    assert "g2 &lt;moved&gt;" in drawn and "scoring" not in drawn


def test_move_mark_has_rule_figures_and_duration() -> None:
    [mark, *_] = list_moves(EVENTS, 1000)
    assert mark.workers == () and mark.at_s == 2.5
    said = "g1 moved from rollout to training: rollout 1.00 s, training 2.00 s a step"
    assert mark.text == f"{said}; it took 0.0 s; stage_time (rollout_s 1, train_s 2)"


JUDGEMENT = {
    "job": "tiny",
    "resident": "g1.1",
    "policy": "stage_time",
    "from": "rollout",
    "to": "training",
    "step": 7,
    "before_s": 1.2,
    "predicted_s": 0.9,
    "observed_s": 1.0,
    "expected_s": 0.95,
    "regret_s": 0.05,
    "paid": True,
    "undone": False,
}


def test_judged_moves_have_a_table() -> None:
    bad = JUDGEMENT | {"paid": False, "undone": True, "observed_s": 1.4, "regret_s": None}
    events = [Event(f"{n}-0", n, "move_judged", f) for n, f in ((1, JUDGEMENT), (2, bad))]
    [(title, table)] = report_page.render_moves(events)
    assert title == "Moves: predicted, observed, regret"
    assert table.count("<tr>") == 3
    first, second = table.split("<tr>")[2:]
    assert "g1.1 from rollout to training" in first and "<td class=n>0.05</td><td>paid" in first
    assert "<td class=n>1.40</td>" in second and "did not pay, undone" in second
    assert report_page.render_moves(EVENTS) == []
    [told, _] = list_moves(events, 0)
    assert told.text.startswith("the move of g1 to training paid: 1 s a step, predicted 0.9 s")
    assert told.text.endswith("; 1.2 s before, regret 0.05 s")


def test_report_lists_each_decision_with_rule_and_figures() -> None:
    assert [d.summary for d in extract_decisions(EVENTS)] == [
        "waiting: it needs 2 workers, and 1 is idle: floor (idle 1, needed 2)",
        "it runs: floor (idle 1, needed 2)",
        "rollout on w1: share (entitled 2.5)",
        "rollout leaves w1: share",
        "training on w1, asleep in memory: share",
        "paused: job big has priority 1: preempt (idle 1, needed 2)",
    ]
    page = render_page(summary(), ROWS, EVALUATIONS, EVENTS, JobConfig(name="tiny").to_document())
    assert "Decisions of the planner" in page and "entitled 2.5" in page
    assert "90 accelerator-seconds, 0:01 waiting" in page
    assert "0.25, 625 per million trained tokens" in page


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 47.0, [0, 10, 20, 30, 40, 50]),
        (3.0, 3.0, [3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0]),
    ],
)
def test_axes_have_round_ticks(low: float, high: float, expected: list[float]) -> None:
    assert charts.compute_ticks(low, high) == pytest.approx(expected)


def test_charts_draw_values_of_any_magnitude() -> None:
    sizes = (0.0, 5e-324, 1e-310, 1e-9, 1.0, 1e17, 1e17 + 16, 1e300, 1.7e308, float("inf"))
    values = [sign * size for size in (*sizes, float("nan")) for sign in (1, -1)]
    for low in values:
        for high in values:
            points = [(0.0, low), (1.0, high)]
            charts.draw_line_chart(
                [charts.Series("x", points), charts.Series("y", points, has_dots=True)], "s"
            )
    for count in range(40):
        series = [charts.Series(f"set {i}", [(1.0, float(i))], has_dots=True) for i in range(count)]
        assert charts.draw_line_chart(series, "step").count("<i style") == count


def test_report_has_many_evaluation_datasets() -> None:
    names = [f"set{i}.{mode}" for i in range(12) for mode in ("sampled", "greedy", "pass@4")]
    many = [Evaluation(f"step-{n}", n, 0.5, None, dict.fromkeys(names, 0.25)) for n in range(3)]
    page = render_page(summary(), ROWS, many, EVENTS, JobConfig(name="tiny").to_document())
    assert all(name in page for name in names)


def test_empty_chart_has_a_note() -> None:
    assert "nothing was measured" in charts.draw_line_chart([charts.Series("x", [])], "step")


def test_resolved_job_survives_a_toml_round_trip() -> None:
    import tomllib

    document = JobConfig().to_document()
    document["environment"]["tools"] = {"odd name": "a:b"}
    document["model"]["config"] = {"nested": {"x": [1, "two"]}, "eps": 1e-6}
    assert tomllib.loads(to_toml(document)) == document


def write_run(run_dir: Path, over: bool = True) -> None:
    document = JobConfig(name="tiny").to_document()
    write_json(run_dir / "job.json", {"job": "tiny", "document": document})
    write_lines(run_dir / "events.jsonl", [asdict(event) for event in EVENTS])
    write_lines(run_dir / "metrics.jsonl", ROWS)
    if over:
        write_json(run_dir / "summary.json", summary())


def write_lines(path: Path, rows: Sequence[dict[str, object]]) -> None:
    path.write_bytes(b"".join(encode_row(row, n) for n, row in enumerate(rows)))


def test_report_of_a_finished_run_is_redrawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    redraw.redraw_report(tmp_path, None)
    page = (tmp_path / "report.html").read_text()
    assert "<title>tiny, seed 3</title>" in page and "training on w1, asleep in memory" in page
    assert "report.html" in capsys.readouterr().out
    found = read_json(tmp_path / "summary.json")
    assert found.pop("health") == []
    write_json(tmp_path / "summary.json", found)  # as in a run of an earlier version
    redraw.redraw_report(tmp_path, None)
    assert "<h2>Health</h2>" in (tmp_path / "report.html").read_text()


def test_page_of_a_running_job_is_not_redrawn(tmp_path: Path) -> None:
    write_run(tmp_path, over=False)
    with pytest.raises(NotFound, match=r"has not ended.*summary\.json"):
        redraw.redraw_report(tmp_path, None)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.deep
def test_each_non_empty_figure_becomes_a_file_also_during_a_run(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, over=False)
    assert read_events(tmp_path)
    written_files = redraw.draw_figures(tmp_path, tmp_path / "new" / "figures")
    names = {path.name for path in written_files}
    assert {p.name for p in (tmp_path / "new" / "figures").iterdir()} == names
    assert {"learning.png", "seconds-a-step.png", "timeline-of-workers.png"} <= names
    assert "evaluation.png" not in names  # there is no dataset beside the held-out set


PNG = b"\x89PNG\r\n\x1a\n"


def test_figure_file_is_named_by_its_title(tmp_path: Path) -> None:
    points = [(1.0, 0.5), (2.0, float("nan")), (3.0, 0.7)]
    figure = Figure(
        "KL divergence, nats", [Series("a", points), Series("b", points, has_dots=True)]
    )
    path = png.write_line_chart(figure, tmp_path)
    assert path == tmp_path / "kl-divergence-nats.png"
    assert path.read_bytes().startswith(PNG)
    assert png.write_line_chart(Figure("Nothing", [Series("a", [])]), tmp_path) is None
    assert [p.name for p in tmp_path.iterdir()] == ["kl-divergence-nats.png"]


def test_worker_timeline_becomes_a_file(tmp_path: Path) -> None:
    spans = [
        RoleSpan("w0 w1", "training", "ready", 0.0, 9.0),
        RoleSpan("w1", "rollout", "leaving", 2.0, 12.0),
    ]
    marks = [TimelineMark(2.0, "moved", ("w1",)), TimelineMark(3.0, "declined")]
    found = WorkerTimeline(spans, marks, [TimelineMark(1.0, "it ended")], 9.0)
    path = png.write_timeline("Workers", found, tmp_path)
    assert path is not None and path.read_bytes().startswith(PNG)
    assert png.write_timeline("Workers", WorkerTimeline([], [], [], 9.0), tmp_path) is None


def test_missing_matplotlib_error_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    png.require_matplotlib()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotFound) as caught:
        png.require_matplotlib()
    assert "pip install 'meshrl[plots]'" in caught.value.fix


def test_report_needs_no_matplotlib() -> None:
    asked = "import sys; import meshrl.view.report.report, meshrl.view.report.redraw; "
    asked += "sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], timeout=scaled(60)).returncode == 0
