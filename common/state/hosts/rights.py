"""What processes of each role may do in Redis, where each role of each host is a user of its own:
the scripts they run, the keys that these and their other commands reach, and the commands.

The keys of scripts are held to the scripts themselves by the tests of the state's contract, which
run each script as a user that has what is here and no more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from meshrl.common.base.errors import Refused
from meshrl.common.base.host.settings import redis_user
from meshrl.common.state.redis.keys import MESH

JOB = "{*}"  # what keys of any job begin with: names of jobs have no braces
# Part of a user's name and of a pattern of keys: `*`, a blank or a colon would widen these.
HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

# Redis' own categories, by kind of value, without what hurts others or tells of keys that are not
# one's own. Scripts are run by the digest of one that the launcher has loaded: who may send a text
# may keep the server busy for ever. What a script does is checked as if its caller did it. Of what
# concerns a connection no more is here than a client begins with: `CLIENT TRACKING`, for one, has
# the server remember what each of its clients has read.
COMMANDS = (
    "-@all +@read +@write -@dangerous -@admin -@scripting +evalsha +time"
    " -scan -randomkey -dbsize +auth +hello +ping +select +quit"
)


@dataclass(frozen=True)
class KeyRights:
    """Patterns of keys that are read, and that are written; one may be in both. Those of `removes`
    may be deleted, and are not written.
    """

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    removes: frozenset[str] = frozenset()

    def __or__(self, other: KeyRights) -> KeyRights:
        removes = self.removes | other.removes
        return KeyRights(self.reads | other.reads, self.writes | other.writes, removes)

    @property
    def rules(self) -> list[str]:
        """As Redis takes them."""
        both = self.reads & self.writes
        patterns = {"RW": both, "R": self.reads - both, "W": self.writes - both}
        found = [f"%{kind}~{key}" for kind, keys in patterns.items() for key in sorted(keys)]
        if self.removes:
            keys = " ".join(f"%W~{key}" for key in sorted(self.removes))
            found.append(f"(-@all +del {keys})")
        return found


def _keys(prefix: str, reads: str = "", writes: str = "", both: str = "") -> KeyRights:
    def named(names: str) -> frozenset[str]:
        return frozenset(f"{prefix}:{name}" for name in names.split())

    return KeyRights(named(reads) | named(both), named(writes) | named(both))


_mesh, _job = partial(_keys, MESH), partial(_keys, JOB)
_TOLD = _mesh(writes="events")
_LEASED = _mesh(reads="entry:*")  # only who holds a lease
_LED = _mesh(reads="leader:*")  # only who leads
_PROGRESS = _job(both="job")
_JOB_ROW = _job(reads="job given")  # `given` is what it runs, for who hands it in to write
_PHASE = (
    _job(writes="job") | _mesh(reads="jobs", writes="jobs:going jobs:ended jobs:paused") | _TOLD
)
_RECORDED = _mesh(both="readers")
_TOKENS = _mesh(both="token")
_DEAD = _mesh(both="entries", writes="entry:* look:counted")  # who has been gone for long
_DOORS = _mesh(reads="door:* admitted doors revoked home")
_STATES = "open ready leased"

# What each script reads and writes. Those that replay an operation have `op:<script>:*` beside it,
# and `row` and `rows` read what they are told to.
SCRIPTS: Mapping[str, KeyRights] = {
    # registry
    "register": _mesh(reads="epoch", writes="entries look:counted", both="entry:*")
    | _TOKENS
    | _TOLD,
    "renew": _mesh(writes="outage_ms look:counted", both="entry:* entries epoch") | _DOORS | _TOLD,
    "vacate": _mesh(writes="entries look:counted", both="entry:*") | _TOLD,
    "entries": _LEASED | _DEAD,
    "append": _LEASED | _TOLD,
    "process_ended": _mesh(reads="entries entry:*", both="ended outage_ms") | _PROGRESS | _PHASE,
    "end_seen": _mesh(reads="jobs jobs:going", both="ended") | _TOLD,
    "row": KeyRights(),
    "rows": KeyRights(),
    # doors; who enters or leaves one writes that of its own role and host alone
    "enter": _DOORS,
    "withdraw": _DOORS,
    "who": _DOORS,
    "door_rows": _DOORS,
    "admit_host": _mesh(both="admitted door:* doors"),
    "revoke": _mesh(both="admitted door:* doors revoked") | _TOLD,
    # leaders
    "campaign": _mesh(both="leader:*") | _TOKENS | _TOLD,
    "keep": _mesh(both="leader:*"),
    "leader": _LED,
    # hosts that come and go
    "ask": _mesh(reads="answered:*", writes="asked"),
    "asked": _mesh(both="asked"),
    "answer": _mesh(writes="asked answered:*"),
    "mark_host": _mesh(both="draining requests") | _TOLD,
    # the pool
    "look": _LED
    | _mesh(
        reads="entries entry:* look:counted look:workers look:gangs jobs:going hosts services:*"
        " draining requests moving planner settings"
    )
    | _JOB_ROW,
    "write": _LED
    | _LEASED
    | _PHASE
    | _mesh(
        writes="gangs hosts look:workers look:gangs moving jobs:paused",
        both="planner worker:* gang:* requests services:* draining",
    )
    | _job(both="job"),
    "forget_gone": _LED
    | _LEASED
    | _DEAD
    | _mesh(
        reads="gang:*",
        writes="services:* look:workers",
        both="worker:* workers hosts draining ended",
    )
    | _TOLD,
    "join_worker": _LEASED
    | _mesh(writes="workers look:workers look:gangs", both="worker:* gang:*")
    | _TOLD,
    "report": _LEASED | _mesh(writes="look:gangs", both="gang:*") | _TOLD,
    "pool_rows": _LEASED | _mesh(reads="gangs gang:* workers worker:*"),
    "request": _mesh(writes="requests draining") | _TOLD,
    "write_settings": _mesh(writes="settings"),
    # readers of events
    "join_reader": _RECORDED,
    "note_reader": _RECORDED | _mesh(reads="jobs:deleted") | _job(reads="job"),
    "history_lost": _RECORDED | _TOLD | _job(reads=f"job steps step:* group:* {_STATES}"),
    "trim_events": _RECORDED
    | _mesh(both="events", writes="trimmed")
    | _job(reads="job", both="steps step:*"),
    # jobs
    "submit": _PROGRESS
    | _PHASE
    | _RECORDED
    | _mesh(reads="jobs:deleting", writes="jobs", both="jobs:in_store")
    | _job(writes="requeue given"),
    "reopen": _PROGRESS | _PHASE | _RECORDED,
    "change": _PROGRESS | _PHASE | _RECORDED | _job(writes="given", both="evaluations"),
    "cancel": _PROGRESS | _PHASE,
    "phase": _LEASED | _PROGRESS | _PHASE,
    "evaluated": _job(reads="job evaluations"),
    "evaluation": _LEASED | _PROGRESS | _TOLD | _job(writes="evaluations"),
    "job_marks": _mesh(reads="jobs jobs:deleted") | _JOB_ROW,
    "old_jobs": _LED | _mesh(reads="jobs:ended jobs:deleting"),
    "delete_job": _PROGRESS
    | _job(reads="given")
    | KeyRights(removes=frozenset({f"{JOB}:given"}))
    | _mesh(writes="jobs jobs:deleting readers", both="jobs:ended jobs:deleted ended")
    | _TOLD,
    "delete_rest": _mesh(writes="jobs:in_store", both="jobs:deleting")
    | _job(writes="group:* step:* shard:* requeue evaluations", both=f"steps shards {_STATES}"),
    # groups
    "admit": _LEASED
    | _PROGRESS
    | _TOLD
    | _job(reads="shard:*", writes="group:* open", both="requeue"),
    "claim_shard": _LEASED | _job(writes="shards", both="shard:*"),
    "note_segment": _LEASED | _job(both="shard:*"),
    "open_groups": _job(reads="job open group:*"),
    "group_ready": _LEASED | _PROGRESS | _TOLD | _job(writes="open ready", both="group:*"),
    "group_returned": _LEASED
    | _PROGRESS
    | _TOLD
    | _job(writes=f"requeue {_STATES}", both="group:*"),
    "lease_groups": _LEASED
    | _PROGRESS
    | _TOLD
    | _job(reads="open", writes="requeue", both="ready leased group:*"),
    "in_flight": _job(reads=f"job group:* {_STATES}"),
    "digests": _job(reads="job ready leased group:* steps step:*"),
    # steps
    "commit_initial": _LEASED | _PROGRESS | _TOLD,
    "commit_step": _LEASED
    | _PROGRESS
    | _PHASE
    | _job(reads="open", both="leased group:* steps step:*"),
    "cover": _LEASED | _PROGRESS | _job(reads="steps", writes="step:*"),
    "checkpoint_state": _job(reads=f"job requeue group:* {_STATES}"),
    "open_lineage": _LEASED
    | _PROGRESS
    | _PHASE
    | _RECORDED
    | _job(both=f"requeue evaluations group:* steps step:* {_STATES}"),
    "step_rows": _job(reads="steps step:*"),
}
# Scripts that change something once for an operation, however often they are asked.
_REPLAYED = (
    "append process_ended end_seen write request submit reopen change cancel delete_job admit"
    " group_ready group_returned open_lineage"
)
REPLAYED = frozenset(_REPLAYED.split())

# What each process of a mesh does, whatever it is: it has a name and a lease, looks others up, and
# knows their keys by what the mesh tells of these.
_ALL = "register renew vacate entries append row enter withdraw who"
ALL = frozenset(_ALL.split())
_PAUSES = _mesh(reads="jobs:paused")
_EVENTS = _mesh(reads="events trimmed")
_DELETING = "delete_job delete_rest"

# The scripts of each role beside those, and what its other commands reach.
_ROLES: Mapping[str, tuple[str, KeyRights]] = {
    "node": ("process_ended end_seen", _JOB_ROW | _mesh(reads="services:* draining")),
    "worker": (
        "join_worker report pool_rows process_ended end_seen",
        _JOB_ROW | _mesh(reads="worker:*"),
    ),
    "engine": ("", _JOB_ROW),
    "hybrid": ("", _JOB_ROW | _PAUSES),
    "rank": ("", _JOB_ROW | _PAUSES),
    "scoring": ("phase", _JOB_ROW),
    "sandbox": ("end_seen", _PAUSES),
    "rollout": (
        "admit claim_shard note_segment open_groups group_ready group_returned evaluation phase"
        " process_ended end_seen",
        _JOB_ROW | _job(reads="evaluations") | _mesh(reads="draining"),
    ),
    "trainer": (
        "phase evaluated lease_groups group_returned commit_initial commit_step cover"
        " checkpoint_state open_lineage step_rows",
        _JOB_ROW | _PAUSES,
    ),
    "weights": (
        "rows digests step_rows",
        _JOB_ROW | _mesh(reads="jobs jobs:deleted settings", both="jobs:in_store"),
    ),
    "planner": (
        f"campaign keep look write forget_gone old_jobs {_DELETING}",
        _mesh(reads="planner"),
    ),
    "gateway": (
        f"rows submit cancel pool_rows ask {_DELETING}",
        _JOB_ROW
        | _EVENTS
        | _mesh(reads="jobs jobs:deleted settings services:* draining")
        | _job(reads="op:delete_job:*"),
    ),
    # Commands at the head do what its launcher does beside them: they look at all there is.
    "person": (
        " ".join(SCRIPTS),
        _JOB_ROW
        | _EVENTS
        | _mesh(
            reads="token epoch planner settings services:* worker:* draining ended readers jobs"
            " jobs:deleted jobs:in_store jobs:paused trimmed",
            both="probe",
        )
        | _job(reads="op:delete_job:* evaluations"),
    ),
}
ROLES = frozenset(_ROLES)


def scripts_of(role: str) -> frozenset[str]:
    """The scripts that processes of a role run."""
    return ALL.union(_ROLES[role][0].split())


def keys_of(role: str, host: str) -> KeyRights:
    """The keys that processes of a role on a host reach."""
    others = _ROLES[role][1]
    own = _mesh(both=f"door:{role}:{host}")
    # What a script is told to belong to: no key has that name.
    found = KeyRights(frozenset({JOB}), frozenset({JOB})) | own | others
    for script in scripts_of(role):
        found |= keys_of_script(script)
    return found


def keys_of_script(script: str) -> KeyRights:
    """The keys that a script reaches."""
    replayed = _job(both=f"op:{script}:*") if script in REPLAYED else KeyRights()
    return SCRIPTS[script] | replayed


def rules(role: str, host: str, digest: str, on: bool) -> list[str]:
    """What the user of a role on a host is made of, for `ACL SETUSER` and for a configuration.
    Refused: there is no such role, or the name of the host cannot be part of a pattern.

    `digest`: SHA-256 of its password, in hexadecimal digits.
    """
    if role not in ROLES:
        raise Refused(
            f"Redis has no user for {role!r}", fix=f"Roles are {', '.join(sorted(ROLES))}"
        )
    if not HOST_NAME.fullmatch(host):
        raise Refused(
            f"{host!r} cannot be the name of a host",
            fix="Letters, digits, dots and hyphens, 64 at most",
        )
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise Refused(f"the password of {redis_user(role, host)} has no SHA-256 digest")
    state = "on" if on else "off"
    patterns = keys_of(role, host).rules
    return ["reset", state, f"#{digest}", *patterns, "resetchannels", *COMMANDS.split()]
