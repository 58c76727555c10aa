"""Who runs a mesh is given the time for its end that it says it takes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshrl.common.base.host.settings import MeshSettings
from meshrl.directory.places import MeshPlace, running_launcher
from meshrl.launch.ending import STOP_S, end
from tests.load import scaled

WITHIN_S = 30.0
HOLDS = """
import signal, sys, time
from pathlib import Path
from meshrl.launch.holding import Hold
from meshrl.directory.places import MeshPlace
place = MeshPlace(Path(sys.argv[1]))
def told(*_):
    (place.root / "asked").write_text(str(place.leaving.exists()))
signal.signal(signal.SIGTERM, told)
Hold(place, end_s=float(sys.argv[2])).take()
while not (place.root / "asked").exists() or sys.argv[3] == "stays":
    time.sleep(0.02)
"""


@pytest.mark.parametrize(("ends", "leaves"), [("stays", False), ("ends", True)])
def test_it_is_killed_when_its_own_time_is_over(tmp_path: Path, ends: str, leaves: bool) -> None:
    place = MeshPlace(tmp_path)
    place.directory.mkdir(mode=0o700)
    MeshSettings(redis_url="redis://127.0.0.1:1/0", run_root=str(tmp_path)).to_file(place.settings)
    end_s = 1.0 if ends == "stays" else 600.0
    words = [sys.executable, "-c", HOLDS, str(tmp_path), str(end_s), ends]
    holder = subprocess.Popen(words)
    try:
        until = time.monotonic() + scaled(WITHIN_S)
        while running_launcher(place) != holder.pid:
            assert holder.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        began = time.monotonic()
        assert end(place, leaves=leaves) == (holder.pid, [])
        assert time.monotonic() - began < STOP_S
        assert holder.wait(scaled(WITHIN_S)) == (0 if ends == "ends" else -9)
        assert (tmp_path / "asked").read_text() == str(leaves)
    finally:
        holder.kill()
        holder.wait()
