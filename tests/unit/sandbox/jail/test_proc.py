"""What a jail shows of the system can be read, not written."""

from __future__ import annotations

import pytest

from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.program import Program
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits

pytestmark = pytest.mark.needs("bwrap")
LIMITS = JailLimits(wall_s=60.0, cpu_s=20.0, memory_bytes=256 * MIB, output_bytes=8192)


async def test_nothing_in_proc_can_be_opened_for_writing(launcher: JailLauncher) -> None:
    """A trigger on /proc/pressure, say, is a channel between jails."""
    source = """
import os
opened = []
for place, folders, names in os.walk("/proc"):
    folders[:] = [name for name in folders if name not in ("task", "net", "fd", "map_files")]
    for name in names:
        try:
            os.close(os.open(os.path.join(place, name), os.O_WRONLY | os.O_NONBLOCK))
            opened.append(os.path.join(place, name))
        except OSError:
            pass
print(opened)
print(open("/proc/self/oom_score_adj").read(), open("/proc/sys/user/max_user_namespaces").read())
"""
    found = await launcher.run(Program(source), LIMITS)
    assert found.stdout == b"[]\n1000\n 0\n\n", found
