"""The seat of a role process: what its worker started it for, as its command line says it."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields
from typing import Any

from meshrl.common.state.pool.workers.rows import ExpertSplit, Tier


@dataclass(frozen=True, slots=True)
class Placement:
    """A process of a resident, on one of its ranks."""

    gang: str
    resident: str
    job: str
    generation: int  # of the process: its worker takes no other one for it
    core: bool = False  # of training: owns parameters and optimizer
    rank: int = 0  # among the resident's
    ranks: int = 1
    turns: bool = False  # it computes by turns with the gang's other residents
    keeper: str = ""  # the worker's process that gives the gang's turns
    apart: ExpertSplit | None = (
        None  # how a core's ranks divide a mixture; None: as its job file has it
    )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Placement:
        """The seat that a command line of `parser` describes."""
        told = {one.name: getattr(args, one.name) for one in fields(cls)}
        return cls(**told | {"apart": ExpertSplit.from_list(json.loads(args.apart))})

    def to_args(self) -> list[str]:
        """The command line's words that `parser` reads."""
        found = ["--gang", self.gang, "--resident", self.resident, "--job", self.job]
        found += ["--generation", str(self.generation), "--keeper", self.keeper]
        if self.core:
            found.append("--core")
        if self.ranks > 1:
            found += ["--rank", str(self.rank), "--ranks", str(self.ranks)]
        if self.apart is not None:
            found += ["--apart", json.dumps(self.apart.to_list())]
        return [*found, "--turns"] if self.turns else found

    def initial_stats(self) -> dict[str, Any]:
        """What each role process publishes of itself beside whether it is ready."""
        return {
            "job": self.job,
            "gang": self.gang,
            "resident": self.resident,
            "generation": self.generation,
            "core": self.core,
            "rank": self.rank,
            "epoch": 0,
            "tier": str(Tier.ACCELERATOR),
        }


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every role process."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--gang", required=True)
    found.add_argument("--resident", required=True)
    found.add_argument("--job", required=True)
    found.add_argument("--generation", type=int, required=True)
    found.add_argument("--core", action="store_true")
    found.add_argument("--rank", type=int, default=0, help="among the resident's")
    found.add_argument("--ranks", type=int, default=1, help="of the resident")
    found.add_argument("--apart", default="null", help="how ranks divide a mixture, as JSON")
    found.add_argument("--turns", action="store_true", help="compute by turns with the others")
    found.add_argument("--keeper", default="", help="who gives the gang's turns")
    return found
