"""A line of a log says whose it is: which process, for which job, in which trace."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import asyncio, sys, threading
from meshrl.common.mesh.telemetry.logs import Telemetry, log_to_stderr
from meshrl.common.mesh.telemetry.tracing import adopt

log_to_stderr(*sys.argv[1:])
log = Telemetry(*sys.argv[1:]).log

async def answers(trace):
    adopt(trace)
    await asyncio.sleep(0)
    log.info("answers")

async def main():
    log.info("starts")
    traces = [f"00-{digit * 32}-0123456789abcdef-01" for digit in "ab"]
    await asyncio.gather(*map(answers, traces))
    thread = threading.Thread(target=log.info, args=("on a thread",))
    thread.start()
    thread.join()

asyncio.run(main())
"""


def lines(*whose: str) -> list[dict[str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *whose], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_every_line_says_which_job_its_process_serves_and_the_trace_of_the_call() -> None:
    found = lines("engine/g1.0", "calculator")
    assert {(line["service"], line["job"]) for line in found} == {("engine/g1.0", "calculator")}
    assert [line["event"] for line in found] == ["starts", "answers", "answers", "on a thread"]
    assert [line.get("trace") for line in found] == [None, "a" * 32, "b" * 32, None]


def test_one_that_serves_no_job_names_none() -> None:
    assert not any("job" in line for line in lines("planner/0"))
