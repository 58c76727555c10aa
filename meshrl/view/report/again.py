"""`meshrl report`: the report of a run drawn anew from its record, and figures as PNG files."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.base.errors import NotFound
from meshrl.common.base.files.lines import whole
from meshrl.directory.places import read_json, shown
from meshrl.view.history import samples
from meshrl.view.history.gangs import WorkerTimeline
from meshrl.view.history.run_snapshot import evaluations_of
from meshrl.view.recording.recorded import METRICS, evaluated, job_of, read_events, thinned
from meshrl.view.report import figures, png
from meshrl.view.report.page import TIMELINE, html
from meshrl.view.report.report import write_page

SUMMARY = "summary.json"


def show(run_dir: Path, directory: Path | None) -> None:
    """Writes PNG files to a directory if there is one, else `report.html`; says what is where.
    NotFound: matplotlib is missing, or the run is not over and has its page by whoever records it.
    """
    if directory is None:
        write(run_dir)
        print(shown(run_dir / "report.html"))
        return
    png.needed()
    written = draw(run_dir, directory)
    print(f"{shown(directory)}: {', '.join(path.name for path in written) or 'nothing to draw'}")


def write(run_dir: Path) -> None:
    """The page of a run that is over. NotFound, Damaged, StorageFull."""
    if not (run_dir / SUMMARY).is_file():
        raise NotFound(
            f"the run in {run_dir} is not over: it has no {SUMMARY}",
            fix="its report.html is written while it goes on; `meshrl resume` ends one that was "
            "cut off",
        )
    found, (job, document) = read_json(run_dir / SUMMARY), job_of(run_dir)
    events, rows = read_events(run_dir), thinned(whole(run_dir / METRICS))
    kept = samples.read(run_dir)
    page = html(
        found,
        rows,
        evaluations_of(evaluated(events, job)),
        events,
        document,
        kept=kept,
    )
    write_page(run_dir, page)


def draw(run_dir: Path, directory: Path) -> list[Path]:
    """Every figure that has something to show as a PNG file, also of a run that goes on."""
    job, _ = job_of(run_dir)
    events, rows = read_events(run_dir), thinned(whole(run_dir / METRICS))
    directory.mkdir(parents=True, exist_ok=True)
    every = figures.every(rows, evaluations_of(evaluated(events, job)), events)
    written = [png.lines(figure, directory) for figure in every]
    written.append(png.workers(TIMELINE, WorkerTimeline.of(events), directory))
    return [path for path in written if path is not None]
