"""Tables of a gang's slice scheduler."""

from __future__ import annotations

from datetime import datetime

from rich.table import Table

from meshrl.common.api.node import SliceExplanation
from meshrl.view.live import console_tables

COLUMNS = ("at", "instance", "function", "waited", "service", "switch", "score", "reason")


def make_decisions_table(explanation: SliceExplanation) -> Table:
    """Return a table of decisions: a row for the chosen request, and one for each other.

    Times are in seconds.
    """
    table = console_tables.make_table(*COLUMNS)
    for decision in explanation.decisions:
        at = datetime.fromtimestamp(decision.at_s).strftime("%H:%M:%S")
        is_open = True  # an instance may have several requests; the first one is chosen
        for candidate in decision.candidates:
            is_chosen = is_open and candidate.instance == decision.chosen
            is_open = is_open and not is_chosen
            figures = (candidate.wait_s, candidate.service_s, candidate.switch_s, candidate.score)
            table.add_row(
                at,
                candidate.instance,
                candidate.function,
                *(f"{figure:.2f}" for figure in figures),
                decision.reason if is_chosen else "waits",
            )
            at = ""
    return table
