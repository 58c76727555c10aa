"""Interface of the gateway for the holder of an access token.

A token gives access to the jobs that were submitted with it, and to no others.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

from meshrl.common.api.calls.interface import Call, Interface, Stream
from meshrl.common.base.encoding.messages import message

PIECE_BYTES = 1 << 20  # of a file in one message: large enough to fill a link, small in memory


@message
class JobState:
    """State of a job."""

    name: str
    phase: str  # see meshrl.common.state.jobs.Phase
    held: str  # block reason, `waiting: WHY` or `paused: WHY`; empty: it runs, or has ended
    step: int  # steps done
    steps: int  # total steps
    version: int  # of its weights; -1: none yet
    trained: int  # trajectories
    error: str
    run_dir: str  # on the mesh's host
    over: bool  # finished, failed or stopped


@message
class BeginUpload:
    """Request to open an upload: the job's document, and the list of its bundle's files."""

    document: Any
    digest: str  # of the bundle
    files: Any  # name -> [bytes, digest]
    parameters: int  # of the model
    # keys of config.json of each model by role (`trained`, `reference`, ..), for planning of memory
    models: Any = None


@message
class UploadOpened:
    """Answer to BeginUpload. The upload is discarded when the stream that opened it ends."""

    upload: str
    piece_bytes: int


@message
class UploadPiece:
    """Bytes of one file of an upload."""

    upload: str
    name: str
    offset: int
    content: bytes


@message
class SubmittedJob:
    """Answer to Gateway.finish: the job was submitted."""

    job: str  # its name on the mesh, numbered if the name was in use
    run_dir: str


@message
class JobList:
    """Answer to Gateway.jobs, in the order of submission."""

    jobs: list[JobState]


@message
class JobRequest:
    """Name of a job for a request; `op_id` identifies repetitions of one request."""

    job: str
    op_id: str = ""


@message
class EventsSince:
    """Request for a job's events after an event, waiting up to `wait_s` for one."""

    job: str
    since: str  # id of an event; "0": from the first one
    wait_s: float


@message
class JobEvent:
    """Event of a job."""

    id: str
    ms: int  # by Redis' clock
    kind: str
    fields: dict[str, Any]


@message
class EventPage:
    """Answer to EventsSince; `cursor` is where to continue."""

    events: list[JobEvent]
    cursor: str


@message
class ModelRequest:
    """Request for a version of a job's model as a Hugging Face directory.

    The version is that of a step, the best one, or the last one (-1).
    """

    job: str
    step: int
    best: bool


@message
class ModelFiles:
    """Answer to ModelRequest: the files, by name -> (bytes, digest)."""

    name: str  # for ReadModelFile
    files: dict[str, tuple[int, str]]


@message
class ReadModelFile:
    """Request for bytes of one file of a model."""

    job: str
    model: str
    name: str
    offset: int


@message
class VersionsRequest:
    """Request to list (`list`), pin or unpin (`pin`, `unpin`) versions of a job."""

    job: str
    action: str
    version: str = ""
    note: str = ""  # of a pin


@message
class VersionsAnswer:
    """Answer to VersionsRequest, as `meshrl weights --json` prints it."""

    answer: Any


@message
class JoinHost:
    """Request of a host with a token to join; it is repeated unchanged until it is answered."""

    host: str  # a name that no other host has had
    key: str  # public half of the host's member key pair; Z85
    address: str  # for other hosts, as the host reports it
    workers: int
    standby: bool  # it offers to run a standby planner
    version: str  # of MeshRL
    ephemeral: bool = False  # the mesh may remove it after `pool.forget_after_s` of absence


@message
class HostAdmitted:
    """Answer to JoinHost: the data of the host's settings.

    The secret is sent once, to the holder of the token that names the same key.
    """

    redis_url: str  # without user and password
    secret: str  # of this host only
    ca_pem: str  # PEM certificate of the authority that signed Redis' certificate; empty: none
    worker_prefix: str  # of its workers' names
    planner: str  # name of the planner that the host runs; empty: none
    settings: Any  # settings that all hosts of the mesh share, by their names in MeshSettings


@message
class RemainingNames:
    """Answer to Gateway.remaining: names of instances, services and processes.

    None: the host is drained. `is_draining`: the host is being drained.
    """

    names: list[str]
    is_draining: bool


@message
class NoticeReport:
    """Argument of Gateway.notice: what a host knows about its end."""

    source: str  # who will end the host; empty: its end is not announced
    preempt_at_s: float  # seconds since 1970; 0: not known, within seconds
    failure: str  # why its source of notices cannot be read; empty: it can


@message
class RedisLocation:
    """Answer to Gateway.whereabouts, as in HostAdmitted."""

    redis_url: str
    ca_pem: str
    settings: Any


class Gateway(Interface):
    """Methods of the gateway."""

    upload = Stream(BeginUpload, UploadOpened)
    put = Call(UploadPiece, NoneType, deadline_s=30.0, idempotent=True)
    # The argument is the name of an upload whose pieces have all arrived.
    finish = Call(str, SubmittedJob, deadline_s=300.0, idempotent=True)
    jobs = Call(NoneType, JobList, deadline_s=15.0, idempotent=True)
    job = Call(JobRequest, JobState, deadline_s=15.0, idempotent=True)
    events = Call(EventsSince, EventPage, deadline_s=40.0, idempotent=True)
    # Calls that stop, delete or change something return False if nothing changed.
    stop = Call(JobRequest, bool, deadline_s=20.0, idempotent=True)
    delete = Call(JobRequest, bool, deadline_s=60.0, idempotent=True)
    model = Call(ModelRequest, ModelFiles, deadline_s=600.0, idempotent=True)
    read = Call(ReadModelFile, bytes, deadline_s=30.0, idempotent=True)  # at most PIECE_BYTES
    versions = Call(VersionsRequest, VersionsAnswer, deadline_s=60.0, idempotent=True)
    join = Call(JoinHost, HostAdmitted, deadline_s=60.0, idempotent=True)
    # Removes the host whose member key the caller has.
    leave = Call(NoneType, bool, deadline_s=60.0, idempotent=True)
    # The host shuts down soon: everything moves away from it until `back`.
    drain = Call(NoneType, bool, deadline_s=60.0, idempotent=True)
    # The same with who ends it and when, or why its notices cannot be read.
    notice = Call(NoticeReport, bool, deadline_s=60.0, idempotent=True)
    # The host is available again, at this address: draining ends, unless a user requested it.
    back = Call(str, bool, deadline_s=60.0, idempotent=True)
    remaining = Call(NoneType, RemainingNames, deadline_s=10.0, idempotent=True)
    # The current address of Redis: the head may have moved.
    whereabouts = Call(NoneType, RedisLocation, deadline_s=60.0, idempotent=True)
    membership = Call(NoneType, str, deadline_s=10.0, idempotent=True)  # the host's name
