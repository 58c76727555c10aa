"""Request that loads a job into its sandboxes.

The job's shards send the request. The process that starts a sandbox computes the request's digest
from the same document.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from meshrl.common.api.sandbox import JailSettings, LoadJob, RewardPart
from meshrl.common.base.encoding.messages import decode, encode
from meshrl.common.job import builtin
from meshrl.common.job.bundle.job_data import MODULES, JobData
from meshrl.common.job.config import JobConfig


def build_load_request(job: JobData) -> LoadJob:
    """Return the request, which is the same on every host; no file is read."""
    config = job.config
    parts = []
    for part in config.reward.reward_parts:
        options = dict(part.options)
        if builtin.is_builtin(part.use):  # stop texts are not part of the answer
            options.setdefault("strip", [*config.rollout.stop, *config.rollout.stop_text])
        parts.append(RewardPart(part.use, part.weight, options, config.reward.over_group))
    return LoadJob(
        job.id,
        str(job.shared_bundle / MODULES),
        dict(config.environment.tools),
        parts,
        config.environment.mcp,
        _jail_settings(config),
        job.digest,
    )


def compute_request_digest(request: LoadJob) -> str:
    """Return the SHA-256 of a request, in hexadecimal digits."""
    # as decoded by a sandbox: a whole weight is a float
    arrived = decode(LoadJob, encode(request)[0])
    return hashlib.sha256(json.dumps(asdict(arrived), sort_keys=True).encode()).hexdigest()


def _jail_settings(config: JobConfig) -> JailSettings:
    sandbox = config.sandbox
    return JailSettings(
        min_tier=sandbox.tier,
        python=sandbox.python,
        root=sandbox.root,
        runner=sandbox.runner,
        imports=sandbox.imports,
        wall_s=sandbox.wall_s,
        cpu_s=sandbox.cpu_s,
        memory_bytes=sandbox.memory_mb << 20,
        processes=sandbox.max_processes,
        open_files=sandbox.open_files,
        scratch_bytes=sandbox.scratch_mb << 20,
        max_files=sandbox.files,
        output_bytes=sandbox.output_kb << 10,
        sessions=sandbox.sessions,
        session_idle_s=sandbox.session_idle_s,
    )
