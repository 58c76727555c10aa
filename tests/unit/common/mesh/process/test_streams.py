"""A process whose log lies on a full disk goes on."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

FULL = Path("/dev/full")  # every write to it is refused: no space is left

CODE = """
    import sys, warnings
    from meshrl.common.mesh.process.output.streams import outlive_a_full_disk
    if sys.argv[1] == "lossy":
        outlive_a_full_disk()
    for number in range(3):
        print("a line " * 1000, flush=True)
        print("an error", file=sys.stderr, flush=True)
    warnings.warn("a warning")
    sys.exit(7)
"""


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_what_a_full_disk_does_not_take_of_a_log_is_lost_and_ends_nobody() -> None:
    def status(how: str) -> int:
        with FULL.open("w") as log:
            argv = [sys.executable, "-c", textwrap.dedent(CODE), how]
            return subprocess.run(argv, stdout=log, stderr=log, check=False).returncode

    assert (status("plain"), status("lossy")) == (1, 7)


def test_what_there_is_room_for_is_there(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        argv = [sys.executable, "-c", textwrap.dedent(CODE), "lossy"]
        subprocess.run(argv, stdout=file, stderr=file, check=False)
    assert log.read_text().count("a line a line") > 3 and log.read_text().count("an error") == 3
