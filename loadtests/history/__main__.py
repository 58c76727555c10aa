"""Whether the history of a run is right, from its files alone.

    python -m loadtests.history RUN

It shares no code with what wrote them: `events.jsonl`, the ledgers' segments and the checkpoints
are read here anew. Every group that was opened was opened once and has one end, or is in flight;
steps follow each other; a version of a lineage has one manifest; checkpoints hold what was
committed; no ledger tells of a group that nobody opened. Prints one JSON object, the same account
as `meshrl audit`, and `problems`; exit status 1 when there is one.
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
