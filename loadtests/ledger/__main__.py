"""Benchmark of a rollout shard's ledger, with a check that no trajectory is lost when engines are
killed.

Usage:

    python -m loadtests.ledger [--seconds 45] [--kill-seconds 120]

First 2,000 trajectories in flight over 64 simulated engines of 32 slots at 40 tokens/s each,
through one shard's process: `service_cores` are CPU-seconds of that process per second,
`write_amplification` is bytes written to the ledger over 10 B per sampled token, all records
counted. Then 64 trajectories over three built-in engines at temperature 0, one of which gets
SIGKILL every 5 s and is replaced: `lost` of those opened, `redecoded_beyond_flush` tokens that an
engine was asked for although the ledger had them, and `exact_outputs`, the share of trajectories
whose tokens, read back from the ledger, are those of an undisturbed engine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from loadtests.ledger.engines import ASKED
from loadtests.ledger.traffic import GREEDY_PROMPT, GREEDY_PROMPTS
from loadtests.measuring.entry import options, report
from loadtests.measuring.meshed import Members, hosted

ENGINES, IN_FLIGHT = 64, 2000
HOSTS = 2  # processes that the simulated engines share
NICE = 3  # CPU of the load generator, which is not measured
WARM_S = 15.0
KILLED, KILLED_IN_FLIGHT = 3, 64
STANDING_BY = 3  # starting a process with torch takes longer than KILL_EVERY_S on a busy host
KILL_EVERY_S = 5.0
SILENT_S = 300.0  # a shard without output for so long beyond its time has failed


def worker(running: Members, *words: str, **options: Any) -> subprocess.Popen[str]:
    name = f"engines-{len(running.running)}"
    return running.start(name, "loadtests.ledger.engines", *words, **options)


def shard_of(running: Members, *words: str) -> subprocess.Popen[str]:
    return running.start("shard", "loadtests.ledger.shard", *words, stdout=subprocess.PIPE)


def line_of(shard: subprocess.Popen[str], running: Members) -> str:
    assert shard.stdout is not None
    line = shard.stdout.readline()
    if not line:
        raise SystemExit(f"the shard has ended with {shard.wait()}:\n{running.logs()}")
    return line.strip()


# ---------------------------------------------------------------- the hot path


def loaded(seconds: float, engines: int, in_flight: int, warm_s: float) -> dict[str, Any]:
    share = engines // HOSTS
    with hosted() as running:
        for n in range(HOSTS):
            worker(
                running, "simulated", f"--first={share * n}", f"--count={share}", f"--nice={NICE}"
            )
        shard = shard_of(
            running,
            "load",
            f"--engines={share * HOSTS}",
            f"--trajectories={in_flight}",
            f"--warm={warm_s}",
            f"--seconds={seconds}",
        )
        line_of(shard, running)
        report: dict[str, Any] = json.loads(line_of(shard, running))
    return report


# ---------------------------------------------------------------- engines that are killed


def killed(chosen: argparse.Namespace) -> dict[str, Any]:
    seconds = chosen.kill_seconds
    with hosted() as running:
        directory = running.directory
        engines = Engines(running, chosen.serving, chosen.standing_by)
        shard = shard_of(
            running,
            "greedy",
            f"--engines={chosen.serving}",
            f"--trajectories={chosen.killed_in_flight}",
            f"--seconds={seconds}",
            f"--out={directory}",
        )
        line_of(shard, running)
        end = time.monotonic() + seconds
        while time.monotonic() + chosen.kill_every < end:
            time.sleep(chosen.kill_every)
            engines.kill()
        report: dict[str, Any] = json.loads(line_of(shard, running))
        prompts = min(report["opened"], GREEDY_PROMPTS)
        undisturbed = directory / "undisturbed.npy"
        worker(running, "reference", f"--trajectories={prompts}", f"--out={undisturbed}").wait(
            SILENT_S
        )
        outputs = compared(directory / "outputs.npz", undisturbed)
        again, ahead = asked_again(directory / "asked.log", directory / "written.npy")
    return {
        "kills": engines.kills,
        "opened": report["opened"],
        "lost": report["opened"] - report["finished"] - report["failed"],
        "typed_failures": report["failed"],
        "continued": report["continued"],
        "redecoded_beyond_flush": again,
        "asked_beyond_ledger": ahead,
        **outputs,
    }


class Engines:
    """Engines in service, and others that stand by loaded to take over, as spot capacity comes."""

    def __init__(self, running: Members, serving: int, standing_by: int) -> None:
        self._running = running
        self._standing_by = [self._started() for _ in range(serving + standing_by)]
        self._joined = 0
        self.kills = 0
        self._serving = [self._next() for _ in range(serving)]

    def _started(self) -> subprocess.Popen[str]:
        log = self._running.directory / "asked.log"
        return worker(self._running, "native", f"--log={log}", stdin=subprocess.PIPE)

    def _next(self) -> subprocess.Popen[str]:
        engine = self._standing_by.pop(0)
        assert engine.stdin is not None
        engine.stdin.write(f"engine/k{self._joined}\n")
        engine.stdin.close()
        self._joined += 1
        return engine

    def kill(self) -> None:
        """Kill the process that has served the longest; another replaces it."""
        gone = self._serving.pop(0)
        gone.kill()
        gone.wait()
        self.kills += 1
        self._serving.append(self._next())
        self._standing_by.append(self._started())


def compared(outputs: Path, undisturbed: Path) -> dict[str, Any]:
    """Compare the ledger's trajectories with an engine's undisturbed completions."""
    from loadtests.ledger.shard import GROUP
    from meshrl.common.records.ledger import extract_group

    expected = np.load(undisturbed)
    exact = 0
    with np.load(outputs) as found:
        for name in found.files:
            trajectory = int(name)
            group = extract_group(trajectory)
            number = group * GROUP + trajectory - (group << 12)
            tokens = found[name][GREEDY_PROMPT:]
            exact += np.array_equal(tokens, expected[number % GREEDY_PROMPTS])
        count = len(found.files)
    return {"exact_outputs": round(exact / count, 4) if count else 0.0, "compared": count}


def asked_again(asked: Path, written: Path) -> tuple[int, int]:
    """Count requested tokens that the ledger had, and those that it did not have."""
    times, trajectories, tokens = np.load(written)
    again = ahead = 0
    rows = np.array(list(ASKED.iter_unpack(asked.read_bytes())), np.int64)
    for trajectory in np.unique(rows[:, 1]).tolist():
        mine = trajectories == trajectory
        held = np.concatenate(([0], np.cumsum(tokens[mine])))
        requests = rows[rows[:, 1] == trajectory]
        by_then = held[np.searchsorted(times[mine], requests[:, 0])]
        short = GREEDY_PROMPT + by_then - requests[:, 2]
        again += int(short[short > 0].sum())
        ahead -= int(short[short < 0].sum())
    return again, ahead


def main() -> None:
    parser = options(
        __doc__,
        seconds=(45.0, "0: leave this part out"),
        kill_seconds=(120.0, "0: leave this part out"),
        engines=(ENGINES, "simulated ones"),
        in_flight=(IN_FLIGHT, "trajectories over them"),
        warm=(WARM_S, "seconds before it is measured"),
        serving=(KILLED, "built-in engines"),
        standing_by=(STANDING_BY, "more of them"),
        killed_in_flight=(KILLED_IN_FLIGHT, "over them"),
        kill_every=(KILL_EVERY_S, "seconds"),
    )
    chosen = parser.parse_args()
    found: dict[str, Any] = {}
    if chosen.seconds:
        found |= loaded(chosen.seconds, chosen.engines, chosen.in_flight, chosen.warm)
    if chosen.kill_seconds:
        found |= killed(chosen)
    report(found)


if __name__ == "__main__":
    main()
