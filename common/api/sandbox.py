"""The interface of the sandbox, which runs a job's tools and rewards where they can do no harm.

A call that fails is an outcome with a type, never an error of its batch and never a reward. A job
that the sandbox does not know (it has restarted) is NotFound for the batch: load it, ask again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshrl.common.api.calls.interface import Call, Cast, Interface
from meshrl.common.api.stats import Stats
from meshrl.common.base.encoding.messages import message

OK = "ok"
TIMEOUT = "timeout"  # over its deadline, in CPU time or in time not spent waiting for a core
OUT_OF_MEMORY = "out_of_memory"
OUTPUT_LIMIT = "output_limit"
REFUSED = "refused"  # it asked for what a jail does not give: network, processes, files, privileges
CRASHED = "crashed"  # its process ended
EVICTED = "evicted"  # its session made room for others, or had been idle for too long
BAD_VALUE = "bad_value"  # a reward that is no finite number, or a value that is no plain JSON
RAISED = "raised"
UNSUPPORTED = "unsupported"  # the tests hold what the grader cannot run: it is named, never scored
POSTPONED = "postponed"  # it was not begun: the calls before it take so long; ask again


@message
class RewardPart:
    """One term of a job's reward."""

    use: str  # "module:function", f(row, turns) -> float, or a built-in reward's name
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


@message
class JailSettings:
    """What code that the model wrote may use; see `SandboxConfig`."""

    tier: str = "bwrap"  # weakest tier that may run it
    python: str = ""
    root: str = ""
    runner: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 << 20
    processes: int = 32
    open_files: int = 128
    scratch_bytes: int = 64 << 20
    files: int = 4096
    output_bytes: int = 64 << 10
    sessions: int = 32
    session_idle_s: float = 600.0


@message
class LoadJob:
    """Asks the sandbox to get ready for the calls of a job."""

    job: str
    # First on the workers' import path, where the run is at home.
    bundle_dir: str
    tools: dict[str, str]  # name -> "module:function", f(input) -> plain value; or a built-in's
    rewards: list[RewardPart] = field(default_factory=list)  # their weighted sum is the reward
    mcp: dict[str, list[str]] = field(default_factory=dict)  # server -> its command
    jail: JailSettings = field(default_factory=JailSettings)
    bundle: str = ""  # digest of the bundle that `bundle_dir` is part of; empty: it lies there only


@message
class LoadResult:
    """The answer to LoadJob."""

    job: str
    workers: int
    isolation_tier: str  # how code of the model is contained; empty: the job runs none


@message
class ToolCall:
    """One call of a tool."""

    id: int  # the caller's, unique within its batch
    job: str
    tool: str
    input: Any
    deadline_s: float
    session: str = ""  # the session that a tool with state works on
    has_session_state: bool = (
        False  # the session holds what earlier calls made: a new one is no substitute
    )
    no_retry: bool = False  # if its process is lost, it is not run again


@message
class RunTools:
    """A batch of tool calls, which may be of several jobs."""

    calls: list[ToolCall]


@message
class RewardCall:
    """One finished trajectory to score: the row of its dataset, and its turns."""

    id: int
    job: str
    row: dict[str, Any]
    turns: list[dict[str, Any]]
    deadline_s: float


@message
class RewardBatch:
    """A batch of trajectories to score, which may be of several jobs."""

    calls: list[RewardCall]


@message
class EndSessions:
    """Sessions that nobody needs any more."""

    job: str
    sessions: list[str]


@message
class CallOutcome:
    """How one call ended.

    A tool that runs the model's code gives {"status", "output"} as its `value`, whatever the status
    is, and "exit" where that is not 0: the model reads it.
    """

    id: int
    status: str  # one of the above
    value: Any  # a reward's is a finite float; None unless ok
    error: str  # one line: what, and where in the job's code


@message
class Outcomes:
    """The answer to RunTools and RewardBatch."""

    outcomes: list[CallOutcome]  # in the order of the calls


@dataclass
class SandboxStats(Stats):
    """The figures of a sandbox, which its entry in the registry has."""

    job: str  # the one that it serves; empty: none yet
    workers: int
    replaced: int  # workers that ended or were killed
    jails: int  # started so far
    busy: int  # slots for jails
    waiting: int  # calls for a slot
    sessions: int
    rests: bool  # what else it does may be asked of another
    outcomes: dict[str, int] = field(default_factory=dict)  # by status

    def encode(self) -> dict[str, Any]:
        """Return them by name; the outcomes of a status are `outcomes_<status>`."""
        figures = super().encode()
        outcomes = figures.pop("outcomes")
        return figures | {f"outcomes_{status}": count for status, count in outcomes.items()}


class Sandbox(Interface):
    """The methods of the sandbox."""

    load_job = Call(LoadJob, LoadResult, deadline_s=120.0, idempotent=True)
    run_tools = Call(RunTools, Outcomes, deadline_s=60.0)
    score_trajectories = Call(RewardBatch, Outcomes, deadline_s=120.0, idempotent=True)
    end_sessions = Cast(EndSessions)
