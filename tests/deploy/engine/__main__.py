"""Command line of the engine."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from tests.deploy.engine import base, daemon
from tests.deploy.engine.packages import EngineError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.deploy.engine")
    parser.add_argument("what", choices=("start", "base", "stop"))
    parser.add_argument("state", type=Path, help="the directory of the engine's state")
    asked = parser.parse_args()
    engine = daemon.Engine(asked.state)
    try:
        if asked.what == "stop":
            engine.stop()
            return 0
        engine.start()
        if asked.what == "base":
            print(base.make(engine.variables()))
        else:
            for name, value in engine.variables().items():
                print(f"export {name}={shlex.quote(value)}")
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
