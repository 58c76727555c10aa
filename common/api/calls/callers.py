"""Which roles may call which method: all there is to ask of a process of the mesh.

A role is the kind of a process, and whoever calls has proved it by its key. What is not here nobody
may call, and who may call nothing (an environment process) has no key.
"""

from __future__ import annotations

from collections.abc import Mapping

Callers = Mapping[str, frozenset[str]]

ROLES = frozenset(
    {
        "engine",
        "gateway",
        "hybrid",
        "node",
        "person",  # a command of the mesh's own user, at its head
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

# What runs on a host that has joined; one of them has a planner too. The weight store, the gateway
# and people's commands are the head's alone.
HOST_ROLES = frozenset(
    {
        "engine",
        "hybrid",
        "node",
        "rank",
        "rollout",
        "sandbox",
        "scoring",
        "trainer",
        "worker",
    }
)
PLANNER = "planner"

# Who holds a token, and is no process of the mesh: the gateway's front door alone knows its key.
CLIENT = "client"
# Who holds a host's token: it joins, and asks about itself.
JOINER = "joiner"

_TABLE: dict[str, tuple[str, ...]] = {
    # what a worker asks of the role process that it started
    "Resting.drain": ("worker",),
    "Resting.settle": ("worker",),
    "Engine.attach": ("rollout",),
    "Engine.submit": ("rollout",),
    "Engine.abort": ("rollout",),
    "Engine.move": ("rollout",),
    "Engine.export": ("engine",),  # one that takes over a session
    "Engine.stored": ("engine",),  # one of another host, which looks for a prefix
    "Engine.look": ("trainer",),  # a step was committed
    "Node.look": ("planner",),  # the host is to run other shards and sandboxes
    "Node.logs": ("person",),
    "Node.read_log": ("person",),
    # whatever else a person may call, and whose jobs it reaches, the gateway decides by the token
    "Gateway.upload": (CLIENT,),
    "Gateway.put": (CLIENT,),
    "Gateway.finish": (CLIENT,),
    "Gateway.jobs": (CLIENT,),
    "Gateway.job": (CLIENT,),
    "Gateway.events": (CLIENT,),
    "Gateway.stop": (CLIENT,),
    "Gateway.delete": (CLIENT,),
    "Gateway.model": (CLIENT,),
    "Gateway.read": (CLIENT,),
    "Gateway.versions": (CLIENT,),
    "Gateway.join": (JOINER,),
    "Gateway.leave": (JOINER,),
    "Gateway.drain": (JOINER,),
    "Gateway.back": (JOINER,),
    "Gateway.remaining": (JOINER,),
    "Gateway.whereabouts": (JOINER,),
    "Gateway.membership": (JOINER,),
    "Ranks.stand_by": ("trainer",),
    "Ranks.form": ("trainer",),
    "Ranks.begin": ("trainer",),
    "Ranks.compute": ("trainer",),
    "Ranks.keep": ("trainer",),
    "Ranks.adopt": ("trainer",),
    "Ranks.apply": ("trainer",),
    "Ranks.score": ("trainer",),
    "Ranks.stage": ("trainer",),
    "Ranks.staged": ("trainer",),
    "Ranks.save": ("trainer",),
    "Ranks.saved": ("trainer",),
    "Ranks.restore": ("trainer",),
    "Ranks.take": ("trainer",),
    "Ranks.rest": ("trainer",),
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
    # who loads the current version on another host than the store's
    "Trainer.gather": ("engine", "hybrid"),
    "Weights.stage": ("trainer",),
    "Weights.manifest": ("engine", "hybrid", "rank", "scoring", "trainer"),  # who loads a version
    "Weights.sources": ("engine", "hybrid", "rank", "scoring", "trainer"),
    "Weights.save": ("trainer",),
    "Weights.load": ("trainer",),
    "Weights.lay_out": ("trainer",),
    "Weights.older": ("trainer",),
    "Weights.set_aside": ("trainer",),
    "Weights.clear": ("trainer",),
    "Weights.keep_lines": ("engine", "rollout", "trainer"),
    # whoever stages a version, and whoever loads one
    "Weights.begin_delta": ("rank", "trainer"),
    "Weights.stage_delta": ("rank", "trainer"),
    "Weights.deltas": ("engine", "hybrid", "rank", "scoring", "trainer"),
    "Weights.received": ("engine", "hybrid"),  # who receives one version after the other
    # who has files of a job to read; of a sandbox's its host's agent
    "Weights.publish": ("engine", "hybrid", "node", "rank", "rollout", "scoring", "trainer"),
    # who was given damaged bytes
    "Weights.examine": ("engine", "hybrid", "node", "rank", "rollout", "scoring", "trainer"),
    "Worker.look": ("planner",),  # its gang has another record
    # the role processes that it has started keep their tensors there
    "Worker.make_segment": ("engine", "hybrid", "rank", "scoring", "trainer"),
    "Worker.find_segment": ("engine", "hybrid", "rank", "scoring", "trainer"),
    "Worker.drop_segment": ("engine", "hybrid", "rank", "scoring", "trainer"),
    # whoever computes on a gang asks rank 0's worker for turns
    "Worker.take_turn": ("engine", "hybrid", "rank", "scoring", "trainer"),
    "Worker.give_back": ("engine", "hybrid", "rank", "scoring", "trainer"),
    "Worker.end_resident": ("worker",),  # rank 0's, where a turn was not given back
}
CALLERS: Callers = {method: frozenset(roles) for method, roles in _TABLE.items()}
