"""Which roles may call which method: all there is to ask of a process of the mesh.

A role is the kind of a process, and whoever calls has proved it by its key. What is not here nobody
may call, and who may call nothing (the command line, an environment process) has no key.
"""

from __future__ import annotations

from collections.abc import Mapping

Callers = Mapping[str, frozenset[str]]

ROLES = frozenset(
    {
        "engine",
        "hybrid",
        "node",
        "planner",
        "rank",
        "rollout",
        "sandbox",
        "scoring",
        "trainer",
        "weights",
        "worker",
    }
)

_TABLE: dict[str, tuple[str, ...]] = {
    # what a worker asks of the role process that it started
    "Drainable.drain": ("worker",),
    "Engine.attach": ("rollout",),
    "Engine.submit": ("rollout",),
    "Engine.abort": ("rollout",),
    "Engine.move": ("rollout",),
    "Engine.export": ("engine",),  # one that takes over a session
    "Engine.rest": ("planner",),
    "Engine.look": ("trainer",),  # a step was committed
    "Ranks.stand_by": ("trainer",),
    "Ranks.form": ("trainer",),
    "Ranks.begin": ("trainer",),
    "Ranks.compute": ("trainer",),
    "Ranks.keep": ("trainer",),
    "Ranks.adopt": ("trainer",),
    "Ranks.apply": ("trainer",),
    "Ranks.score": ("trainer",),
    "Ranks.gather": ("trainer",),
    "Ranks.take": ("trainer",),
    # code of a job's author and of the model runs there: its shards alone bring any
    "Sandbox.load": ("rollout",),
    "Sandbox.run": ("rollout",),
    "Sandbox.score": ("rollout",),
    "Sandbox.end_sessions": ("rollout",),
    "Scoring.score": ("rollout",),
    "Scoring.judge": ("rollout",),
    "Trainer.join": ("hybrid",),
    "Trainer.leave": ("hybrid",),
    "Trainer.lease_round": ("hybrid",),
    "Trainer.round_done": ("hybrid",),
    "Trainer.restage": ("engine", "hybrid"),  # who cannot load the current version
    "Weights.stage": ("trainer",),
    "Weights.manifest": ("engine", "hybrid", "scoring", "trainer"),  # who loads a version
    "Weights.save": ("trainer",),
    "Weights.load": ("trainer",),
    "Weights.examine": ("engine", "hybrid", "scoring", "trainer"),  # who was given damaged bytes
    "Worker.look": ("planner",),  # its gang has another record
}
CALLERS: Callers = {method: frozenset(roles) for method, roles in _TABLE.items()}
