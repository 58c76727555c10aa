"""Moves for people: their predictions, their outcomes, and why none is made now."""

from __future__ import annotations

from collections.abc import Iterable

from meshrl.common.state.events import Event
from meshrl.common.state.pool.store.planner_reports import (
    MOVE_OUTCOME_EVENT,
    JobPrediction,
    MoveOutcome,
    decode_move_outcome,
)
from meshrl.view.history import decisions

MAX_MOVES = 10  # judged moves that are shown, the last ones


def list_outcomes(events: Iterable[Event], subject: str = "") -> list[MoveOutcome]:
    """Return the last judged moves of a job, a gang or an instance, or of all, oldest first."""
    found = (
        decode_move_outcome(event.ms, event.fields)
        for event in events
        if event.kind == MOVE_OUTCOME_EVENT
    )
    return [m for m in found if subject in ("", m.job, m.resident, m.gang)][-MAX_MOVES:]


def merge_events(*sources: Iterable[Event]) -> list[Event]:
    """Return judged moves of several sources, each once, in their order."""
    return [one for one in decisions.merge_events(*sources) if one.kind == MOVE_OUTCOME_EVENT]


def format_seconds(value: float | None) -> str:
    """Return three digits of the value; a dash if it is not known."""
    return "-" if value is None else f"{value:.3g} s"


def format_outcome(move: MoveOutcome) -> str:
    """Return whether the move paid, and whether it was undone and why, as a text."""
    paid = "paid" if move.paid else "did not pay"
    if not move.undone:
        return paid
    return f"{paid}, undone" + (f": {move.reason}" if move.reason else "")


def format_move(move: MoveOutcome) -> str:
    """Return the outcome of a move as a line of news."""
    times = (
        f"{format_seconds(move.observed_s)} a step, predicted {format_seconds(move.predicted_s)}"
    )
    without = "" if move.expected_s is None else f", {format_seconds(move.expected_s)} without it"
    return f"the move of {move.gang} to {move.to} {format_outcome(move)}: {times}{without}"


def describe_prediction(prediction: JobPrediction) -> list[str]:
    """Return a job's predicted step times under the current division, and why nothing moves."""
    parts = {
        "rollout": prediction.rollout_s,
        "training": prediction.train_s,
        "the host's cores": prediction.host_s,
    }
    text = ", ".join(f"{name} {format_seconds(value)}" for name, value in parts.items() if value)
    found = []
    if prediction.step_s:
        found.append(
            f"a step is predicted to take {format_seconds(prediction.step_s)}"
            + (text and f": {text}")
        )
    if prediction.bottleneck:
        found.append(f"the bottleneck is {prediction.bottleneck}")
    if prediction.median_error is not None:
        found.append(
            f"the error of predicted moves is {100 * prediction.median_error:.0f} % (median)"
        )
    splits = prediction.seeding, prediction.expert_split_reason
    sentences = prediction.verdict, prediction.hybrid_cost, *splits
    return found + [text for text in sentences if text]
