"""Placement of a role process, as its worker writes it on its command line."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields
from typing import Any

from meshrl.common.state.pool.workers.rows import ExpertSplit, Tier


@dataclass(frozen=True, slots=True)
class Placement:
    """Process of an instance, on one of its ranks."""

    gang: str
    instance: str
    job: str
    generation: int  # of the process: its worker accepts no other generation
    core: bool = False  # of training: owns parameters and optimizer
    rank: int = 0  # among the instance's ranks
    ranks: int = 1
    time_sliced: bool = False  # computes in time slices with the gang's other instances
    slice_scheduler: str = ""  # the worker's process that schedules the gang's time slices
    # how a core's ranks divide a mixture; None: as in its job file
    expert_split: ExpertSplit | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Placement:
        """Return the placement that a command line of `build_parser` describes."""
        found = {one.name: getattr(args, one.name) for one in fields(cls)}
        split = ExpertSplit.from_list(json.loads(args.expert_split))
        return cls(**found | {"expert_split": split})

    def to_args(self) -> list[str]:
        """Return the command line arguments that `build_parser` parses."""
        found = ["--gang", self.gang, "--instance", self.instance, "--job", self.job]
        found += ["--generation", str(self.generation), "--slice-scheduler", self.slice_scheduler]
        if self.core:
            found.append("--core")
        if self.ranks > 1:
            found += ["--rank", str(self.rank), "--ranks", str(self.ranks)]
        if self.expert_split is not None:
            found += ["--expert-split", json.dumps(self.expert_split.to_list())]
        return [*found, "--time-sliced"] if self.time_sliced else found

    def initial_stats(self) -> dict[str, Any]:
        """Return the stats that each role process publishes at its start."""
        return {
            "job": self.job,
            "gang": self.gang,
            "instance": self.instance,
            "resident": self.instance,  # deprecated
            "generation": self.generation,
            "core": self.core,
            "rank": self.rank,
            "epoch": 0,
            "tier": str(Tier.ACCELERATOR),
        }


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the options of every role process."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--gang", required=True)
    found.add_argument("--instance", required=True)
    found.add_argument("--job", required=True)
    found.add_argument("--generation", type=int, required=True)
    found.add_argument("--core", action="store_true")
    found.add_argument("--rank", type=int, default=0, help="among the instance's ranks")
    found.add_argument("--ranks", type=int, default=1, help="number of the instance's ranks")
    found.add_argument(
        "--expert-split", default="null", help="division of a mixture between ranks, as JSON"
    )
    found.add_argument(
        "--time-sliced",
        action="store_true",
        help="compute in time slices with the gang's other instances",
    )
    found.add_argument(
        "--slice-scheduler", default="", help="process that schedules the gang's time slices"
    )
    return found
