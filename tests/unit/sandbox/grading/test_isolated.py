"""Python tests in two jails: supported features, and claims of a solution that do not count."""

from __future__ import annotations

import time
from typing import Any

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.grading.isolated_support import UnsupportedTests
from meshrl.services.sandbox.grading.code import isolated_tests
from meshrl.services.sandbox.grading.code.attempt import MAX_STARVED_JAILS, GradingAttempt
from meshrl.services.sandbox.grading.code.code_reward import CodeGrader
from meshrl.services.sandbox.grading.code.program_extraction import build_prelude
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import Jail, JailFailed, ProgramResult
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from tests.load import scaled
from tests.unit.sandbox.grading.graders import BatchGrader, on_shared_loop, read_rows

CASE_S = 4.0  # these take no time, but the host may be busy
ROWS = read_rows("rows.toml", "row")


async def run_isolated(
    launcher: JailLauncher, solution: str, tests: str, case_s: float = 0.0
) -> str:
    slots, options = JailSlots(SystemClock(), 2), {"case_s": case_s or scaled(CASE_S)}
    attempt = GradingAttempt(launcher, slots, JailLimits(), options)
    return "".join("01"[one] for one in await isolated_tests.run_tests(attempt, solution, tests))


@on_shared_loop
@pytest.mark.needs("bwrap")
@pytest.mark.rotating(3)
@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
async def test_common_test_styles_are_graded(launcher: JailLauncher, row: dict[str, str]) -> None:
    if row["passed"] == "unsupported":
        with pytest.raises(UnsupportedTests):
            await run_isolated(launcher, row["solution"], row["tests"])
        return
    passed = await run_isolated(launcher, row["solution"], row["tests"])
    assert passed == ("1" * len(passed) if row["passed"] == "all" else row["passed"])


EQUAL = """
class Equal:
    def __init__(self, *a, **k): pass
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda *a: True
    __ne__ = lambda *a: False
    __hash__ = lambda self: hash(8)
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __abs__ = __neg__ = lambda self, *a: self
    __bool__ = lambda self: False
    __float__ = lambda self: 0.0
    __getattr__ = lambda self, name: self
def f(*a): return Equal()
Point = Equal
"""
DATA = """
import pytest, unittest
from unittest import mock
from solution import f, Point
def test_eq(): assert f() == 8
def test_turned(): assert 8 == f()
def test_list(): assert [f()] == [8]
def test_in(): assert f() in [8]
def test_set(): assert f() in {8}
def test_dict(): assert {"a": f()} == {"a": 8}
def test_close(): assert abs(f() - 8) < 1e-6
def test_falsy(): assert not (f() - 8)
def test_approx(): assert f() == pytest.approx(8)
def test_order(): assert 7 < f() < 9
def test_objects(): assert f() == Point(1, 2)
def test_attribute(): assert f().x == 3
def test_empty(): assert f() == []
class TestUnit(unittest.TestCase):
    def test_equal(self): self.assertEqual(f(), 8)
    def test_almost(self): self.assertAlmostEqual(f(), 8)
"""


BORROWED = """
import unittest.mock
f = Point = type(unittest.mock.ANY)
"""


@on_shared_loop
@pytest.mark.needs("bwrap")
@pytest.mark.parametrize("solution", [EQUAL, BORROWED], ids=["own", "borrowed"])
async def test_object_that_equals_everything_equals_nothing(
    launcher: JailLauncher, solution: str
) -> None:
    assert set(await run_isolated(launcher, solution, DATA)) == {"0"}


ALIASED = """
class Many(list):
    def __eq__(self, other): return True
    def __iter__(self): return iter([1, 2])
class Text(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
class Number(int):
    def __eq__(self, other): return True
    def __sub__(self, other): return Number(0)
    __rsub__ = __xor__ = __sub__
    __hash__ = int.__hash__
def f(): return Many([3])
def g(): return Text("no")
def h(): return Number(3)
"""


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_subclasses_of_data_types_are_compared_by_content(launcher: JailLauncher) -> None:
    tests = "from solution import f, g, h\ndef test_f(): assert f() == [1, 2]\n"
    tests += "def test_g(): assert g() == 'yes'\ndef test_h(): assert h() == 4\n"
    tests += "def test_difference(): assert h() - 4 == 0\ndef test_right(): assert f() == [3]\n"
    assert await run_isolated(launcher, ALIASED, tests) == "00001"


