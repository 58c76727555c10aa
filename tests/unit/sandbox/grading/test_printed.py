"""Programs that read and print are judged as an online judge would."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.base.clock import SystemClock
from services.sandbox.grading.code.grading import Grading
from services.sandbox.isolation.jail_launcher import JailLauncher
from services.sandbox.isolation.resources.limits import JailLimits
from services.sandbox.isolation.resources.slots import JailSlots
from services.sandbox.outcomes.answer import Answer
from tests.load import scaled

pytestmark = pytest.mark.needs("bwrap")

READS = {  # ways to read all of the input; each prints the sum of its numbers
    "input": "n = int(input())\nprint(sum(int(input()) for _ in range(n)) + n)",
    "until EOFError": (
        "total = 0\ntry:\n    while True: total += int(input())\nexcept EOFError:\n    print(total)"
    ),
    "readlines": "import sys\nprint(sum(map(int, sys.stdin.readlines())))",
    "iteration": "import sys\nprint(sum(int(line) for line in sys.stdin))",
    "buffer": "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
    "open(0)": "print(sum(map(int, open(0).read().split())))",
    "open(0, 'rb')": "print(sum(map(int, open(0, 'rb'))))",
    "os.read": "import os\nprint(sum(map(int, os.read(0, 10**6).split())))",
    "fstat": (
        "import io, os, sys\ninput = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\n"
        "n = int(input())\nprint(n + sum(int(input()) for _ in range(n)))"
    ),
    "fileinput": "import fileinput\nprint(sum(int(line) for line in fileinput.input()))",
    "/dev/stdin": "print(sum(map(int, open('/dev/stdin'))))",
    "iter": "import sys\nprint(sum(map(int, iter(sys.stdin.readline, ''))))",
    "__stdin__": "import sys\nprint(sum(map(int, sys.__stdin__)))",
    "wrapper": (
        "import io, sys\nsys.stdin = io.TextIOWrapper(sys.stdin.buffer)\n"
        "print(sum(map(int, sys.stdin.read().split())))"
    ),
}
ENDS = {  # of a program that has printed what was due
    "exit": ("exit()", 1.0),
    "exit in a function": ("def main():\n    print(end='')\n    exit(0)\nmain()", 1.0),
    "quit": ("quit()", 1.0),
    "sys.exit": ("import sys\nsys.exit()", 1.0),
    "sys.exit of a status": ("import sys\nsys.exit(1)", 0.0),
    "sys.exit of a text": ("import sys\nsys.exit('done')", 0.0),
    "sys.exit of 0": ("import sys\nsys.exit(0)", 1.0),
    "exit of what main returns": ("import sys\ndef main(): pass\nsys.exit(main())", 1.0),
    "SystemExit": ("raise SystemExit", 1.0),
    "os._exit": ("import os, sys\nsys.stdout.flush()\nos._exit(0)", 1.0),
    "an error": ("1 / 0", 0.0),
    "much on standard error": ("import sys\nprint('x' * 10**6, file=sys.stderr)", 1.0),
    "end of input": ("input()\ninput()\ninput()\ninput()\ninput()", 0.0),
    "a signal": ("import os, signal\nos.kill(os.getpid(), signal.SIGABRT)", 0.0),
}
PRINTS = {  # ways to print 6
    "main": "def main():\n    print(6)\nif __name__ == '__main__':\n    main()",
    "open": "out = open(1, 'w')\nout.write('6')",
    "os.write": "import os\nos.write(1, b'6')",
    "buffer": "import sys\nsys.stdout.buffer.write(b'6\\n')",
    "atexit": (
        "import atexit, io, sys\nbuffer = io.BytesIO()\nsys.stdout = io.TextIOWrapper(buffer)\n"
        "atexit.register(lambda: (sys.stdout.flush(), sys.__stdout__.write("
        "buffer.getvalue().decode())))\nprint(6)"
    ),
    "a thread with a deep stack": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**29)\n"
        "def deep(n): return 0 if n == 0 else 1 + deep(n - 1)\n"
        "def main(): print(deep(50_000) - 49_994)\n"
        "t = threading.Thread(target=main)\nt.start()\nt.join()"
    ),
    "deep recursion in C": (
        "import functools, sys\nsys.setrecursionlimit(10**6)\n"
        "@functools.lru_cache(None)\n"
        "def deep(n): return 0 if n == 0 else 1 + deep(n - 1)\nprint(deep(40_000) - 39_994)"
    ),
    "as an interpreter's own streams": (
        "import sys\nfor stream in (sys.stdin, sys.stdout, sys.stderr):\n"
        "    assert stream.buffer.name == stream.name\n"
        "    print(stream.name, stream.mode, stream.fileno(), file=sys.stderr)\n"
        "assert [s.mode for s in (sys.stdin, sys.stdout, sys.stderr)] == ['r', 'w', 'w']\n"
        "assert (sys.stdin.name, sys.stdout.name) == ('<stdin>', '<stdout>')\n"
        "assert (sys.stderr.name, sys.__stdout__.mode) == ('<stderr>', 'w')\n"
        "print(6)"
    ),
    "a stream of its own over the given ones": (
        "import io, os, sys\n"
        "class Fast(io.IOBase):\n"
        "    def __init__(self, file):\n"
        "        self.fd, self.writable = file.fileno(), 'r' not in file.mode\n"
        "    def write(self, text):\n        os.write(self.fd, text.encode())\n"
        "sys.stdin, sys.stdout = Fast(sys.stdin), Fast(sys.stdout)\n"
        "assert sys.stdout.writable and not sys.stdin.writable\nprint(6)"
    ),
    "a number of many digits": "print(len(str(10**5000)) - 4995)",
}


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "model", "text": text}]


class Judge:
    def __init__(self, launcher: JailLauncher, **options: Any) -> None:
        slots = JailSlots(SystemClock(), 4)
        self.grading = Grading(launcher, slots, JailLimits(), {"case_s": scaled(5.0)} | options)

    async def answer(self, tests: Any, source: str) -> Answer:
        return await self.grading.reward({"tests": tests}, said(f"```python\n{source}\n```"))

    async def all(self, graded: dict[str, tuple[Any, str]]) -> dict[str, Any]:
        """The score of each (tests, program) by name."""
        answers = await asyncio.gather(*(self.answer(*pair) for pair in graded.values()))
        return {
            name: answer.value if answer.status == "ok" else answer
            for name, answer in zip(graded, answers, strict=True)
        }


async def test_input_is_read_in_every_way(launcher: JailLauncher) -> None:
    tests = [{"input": "3\n1\n2\n3", "output": "9\n"}]
    scores = await Judge(launcher).all({name: (tests, source) for name, source in READS.items()})
    assert scores == dict.fromkeys(READS, 1.0)


async def test_how_a_program_ends_after_it_has_printed(launcher: JailLauncher) -> None:
    tests = [{"input": "1\n2", "output": "6"}]
    scores = await Judge(launcher).all(
        {name: (tests, f"print(6)\n{source}") for name, (source, _) in ENDS.items()}
    )
    assert scores == {name: score for name, (_, score) in ENDS.items()}


async def test_output_is_printed_in_every_way(launcher: JailLauncher) -> None:
    tests = [{"input": "", "output": "6"}]
    scores = await Judge(launcher).all({name: (tests, source) for name, source in PRINTS.items()})
    assert scores == dict.fromkeys(PRINTS, 1.0)


async def test_large_inputs_and_outputs(launcher: JailLauncher) -> None:
    lines = "\n".join(map(str, range(40_000)))
    echo = [{"input": lines, "output": lines}]
    wide = [{"input": "ä" * 5_000_000, "output": "5000000"}]
    scores = await Judge(launcher).all(
        {
            "echo": (echo, "import sys\nfor line in sys.stdin:\n    print(line, end='')"),
            "less": (echo, "import sys\nprint(sys.stdin.read()[:-1])"),
            "endless": (echo, "while True: print('1')"),
            "wide": (wide, "print(len(input()))"),
        }
    )
    assert scores == {"echo": 1.0, "less": 0.0, "endless": 0.0, "wide": 1.0}


async def test_shapes_of_the_corpora(launcher: JailLauncher) -> None:
    double = "print(2 * int(input()))"
    pairs = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
    scores = await Judge(launcher).all(
        {
            "pairs": (pairs, double),
            "JSON text": ('{"inputs": ["1", "3"], "outputs": ["2", "5"]}', double),
            "lines": ([{"input": ["1", "2"], "output": ["2", "2"]}], double + "\nprint(2)"),
            "any": ([{"input": "1", "outputs": ["3", "2"]}], double),
            "none": ([{"input": "1", "outputs": ["3", "4"]}], double),
            "CRLF": ([{"input": "1\r\n", "output": "2  \r\n3\r\n"}], double + "\nprint(3)"),
            "numbers": ([{"input": 1, "output": 2}], double),
        }
    )
    assert scores == {
        "pairs": 1.0,
        "JSON text": 0.5,
        "lines": 1.0,
        "any": 1.0,
        "none": 0.0,
        "CRLF": 1.0,
        "numbers": 1.0,
    }


async def test_what_cannot_be_judged_is_no_score(launcher: JailLauncher) -> None:
    judge = Judge(launcher)
    for tests, status in (
        ([{"input": "1", "output": "2", "testtype": "functional"}], "unsupported"),
        ([{"input": [[1]], "output": "2"}], "unsupported"),
        ([{"input": None, "output": "2"}], "bad_value"),
        ({"inputs": ["1"], "outputs": []}, "bad_value"),
        ({"inputs": ["1"]}, "bad_value"),
    ):
        answer = await judge.answer(tests, "print(2)")
        assert (answer.status, answer.value) == (status, None), tests


async def test_the_options_set_the_tolerance(launcher: JailLauncher) -> None:
    tests = [{"input": "", "output": "3.14"}]
    loose, tight = Judge(launcher, rel_tol=0.01), Judge(launcher)
    assert (await loose.answer(tests, "print(3.1415)")).value == 1.0
    assert (await tight.answer(tests, "print(3.1415)")).value == 0.0
