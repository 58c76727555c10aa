"""Command line: arguments and output of each command. Open `arguments.py` first.

Implementations are imported when a command runs, so that `meshrl --help` and errors in a job file
appear at once.
"""

# `meshrl --help` shows the commands in this order.
from meshrl.cli import runs, weights, monitoring, meshes, hosts, tokens  # isort: skip
from meshrl.cli.arguments import app

__all__ = ["app", "hosts", "meshes", "monitoring", "runs", "tokens", "weights"]
