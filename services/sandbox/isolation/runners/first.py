"""The first lines that Python runs in a runner's container."""

from __future__ import annotations

VERSION = """
import sys
sys.version_info >= (3, 8) or sys.exit(
    "meshrl: jails take Python 3.8 or newer, this is " + sys.version
)
"""
# Run where no bundle shows the package: it comes as the first frame, and is imported from that.
CARRIED = (
    VERSION
    + """import importlib.util, json, os
def exactly(size):
    parts = b""
    while len(parts) < size:
        part = os.read(0, size - len(parts))
        if not part:
            sys.exit("the sandbox has gone")
        parts += part
    return parts
files = json.loads(exactly(int.from_bytes(exactly(4), "little")))
class Carried:
    def find_spec(self, name, path=None, target=None):
        if name in files:
            package = any(each.startswith(name + ".") for each in files)
            return importlib.util.spec_from_loader(name, self, is_package=package)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        module.__file__ = "<meshrl>/" + module.__name__
        exec(compile(files[module.__name__], module.__file__, "exec"), module.__dict__)
sys.meta_path.insert(0, Carried())
import jail.relay
jail.relay.main()
"""
)
SHOWN = (
    VERSION
    + """sys.path.insert(0, {!r})
import jail.relay
sys.path.pop(0)
jail.relay.main()
"""
)
