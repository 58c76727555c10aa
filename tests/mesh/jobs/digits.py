"""Rewards of the job of digits: a correct one, and one for each failure."""

from __future__ import annotations

import subprocess
import time
from typing import Any

Row = dict[str, Any]
Turns = list[dict[str, Any]]
STAYS_S = 31_536_042  # argument of the processes of `broken`, by which a test finds them
STARTED: list[subprocess.Popen[bytes]] = []


def share_of_digits(row: Row, turns: Turns) -> float:
    """Return a reward that grows with the share of digits, which varies between samples."""
    text: str = turns[-1]["text"]
    return sum(character.isdigit() for character in text) / max(1, len(text))


def broken(row: Row, turns: Turns) -> float:
    """Start processes that outlive the call, identified only by their ancestors."""
    if not STARTED:
        stays = f"exec sleep {STAYS_S} > /dev/null 2>&1"
        STARTED.append(subprocess.Popen(["setsid", "sh", "-c", stays]))
        subprocess.run(["env", "-i", "setsid", "sh", "-c", f"({stays}) &"], check=True)
    raise ValueError(f"cannot judge {row['prompt']}")


def unreliable(row: Row, turns: Turns) -> Any:
    """Fail in another way for each kind of row; succeed for sums of even digits."""
    kind = row["kind"]
    print("a line on the standard output " * 100)
    if kind == "raises":
        raise ValueError("no")
    if kind == "hangs":
        time.sleep(3600)
    if kind == "garbage":
        return "a lot"
    if kind == "exits":
        raise SystemExit(3)
    return share_of_digits(row, turns)


class Notebook:
    """Environment that runs two cells in its session; each answer is appended as a zero."""

    def open(self, row: Row) -> str:
        self.calls = 0
        return str(row["prompt"])

    def step(self, text: str) -> dict[str, Any]:
        self.calls += 1
        cells = ["x = 7\nx", "x * 6"]
        if self.calls > len(cells):
            return {"done": True}
        return {"tool": "notebook", "input": cells[self.calls - 1]}

    def result(self, value: Any) -> dict[str, Any]:
        return {"append": "0"}

    def close(self) -> None:
        return None


def notebook() -> Notebook:
    return Notebook()


def score_session(row: Row, turns: Turns) -> float:
    """Return the share of digits; raise ValueError if the session lost its state without a
    crash.
    """
    output = [turn["value"] for turn in turns if turn["role"] == "tool"]
    expected = [{"status": "ok", "output": "7\n"}, {"status": "ok", "output": "42\n"}]
    lost = any(value["status"] == "crashed" for value in output)
    if not lost and output != expected[: len(output)]:
        raise ValueError(f"the session said {output}")
    return share_of_digits(row, turns)
