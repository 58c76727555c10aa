"""Table of a report's trajectories: some of evaluations and of training steps, with a filter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from meshrl.view.history.sample_files import (
    Sample,
    describe_end,
    format_heading,
    format_reward,
    select_evaluations,
    split_parts,
)
from meshrl.view.recording.run_record import thin_rows

MIN_TRAINING_SAMPLES = 100  # of more, 100 to 200 remain, evenly over the run
MAX_TITLE_CHARS = 90  # of a folded trajectory
COLUMNS = ("step", "from", "reward", "end", "tokens", "trajectory")
NUMBERS = '<input name="{0}_from" type="number" step="any" aria-label="least {0}"> to '
NUMBERS += '<input name="{0}_to" type="number" step="any" aria-label="largest {0}">'


def select_report_samples(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples for the table, oldest first, of all samples of a run in any order.

    They are those of the first and the last two evaluations, and some of each part of training.
    """
    evaluated: list[Sample] = []

    def pass_training() -> Iterable[Sample]:
        for sample in samples:
            if sample.get("evaluation"):
                evaluated.append(sample)
            else:
                yield sample

    trained = thin_rows(pass_training(), MIN_TRAINING_SAMPLES)
    evaluated.sort(key=lambda sample: float(sample["at"]))
    found = [*select_evaluations(evaluated), *trained]
    return sorted(found, key=lambda sample: float(sample["at"]))


def render_trajectories(samples: Sequence[Sample]) -> str:
    """Return the table, newest first; the filter appears where scripts run."""
    if not samples:
        return '<p class="none">no trajectory was recorded</p>'
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join(map(_render_row, reversed(samples)))
    table = f'<table id="trajectories"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'{_render_filter(samples)}<div class="wide">{table}</div>'


def _render_filter(samples: Sequence[Sample]) -> str:
    sets = _render_choice("set", [_name_set(s) for s in samples])
    outcomes = _render_choice("outcome", [describe_end(s) for s in samples])
    fields = [
        '<input name="text" type="search" placeholder="text" aria-label="text">',
        *(f"<label>{name} {NUMBERS.format(name)}</label>" for name in ("step", "reward")),
        f"<label>from {sets}</label>",
        f"<label>end {outcomes}</label>",
        "<output></output>",
    ]
    return f'<form id="filter" hidden>{"".join(fields)}</form>'


def _render_choice(name: str, values: Iterable[str]) -> str:
    options = "".join(f"<option>{escape(value)}</option>" for value in dict.fromkeys(values))
    return f'<select name="{name}"><option value="">any</option>{options}</select>'


def _name_set(sample: Sample) -> str:
    tag = sample.get("evaluation")
    return f"{tag}, {sample['set']}" if tag else str(sample["set"])


def _render_row(sample: Sample) -> str:
    parts = list(split_parts(sample))
    parts_html = "".join(
        f'<b>{escape(title)}</b><pre class="{role}">{escape(text)}</pre>'
        for role, title, text in parts
    )
    title = " ".join(parts[0][2].split())
    if len(title) > MAX_TITLE_CHARS:
        title = f"{title[:MAX_TITLE_CHARS]}..."
    reward, end = sample["reward"], describe_end(sample)
    data = {
        "step": sample["step"],
        "reward": "" if reward is None else reward,
        "set": _name_set(sample),
        "outcome": end,
    }
    attributes = "".join(f' data-{key}="{escape(str(value))}"' for key, value in data.items())
    return (
        f"<tr{attributes}><td class=n>{sample['step']}</td><td>{escape(_name_set(sample))}</td>"
        f"<td class=n>{escape(format_reward(sample))}</td><td>{escape(end)}</td>"
        f"<td class=n>{sample['tokens']}</td><td><details><summary>{escape(title)}</summary>"
        f'<p class="note">{escape(format_heading(sample))}</p>{parts_html}</details></td></tr>'
    )
