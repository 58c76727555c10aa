"""Seeds of a shared gang: `python -m tests.mesh.simulated.sharing.runner --seeds 0:500 --jobs 2`.

It prints a line of JSON for each seed, then a summary, and exits with 1 after a violation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import DeadlineExceeded, MeshError
from meshrl.common.base.random import Random
from meshrl.sim.event_record import EventRecord
from meshrl.sim.mesh.seed_runner import run_scenario
from meshrl.sim.virtual_loop import VirtualLoop
from tests.mesh.simulated.sharing import invariants
from tests.mesh.simulated.sharing.faults import SharedFaults
from tests.mesh.simulated.sharing.world import GangShape, SharedGang

LIMIT_S = 1500.0  # of virtual time
START_S = 14.0  # from the start of the mesh to the first fault, about
FAULTS = 4
COMMAND = "python -m tests.mesh.simulated.sharing.runner"


@dataclass
class SharedOutcome:
    seed: int
    shape: GangShape
    planned: Sequence[str] = ()  # faults; none: they are drawn from the seed
    digest: str = ""
    violations: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    recovery_s: float = 0.0  # from the last fault until each job has made further steps
    processes: int = 0
    unsliced_overlaps: int = 0

    @property
    def replay_command(self) -> str:
        planned = f" --faults '{','.join(self.planned)}'" if self.planned else ""
        return f"{COMMAND} --seed {self.seed}{planned} --log seed-{self.seed}.log"


def draw_shape(seed: int) -> GangShape:
    """Draw the size of the gang, its budgets and the policy of its time slices."""
    random = Random(seed).child("shape")
    workers, ranks = random.choice([(1, 1), (1, 1), (2, 1), (2, 2)])
    memory_bytes, disk_bytes = random.choice([(0, 0), (0, 0), (600_000, 1_500_000), (0, 900_000)])
    return GangShape(
        workers,
        ranks,
        random.choice([250_000, 330_000, 330_000, 480_000, 0]),
        memory_bytes,
        disk_bytes,
        random.choice(["hrrs", "hrrs", "fifo", "round_robin", "exhaustive"]),
        random.child("planners").choice([1, 2]),
    )


def run_seed(seed: int, log: Path | None = None, planned: Sequence[str] = ()) -> SharedOutcome:
    """Run a seed with faults that are drawn from it, or with planned ones and a standby planner."""
    shape = replace(draw_shape(seed), planners=2) if planned else draw_shape(seed)
    outcome, loop = SharedOutcome(seed, shape, planned), VirtualLoop()
    loop.limit_s = LIMIT_S
    outcome.cpu_s = run_scenario(loop, lambda record, root: _run(loop, record, root, outcome), log)
    outcome.virtual_s = loop.now_s
    return outcome


async def _run(loop: VirtualLoop, record: EventRecord, root: Path, outcome: SharedOutcome) -> None:
    random = Random(outcome.seed)
    world = SharedGang(loop, random, root, record, outcome.shape)
    try:
        await _run_world(world, random, outcome)
    except (MeshError, DeadlineExceeded) as error:
        world.violate(f"the run ended with {error}")
    outcome.violations = [*world.violations, *world.machine.failures]
    outcome.processes, outcome.digest = len(world.machine.processes), record.digest
    outcome.unsliced_overlaps = world.unsliced_overlaps


async def _run_world(world: SharedGang, random: Random, outcome: SharedOutcome) -> None:
    await world.start()
    watching = asyncio.create_task(invariants.watch_copies(world), name="watch copies")
    await world.clock.sleep(random.child("start").uniform(0.5, 1.5) * START_S)
    faults = SharedFaults(world, random.child("faults"))
    await faults.run(FAULTS, outcome.planned)
    faults.repair()
    outcome.faults = sorted(faults.counts)
    outcome.recovery_s = await invariants.wait_for_steps(world)
    await invariants.check_residency(world)
    await invariants.check_decisions(world)
    watching.cancel()
    await world.stop()
    await invariants.check_accounts(world)
    world.violations += invariants.list_leftovers(world)


def run_seeds(seeds: list[int], process_count: int) -> int:
    outcomes: list[SharedOutcome] = []
    with get_context("spawn").Pool(process_count) as pool:
        for outcome in pool.imap_unordered(run_seed, seeds):
            outcomes.append(outcome)
            print(json.dumps(asdict(outcome)), flush=True)
    failed = [outcome for outcome in outcomes if outcome.violations]
    summary: dict[str, Any] = {
        "seeds": len(outcomes),
        "failures": sorted(outcome.seed for outcome in failed),
        "cpu_s": round(sum(outcome.cpu_s for outcome in outcomes), 1),
        "virtual_s": round(sum(outcome.virtual_s for outcome in outcomes), 1),
        "recovery_s_max": max((round(one.recovery_s, 1) for one in outcomes), default=0.0),
    }
    print(json.dumps(summary))
    return print_failures(failed)


def print_failures(failed: list[SharedOutcome]) -> int:
    for outcome in failed:
        print(
            f"replay: {outcome.replay_command}",
            *outcome.violations[:5],
            sep="\n  ",
            file=sys.stderr,
        )
    return int(bool(failed))


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", default="", metavar="A:B", help="every seed from A to B - 1")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run seeds")
    parser.add_argument("--faults", default="", help="planned faults of one seed, by commas")
    parser.add_argument("--log", type=Path, help="file for the log of all events")
    a = parser.parse_args()
    if a.seeds:
        first, _, end = a.seeds.partition(":")
        return run_seeds(list(range(int(first), int(end))), a.jobs)
    planned = a.faults.split(",") if a.faults else ()
    outcome = run_seed(a.seed, a.log, planned)
    print(json.dumps(asdict(outcome), indent=1))
    return print_failures([outcome] if outcome.violations else [])


if __name__ == "__main__":
    sys.exit(main())
