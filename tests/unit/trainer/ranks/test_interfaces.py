"""A gang lives on one host, and so does what its ranks say to each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, sys
from pathlib import Path
from services.trainer.ranks.rank import join_group, leave_group

join_group(Path(sys.argv[1]), 0, 1, "cpu", 30.0)
print(json.dumps([os.environ[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL")]))
leave_group()
"""


@pytest.mark.parametrize(("chosen", "used"), [({}, "lo"), ({"NCCL_SOCKET_IFNAME": "ib0"}, "ib0")])
def test_ranks_meet_on_loopback_unless_an_interface_is_chosen(
    tmp_path: Path, chosen: dict[str, str], used: str
) -> None:
    inherited = {k: v for k, v in os.environ.items() if not k.endswith("_SOCKET_IFNAME")}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "meeting")],
        env={**inherited, "PYTHONPATH": str(Path(__file__).parents[4]), **chosen},
        capture_output=True,
        timeout=120.0,
        check=True,
    )
    assert json.loads(found.stdout) == ["lo", used]
