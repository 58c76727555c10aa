"""Live view of a run: progress, waits, failures and storage."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshrl.common.base.files import json_lines
from meshrl.common.job.config import JobConfig
from meshrl.common.state.events import Event
from meshrl.common.state.jobs import JobRow, Phase
from meshrl.common.state.pool.workers.rows import (
    Gang,
    Instance,
    InstancePhase,
    InstanceReport,
    Role,
    Tier,
    WorkerRow,
)
from meshrl.common.state.registry import RegistryEntry
from meshrl.view import disk_full
from meshrl.view.history.event_text import format_event
from meshrl.view.history.job_failures import (
    COUNT_INTERVAL_S,
    FailureCounter,
    FailurePrinter,
    format_share,
)
from meshrl.view.history.run_snapshot import (
    RunHistory,
    RunReading,
    build_snapshot,
    parse_evaluation,
)
from meshrl.view.live.run_text import format_duration, format_evaluation, format_step
from meshrl.view.live.run_view import RunLines, draw_sparkline, render_screen
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot
from meshrl.view.mesh.rates import estimate_remaining_s


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "reward": 0.1 * step,
        "tokens_trained": 1000,
        "wall": 100.0 + 2 * step,
        "staleness": 0.5,
        "logprob_gap": None,
        "length_mean": 40.0,
        "length_max": 200,
        "train_s": 0.5,
        "wait_s": 0.2,
        **more,
    }


def job(phase: str, steps_done: int) -> JobRow:
    names = ("opened", "trained", "filtered", "stale_requeued", "host_lost", "typed_drops")
    counts: dict[str, Any] = dict.fromkeys(names, 0)
    return JobRow(
        id="tiny",
        phase=Phase(phase),
        document=JobConfig().to_document(),
        run_dir="/run",
        lineage=0,
        version=steps_done,
        manifest="",
        checkpoint="",
        steps_done=steps_done,
        cursor=0,
        admitted=0,
        error="",
        **counts,
    )


def make_instance(gang: str, number: int, of: str, role: Role, **more: Any) -> Instance:
    """Make an instance that is ready at its desired tier, unless `more` differs."""
    report = InstanceReport(
        0, 1, 1, 7, more.pop("doing", InstancePhase.READY), more.pop("at", Tier.ACCELERATOR)
    )
    return Instance(f"{gang}.{number}", of, role, reports={0: report}, **more)


MESH = MeshSnapshot(
    tuple(WorkerRow(f"w{n}", "h0", f"cpu:{n}", 7) for n in range(4)),
    (
        Gang("g0", ("w0",), 1, (make_instance("g0", 0, "tiny", Role.TRAINING, core=True),)),
        Gang(
            "g1",
            ("w1",),
            1,
            (
                make_instance("g1", 0, "tiny", Role.ROLLOUT),
                make_instance(
                    "g1", 1, "big", Role.ROLLOUT, tier=Tier.MEMORY, doing=InstancePhase.MOVING
                ),
            ),
        ),
        Gang("g2", ("w2",), 1, (make_instance("g2", 0, "big", Role.TRAINING, core=True),)),
    ),
)

WAITS = "waiting: it needs 2 workers, and 1 is idle"
EVALUATIONS = [
    {"tag": "before", "step": 0, "sampled": 0.25, "greedy": 0.01},
    {"tag": "step-10", "step": 10, "sampled": 0.6},
]


def reading(at: float, tokens: float, *events: Event) -> RunReading:
    rollout = RegistryEntry(
        name="rollout/tiny/0",
        kind="rollout",
        alive=True,
        stats={"tokens": tokens, "in_flight": 7, "bounds": [64, 128], "histogram": [5, 1, 1]},
    )
    other = RegistryEntry(
        name="rollout/big/0",
        kind="rollout",
        alive=True,
        stats={"tokens": 10 * tokens, "in_flight": 90, "bounds": [64, 128], "histogram": [9, 9, 9]},
    )
    said = {"running": 31, "version": 9, "job": "tiny"}
    engine = RegistryEntry(name="engine/g1.0", kind="engine", alive=True, stats=said)
    return RunReading(
        elapsed_s=at,
        job=job("training", 3),
        step_rows=[row(1), row(2), row(3)],
        mesh=replace(
            MESH,
            entries=[rollout, other, engine],
            jobs=[job("training", 3), replace(job("queued", 0), id="big", block_reason=WAITS)],
        ),
        evaluations=list(map(parse_evaluation, EVALUATIONS)),
        events=events,
    )


def test_snapshot_has_the_progress_of_the_run() -> None:
    shot = build_snapshot(reading(10.0, 0), RunHistory())
    assert (shot.step, shot.steps, shot.phase) == (3, JobConfig().budget.steps, "training")
    assert shot.rewards == pytest.approx((0.1, 0.2, 0.3))
    assert shot.trained_tokens_per_s == pytest.approx(500.0)
    assert shot.eta_s == 2.0 * (JobConfig().budget.steps - 3)
    assert [e.greedy_reward for e in shot.evaluations] == [0.01, None]
    assert (shot.in_flight, shot.histogram, shot.histogram_bounds) == (7, (5, 1, 1), (64, 128))


def test_worker_lines_have_all_instances_of_each_worker() -> None:
    shot = build_snapshot(reading(10.0, 0), RunHistory())
    told = [
        (w.worker, w.gang, w.job, w.role, w.tier, w.state, w.activity) for w in shot.worker_lines
    ]
    on, training, rollout = Tier.ACCELERATOR, Role.TRAINING, Role.ROLLOUT
    assert told == [
        ("w0", "g0", "tiny", training, on, "ready", "core"),
        ("w1", "g1", "tiny", rollout, on, "ready", "31 running, version 9"),
        ("w1", "g1", "big", rollout, on, "moving", ""),
        ("w3", "", "", Role.IDLE, Tier.ABSENT, "idle", ""),
    ]
    assert shot.worker_lines[2].desired_tier == Tier.MEMORY
    assert (shot.hidden_workers.busy_elsewhere, shot.hidden_workers.idle) == (1, 0), (
        "w2 serves the other job alone"
    )


def test_starting_engine_shows_its_progress() -> None:
    look = reading(10.0, 0)
    starting = "SGLang starts: capturing graphs, 9 of 36"
    look.mesh.entries[-1].stats["starting"] = starting
    shot = build_snapshot(look, RunHistory())
    assert [line.activity for line in shot.worker_lines if line.role == Role.ROLLOUT] == [
        starting,
        "",
    ]


def test_other_job_is_one_line_and_adds_no_figures() -> None:
    shot = build_snapshot(reading(10.0, 0), RunHistory())
    steps = JobConfig().budget.steps
    assert shot.other_jobs == (f"big: {WAITS}, step 0/{steps}, 2 workers",)
    assert (shot.in_flight, shot.histogram) == (7, (5, 1, 1))


def test_blocked_job_shows_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    paused = "paused: job big has priority 1"
    lines, history = RunLines(), RunHistory()
    for held in ("", paused, paused, ""):
        look = reading(10.0, 0)
        look.job = replace(look.job, block_reason=held)
        shot = build_snapshot(look, history)
        lines.show(shot, [])
        if held:
            console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
            console.print(render_screen(shot, Path("runs/tiny")))
            assert paused in console.export_text()
    output = capsys.readouterr().out
    assert output.count(paused) == 1 and output.count("the job runs") == 1


def test_rate_covers_recent_seconds_and_survives_a_restart() -> None:
    history = RunHistory()
    for second in range(20):
        shot = build_snapshot(reading(float(second), second * 100.0), history)
    assert shot.rollout_tokens_per_s == pytest.approx(100.0)
    assert build_snapshot(reading(20.0, 5.0), history).rollout_tokens_per_s == 0.0
    assert build_snapshot(reading(21.0, 105.0), history).rollout_tokens_per_s == pytest.approx(
        100.0
    )


def test_remaining_time_counts_all_remaining_steps() -> None:
    assert estimate_remaining_s([row(5), row(6), row(7)], 10) == 2.0 * 3


def test_remaining_time_needs_three_steps() -> None:
    assert estimate_remaining_s([row(1), row(2)], 10) is None


MOVE = Event(
    "1-0",
    1,
    "move",
    {
        "gang": "g1",
        "from": "rollout",
        "to": "training",
        "policy": "stage_time",
        "rollout_s": 0.8,
        "train_s": 1.3,
    },
)


def test_events_are_formatted_for_people() -> None:
    assert format_event(MOVE) == (
        "g1 moved from rollout to training: rollout 0.80 s, training 1.30 s a step"
    )
    late = replace(MOVE, fields=MOVE.fields | {"undone": True})
    assert format_event(late) == "g1 is rollout again: its move to training exceeded the time limit"
    paused = Event("2-0", 2, "admission", {"job": "tiny", "held": "paused: job big"})
    assert format_event(paused) == "the job is paused: job big"
    assert format_event(replace(paused, fields={"job": "tiny", "held": ""})) == "the job runs"
    killed = Event("2-0", 2, "process_ended", {"name": "weights", "why": "signal 9", "code": -9})
    asked = Event("3-0", 3, "process_ended", {"name": "weights", "why": "stopped", "code": 0})
    assert "weights exited (signal 9)" in format_event(killed)
    assert format_event(asked) == ""


def test_live_view_shows_every_part() -> None:
    console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    shot = build_snapshot(reading(65.0, 0, MOVE), RunHistory())
    console.print(render_screen(shot, Path("runs/tiny")))
    text = console.export_text()
    for wanted in (
        "step 3/48",
        "1:05",
        "about 1:30 left",
        "reward",
        "0.250 (0.010 greedy)",
        "10: 0.600",
        "rolled out",
        "trained",
        "staleness 0.50 (at most 2)",
        "log-probability gap",
        "w1",
        "accelerator -> memory",
        "job big",
        "beside",
        WAITS,
        "workers not shown: 1 for other jobs",
        "7 trajectories",
        "128",
        "more",
        "g1 moved",
    ):
        assert wanted in text, wanted


def test_output_without_a_terminal_has_one_line_for_each_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = RunLines()
    first = reading(10.0, 0)
    shot = build_snapshot(first, RunHistory())
    lines.show(shot, [row(1)])
    lines.show(shot, [row(1), row(2)])
    lines.show(shot, [row(1), row(2)])
    output = capsys.readouterr().out
    assert output.count("step 1/48") == 1
    assert output.count("step 2/48") == 1
    assert output.count("held-out after step 10: 0.600 sampled") == 1


NO_SIGNAL = [row(step, sequences=0, reward=0.0) for step in range(1, 6)]


def test_finding_is_printed_once_and_stays_on_the_screen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    look, lines, history = reading(10.0, 0), RunLines(), RunHistory()
    for steps, expected in ((4, 0), (5, 1), (5, 0)):
        look.step_rows = NO_SIGNAL[:steps]
        shot = build_snapshot(look, history)
        lines.show(shot, look.step_rows)
        told = capsys.readouterr().out.count("no learning (all_filtered): no trajectory")
        assert told == expected
    console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_screen(shot, Path("runs/tiny")))
    assert "all_filtered" in console.export_text()


def test_step_line_has_spread_and_truncated_share() -> None:
    shot = build_snapshot(reading(10.0, 0), RunHistory())
    full = row(1, reward_spread=0.25, truncated=2, tokens=320)
    assert "  spread 0.250  length 40  truncated 25 %  " in format_step(full, shot)
    assert "  spread -  length 40  truncated -  " in format_step(row(1), shot)


def test_sparkline_shows_small_values() -> None:
    assert draw_sparkline([0, 1, 100]) == " ▁█"
    assert draw_sparkline([]) == ""


def test_durations_are_formatted_as_clock_times() -> None:
    assert [format_duration(5), format_duration(65), format_duration(3665)] == [
        "0:05",
        "1:05",
        "1:01:05",
    ]


REFUSED = {
    "type": "ConfigError",
    "text": "slots of 320 tokens exceed the model's 256 positions",
    "where": "rollout.max_tokens",
    "fix": "lower it",
}


def make_exit(name: str, **more: Any) -> Event:
    fields = {"name": name, "why": "exit status 1", "code": 1, "job": "tiny", "times": 1} | more
    return Event("4-0", 4, "process_ended", fields)


def test_process_exit_is_reported_with_error_and_count() -> None:
    again = format_event(
        make_exit("rollout/0", error={"type": "ValueError", "text": "odd"}, times=3)
    )
    assert again == "rollout/0 exited with ValueError: odd; it restarts, 3 times so far"
    final = format_event(make_exit("engine/g1", error=REFUSED, final=True))
    assert "ConfigError: slots of 320 tokens" in final and "(at rollout.max_tokens)" in final
    assert final.endswith("it will not restart")
    failed = Event("5-0", 5, "phase", {"job": "tiny", "phase": "failed", "error": "so"})
    assert format_event(failed) == "the job failed: so"


def test_output_without_a_terminal_reports_every_exit_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines, history = RunLines(), RunHistory()
    first = build_snapshot(reading(10.0, 0, make_exit("engine/g1")), history)
    lines.show(first, [row(1)])
    lines.show(first, [row(1)])
    lines.show(build_snapshot(reading(11.0, 0, make_exit("engine/g1", times=2)), history), [row(1)])
    output = capsys.readouterr().out
    assert output.count("[0:10] engine/g1 exited (exit status 1); it restarts\n") == 1
    assert output.count("it restarts, 2 times so far") == 1


def test_repeated_exits_are_reported_with_decreasing_frequency(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines, history = RunLines(), RunHistory()
    for times in range(1, 101):
        look = reading(10.0, 0, make_exit("environment-rollout-0-0", times=times))
        lines.show(build_snapshot(look, history), [])
    assert capsys.readouterr().out.count("environment-rollout-0-0 exited") == 3 + 5


WHERE = "digits.py:12 in reward()"


def failure(count: int = 1, **more: Any) -> Event:
    fields = {
        "job": "tiny",
        "kind": "reward raised",
        "text": "ValueError: no",
        "where": WHERE,
        "count": count,
        "calls": 0,
        "evaluation": False,
        "by": "rollout/0",
    }
    return Event("1-0", 1, "failure", fields | more)


def test_first_failure_of_each_kind_is_reported_at_once_and_its_count_with_steps() -> None:
    heard, told = FailureCounter([failure()]), FailurePrinter()
    assert told.format_new(heard.kinds, False, 1.0) == [f"reward raised at {WHERE}: ValueError: no"]
    heard.add(failure(5))
    assert told.format_new(heard.kinds, False, 2.0) == []
    assert told.format_new(heard.kinds, True, 3.0) == [f"failed so far: reward raised 6 ({WHERE})"]
    assert told.format_new(heard.kinds, True, 4.0) == [], "nothing new"
    hung = failure(0, kind="reward timed out", text="reward took more than 5 s", calls=1)
    heard.add(hung)
    assert told.format_new(heard.kinds, False, 5.0)[0].startswith("reward timed out at ")
    heard.add(hung)
    assert told.format_new(heard.kinds, False, 6.0 + COUNT_INTERVAL_S) == [
        f"failed so far: reward timed out 0, 2 calls abandoned ({WHERE})"
    ], "also where no step comes"


def test_plain_lines_report_failures_and_each_steps_failed_share(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shot = build_snapshot(reading(10.0, 0.0, failure(3)), RunHistory())
    lines = RunLines()
    lines.show(shot, [])
    assert f"reward raised at {WHERE}: ValueError: no" in capsys.readouterr().out
    assert "  failed 12 %  " in format_step(row(1, failed_share=0.125), shot)
    assert "  failed 0 %  " in format_step(row(1), shot)


def test_supervised_run_shows_losses_instead_of_rewards() -> None:
    told = parse_evaluation({"tag": "step-10", "step": 10, "figures": {"held_out.loss": 0.75}})
    assert format_evaluation(told) == "held-out after step 10: loss 0.7500"
    shot = replace(
        build_snapshot(reading(10.0, 0.0), RunHistory()),
        is_supervised=True,
        losses=(1.5, 0.5),
        evaluations=(told,),
    )
    line = format_step(row(10, loss=0.5, held_out_loss=0.75, grad_norm=0.125), shot)
    assert "  loss 0.5000  held-out loss 0.7500  grad norm 0.12  length 40  " in line
    assert "reward" not in line and "staleness" not in line and "rolled out" not in line
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(render_screen(shot, Path("runs/tiny")))
    screen = console.export_text()
    assert "loss      0.500" in screen and "10: loss 0.7500" in screen and "reward" not in screen


def test_figure_names_its_share_of_samples() -> None:
    assert (format_share(0.4), format_share(1.0), format_share(None)) == (" of 40 %", "", "")
    assert format_share(0.999) == " of 99.9 %"
    some = parse_evaluation(
        {
            "tag": "step-10",
            "step": 10,
            "sampled": 0.361,
            "figures": {"held_out.sampled": 0.361, "more.mean": 0.5},
            "shares": {"held_out.sampled": 0.4, "more.mean": 1.0},
            "reasons": {"reward raised": 154},
        }
    )
    said = "held-out after step 10: 0.361 sampled of 40 %, more.mean 0.500"
    assert format_evaluation(some) == said


def test_evaluation_that_ends_the_run_states_the_reason() -> None:
    fields = {"tag": "step-8", "step": 8, "sampled": 0.5, "ends_at": 9}
    last = parse_evaluation(fields | {"best_version": 4, "patience": 2})
    assert format_evaluation(last) == (
        "held-out after step 8: 0.500 sampled; the run ends after step 9: version 4 is the best, "
        "and no better one came in the 2 evaluations since"
    )


def test_evaluation_without_scored_samples_is_reported() -> None:
    none = parse_evaluation(
        {
            "tag": "before",
            "step": 0,
            "shares": {"held_out.sampled": 0.0, "held_out.greedy": 0.0},
            "reasons": {"reward raised": 512},
        }
    )
    assert format_evaluation(none) == (
        "evaluated after step 0: held_out.sampled, held_out.greedy: no sample was scored "
        "(reward raised 512)"
    )


NO_ROOM_THERE = Path("/proc")  # a file system that never has free space


def test_full_disk_is_named_with_a_fix(tmp_path: Path) -> None:
    assert disk_full.find_full_disk([tmp_path, tmp_path / "gone"]) == ""
    text = disk_full.find_full_disk([tmp_path, NO_ROOM_THERE])
    assert "disk of /proc is full" in text and "Free disk space" in text


def test_rows_are_appended_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = f"""
        import resource
        from pathlib import Path
        from meshrl.common.base.errors import StorageFull
        from meshrl.common.base.files.json_lines import LineFile
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            for step in range(20):
                LineFile(Path({str(path)!r})).append([{{"step": step}}, {{"also": step}}])
        except StorageFull as error:
            print(error.where, step)
    """
    said = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True)
    where, step = said.split()
    assert where == str(path)
    before = path.read_text()
    assert before.endswith("\n") and len(json_lines.read_lines(path).rows) == 2 * int(step)
    assert json_lines.read_lines(path).rows[-1] == {"also": int(step) - 1}


def test_log_on_a_full_disk_raises_no_error() -> None:
    code = """
        from meshrl.common.mesh.telemetry.logs import Telemetry, log_to_stderr
        log_to_stderr("rollout/0")
        for _ in range(3):
            Telemetry("rollout/0").log.error("ledger: disk full")
        print("goes on")
    """
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", textwrap.dedent(code)]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True)
    assert result.stdout == "goes on\n"


def test_wait_for_disk_space_is_reported_at_start_and_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    waits = [{"on": "disk", "what": "room for the ledger", "since_ms": 0, "count": 1}]
    full, well = reading(10.0, 0), reading(14.0, 0)
    entry = RegistryEntry(name="rollout/0", kind="rollout", alive=True, waits=waits)
    full.mesh = replace(full.mesh, entries=[entry])
    lines, history = RunLines(), RunHistory()
    for look in (full, full, well):
        lines.show(build_snapshot(look, history), [])
    output = capsys.readouterr().out
    assert (
        output.count("a disk is full: rollout/0 waits for room for the ledger. Free disk space")
        == 1
    )
    assert output.count("the disk has free space again") == 1
