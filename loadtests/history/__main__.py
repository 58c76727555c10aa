"""Check of a run's history from its files alone.

Usage:

    python -m loadtests.history RUN

It shares no code with the writers of the files: it reads `events.jsonl`, the ledgers' segments and
the checkpoints itself. Every group was opened once and has one end, or is in flight. Steps follow
each other. A version of a lineage has one manifest. Checkpoints hold committed versions. Every
group of a ledger was opened. Prints one JSON object, the same account as `meshrl audit`, and
`problems`. The exit status is 1 when there is one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from loadtests.history.checking import check
from loadtests.measuring.entry import report


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    found = check(Path(sys.argv[1]))
    report(found)
    return int(bool(found["problems"]))


if __name__ == "__main__":
    sys.exit(main())
