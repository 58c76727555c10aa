"""Program that trains the job of digits with code and rows of its own, and prints its progress.

The arguments are KEY=VALUE. It has no guard for imports: no process imports it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import meshrl

FULL = 2.0


def score(row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
    """Return a reward that grows with the share of digits, which varies between samples."""
    text: str = turns[-1]["text"]
    return FULL * sum(character.isdigit() for character in text) / max(1, len(text))


rows = [{"prompt": f"?{first}a+{second}="} for first in range(1, 9) for second in range(1, 9)]
job = Path(__file__).parent / "digits.toml"
with meshrl.start(job, reward=score, dataset=rows, overrides=sys.argv[1:]) as run:
    print(run.directory, flush=True)
    for step in run:
        print(step["step"], step["reward"], flush=True)
