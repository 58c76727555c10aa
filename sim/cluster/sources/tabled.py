"""Makes the workload of a scenario's table: what is drawn, or the trajectories of a trace."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError
from sim.cluster.model.workload import (
    Chain,
    LogNormal,
    Script,
    SimTurn,
    SimWorkload,
    ToolAnswer,
    Trace,
)
from sim.cluster.sources.scenario import DriftTable, WorkloadTable
from sim.drift import Drift


def workload_of(table: WorkloadTable, size: int, seed: int, base: Path) -> SimWorkload:
    """The workload of a job's groups of `size`; a trace that is named relatively lies in `base`."""
    if table.trace:
        return Trace(_traced(base / table.trace), size)
    longest = float(table.longest) or math.inf
    median, sigma = _drift(table.median), _drift(table.sigma)
    if not table.answers:
        tool_s = _drift(table.tool_s)
        return LogNormal(seed, table.turns, median, sigma, tool_s, table.prompt, 1.0, longest)
    answers = [
        ToolAnswer((a.tool, a.size, a.status), a.weight, a.seconds, a.tokens, a.ends, a.scale)
        for a in table.answers
    ]
    return Chain(seed, median, sigma, answers, table.turns, table.prompt, longest)


def _drift(table: DriftTable) -> Drift:
    return Drift(table.first, table.last or table.first)


def _traced(path: Path) -> list[Script]:
    """The trajectories of a trace, a line each: `{"prompt": 512, "turns": [{"tokens": 200,
    "tool_s": 1.5, "answer": 40, "tool": "search", "size": "small", "status": "success"}]}`.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace cannot be read: {error}", where=str(path)) from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            turns = [_turn(one) for one in row["turns"]]
            prompt = float(row.get("prompt", 0.0))
            if not turns or not 0 <= prompt < math.inf:
                raise ValueError(f"{len(turns)} turns behind a prompt of {prompt} tokens")
            found.append(Script(prompt, turns))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}, line {number}: no trajectory: {error}",
                fix='Write {"prompt": 512, "turns": [{"tokens": 200, "tool_s": 1.5}]}',
            ) from error
    if not found:
        raise ConfigError("the trace is empty", where=str(path))
    return found


def _turn(row: dict[str, Any]) -> SimTurn:
    tokens, tool_s = float(row["tokens"]), float(row.get("tool_s", 0.0))
    if not (0 < tokens < math.inf and 0 <= tool_s < math.inf):
        raise ValueError(f"{tokens} tokens and {tool_s} s are no turn")
    named = ("tool", "size", "status")
    state = tuple(str(row[name]) for name in named) if all(n in row for n in named) else None
    returned = (state[0], state[1], state[2]) if state else None
    return SimTurn(tokens, tool_s, float(row.get("answer", 0.0)), returned)
