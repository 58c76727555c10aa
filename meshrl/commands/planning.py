"""`meshrl plan`: what the planner decides from, and what it would decide now, with its rules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError, StateUnavailable
from meshrl.common.state import leader
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.pool.store.reading import snapshot_document
from meshrl.common.state.redis.client import State
from meshrl.common.state.redis.keys import PLANNER
from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.places import find_mesh

EXPLAIN_S = 60.0


def show(look: Path | None, explain: bool, as_json: bool, mesh: Path | None) -> int:
    """Prints a look, or what would be decided of it; the exit status. `look` is a file that this
    has printed before; None: the mesh is looked at.
    """
    if look is None:
        text = json.dumps(ask(find_mesh(mesh), _look, ANSWER_S), indent=2)
    else:
        try:
            text = look.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the look cannot be read: {error}", where=str(look)) from error
    if not explain:
        print(text)
        return 0
    words = [
        sys.executable,
        "-m",
        "meshrl.services.planner.explain",
        *(["--json"] if as_json else []),
    ]
    said = subprocess.run(words, input=text, text=True, check=False, timeout=EXPLAIN_S)
    return said.returncode


async def _look(state: State) -> dict[str, Any]:
    """As the leader sees it: who asks takes the leader's token, and writes nothing by it."""
    owner, token = await leader.leader(state, PLANNER)
    if not owner:
        raise StateUnavailable("no planner leads at the moment", fix="Ask again in a second")
    found = await pool.look(state, token)
    return {"snapshot": snapshot_document(found.snapshot), "memory": found.memory}
