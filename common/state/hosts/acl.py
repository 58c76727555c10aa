"""Permissions of each role's processes in Redis: scripts, keys and commands.

Each role of each host is a user of its own. The tests of the state's contract check the keys of
scripts: they run each script as a user that has only the permissions listed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from meshrl.common.base.errors import Refused
from meshrl.common.base.host.settings import make_redis_user
from meshrl.common.state.redis.keys import MESH_PREFIX

ANY_JOB = "{*}"  # prefix of the keys of any job: names of jobs have no braces
# A host name is part of a user name and of key patterns: `*`, a blank or a colon would widen these.
HOST_NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")

# Redis' own categories by kind of value, without commands that harm other clients or reveal their
# keys. Scripts run only by the digest of a script that the launcher has loaded: a client that may
# send script text can keep the server busy forever. Redis checks a script's commands with the
# permissions of its caller. Only those connection commands are allowed that a client starts with:
# `CLIENT TRACKING`, for example, makes the server store what each of its clients has read.
COMMANDS = (
    "-@all +@read +@write -@dangerous -@admin -@scripting +evalsha +time"
    " -scan -randomkey -dbsize +auth +hello +ping +select +quit"
)


@dataclass(frozen=True)
class KeyPermissions:
    """Patterns of keys that may be read, and written; a pattern may be in both.

    Keys of `deletes` may be deleted but not written.
    """

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    deletes: frozenset[str] = frozenset()

    def __or__(self, other: KeyPermissions) -> KeyPermissions:
        deletes = self.deletes | other.deletes
        return KeyPermissions(self.reads | other.reads, self.writes | other.writes, deletes)

    @property
    def acl_patterns(self) -> list[str]:
        """Key permissions in the syntax of Redis ACLs."""
        both = self.reads & self.writes
        patterns = {"RW": both, "R": self.reads - both, "W": self.writes - both}
        acl_patterns = [f"%{kind}~{key}" for kind, keys in patterns.items() for key in sorted(keys)]
        if self.deletes:
            keys = " ".join(f"%W~{key}" for key in sorted(self.deletes))
            acl_patterns.append(f"(-@all +del {keys})")
        return acl_patterns


def _prefix_permissions(
    prefix: str, reads: str = "", writes: str = "", both: str = ""
) -> KeyPermissions:
    def add_prefix(names: str) -> frozenset[str]:
        return frozenset(f"{prefix}:{name}" for name in names.split())

    both_keys = add_prefix(both)
    return KeyPermissions(add_prefix(reads) | both_keys, add_prefix(writes) | both_keys)


_mesh, _job = partial(_prefix_permissions, MESH_PREFIX), partial(_prefix_permissions, ANY_JOB)
_EVENT_APPEND = _mesh(writes="events")
_LEASE_CHECK = _mesh(reads="entry:*")  # only holders of a lease
_LEADER_CHECK = _mesh(reads="leader:*")  # only the leader
_PROGRESS = _job(both="job")
_JOB_ROW = _job(reads="job submission")  # `submission` is its document, written by its submitter
_PHASE = (
    _job(writes="job")
    | _mesh(reads="jobs", writes="jobs:active jobs:ended jobs:paused")
    | _EVENT_APPEND
)
_EVENT_READERS = _mesh(both="readers")
_TOKENS = _mesh(both="token")
# removal of entries that have been dead for long
_DEAD_ENTRIES = _mesh(both="entries", writes="entry:* snapshot:stats")
_CREDENTIALS = _mesh(reads="credentials:* admitted revocations revoked run_host")
_GROUP_INDEXES = "open ready leased"

# Keys that each script reads and writes. Idempotent scripts also use `op:<script>:*`, and
# `read_row` and `read_rows` read the keys in their arguments.
SCRIPT_PERMISSIONS: Mapping[str, KeyPermissions] = {
    # registry
    "register": _mesh(reads="epoch", writes="entries snapshot:stats", both="entry:*")
    | _TOKENS
    | _EVENT_APPEND,
    "renew": _mesh(writes="outage_ms snapshot:stats", both="entry:* entries epoch")
    | _CREDENTIALS
    | _EVENT_APPEND,
    "end_lease": _mesh(writes="entries snapshot:stats", both="entry:*") | _EVENT_APPEND,
    "list_entries": _LEASE_CHECK | _DEAD_ENTRIES,
    "append": _LEASE_CHECK | _EVENT_APPEND,
    "charge_exit": _mesh(reads="entries entry:*", both="exits outage_ms") | _PROGRESS | _PHASE,
    "record_exit": _mesh(reads="jobs jobs:active", both="exits") | _EVENT_APPEND,
    "read_row": KeyPermissions(),
    "read_rows": KeyPermissions(),
    # credentials; a process writes only those of its own role and host
    "register_key": _CREDENTIALS,
    "withdraw_key": _CREDENTIALS,
    "key_owners": _CREDENTIALS,
    "list_keys": _CREDENTIALS,
    "admit_host": _mesh(both="admitted credentials:* revocations"),
    "revoke_keys": _mesh(both="admitted credentials:* revocations revoked") | _EVENT_APPEND,
    # leaders
    "campaign": _mesh(both="leader:*") | _TOKENS | _EVENT_APPEND,
    "renew_leadership": _mesh(both="leader:*"),
    "leader": _LEADER_CHECK,
    # admission and removal of hosts
    "submit_host_request": _mesh(reads="host_answers:*", writes="host_requests"),
    "pending_host_requests": _mesh(both="host_requests"),
    "answer_host_request": _mesh(writes="host_requests host_answers:*"),
    "set_drain_reason": _mesh(both="draining requests") | _EVENT_APPEND,
    # the pool
    "snapshot": _LEADER_CHECK
    | _mesh(
        reads="entries entry:* snapshot:stats snapshot:workers snapshot:gangs jobs:active hosts"
        " services:* draining notices requests moves planner settings"
    )
    | _JOB_ROW,
    "write_decisions": _LEADER_CHECK
    | _LEASE_CHECK
    | _PHASE
    | _mesh(
        writes="gangs hosts snapshot:workers snapshot:gangs moves jobs:paused",
        both="planner worker:* gang:* requests services:* draining",
    )
    | _job(both="job"),
    "remove_gone": _LEADER_CHECK
    | _LEASE_CHECK
    | _DEAD_ENTRIES
    | _mesh(
        reads="gang:*",
        writes="services:* snapshot:workers",
        both="worker:* workers hosts draining notices exits",
    )
    | _EVENT_APPEND,
    "join_worker": _LEASE_CHECK
    | _mesh(writes="workers snapshot:workers snapshot:gangs", both="worker:* gang:*")
    | _EVENT_APPEND,
    "report_instance": _LEASE_CHECK | _mesh(writes="snapshot:gangs", both="gang:*") | _EVENT_APPEND,
    "pool_rows": _LEASE_CHECK | _mesh(reads="gangs gang:* workers worker:*"),
    "submit_request": _mesh(writes="requests draining") | _EVENT_APPEND,
    "write_settings": _mesh(writes="settings"),
    "write_profile": _mesh(both="profiles"),
    # readers of events
    "join_reader": _EVENT_READERS,
    "record_cursor": _EVENT_READERS | _mesh(reads="jobs:deleted") | _job(reads="job"),
    "record_history_loss": _EVENT_READERS
    | _EVENT_APPEND
    | _job(reads=f"job steps step:* group:* {_GROUP_INDEXES}"),
    "trim_events": _EVENT_READERS
    | _mesh(both="events", writes="trimmed")
    | _job(reads="job", both="steps step:*"),
    # jobs
    "submit": _PROGRESS
    | _PHASE
    | _EVENT_READERS
    | _mesh(reads="jobs:deleting", writes="jobs", both="jobs:in_store")
    | _job(writes="requeue submission"),
    "reopen": _PROGRESS | _PHASE | _EVENT_READERS,
    "change_document": _PROGRESS
    | _PHASE
    | _EVENT_READERS
    | _job(writes="submission", both="evaluations"),
    "cancel": _PROGRESS | _PHASE,
    "set_phase": _LEASE_CHECK | _PROGRESS | _PHASE,
    "evaluation_status": _job(reads="job evaluations"),
    "record_evaluation": _LEASE_CHECK | _PROGRESS | _EVENT_APPEND | _job(both="evaluations"),
    "job_watermarks": _mesh(reads="jobs jobs:deleted") | _JOB_ROW,
    "old_jobs": _LEADER_CHECK | _mesh(reads="jobs:ended jobs:deleting"),
    "delete_job": _PROGRESS
    | _job(reads="submission")
    | KeyPermissions(deletes=frozenset({f"{ANY_JOB}:submission"}))
    | _mesh(writes="jobs jobs:deleting readers", both="jobs:ended jobs:deleted exits")
    | _EVENT_APPEND,
    "delete_remaining_rows": _mesh(writes="jobs:in_store", both="jobs:deleting")
    | _job(
        writes="group:* step:* shard:* requeue evaluations", both=f"steps shards {_GROUP_INDEXES}"
    ),
    # groups
    "admit_groups": _LEASE_CHECK
    | _PROGRESS
    | _EVENT_APPEND
    | _job(reads="shard:*", writes="group:* open", both="requeue"),
    "claim_shard": _LEASE_CHECK | _job(writes="shards", both="shard:*"),
    "record_segment": _LEASE_CHECK | _job(both="shard:*"),
    "open_groups": _job(reads="job open group:*"),
    "mark_group_ready": _LEASE_CHECK
    | _PROGRESS
    | _EVENT_APPEND
    | _job(writes="open ready", both="group:*"),
    "return_group": _LEASE_CHECK
    | _PROGRESS
    | _EVENT_APPEND
    | _job(writes=f"requeue {_GROUP_INDEXES}", both="group:*"),
    "lease_groups": _LEASE_CHECK
    | _PROGRESS
    | _EVENT_APPEND
    | _job(reads="open", writes="requeue", both="ready leased group:*"),
    "in_flight": _job(reads=f"job group:* {_GROUP_INDEXES}"),
    "live_digests": _job(reads="job ready leased group:* steps step:*"),
    # steps
    "commit_initial": _LEASE_CHECK | _PROGRESS | _EVENT_APPEND,
    "commit_step": _LEASE_CHECK
    | _PROGRESS
    | _PHASE
    | _job(reads="open", both="leased group:* steps step:*"),
    "record_checkpoint": _LEASE_CHECK | _PROGRESS | _job(reads="steps", writes="step:*"),
    "checkpoint_state": _job(reads=f"job requeue group:* {_GROUP_INDEXES}"),
    "open_lineage": _LEASE_CHECK
    | _PROGRESS
    | _PHASE
    | _EVENT_READERS
    | _job(both=f"requeue evaluations group:* steps step:* {_GROUP_INDEXES}"),
    "step_rows": _job(reads="steps step:*"),
}
# Scripts that apply an operation once, however often they are called with its id.
_IDEMPOTENT_NAMES = (
    "append charge_exit record_exit write_decisions submit_request submit reopen change_document"
    " cancel delete_job admit_groups mark_group_ready return_group open_lineage write_profile"
)
IDEMPOTENT_SCRIPTS = frozenset(_IDEMPOTENT_NAMES.split())

# Scripts of every process of a mesh: it has a name and a lease, and looks up other processes and
# their keys.
_COMMON_NAMES = (
    "register renew end_lease list_entries append read_row register_key withdraw_key key_owners"
)
COMMON_SCRIPTS = frozenset(_COMMON_NAMES.split())
_PAUSED_JOBS = _mesh(reads="jobs:paused")
_EVENTS = _mesh(reads="events trimmed")
_DELETION_SCRIPTS = "delete_job delete_remaining_rows"

# Additional scripts of each role, and the keys of its other commands.
_ROLE_PERMISSIONS: Mapping[str, tuple[str, KeyPermissions]] = {
    "node": ("charge_exit record_exit", _JOB_ROW | _mesh(reads="services:* draining")),
    "worker": (
        "join_worker report_instance pool_rows charge_exit record_exit",
        _JOB_ROW | _mesh(reads="worker:* settings notices"),
    ),
    "engine": ("write_profile", _JOB_ROW),
    "hybrid": ("write_profile", _JOB_ROW | _PAUSED_JOBS),
    "rank": ("", _JOB_ROW | _PAUSED_JOBS),
    "scoring": ("set_phase write_profile", _JOB_ROW),
    "sandbox": ("record_exit", _PAUSED_JOBS),
    "rollout": (
        "admit_groups claim_shard record_segment open_groups mark_group_ready return_group"
        " record_evaluation step_rows set_phase charge_exit record_exit",
        _JOB_ROW | _job(reads="evaluations") | _mesh(reads="draining"),
    ),
    "trainer": (
        "set_phase evaluation_status lease_groups return_group commit_initial commit_step"
        " record_checkpoint checkpoint_state open_lineage step_rows write_profile",
        _JOB_ROW | _PAUSED_JOBS,
    ),
    "weights": (
        "read_rows live_digests step_rows",
        _JOB_ROW | _mesh(reads="jobs jobs:deleted settings", both="jobs:in_store"),
    ),
    "planner": (
        "campaign renew_leadership snapshot write_decisions remove_gone old_jobs"
        f" {_DELETION_SCRIPTS}",
        _mesh(reads="planner"),
    ),
    "gateway": (
        f"read_rows submit cancel pool_rows submit_host_request {_DELETION_SCRIPTS}",
        _JOB_ROW
        | _EVENTS
        | _mesh(reads="jobs jobs:deleted settings services:* draining")
        | _job(reads="op:delete_job:*"),
    ),
    # Commands at the head, which may do what the launcher does and read everything.
    "person": (
        " ".join(SCRIPT_PERMISSIONS),
        _JOB_ROW
        | _EVENTS
        | _mesh(
            reads="token epoch planner settings services:* worker:* draining notices exits readers"
            " jobs jobs:deleted jobs:in_store jobs:paused trimmed scaler",
            both="probe",
        )
        | _job(reads="op:delete_job:* evaluations"),
    ),
}
ROLES = frozenset(_ROLE_PERMISSIONS)


def list_role_scripts(role: str) -> frozenset[str]:
    """Return the scripts that processes of a role run."""
    return COMMON_SCRIPTS.union(_ROLE_PERMISSIONS[role][0].split())


def compute_role_permissions(role: str, host: str) -> KeyPermissions:
    """Return the keys that processes of a role on a host may access."""
    command_keys = _ROLE_PERMISSIONS[role][1]
    own_credentials = _mesh(both=f"credentials:{role}:{host}")
    # The prefix that a script gets as its key: no key has that name.
    permissions = KeyPermissions(frozenset({ANY_JOB}), frozenset({ANY_JOB}))
    permissions |= own_credentials | command_keys
    for script in list_role_scripts(role):
        permissions |= compute_script_permissions(script)
    return permissions


def compute_script_permissions(script: str) -> KeyPermissions:
    """Return the keys that a script accesses."""
    is_idempotent = script in IDEMPOTENT_SCRIPTS
    operations = _job(both=f"op:{script}:*") if is_idempotent else KeyPermissions()
    return SCRIPT_PERMISSIONS[script] | operations


def build_acl_rules(role: str, host: str, password_digest: str, enabled: bool) -> list[str]:
    """Return the ACL rules of a role's user on a host, for `ACL SETUSER` and for a configuration.

    `password_digest` is the SHA-256 of its password, in hexadecimal digits. Refused: there is no
    such role, or the name of the host cannot be part of a pattern.
    """
    if role not in ROLES:
        raise Refused(
            f"Redis has no user for {role!r}", fix=f"Choose one of {', '.join(sorted(ROLES))}"
        )
    if not HOST_NAME_PATTERN.fullmatch(host):
        raise Refused(
            f"{host!r} is not a valid host name",
            fix="Use at most 64 letters, digits, dots and hyphens",
        )
    if not re.fullmatch(r"[0-9a-f]{64}", password_digest):
        raise Refused(
            f"the password digest of {make_redis_user(role, host)} is not a SHA-256 digest"
        )
    state = "on" if enabled else "off"
    patterns = compute_role_permissions(role, host).acl_patterns
    return ["reset", state, f"#{password_digest}", *patterns, "resetchannels", *COMMANDS.split()]
