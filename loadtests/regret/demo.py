"""The demo with the planner over the demo with its first split held."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests.measuring.commands import meshrl
from loadtests.measuring.entry import tell
from loadtests.measuring.host import HostMeter
from meshrl.common.base.files import lines
from meshrl.common.state.events import Event
from meshrl.common.state.pool.store.explained import PLANNED
from meshrl.sim.mesh.paced import rl_s
from meshrl.view.recording.recorded import EVENTS, event_of

JOB = Path(__file__).parents[2] / "examples" / "calculator.toml"
RUN_S = 600.0
ARMS = {"planner": "true", "held": "false"}  # name -> planner.moves


async def compared(seeds: Sequence[int]) -> dict[str, Any]:
    """Flat; the ratio is the median over seeds. Which of the two comes first turns."""
    found: dict[str, list[float]] = {name: [] for name in ARMS}
    moves, shares = 0, []
    meter = HostMeter()
    for number, seed in enumerate(seeds):
        for name in list(ARMS) if number % 2 else list(reversed(ARMS)):
            events, cpu_s = await _ran(seed, ARMS[name])
            if name == "planner":
                planners_s = sum(
                    s for process, s in cpu_s.items() if process.startswith("planner/")
                )
                shares.append(planners_s / sum(cpu_s.values()))
            found[name].append(round(rl_s(events), 2))
            moved = sum(e.kind == "move" and e.fields.get("rule") in PLANNED for e in events)
            moves += moved
            told = {"arm": name, "seed": seed, "rl_s": found[name][-1], "moves": moved}
            tell(told | meter.reading())
    ratios = [ours / held for ours, held in zip(*found.values(), strict=True)]
    return {
        "demo_time_ratio": round(statistics.median(ratios), 4),
        "demo_time_ratio_most": round(max(ratios), 4),
        "demo_moves": moves,
        "demo_planner_cpu_share": round(statistics.median(shares), 4),
        "demo_planner_s": statistics.median(found["planner"]),
        "demo_held_s": statistics.median(found["held"]),
        **{f"demo_{key}": value for key, value in meter.reading().items()},
    }


async def _ran(seed: int, moves: str) -> tuple[list[Event], dict[str, float]]:
    """What a run of the demo has recorded, and the CPU-seconds of its processes."""
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        out = Path(folder) / "run"
        words = ("run", str(JOB), "--seed", str(seed), "--set", f"out={out}")
        await meshrl(*words, "--set", f"planner.moves={moves}", within_s=RUN_S)
        cpu_s: dict[str, float] = json.loads((out / "summary.json").read_text())["cpu_s"]
        return [event_of(row) for row in lines.read(out / EVENTS).rows], cpu_s