@on_shared_loop
@pytest.mark.needs("bwrap")
@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("solution", "tests"),
    [
        ("import time\ndef f(x):\n    if x == 1: time.sleep(60)\n    return x", 3),
        ("def f(x):\n    while x == 1: pass\n    return x", 3),
        ("import time\ntime.sleep(60)\ndef f(x): return x", 1),
    ],
    ids=["sleeps", "spins", "sleeps at once"],
)
async def test_hanging_case_costs_only_its_limit(
    launcher: JailLauncher, solution: str, tests: int
) -> None:
    source = "from solution import f\n"
    source += "".join(f"def test_{x}():\n    assert f({x}) == {x}\n" for x in range(tests))
    start_s, case_s = time.monotonic(), min(1.5, scaled(0.3))
    passed = await run_isolated(launcher, solution, source, case_s)
    assert passed == ("101" if tests == 3 else "0")
    # With a limit of ten times and ten seconds it took 13 s.
    assert time.monotonic() - start_s < scaled(9.0)


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_time_of_the_tests_does_not_count_for_the_solution(launcher: JailLauncher) -> None:
    source = "import time\nfrom solution import f\ndef test_f():\n    for _ in range(3):\n"
    source += "        time.sleep(0.3)\n        assert f() == 1"
    assert await run_isolated(launcher, "def f(): return 1", source, min(0.85, scaled(0.6))) == "1"


@on_shared_loop
@pytest.mark.needs("bwrap")
@pytest.mark.parametrize(
    ("tests", "error"),
    [
        ("import pytest\nx = getattr(pytest, 'stash')\ndef test_f(): pass", "pytest.stash"),
        ("import threading\nfrom solution import f\ndef test_f(): f(threading.Lock())", "lock"),
    ],
)
async def test_unsupported_feature_is_named(launcher: JailLauncher, tests: str, error: str) -> None:
    with pytest.raises(UnsupportedTests, match=error):
        await run_isolated(launcher, "def f(x): return x", tests)


CLIMBS = """
def f(*given):
    for thing in given:
        for name in ("__globals__", "__code__", "gi_frame", "__self__", "_secret", "f_globals"):
            try:
                found = getattr(thing, name)
                return getattr(found, "f_globals", found)["SECRET"]
            except Exception:
                pass
        try:
            thing.lock
        except TypeError:
            pass
        try:
            thing.called_once = thing.assert_called_once_with = lambda *a: None
        except Exception:
            pass
"""


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_solution_cannot_reach_internals_of_its_arguments(launcher: JailLauncher) -> None:
    tests = """
from unittest.mock import Mock
from solution import f
SECRET = 5
class Own:
    _secret = {"SECRET": 5}
    lock = __import__("threading").Lock()
    def method(self): pass
def numbers():
    yield 1
def test_function(): assert f(numbers) == 5
def test_generator(): assert f(numbers()) == 5
def test_own(): assert f(Own()) == 5
def test_method(): assert f(Own().method) == 5
def test_mock():
    m = Mock()
    f(m)
    m.assert_called_once_with(3)
"""
    assert await run_isolated(launcher, CLIMBS, tests) == "00000"


@on_shared_loop
@pytest.mark.needs("bwrap")
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_solution_cannot_suppress_asserts_of_a_callback(
    launcher: JailLauncher, kind: str
) -> None:
    await_keyword = "await " if kind != "def" else ""
    call = "asyncio.run(visit(check))" if await_keyword else "visit(check)"
    tests = "import asyncio\n" if await_keyword else ""
    tests += f"from solution import visit\n{kind} check(value):\n"
    tests += f"    assert value == 41\ndef test_visit():\n    {call}\n"
    body = "    try:\n        {0}f({1})\n    except {2}: {3}\n"
    for value, exception, handler in ((41, "BaseException", "pass"), (41, "ValueError", "pass")):
        source = f"{kind} visit(f):\n" + body.format(await_keyword, value, exception, handler)
        assert await run_isolated(launcher, source, tests) == "1"
    for exception, handler in (("BaseException", "raise"), ("ValueError", "pass")):
        source = f"{kind} visit(f):\n" + body.format(await_keyword, 40, exception, handler)
        assert await run_isolated(launcher, source, tests) == "0"
        expected = tests.replace(call, f"with pytest.raises(AssertionError): {call}")
        assert await run_isolated(launcher, source, "import pytest\n" + expected) == "1"
    source = f"{kind} visit(f):\n" + body.format(await_keyword, 40, "BaseException", "pass")
    with pytest.raises(
        UnsupportedTests, match="callback of the tests, and the solution caught"
    ) as error:
        await run_isolated(launcher, source, tests)
    assert error.value.is_caused_by_solution


