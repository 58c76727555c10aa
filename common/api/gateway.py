"""The interface of the gateway: what a person who was given a token may ask of a mesh. A token
reaches the jobs that were submitted with it, and no others.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

from meshrl.common.api.calls.interface import Call, Interface, Stream
from meshrl.common.base.encoding.messages import message

PIECE_BYTES = 1 << 20  # of a file in one message: enough to fill a link, little to keep in memory


@message
class JobState:
    """How a job stands."""

    name: str
    phase: str  # see meshrl.common.state.jobs.Phase
    held: str  # `waiting: WHY` or `paused: WHY`; empty: it runs, or has ended
    step: int  # steps done
    steps: int  # steps that it is to do
    version: int  # of its weights; -1: there are none yet
    trained: int  # trajectories
    error: str
    run_dir: str  # on the mesh's host
    over: bool  # it has finished, failed or been stopped


@message
class BeginUpload:
    """Opens an upload: the job as it is to be submitted, and what files its bundle has."""

    document: Any
    digest: str  # of the bundle
    files: Any  # name -> [bytes, digest]
    parameters: int  # of the model


@message
class UploadOpened:
    """The answer to BeginUpload; the upload is given up when the stream that brought it ends."""

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
    """The answer to Gateway.finish: the job was submitted."""

    job: str  # its name on the mesh, numbered where the mesh had one of that name
    run_dir: str


@message
class JobList:
    """The answer to Gateway.jobs, in the order of submission."""

    jobs: list[JobState]


@message
class JobRequest:
    """Names a job; `op` tells repetitions of one request from another request."""

    job: str
    op_id: str = ""


@message
class EventsSince:
    """Asks for what has happened to a job after an event, waiting up to `wait_s` for it."""

    job: str
    since: str  # id of an event; "0": from the first
    wait_s: float


@message
class JobEvent:
    """An event of a job."""

    id: str
    ms: int  # by the state's clock
    kind: str
    fields: dict[str, Any]


@message
class EventPage:
    """The answer to EventsSince; `cursor` is where to go on."""

    events: list[JobEvent]
    cursor: str


@message
class ModelRequest:
    """Asks for a version of a job's model as a Hugging Face directory: of a step, the best one, or
    the last one (-1).
    """

    job: str
    step: int
    best: bool


@message
class ModelFiles:
    """The answer to ModelRequest: the files, by name -> (bytes, digest)."""

    name: str  # by which its files are read
    files: dict[str, tuple[int, str]]


@message
class ReadModelFile:
    """Asks for bytes of one file of a model."""

    job: str
    model: str
    name: str
    offset: int


@message
class VersionsRequest:
    """Asks for the versions of a job (`list`), or has one pinned or unpinned (`pin`, `unpin`)."""

    job: str
    action: str
    version: str = ""
    note: str = ""  # of a pin


@message
class VersionsAnswer:
    """The answer to VersionsRequest, as `meshrl weights --json` prints it."""

    answer: Any


@message
class JoinHost:
    """A host with a token asks to be let in; again with the same words while it has no answer."""

    host: str  # its name, which no other has had
    key: str  # public half of the pair that it made to be known by as a member; Z85
    address: str  # by which others reach it, as it says
    workers: int
    standby: bool  # it would run a planner that stands by
    version: str  # of MeshRL
    ephemeral: bool = False  # the mesh may forget it when it has been away for `pool.gone_s`


@message
class HostAdmitted:
    """The answer to JoinHost: what the host's settings are made of. The secret is told once, to who
    holds the token and names the same key.
    """

    redis_url: str  # without user and password
    secret: str  # the host's own
    authority: str  # certificate that Redis' own is signed with, PEM; empty: there is none
    prefix: str  # of its workers' names
    planner: str  # name of the planner that it is to run; empty: none
    settings: Any  # what all hosts of the mesh share, by their names in MeshSettings


@message
class RemainingNames:
    """The answer to Gateway.remaining: names of residents, services and processes; none: the host
    is drained. `drains`: whether it is to become empty.
    """

    names: list[str]
    is_draining: bool


@message
class RedisLocation:
    """The answer to Gateway.whereabouts, as in HostAdmitted."""

    redis_url: str
    authority: str
    settings: Any


class Gateway(Interface):
    """The methods of the gateway."""

    upload = Stream(BeginUpload, UploadOpened)
    put = Call(UploadPiece, NoneType, deadline_s=30.0, idempotent=True)
    # The name of an upload, all pieces of which have arrived.
    finish = Call(str, SubmittedJob, deadline_s=300.0, idempotent=True)
    jobs = Call(NoneType, JobList, deadline_s=15.0, idempotent=True)
    job = Call(JobRequest, JobState, deadline_s=15.0, idempotent=True)
    events = Call(EventsSince, EventPage, deadline_s=40.0, idempotent=True)
    # What stops, deletes or changes something answers False where that was so already.
    stop = Call(JobRequest, bool, deadline_s=20.0, idempotent=True)
    delete = Call(JobRequest, bool, deadline_s=60.0, idempotent=True)
    model = Call(ModelRequest, ModelFiles, deadline_s=600.0, idempotent=True)
    read = Call(ReadModelFile, bytes, deadline_s=30.0, idempotent=True)  # PIECE_BYTES at most
    versions = Call(VersionsRequest, VersionsAnswer, deadline_s=60.0, idempotent=True)
    join = Call(JoinHost, HostAdmitted, deadline_s=60.0, idempotent=True)
    # Of the host whose member key the caller has: the mesh forgets it.
    leave = Call(NoneType, bool, deadline_s=60.0, idempotent=True)
    # It is about to end: everything is to move away from it, until it is back.
    drain = Call(NoneType, bool, deadline_s=60.0, idempotent=True)
    # It is there again, at this address: it drains no more, unless a person has asked for that.
    back = Call(str, bool, deadline_s=60.0, idempotent=True)
    remaining = Call(NoneType, RemainingNames, deadline_s=10.0, idempotent=True)
    # Where Redis is now: the head may have moved.
    whereabouts = Call(NoneType, RedisLocation, deadline_s=60.0, idempotent=True)
    membership = Call(NoneType, str, deadline_s=10.0, idempotent=True)  # the host's name
