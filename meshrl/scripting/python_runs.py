"""`meshrl.run`, `meshrl.start`, `meshrl.resume` and `meshrl.Run`: runs from Python code.

A run has a child process, so that the program is neither forked nor imported again, and may have an
event loop of its own.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from meshrl.client.event_types import make_typed_event
from meshrl.common.base.errors import DeadlineExceeded, MeshError
from meshrl.common.base.files import json_lines
from meshrl.common.state.events import Event, parse_event_id
from meshrl.directory import command_target, directory_paths
from meshrl.runs import completion, outcome
from meshrl.scripting.child_process import ChildProcess
from meshrl.scripting.job_request import Config, write_request
from meshrl.scripting.row_follower import RowFollower
from meshrl.view.history import sample_files
from meshrl.view.history.run_snapshot import parse_evaluations
from meshrl.view.recording.run_record import select_evaluations

EVALUATION_EVENTS = tuple(f'"kind": "{kind}"' for kind in ("evaluation", "lineage", "changed"))
POLL_S = 0.3  # of the files of a run
FOREIGN_POLL_S = 2.0  # of a run of another program, whose state is in its files


class JobFailed(MeshError):
    """Error raised when a job that Python code waits for has failed."""

    code = "job_failed"


def run(
    config: Config,
    *,
    reward: Any = None,
    environment: Any = None,
    dataset: Any = None,
    held_out: Any = None,
    overrides: Sequence[str] = (),
    force: bool = False,
) -> Run:
    """Train a job to its end on a mesh of its own, show its progress, and return the run.

    Ctrl-C stops the run cleanly, prints how to resume it, and raises KeyboardInterrupt.

    Args:
        config: Tables and keys of a job file as a dict, or the path of a job file. Each key that
            names code or rows takes the function, the class or the rows themselves.
        reward: Function `f(row, turns)`, or the name of a built-in reward: `reward.use`.
        environment: Class or function that returns an environment: `environment.use`.
        dataset: Rows to train on: dicts in any iterable, a DataFrame, a `datasets.Dataset`, or a
            path or an id of the Hub: `dataset.train`.
        held_out: Rows to evaluate on: `dataset.held_out`.
        overrides: KEY=VALUE, as of `--set`.
        force: Replace a run that has ended.

    Raises:
        ConfigError: A key, the code or a row is wrong; nothing has started.
        JobFailed: The job has failed.
    """
    objects = _name_objects(reward, environment, dataset, held_out)
    return _follow(_start_job(config, objects, overrides, force, is_shown=True))


def start(
    config: Config,
    *,
    reward: Any = None,
    environment: Any = None,
    dataset: Any = None,
    held_out: Any = None,
    overrides: Sequence[str] = (),
    force: bool = False,
) -> Run:
    """Start a job and return its run as soon as its mesh has started.

    The arguments are those of `run`. The run stops at the end of a `with` block, by `Run.stop`, or
    with this program. Raises ConfigError like `run`.
    """
    objects = _name_objects(reward, environment, dataset, held_out)
    return _start_job(config, objects, overrides, force, is_shown=False)


def resume(directory: Path | str, overrides: Sequence[str] = ()) -> Run:
    """Continue a run that was stopped, interrupted or killed, as `meshrl resume` does.

    `overrides` are new values of keys, KEY=VALUE. Shows the progress like `run`.
    """
    return _follow(_start_child(["resume", str(directory), *overrides], is_shown=True))


class Run:
    """Run in a directory, of any origin: its records, and its end if this program started it."""

    def __init__(self, directory: Path | str, *, process: ChildProcess | None = None) -> None:
        self.directory = directory_paths.require_run(Path(directory))
        self._process = process

    def __repr__(self) -> str:
        return f"Run({directory_paths.format_path(self.directory)!r}, {self.state})"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of the steps so far, with the keys of `metrics.jsonl`."""
        return list(json_lines.iterate_rows(self.directory / "metrics.jsonl"))

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Rows of the evaluations so far: `step`, `tag`, `best`, and figures by their names."""
        rows = json_lines.iterate_rows(self.directory / "events.jsonl", *EVALUATION_EVENTS)
        job = command_target.read_run(self.directory).job
        found = parse_evaluations(select_evaluations(list(map(_make_event, rows)), job))
        return [{"step": e.step, "tag": e.tag, "best": e.is_best, **e.figures} for e in found]

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Recorded trajectories, with the keys of `samples.jsonl`."""
        return sample_files.read_samples(self.directory)

    @property
    def summary(self) -> dict[str, Any]:
        """Content of `summary.json`; empty before the end."""
        return directory_paths.read_json_or_empty(self.directory / "summary.json")

    @property
    def model(self) -> Path | None:
        """Directory of the trained model in Hugging Face's layout; None before the end."""
        path = self.directory / "model"
        return path if (path / "config.json").is_file() else None

    @property
    def state(self) -> str:
        """State of the run: running, finished, failed or stopped."""
        if self._has_own_process:
            return outcome.RUNNING_STATE
        return self.read_outcome().state

    @property
    def output(self) -> str:
        """Last lines of output of a run that this program started without a terminal."""
        return "\n".join(self._process.output) if self._process is not None else ""

    def read_outcome(self) -> outcome.RunOutcome:
        """Return what `meshrl wait` prints: state, step, reward and error."""
        location = command_target.read_run(self.directory)
        return outcome.read_outcome(location, self._has_own_process or None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the row of each step, past ones first, until the run ends.

        A step that is repeated after a loss is yielded again.
        """
        last_rows: dict[int, dict[str, Any]] = {}  # a replaced file has rows that were yielded
        for row in self._follow_file("metrics.jsonl"):
            if last_rows.get(row["step"]) != row:
                last_rows[row["step"]] = row
                yield row

    def events(self) -> Iterator[Event[Any]]:
        """Yield the events of the run, past ones first, until it ends."""
        last_id = "0"
        for row in self._follow_file("events.jsonl"):
            if parse_event_id(row["id"]) > parse_event_id(last_id):
                last_id = row["id"]
                yield make_typed_event(_make_event(row))

    def wait(self, timeout_s: float | None = None) -> Self:
        """Return the run once it has ended and its results are written.

        Raises JobFailed if the job has failed, DeadlineExceeded after `timeout_s`, and MeshError if
        the process of the run has crashed.
        """
        too_long = DeadlineExceeded(f"{self.directory} runs for more than {timeout_s or 0:g} s")
        if self._process is not None:
            if self._process.wait(timeout_s) is None:
                raise too_long
            if self._process.error is not None:
                raise self._process.error
        if self.state == outcome.RUNNING_STATE:  # on a mesh of others
            location = command_target.read_run(self.directory)
            if completion.wait_for_outcome(location, timeout_s) is None:
                raise too_long
        ended = self.read_outcome()
        if ended.state == "failed":
            lines = ended.format_lines()
            raise JobFailed(lines[0], fix=" ".join(lines[1:]))
        if self._process is not None and self._process.has_crashed and ended.state != "finished":
            raise self._process.make_exit_error()
        return self

    def stop(self) -> Self:
        """Stop the run cleanly, and return it once it has ended. `resume` continues it.

        Only a run that this program started can be stopped; `meshrl cancel` stops any.
        """
        if self._process is not None:
            self._process.stop()
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def _has_own_process(self) -> bool:
        """True while a process of this program runs it."""
        return self._process is not None and self._process.exit_status is None

    def _follow_file(self, name: str) -> Iterator[dict[str, Any]]:
        follower = RowFollower(self.directory / name)
        while True:
            is_running = self.state == outcome.RUNNING_STATE  # before the rows: the last ones too
            yield from follower.read_new()
            if not is_running:
                return
            time.sleep(POLL_S if self._has_own_process else FOREIGN_POLL_S)


def _make_event(row: dict[str, Any]) -> Event:
    return Event(str(row["id"]), int(row["ms"]), str(row["kind"]), row["fields"])


def _name_objects(reward: Any, environment: Any, dataset: Any, held_out: Any) -> dict[str, Any]:
    """Return the values of the keys that the arguments stand for."""
    return {
        "reward.use": reward,
        "environment.use": environment,
        "dataset.train": dataset,
        "dataset.held_out": held_out,
    }


def _start_job(
    config: Config,
    objects: Mapping[str, Any],
    overrides: Sequence[str],
    force: bool,
    *,
    is_shown: bool,
) -> Run:
    """Start a job in a child process and return its run."""
    directory = write_request(config, objects, overrides, force)
    try:
        return _start_child(["start", str(directory)], is_shown=is_shown)
    finally:  # the run's bundle has all of it
        shutil.rmtree(directory, ignore_errors=True)


def _start_child(arguments: list[str], *, is_shown: bool) -> Run:
    """Start the child process and return its run; an interrupt ends the process."""
    process = ChildProcess(arguments, is_shown=is_shown)
    try:
        return Run(process.read_directory(), process=process)
    except KeyboardInterrupt:
        process.stop()
        raise


def _follow(started: Run) -> Run:
    """Wait for the end of a run; an interrupt stops it cleanly."""
    try:
        return started.wait()
    except KeyboardInterrupt:
        started.stop()
        path = directory_paths.format_path(started.directory)
        print(f"To resume from Python: meshrl.resume({path!r})", flush=True)
        raise