LINES = {  # a program, and the sorted names of its prelude
    "def f(a: List[int]) -> Optional[int]: return a": "List Optional",
    "def f(a: 'List[int]'): return a": "List",
    "from typing import *\ndef f(a: List[int]): return a": "List",
    "from typing import List\ndef f(a: List[int]): return a": "",
    "def f(a): return Counter(a), inf, gcd(a, 2), heappop(a)": "Counter gcd heappop inf",
    "def f(a): return math.sqrt(a) + bisect.bisect(a, 1)": "bisect math",
    "def f(a): return bisect(a, 1)": "bisect",
    "def f(a, inf): return inf": "",
    "def gcd(a, b): return a\nx = gcd(1, 2) + pow(2, 3)": "",
    "x = re.sub('a', 'b', 'c'); y = json.dumps(x); z = sys.maxsize": "json re sys",
    "def f(:": "",
    "x = undefined": "",
}
SOLUTION = """from __future__ import annotations
class Solution:
    @lru_cache(None)
    def steps(self, n: int) -> int:
        return n if n < 3 else self.steps(n - 1) + self.steps(n - 2)
    def pairs(self, nums: List[int], most: Optional[int] = None) -> List[List[int]]:
        seen: DefaultDict[int, int] = defaultdict(int)
        return [list(pair) for pair in combinations(nums, 2) if not most or sum(pair) <= most]
"""
NAMES = "from solution import Solution\ndef test(): assert Solution().steps(4) == 5"
BARE = "def f(nums: List[int]) -> int:\n    return max(accumulate(nums), default=-inf)"
PLAIN = "def total(nums: List[int]) -> int: return sum(nums)"


def test_prelude_imports_only_names_that_a_program_lacks() -> None:
    for program, names in LINES.items():
        prelude = build_prelude(program)
        imported = [line.split()[-1] for line in prelude.splitlines() if "import" in line]
        assert " ".join(sorted(imported)) == names, program
        exec(prelude, {})


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_solutions_without_imports_are_graded(launcher: JailLauncher) -> None:
    cases = [{"args": [[1, 2, 3]], "output": [[1, 2], [1, 3], [2, 3]]}]
    programs = {
        "method": ({"function": "Solution.pairs", "cases": cases}, SOLUTION),
        "bare name": ({"function": "steps", "cases": [{"args": [5], "output": 8}]}, SOLUTION),
        "function": ({"function": "f", "cases": [{"args": [[1, -2]], "output": 1}]}, BARE),
        "unit": (NAMES, SOLUTION),
        "wrong": ({"function": "total", "cases": [{"args": [[1]], "output": 2}]}, PLAIN),
    }
    scores = dict.fromkeys(programs, 1.0) | {"wrong": 0.0}
    assert await BatchGrader(launcher).grade_all(programs) == scores


SHORT_CASE_S, LAG_S = 0.2, 0.6
CALLS = {"function": "f", "cases": [{"args": [1], "output": 2}, {"args": [2], "output": 3}]}
UNIT = "from solution import f\ndef test_one(): assert f(1) == 2\ndef test_two(): assert f(2) == 3"
RIGHT = "def f(x): return x + 1"
SLEEPS = "import time\ntime.sleep(1000)\n" + RIGHT
OPTIONS = {"case_s": SHORT_CASE_S}


class LaggingLauncher:
    """Launcher in a process that is blocked after each jail that it has opened."""

    def __init__(self, launcher: JailLauncher) -> None:
        self._launcher = launcher
        self.clock, self.tier, self.opened_count = launcher.clock, launcher.tier, 0

    async def open(self, *arguments: Any, **options: Any) -> Jail:
        jail = await self._launcher.open(*arguments, **options)
        self.opened_count += 1
        time.sleep(LAG_S)  # noqa: ASYNC251 - the loop stands still
        return jail


def make_grader(launcher: Any) -> CodeGrader:
    return CodeGrader(launcher, JailSlots(SystemClock(), 4), JailLimits(), OPTIONS)


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_right_program_passes_when_its_first_call_is_late(launcher: JailLauncher) -> None:
    for tests, jails in ((CALLS, 1), (UNIT, 2)):
        lagging_launcher = LaggingLauncher(launcher)
        turns = [{"role": "model", "text": RIGHT}]
        answer = await make_grader(lagging_launcher).compute_reward({"tests": tests}, turns)
        assert (answer.status, answer.value, lagging_launcher.opened_count) == ("ok", 1.0, jails), (
            tests
        )


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_program_that_sleeps_at_its_start_is_not_passed(launcher: JailLauncher) -> None:
    for tests in (CALLS, UNIT):
        answer = await make_grader(launcher).compute_reward(
            {"tests": tests}, [{"role": "model", "text": SLEEPS}]
        )
        assert (answer.status, answer.value) == ("ok", 0.0), tests


def test_starved_jails_are_retried_and_then_a_typed_error() -> None:
    launcher: Any = LaggingLauncher.__new__(LaggingLauncher)
    launcher.clock = SystemClock()
    attempt = GradingAttempt(launcher, JailSlots(launcher.clock, 1), JailLimits(), OPTIONS)
    result = ProgramResult(
        "timeout", b"", b"", -9, cpu_s=0.01, wall_s=22.0, is_wall_timeout=True, is_starved=True
    )
    for _ in range(MAX_STARVED_JAILS):
        attempt.count_starved(result)
    with pytest.raises(JailFailed, match=r"no time to run.*0.01 s of CPU time in 22 s"):
        attempt.count_starved(result)
