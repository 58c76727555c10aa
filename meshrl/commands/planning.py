"""`meshrl plan`: the planner's input, and its decisions for that now, with their rules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError, StateUnavailable
from meshrl.common.state import leader
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.store.snapshot_documents import encode_snapshot
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import PLANNER_ELECTION
from meshrl.directory.directory_paths import find_mesh
from meshrl.directory.mesh_query import ANSWER_TIMEOUT_S, query_mesh

EXPLAIN_TIMEOUT_S = 60.0


def print_plan(snapshot_file: Path | None, explain: bool, as_json: bool, mesh: Path | None) -> int:
    """Print a snapshot, or the decisions for it, and return the exit status.

    `snapshot_file` is a file that this command has printed before; None: the mesh is read.
    """
    if snapshot_file is None:
        text = json.dumps(
            query_mesh(find_mesh(mesh), _read_planner_input, ANSWER_TIMEOUT_S), indent=2
        )
    else:
        try:
            text = snapshot_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the snapshot cannot be read: {error}", where=str(snapshot_file)
            ) from error
    if not explain:
        print(text)
        return 0
    words = [
        sys.executable,
        "-m",
        "meshrl.services.planner.explain",
        *(["--json"] if as_json else []),
    ]
    result = subprocess.run(words, input=text, text=True, check=False, timeout=EXPLAIN_TIMEOUT_S)
    return result.returncode


async def _read_planner_input(state: StateClient) -> dict[str, Any]:
    """Return the leader's input, read with the leader's token, which is used for no write."""
    owner, token = await leader.read_leader(state, PLANNER_ELECTION)
    if not owner:
        raise StateUnavailable("no planner leads at the moment", fix="Try again in a second")
    found = await pool.read_snapshot(state, token)
    return {"snapshot": encode_snapshot(found.snapshot), "memory": found.memory}
