"""`meshrl report`: redraws the report of a run from its record, and figures as PNG files."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.base.errors import NotFound
from meshrl.common.base.files.json_lines import iterate_rows
from meshrl.directory.directory_paths import format_path, read_json
from meshrl.view.health.findings import find_problems
from meshrl.view.health.run_figures import collect_figures
from meshrl.view.history.run_snapshot import parse_evaluations
from meshrl.view.history.sample_files import iterate_samples
from meshrl.view.history.worker_timeline import WorkerTimeline
from meshrl.view.mesh.slice_lanes import read_lanes
from meshrl.view.recording.run_record import (
    METRICS_FILE,
    read_events,
    read_job,
    select_evaluations,
    thin_rows,
)
from meshrl.view.report import figures, png
from meshrl.view.report.report import write_page
from meshrl.view.report.report_page import TIMELINE_TITLE, render_page
from meshrl.view.report.trajectory_table import select_report_samples

SUMMARY_FILE = "summary.json"


def redraw_report(run_dir: Path, directory: Path | None) -> None:
    """Write PNG files to a directory if there is one, else `report.html`; print their paths.

    Raises NotFound if matplotlib is missing, or the run is not over: its recorder writes the page.
    """
    if directory is None:
        write_report(run_dir)
        print(format_path(run_dir / "report.html"))
        return
    png.require_matplotlib()
    written = draw_figures(run_dir, directory)
    print(
        f"{format_path(directory)}: {', '.join(path.name for path in written) or 'nothing to draw'}"
    )


def write_report(run_dir: Path) -> None:
    """Write the page of a run that is over. Raises NotFound, CorruptData, StorageFull."""
    if not (run_dir / SUMMARY_FILE).is_file():
        raise NotFound(
            f"the run in {run_dir} has not ended: it has no {SUMMARY_FILE}",
            fix="Open its report.html, which a running job keeps current; run `meshrl resume` "
            "to complete an interrupted run",
        )
    found, (job, document) = read_json(run_dir / SUMMARY_FILE), read_job(run_dir)
    events, rows = read_events(run_dir), thin_rows(iterate_rows(run_dir / METRICS_FILE))
    if "health" not in found:  # a summary of an earlier version
        so_far = collect_figures(iterate_rows(run_dir / METRICS_FILE))
        problems = find_problems(so_far, document, is_over=True)
        found["health"] = [finding.to_document() for finding in problems]
    samples = select_report_samples(iterate_samples(run_dir))
    page = render_page(
        found,
        rows,
        parse_evaluations(select_evaluations(events, job)),
        events,
        document,
        kept_samples=samples,
        lanes=read_lanes(run_dir),
    )
    write_page(run_dir, page)


def draw_figures(run_dir: Path, directory: Path) -> list[Path]:
    """Write every figure that has content as a PNG file, also of a running run."""
    job, _ = read_job(run_dir)
    events, rows = read_events(run_dir), thin_rows(iterate_rows(run_dir / METRICS_FILE))
    directory.mkdir(parents=True, exist_ok=True)
    every = figures.make_figures(rows, parse_evaluations(select_evaluations(events, job)), events)
    written = [png.write_line_chart(figure, directory) for figure in every]
    written.append(
        png.write_timeline(TIMELINE_TITLE, WorkerTimeline.from_events(events), directory)
    )
    return [path for path in written if path is not None]
