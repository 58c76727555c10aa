"""`meshrl run` of the job of digits in its own process, with an operator's access to its state."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import redis
from redis import Redis

from meshrl.common.records import ledger
from meshrl.common.records.ledger import RecordKind
from meshrl.view.recording.audit import audit_run
from tests.load import scaled

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).parent / "jobs/digits.toml"
UP_S = 90.0
END_S = 180.0
POLL_S = 0.03  # between two polls of a run's progress: each queries its Redis

T = TypeVar("T")


def slow_pace(decode_ms: float, plateau: int, prefill_tokens_per_s: int) -> str:
    """Return a `rollout.emulate` at which a job still runs when the test acts.

    It is slower on slower machines.
    """
    return f"{scaled(decode_ms):g}/{plateau}/{prefill_tokens_per_s}"


class Run:
    """Run whose keys a plain Redis client reads, as an operator does."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory / "run"
        words = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
        self._output = (directory / "said").open("w+")
        self._start("run", str(JOB), f"--set=out={self.directory}", *words)

    def resume(self) -> None:
        """Resume the run after `end`, as `meshrl resume` does."""
        self._output = Path(self._output.name).open("a+")  # noqa: SIM115 (until `end`)
        self._start("resume", str(self.directory))

    def _start(self, *words: str) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "MESHRL_REDIS_URL"}
        self.program = subprocess.Popen(
            [sys.executable, "-m", "meshrl", *words],
            cwd=self.directory.parent,
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        self._client: redis.Redis | None = None

    def end(self) -> None:
        """End the processes that a failed test left running."""
        if self.program.poll() is None:
            self.program.send_signal(signal.SIGINT)
            try:
                self.program.wait(scaled(20.0))
            except subprocess.TimeoutExpired:
                self.program.kill()
                self.program.wait()
        self._output.close()

    def finish(self) -> int:
        """Wait for the run to end by itself, and return its exit status."""
        return self.program.wait(scaled(END_S))

    @property
    def output(self) -> str:
        self._output.flush()
        return Path(self._output.name).read_text()

    # -- waiting ---------------------------------------------------------------------------------

    def until(self, what: str, poll: Callable[[], T | None], within_s: float = UP_S) -> T:
        """Wait until `poll` returns a true value, and return the value."""
        within_s = scaled(within_s)
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            found = poll()
            if found:
                return found
            assert self.program.poll() is None, f"the run ended before {what}:\n{self.output}"
            time.sleep(POLL_S)
        raise AssertionError(f"not {what} within {within_s:g} s:\n{self.output}\n{self.logs()}")

    def logs(self) -> str:
        files = sorted((self.directory / "mesh/logs").glob("*.log"))
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in files)

    # -- Redis -----------------------------------------------------------------------------------

    @property
    def redis(self) -> redis.Redis:
        if self._client is None:
            self._client = self.until("an answer of Redis", self._connected)
        return self._client

    def _connected(self) -> Redis | None:
        """Return a client, or None until Redis answers: the settings may be those of the run
        before.
        """
        settings = self.directory / "mesh/settings.json"
        if not settings.is_file():
            return None
        url = json.loads(settings.read_text())["redis_url"]
        client = redis.Redis.from_url(url, decode_responses=True)
        try:
            client.ping()
        except redis.exceptions.RedisError:  # it loads its data, or is not running yet
            return None
        return client

    @property
    def version(self) -> int:
        """Version of the weights that were committed last; -1 before the first."""
        return int(self.redis.hget("{digits}:job", "version") or -1)

    def entry(self, name: str) -> dict[str, Any]:
        """Return the registry entry of a live process; empty if it is absent."""
        row = self.redis.hgetall(f"{{mesh}}:entry:{name}")
        if not row or row.get("gone") == "1":
            return {}
        about: dict[str, Any] = json.loads(row["about"])
        return about | {"stats": json.loads(row["stats"])}

    def pid(self, name: str, other_than: int = 0) -> int:
        def poll() -> int:
            pid = int(self.entry(name).get("pid", 0))
            return pid if pid != other_than else 0

        return self.until(f"a process {name}", poll)

    # -- files -----------------------------------------------------------------------------------

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the fields of the recorded events of a kind; an empty list while there is no
        record.
        """
        path = self.directory / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last line may be incomplete
        return [e["fields"] for e in map(json.loads, lines) if e["kind"] == kind]

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return found

    def audit(self) -> dict[str, Any]:
        return audit_run(self.directory)

    def in_ledger(self, kind: RecordKind) -> int:
        """Count the records of a kind in the ledger of the first shard."""
        return sum(
            record.kind is kind for record in ledger.iter_records(self.directory / "ledger/shard-0")
        )

    def copy_ledger(self, to: Path) -> Path:
        shutil.copytree(self.directory / "ledger/shard-0", to)
        return to
