"""A gang lives on one host, and so does what its ranks say to each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHOSEN: list[dict[str, str]] = [{}, {"NCCL_SOCKET_IFNAME": "ib0"}]
# A rank of each, which are forks of one process that has imported PyTorch.
PROGRAM = """
import json, os, sys
from pathlib import Path
from services.trainer.ranks.rank import join_group, leave_group

for number, chosen in enumerate(json.loads(sys.argv[2])):
    if os.fork() == 0:
        os.environ.update(chosen)
        join_group(Path(sys.argv[1], str(number)), 0, 1, "cpu", 30.0)
        used = [os.environ[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL")]
        print(json.dumps(used), flush=True)
        leave_group()
        os._exit(0)
    if os.wait()[1]:
        sys.exit(1)
"""


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The interfaces of each of CHOSEN."""
    inherited = {k: v for k, v in os.environ.items() if not k.endswith("_SOCKET_IFNAME")}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("ranks")), json.dumps(CHOSEN)],
        env={**inherited, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        timeout=120.0,
        check=True,
    )
    return [json.loads(line) for line in found.stdout.splitlines()]


@pytest.mark.xdist_group("interfaces")
@pytest.mark.parametrize(("which", "expected"), [(0, "lo"), (1, "ib0")])
def test_ranks_meet_on_loopback_unless_an_interface_is_chosen(
    used: list[list[str]], which: int, expected: str
) -> None:
    assert used[which] == ["lo", expected]
