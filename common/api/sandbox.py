"""What the sandbox offers: a job's tools and reward, run where they can hang, crash and print.

A call that fails is an outcome with a type, never an error of its batch and never a value. A job
that the sandbox does not know (it has restarted) is NotFound for the batch: load it, ask again.
"""

from __future__ import annotations

from typing import Any

from common.interface import Call, Interface
from common.wire import message

OK = "ok"
TIMEOUT = "timeout"  # over its deadline, in CPU time or in time not spent waiting for a core
CRASHED = "crashed"  # its process ended, twice
OUT_OF_MEMORY = "out_of_memory"
OUTPUT_LIMIT = "output_limit"
REFUSED = "refused"  # it asked for what a jail does not give: network, processes, files, privileges
EVICTED = "evicted"  # its session made room for others, or had been idle for too long
BAD_VALUE = "bad_value"  # a reward that is no finite number, or a value that is no plain JSON
RAISED = "raised"


@message
class LoadJob:
    job: str
    bundle_dir: str  # first on the workers' import path
    tools: dict[str, str]  # name -> "module:function", f(input) -> plain value
    reward: str  # "module:function", f(row, turns) -> float; empty: none


@message
class Loaded:
    job: str
    workers: int
    tier: str  # how the code is contained: "rlimits"


@message
class ToolCall:
    id: int  # the caller's, unique within its batch
    job: str
    tool: str
    input: Any
    deadline_s: float


@message
class RunTools:
    calls: list[ToolCall]


@message
class RewardCall:
    id: int
    job: str
    row: dict[str, Any]
    turns: list[dict[str, Any]]
    deadline_s: float


@message
class ScoreBatch:
    calls: list[RewardCall]


@message
class Outcome:
    id: int
    status: str  # one of the five above
    value: Any  # of a reward: a finite float; None unless ok
    error: str  # one line: what, and where in the job's code


@message
class Outcomes:
    outcomes: list[Outcome]  # in the order of the calls


class Sandbox(Interface):
    load = Call(LoadJob, Loaded, deadline_s=60.0, idempotent=True)
    run = Call(RunTools, Outcomes, deadline_s=60.0)
    score = Call(ScoreBatch, Outcomes, deadline_s=120.0, idempotent=True)
