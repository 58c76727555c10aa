"""Process of one tracker: receives a run's figures from its parent and publishes them.

`python -m meshrl.view.trackers.tracker_main NAME`, started by `tracker_processes.py`, which
describes the frames. A tracker's package may hang, raise or end the process: nothing else runs
here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from meshrl.common.mesh.process.entry.child import ChildChannel

Values = dict[str, float]
TableRows = list[dict[str, Any]]  # of a table, all with the same keys
SAMPLES_TITLE = "evaluation/samples"


class RunTracker(Protocol):
    def log_values(self, step: int, values: Values, wall: float) -> None: ...
    def log_table(self, step: int, rows: TableRows, wall: float) -> None:
        """Log trajectories of an evaluation, for reading."""

    def rewind(self, step: int) -> None:
        """Drop the steps after this one, which are not part of the run any more."""

    def close(self) -> None: ...


class TensorBoard:
    """TensorBoard event files, without TensorFlow and without torch."""

    def __init__(self, description: dict[str, Any]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2, summary_pb2
        Path(description["target"]).mkdir(parents=True, exist_ok=True)
        self._file = EventFileWriter(description["target"])

    def log_values(self, step: int, values: Values, wall: float) -> None:
        found = [self._summary.Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        summary = self._summary.Summary(value=found)
        self._file.add_event(self._event.Event(wall_time=wall, step=step, summary=summary))
        self._file.flush()

    def log_table(self, step: int, rows: TableRows, wall: float) -> None:
        from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2

        shape = tensor_shape_pb2.TensorShapeProto
        tensor = tensor_pb2.TensorProto(
            dtype="DT_STRING",
            string_val=[format_markdown(row).encode("utf-8", "replace") for row in rows],
            tensor_shape=shape(dim=[shape.Dim(size=len(rows))]),
        )
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summary.SummaryMetadata(plugin_data=plugin)
        value = self._summary.Summary.Value(tag=SAMPLES_TITLE, metadata=metadata, tensor=tensor)
        summary = self._summary.Summary(value=[value])
        self._file.add_event(self._event.Event(wall_time=wall, step=step, summary=summary))
        self._file.flush()

    def rewind(self, step: int) -> None:
        log = self._event.SessionLog(status=self._event.SessionLog.START)
        event = self._event.Event(wall_time=time.time(), step=step + 1, session_log=log)
        self._file.add_event(event)

    def close(self) -> None:
        self._file.close()


class Wandb:
    def __init__(self, description: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=description["target"],
            id=description["id"],
            name=description["job"],
            dir=description["run_dir"],
            config=description["document"],
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="step")  # its own step can only grow

    def log_values(self, step: int, values: Values, wall: float) -> None:
        self._run.log({**values, "step": step})

    def log_table(self, step: int, rows: TableRows, wall: float) -> None:
        import wandb

        data = [list(row.values()) for row in rows]
        table = wandb.Table(columns=list(rows[0]), data=data, allow_mixed_types=True)
        self._run.log({SAMPLES_TITLE: table, "step": step})

    def rewind(self, step: int) -> None:
        """Do nothing: repeated steps replace the old ones in a chart over `step`."""

    def close(self) -> None:
        self._run.finish()


class Trackio:
    def __init__(self, description: dict[str, Any]) -> None:
        import trackio

        self._trackio: Any = trackio
        trackio.init(
            project=description["target"],
            name=description["id"],
            config=description["document"],
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log_values(self, step: int, values: Values, wall: float) -> None:
        self._trackio.log({k: v for k, v in values.items() if k != "step"}, step=step)

    def log_table(self, step: int, rows: TableRows, wall: float) -> None:
        data = [list(row.values()) for row in rows]
        table = self._trackio.Table(columns=list(rows[0]), data=data)
        self._trackio.log({SAMPLES_TITLE: table}, step=step)

    def rewind(self, step: int) -> None:
        """Do nothing: a repeated step appears beside the old one."""

    def close(self) -> None:
        self._trackio.finish()


def format_markdown(row: dict[str, Any]) -> str:
    """Return a row for a text panel: short values in one line, texts as blocks."""
    short = {k: v for k, v in row.items() if k not in ("prompt", "turns")}
    head = ", ".join(f"{name} {value}" for name, value in short.items())
    blocks = "".join(f"\n\n    {row[k]}".replace("\n", "\n    ") for k in ("prompt", "turns"))
    return f"**{head}**{blocks}"


TRACKERS: dict[str, Callable[[dict[str, Any]], RunTracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


def run_tracker(name: str, channel: ChildChannel) -> None:
    """Show figures until the parent closes the channel; answer each frame once it is shown."""
    first = channel.recv()
    if first is None:
        return
    tracker: RunTracker = TRACKERS[name](json.loads(first))
    channel.send(b"ready")
    while (frame := channel.recv()) is not None:
        for record in json.loads(frame):
            if record["kind"] == "rewind":
                tracker.rewind(record["step"])
            else:
                tracker.log_values(record["step"], record["values"], record["wall"])
                if record.get("samples"):
                    tracker.log_table(record["step"], record["samples"], record["wall"])
        channel.send(b"shown")
    tracker.close()


if __name__ == "__main__":
    run_tracker(sys.argv[1], ChildChannel.from_env())
    sys.stdout.flush()
    os._exit(0)  # a package's threads and exit handlers do not hold the run's end up
