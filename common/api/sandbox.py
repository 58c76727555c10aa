"""Interface of the sandbox, which runs a job's tools and rewards in isolation.

A failed call is an outcome with a type, never an error of its batch and never a reward. For a job
that the sandbox does not know (it has restarted) the batch raises NotFound: load the job, repeat
the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from meshrl.common.api.calls.interface import Call, Cast, Interface
from meshrl.common.api.stats import Stats
from meshrl.common.base.encoding.messages import message

OK = "ok"
TIMEOUT = "timeout"  # over its deadline, in CPU time or in wall time without the wait for a core
OUT_OF_MEMORY = "out_of_memory"
OUTPUT_LIMIT = "output_limit"
# it requested something that a jail denies: network, processes, files, privileges
REFUSED = "refused"
CRASHED = "crashed"  # its process exited
EVICTED = "evicted"  # its session was removed for others, or was idle for too long
BAD_VALUE = "bad_value"  # a reward that is not a finite number, or a value that is not plain JSON
RAISED = "raised"
UNSUPPORTED = "unsupported"  # tests that the grader cannot run: reported, never scored
POSTPONED = "postponed"  # not started, as earlier calls took too long; repeat the call


@message
class RewardPart:
    """Term of a job's reward."""

    use: str  # "module:function", f(row, turns) -> float, or a built-in reward's name
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    over_group: bool = False  # f(row, [turns of a member, ...]) -> list; it is the only part


@message
class JailSettings:
    """Limits of the model's code; see `SandboxConfig`."""

    min_tier: str = "bwrap"  # weakest allowed tier
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
    max_files: int = 4096
    output_bytes: int = 64 << 10
    sessions: int = 32
    session_idle_s: float = 600.0


@message
class LoadJob:
    """Request to prepare the sandbox for the calls of a job."""

    job: str
    # First on the workers' import path, on the run host.
    bundle_dir: str
    tools: dict[str, str]  # name -> "module:function", f(input) -> plain value; or a built-in's
    rewards: list[RewardPart] = field(default_factory=list)  # their weighted sum is the reward
    mcp: dict[str, list[str]] = field(default_factory=dict)  # server -> its command
    jail: JailSettings = field(default_factory=JailSettings)
    bundle: str = ""  # digest of the bundle with `bundle_dir`; empty: it is only on the run host


@message
class LoadResult:
    """Answer to LoadJob."""

    job: str
    workers: int
    isolation_tier: str  # isolation of the model's code; empty: the job runs none


@message
class ToolCall:
    """Call of a tool."""

    id: int  # the caller's, unique within its batch
    job: str
    tool: str
    input: Any
    deadline_s: float
    session: str = ""  # of a tool with state
    # the session has state of earlier calls, so a new session cannot replace it
    has_session_state: bool = False
    no_retry: bool = False  # if its process is lost, the call is not repeated


@message
class RunTools:
    """Batch of tool calls, which may be of several jobs."""

    calls: list[ToolCall]


@message
class RewardCall:
    """Finished trajectory to score: its row of the dataset, and its turns; or those of a group."""

    id: int
    job: str
    row: dict[str, Any]
    turns: list[dict[str, Any]]
    deadline_s: float
    group: list[list[dict[str, Any]]] = field(default_factory=list)  # turns of each member


@message
class RewardBatch:
    """Batch of trajectories to score, which may be of several jobs."""

    calls: list[RewardCall]


@message
class EndSessions:
    """Sessions that are no longer needed."""

    job: str
    sessions: list[str]


@message
class CallOutcome:
    """Outcome of one call.

    A tool that runs the model's code has {"status", "output"} as its `value`, for any status, and
    "exit" if that is not 0: the model reads it.
    """

    id: int
    status: str  # one of the above
    # a reward's is a finite float, or with metrics as in `reward_numbers`; of a group, a list of
    # them; None unless ok
    value: Any
    error: str  # one line: error, and location in the job's code


@message
class Outcomes:
    """Answer to RunTools and RewardBatch."""

    outcomes: list[CallOutcome]  # in the order of the calls


@dataclass
class SandboxStats(Stats):
    """Statistics of a sandbox in its registry entry."""

    job: str  # that it serves; empty: none yet
    workers: int
    replaced: int  # workers that exited or were killed
    jails: int  # started so far
    busy: int  # slots for jails
    waiting: int  # calls waiting for a slot
    sessions: int
    safe_to_evict: bool  # another sandbox can take over its work
    outcomes: dict[str, int] = field(default_factory=dict)  # by status
    deprecated_keys: ClassVar[Mapping[str, str]] = {"safe_to_evict": "rests"}

    def encode(self) -> dict[str, Any]:
        """Return the statistics by name; the outcomes of a status are `outcomes_<status>`."""
        figures = super().encode()
        outcomes = figures.pop("outcomes")
        return figures | {f"outcomes_{status}": count for status, count in outcomes.items()}


class Sandbox(Interface):
    """Methods of the sandbox."""

    load_job = Call(LoadJob, LoadResult, deadline_s=120.0, idempotent=True)
    run_tools = Call(RunTools, Outcomes, deadline_s=60.0)
    score_trajectories = Call(RewardBatch, Outcomes, deadline_s=120.0, idempotent=True)
    end_sessions = Cast(EndSessions)
