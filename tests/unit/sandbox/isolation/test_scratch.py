"""Nothing that a jail leaves in its directory on disk keeps that from being removed."""

from __future__ import annotations

import os

import pytest

from meshrl.services.sandbox.isolation.resources import places
from tests.unit.sandbox.beside import PLAIN, printed

LEFT = """
import os, sys
from meshrl.services.sandbox.isolation.resources import places
place, outside = places.make_scratch(0), places.make_scratch(0)
os.chdir(place)
os.makedirs("closed/within/more")
open("closed/within/more/file", "w").close()
os.symlink(outside, "link")
os.symlink("nowhere", "closed/link")
os.mkfifo("closed/pipe")
os.chmod("closed/within", 0)
os.chmod("closed", 0)
for _ in range(3000):
    os.mkdir("deep" * 10)
    os.chdir("deep" * 10)
os.chdir("/")
os.chmod(outside, 0o755)
os.chmod(place, 0)
places.remove_scratch(place)
assert not os.path.lexists(place)
assert os.stat(outside).st_mode & 0o777 == 0o755
places.remove_scratch(outside)
"""


def test_a_plain_user_removes_closed_and_deep_directories_and_follows_no_link() -> None:
    printed(LEFT, become=PLAIN if os.getuid() == 0 else ())


@pytest.mark.needs("root")
def test_root_gives_it_to_the_user_of_the_jail() -> None:
    place = places.make_scratch(1_900_000_007)
    assert os.stat(place).st_uid == os.stat(place).st_gid == 1_900_000_007
    places.remove_scratch(place)
    assert not os.path.lexists(place)
