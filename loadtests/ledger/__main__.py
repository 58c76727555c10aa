"""What a rollout shard's ledger costs, and that it loses nothing when engines are killed.

    python -m loadtests.ledger [--seconds 45] [--kill-seconds 120]

First 2,000 trajectories in flight over 64 simulated engines of 32 slots at 40 tokens/s each,
through one shard's process: `service_cores` are CPU-seconds of that process per second,
`write_amplification` is bytes written to the ledger over 10 B per sampled token, all records
counted. Then 64 trajectories over three built-in engines at temperature 0, one of which gets
SIGKILL every 5 s and is replaced: `lost` of those opened, `redecoded_beyond_flush` tokens that an
engine was asked for although the ledger had them, and `exact_outputs`, the share of trajectories
whose tokens, read back from the ledger, are those of an engine that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from common.base.host.secret import SECRET_BYTES
from common.base.host.settings import SETTINGS_ENV, MeshSettings
from common.state.redis import embedded
from loadtests.ledger.engines import ASKED
from loadtests.ledger.traffic import GREEDY_PROMPT, GREEDY_PROMPTS

ENGINES, IN_FLIGHT = 64, 2000
HOSTS = 2  # processes that the simulated engines share
NICE = 3  # of what makes the load: it is not what is measured
WARM_S = 15.0
KILLED, KILLED_IN_FLIGHT = 3, 64
STANDING_BY = 3  # starting a process with torch takes longer than KILL_EVERY_S on a busy host
KILL_EVERY_S = 5.0
SILENT_S = 300.0  # a shard that says nothing for so long beyond its time has failed


class Processes:
    """A Redis of our own, and the processes of one part of the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._running: list[subprocess.Popen[str]] = []
        server = embedded.command(directory / "redis")
        self._start(server.argv, "redis")
        settings = MeshSettings(
            redis_url=server.url,
            run_root=str(directory),
            secret=secrets.token_hex(SECRET_BYTES),
        )
        settings.to_file(directory / "settings.json")
        self._environment = {
            **os.environ,
            SETTINGS_ENV: str(directory / "settings.json"),
            "OMP_NUM_THREADS": "1",
        }

    def _start(self, argv: list[str], log: str, **options: Any) -> subprocess.Popen[str]:
        with (self.directory / f"{log}.log").open("a") as said:
            options = {"stdout": said, **options}
            process = subprocess.Popen(argv, stderr=said, text=True, **options)
        self._running.append(process)
        return process

    def worker(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "loadtests.ledger.engines", *words]
        return self._start(argv, "workers", env=self._environment, **options)

    def shard(self, *words: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "loadtests.ledger.shard", *words]
        return self._start(argv, "shard", env=self._environment, stdout=subprocess.PIPE)

    def told(self) -> str:
        """The end of what each process logged."""
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in logs)

    def stop(self) -> None:
        for process in reversed(self._running):  # Redis last
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(10.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@contextmanager
def processes(name: str) -> Iterator[Processes]:
    with tempfile.TemporaryDirectory(prefix=f"meshrl-{name}-") as directory:
        running = Processes(Path(directory))
        try:
            yield running
        finally:
            running.stop()


def line_of(shard: subprocess.Popen[str], running: Processes) -> str:
    """What the shard prints next; SystemExit with the logs when it has ended."""
    assert shard.stdout is not None
    line = shard.stdout.readline()
    if not line:
        raise SystemExit(f"the shard has ended with {shard.wait()}:\n{running.told()}")
    return line.strip()


# ---------------------------------------------------------------- the hot path


def loaded(seconds: float, engines: int, in_flight: int, warm_s: float) -> dict[str, Any]:
    share = engines // HOSTS
    with processes("ledger-load") as running:
        hosts = [
            running.worker(
                "simulated", f"--first={share * n}", f"--count={share}", f"--nice={NICE}"
            )
            for n in range(HOSTS)
        ]
        shard = running.shard(
            "load",
            f"--engines={share * HOSTS}",
            f"--trajectories={in_flight}",
            f"--warm={warm_s}",
            f"--seconds={seconds}",
        )
        line_of(shard, running)
        before, began = [cpu_s(host.pid) for host in hosts], time.monotonic()
        report: dict[str, Any] = json.loads(line_of(shard, running))
        spent = sum(cpu_s(host.pid) - b for host, b in zip(hosts, before, strict=True))
        report["engine_cores"] = round(spent / (time.monotonic() - began), 3)
    return report


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- engines that are killed


def killed(chosen: argparse.Namespace) -> dict[str, Any]:
    seconds = chosen.kill_seconds
    with processes("ledger-kill") as running:
        directory = running.directory
        engines = Engines(running, chosen.serving, chosen.standing_by)
        shard = running.shard(
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
        running.worker("reference", f"--trajectories={prompts}", f"--out={undisturbed}").wait(
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
    """Engines in service, and others that stand by loaded: a new one takes over under a name of
    its own, as spot capacity comes.
    """

    def __init__(self, running: Processes, serving: int, standing_by: int) -> None:
        self._running = running
        self._standing_by = [self._started() for _ in range(serving + standing_by)]
        self._joined = 0
        self.kills = 0
        self._serving = [self._next() for _ in range(serving)]

    def _started(self) -> subprocess.Popen[str]:
        log = self._running.directory / "asked.log"
        return self._running.worker("native", f"--log={log}", stdin=subprocess.PIPE)

    def _next(self) -> subprocess.Popen[str]:
        engine = self._standing_by.pop(0)
        assert engine.stdin is not None
        engine.stdin.write(f"engine/k{self._joined}\n")
        engine.stdin.close()
        self._joined += 1
        return engine

    def kill(self) -> None:
        """SIGKILL for the one that has served for longest; another takes its place."""
        gone = self._serving.pop(0)
        gone.kill()
        gone.wait()
        self.kills += 1
        self._serving.append(self._next())
        self._standing_by.append(self._started())


def compared(outputs: Path, undisturbed: Path) -> dict[str, Any]:
    """Trajectories of the ledger beside what an engine makes of their prompts alone."""
    from common.records.ledger import group_of
    from loadtests.ledger.shard import GROUP

    expected = np.load(undisturbed)
    exact = 0
    with np.load(outputs) as found:
        for name in found.files:
            trajectory = int(name)
            group = group_of(trajectory)
            number = group * GROUP + trajectory - (group << 12)
            tokens = found[name][GREEDY_PROMPT:]
            exact += np.array_equal(tokens, expected[number % GREEDY_PROMPTS])
        count = len(found.files)
    distinct = float(np.mean([len(np.unique(row)) for row in expected]))
    return {
        "exact_outputs": round(exact / count, 4) if count else 0.0,
        "compared": count,
        "distinct_tokens_per_output": round(distinct, 1),
    }


def asked_again(asked: Path, written: Path) -> tuple[int, int]:
    """Tokens that engines were asked for though the ledger had them by then, and tokens of contexts
    that it did not have.
    """
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=45.0, help="0: leave this part out")
    parser.add_argument("--kill-seconds", type=float, default=120.0, help="0: leave this part out")
    parser.add_argument("--engines", type=int, default=ENGINES, help="simulated ones")
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT, help="trajectories over them")
    parser.add_argument("--warm", type=float, default=WARM_S, help="seconds before it is measured")
    parser.add_argument("--serving", type=int, default=KILLED, help="built-in engines")
    parser.add_argument("--standing-by", type=int, default=STANDING_BY, help="more of them")
    parser.add_argument("--killed-in-flight", type=int, default=KILLED_IN_FLIGHT, help="over them")
    parser.add_argument("--kill-every", type=float, default=KILL_EVERY_S, help="seconds")
    chosen = parser.parse_args()
    report: dict[str, Any] = {}
    if chosen.seconds:
        report |= loaded(chosen.seconds, chosen.engines, chosen.in_flight, chosen.warm)
    if chosen.kill_seconds:
        report |= killed(chosen)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
