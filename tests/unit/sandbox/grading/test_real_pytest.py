"""Tests in Python under the real pytest: what is passed, and what a program cannot change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from common.base.clock import SystemClock
from common.mesh.process.host import SystemHost
from services.sandbox.grading.code.grading import Grading
from services.sandbox.grading.code.real_pytest import Suites
from services.sandbox.isolation.jail_launcher import JailLauncher
from services.sandbox.isolation.outer_jail.interpreters import Interpreter
from services.sandbox.isolation.outer_jail.pytest_packages import with_pytest
from services.sandbox.isolation.resources import cgroups
from services.sandbox.isolation.resources.limits import JailLimits
from services.sandbox.isolation.resources.slots import JailSlots
from services.sandbox.outcomes.answer import Answer
from tests.load import scaled

pytestmark = [pytest.mark.needs("bwrap"), pytest.mark.group("real pytest")]
ADD = "def add(a, b):\n    return a + b\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suites(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suites]:
    log = tmp_path_factory.mktemp("suites") / "jails.log"
    interpreter = with_pytest(Interpreter.own())
    made = JailLauncher(
        SystemHost(), SystemClock(), "bwrap", interpreter, cgroups.find(), Path(log)
    )
    await made.start()
    yield Suites(made)
    await made.stop()


async def graded(suites: Suites, tests: str, source: str, **options: Any) -> Answer:
    options = {"case_s": scaled(2.0), "runner": "pytest", **options}
    slots = JailSlots(SystemClock(), 2)
    grading = Grading(suites.launcher, slots, JailLimits(), options, suites)
    return await grading.reward({"tests": tests}, [{"role": "model", "text": source}])


USUAL = """
import pytest, unittest
from solution import add

STATE = []

@pytest.fixture(scope="module")
def started():
    STATE.append(1)
    yield STATE
    STATE.clear()

@pytest.mark.parametrize("a, b, c", [(1, 2, 3), (2, 2, 4), (1, 1, 3)], ids="xyz")
def test_sums(a, b, c):
    assert add(a, b) == c

class TestMore:
    def test_files(self, tmp_path, capsys, caplog, started):
        (tmp_path / "x").write_text(str(add(1, 1)))
        print((tmp_path / "x").read_text())
        assert capsys.readouterr().out == "2\\n" and started == [1]

class Case(unittest.TestCase):
    def setUp(self):
        self.two = 2
    def test_case(self):
        self.assertEqual(add(self.two, self.two), 4)

def test_after(started):
    assert len(STATE) == 1
"""
OUTCOMES = """
import pytest
from solution import add
def test_passes(): assert add(1, 1) == 2
@pytest.mark.skip
def test_skipped(): pass
def test_skips(): pytest.skip("not now")
@pytest.mark.xfail
def test_xfails(): assert add(1, 1) == 3
@pytest.mark.xfail
def test_xpasses(): assert add(1, 1) == 2
@pytest.fixture
def torn():
    yield
    assert add(1, 1) == 3
def test_torn(torn): pass
"""


@pytest.mark.rotating(3)
@pytest.mark.asyncio(loop_scope="module")
async def test_the_share_of_what_pytest_passes(suites: Suites) -> None:
    assert await graded(suites, USUAL, ADD) == Answer("ok", 5 / 6, "")
    assert await graded(suites, USUAL, ADD, partial=False) == Answer("ok", 0.0, "")
    assert await graded(suites, USUAL, "def add(a, b): return 0") == Answer("ok", 1 / 6, "")
    assert await graded(suites, USUAL, "def sub(a, b): return 0") == Answer("ok", 0.0, "")
    assert await graded(suites, OUTCOMES, ADD) == Answer("ok", 1 / 6, "")


@pytest.mark.deep
@pytest.mark.asyncio(loop_scope="module")
async def test_a_test_that_hangs_or_ends_its_process_costs_only_itself(suites: Suites) -> None:
    tests = "from solution import f\nimport pytest\n"
    tests += "@pytest.mark.parametrize('x', range(6))\ndef test_f(x): assert f(x) == x\n"
    source = "import os\ndef f(x):\n    while x == 2: pass\n    if x == 3: os._exit(0)\n"
    source += "    if x == 4: raise KeyboardInterrupt\n    return x"
    assert await graded(suites, tests, source, case_s=min(2.0, scaled(0.5))) == Answer(
        "ok", 0.5, ""
    )


FORGERIES = {
    "exits": "import os\nos._exit(0)",
    "exits in a test": "import os\ndef add(a, b): os._exit(0)",
    "exits politely": "import sys\ndef add(a, b): sys.exit(0)",
    "ends the session": "import pytest\ndef add(a, b): pytest.exit('all passed', 0)",
    "skips": "import pytest\ndef add(a, b): pytest.skip('no')",
    "skips all": "import pytest\npytest.skip('no', allow_module_level=True)",
    "expects to fail": "import pytest\ndef add(a, b): pytest.xfail('no')",
    "conftest": """
open('conftest.py', 'w').write('''
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    (yield).get_result().outcome = "passed"
''')
open('pytest.ini', 'w').write('[pytest]\\naddopts = --co')
def add(a, b): return 0
""",
    "hooks of its own": """
def pytest_runtest_call(item): item.obj = lambda *a, **k: None
def pytest_collection_modifyitems(items): items.clear()
def add(a, b): return 0
""",
    "a function of pytest": """
import _pytest.python
_pytest.python.Function.runtest = lambda self: None
def add(a, b): return 0
""",
    "the code of a function of pytest": """
import _pytest.runner
def call(item): pass
_pytest.runner.pytest_runtest_call.__code__ = call.__code__
def add(a, b): return 0
""",
    "a report": """
from _pytest import reports
make = reports.TestReport.from_item_and_call.__func__
def always(cls, item, call):
    call.excinfo = None
    return make(cls, item, call)
reports.TestReport.from_item_and_call = classmethod(always)
def add(a, b): return 0
""",
    "a plugin": """
import gc, pytest
class Plugin:
    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self): return True
for one in gc.get_objects():
    if type(one).__name__ == 'PytestPluginManager': one.register(Plugin())
def add(a, b): return 0
""",
    "the test's code": """
import sys
def add(a, b):
    tests = sys._getframe(1).f_globals
    for name in list(tests):
        if name.startswith('test'): tests[name].__code__ = (lambda: None).__code__
    return 0
""",
    "an error that is none": """
import builtins
builtins.AssertionError = type('Never', (BaseException,), {})
builtins.all = builtins.any = lambda x: True
builtins.abs = lambda x: 0
def add(a, b): return 0
""",
    "a process that goes on": """
import os
def add(a, b):
    if os.fork(): os._exit(0)
    return 0
""",
    "a look into the file of tests": """
import re
text = open('test_solution.py').read()
def add(a, b): return int(re.search(r'add\\(%d, %d\\) == (\\d+)' % (a, b), text)[1])
""",
    "what runs the tests": """
import sys
suite = sys.modules['jail.guests.suite']
suite._outcome = lambda reports: 'passed'
def add(a, b): return 0
""",
    "a trace": """
import sys
def trace(frame, event, argument):
    if frame.f_code.co_name.startswith('test'):
        frame.f_trace_lines = True
        frame.f_globals['add'] = lambda a, b: a + b
    return trace
sys.settrace(trace)
def add(a, b): return 0
""",
    "unittest": """
import unittest
unittest.TestCase.assertEqual = lambda *a: None
def add(a, b): return 0
""",
    "at the end": """
import atexit, sys, os
atexit.register(os._exit, 0)
sys.excepthook = lambda *a: None
def add(a, b): return 0
""",
    "what it says": """
import os
for fd in range(3, 32):
    try: os.write(fd, b'1 passed in 0.01s')
    except OSError: pass
def add(a, b): print('7 passed'); return 0
""",
}
JUDGE = """
import unittest
from solution import add
def test_small(): assert add(2, 3) == 5
def test_close(): assert abs(add(1, 1) - 2) < 1e-9
def test_all(): assert all([add(x, 1) == x + 1 for x in range(3)])
class Case(unittest.TestCase):
    def test_case(self): self.assertEqual(add(4, 4), 8)
"""


@pytest.mark.rotating(3)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", FORGERIES)
async def test_a_forgery_is_not_paid(suites: Suites, name: str) -> None:
    assert await graded(suites, JUDGE, FORGERIES[name]) == Answer("ok", 0.0, "")


KNOWN = {  # docs/sandbox.md names them
    "equal to everything": """
class Same:
    def __init__(self, *_): pass
    __eq__ = __lt__ = lambda self, other: True
    __hash__ = None
    __sub__ = __abs__ = lambda self, *_: self
    __add__ = __radd__ = lambda self, *_: self
add = Same
""",
    "a look at the code of the test that calls": """
import sys
def add(a, b):
    numbers = [c for c in sys._getframe(1).f_code.co_consts if isinstance(c, int)]
    return max(numbers)
""",
    "the pipe": """
import json, os, stat, sys
def add(a, b):
    def frame():
        size = int.from_bytes(os.read(fd, 4), 'little')
        return json.loads(os.read(fd, size))
    fd = next(n for n in range(3, 32) if os.path.exists(f'/proc/self/fd/{n}')
              and stat.S_ISSOCK(os.fstat(n).st_mode))
    body = json.dumps({'test': 0, 'outcome': 'passed', **frame()}).encode()
    os.write(fd, len(body).to_bytes(4, 'little') + body)
    while True:
        test, asked = frame(), frame()
        body = json.dumps({'outcome': 'passed', **test, **asked}).encode()
        os.write(fd, len(body).to_bytes(4, 'little') + body)
""",
}
PLAIN = "from solution import add\n" + "".join(
    f"def test_{a}(): assert add({a}, 40) == {a + 40}\n" for a in range(3)
)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", KNOWN)
async def test_what_a_program_can_forge_is_known(suites: Suites, name: str) -> None:
    assert (await graded(suites, PLAIN, KNOWN[name])).value == 1.0


@pytest.mark.asyncio(loop_scope="module")
async def test_tests_that_a_program_adds_or_takes_away_change_nothing(suites: Suites) -> None:
    assert (await graded(suites, JUDGE, ADD)).value == 1.0
    tests = "from solution import *\ndef test_add(): assert add(1, 1) == 2\n"
    more = "def add(a, b): return 0\n" + "".join(f"def test_{i}(): pass\n" for i in range(9))
    assert (await graded(suites, tests, more)).value == 0.0
    assert (await graded(suites, tests, ADD)).value == 1.0
    fewer = "def add(a, b): return a + b\ndef pytest_generate_tests(metafunc):\n"
    fewer += "    metafunc.parametrize('nothing', [])\n"
    assert (await graded(suites, tests, fewer)).value == 0.0


@pytest.mark.deep
@pytest.mark.asyncio(loop_scope="module")
async def test_tests_that_cannot_be_run_are_no_score(suites: Suites) -> None:
    for tests, status, text in (
        ("import numpy_like\ndef test_f(): pass", "unsupported", "numpy_like"),
        ("def test_f(nobody): pass", "unsupported", "the fixture nobody"),
        ("async def test_f(): pass", "unsupported", "async functions"),
        ("x = 1 / 0\ndef test_f(): pass", "bad_value", "ZeroDivisionError"),
        ("def test_f(:", "bad_value", "line 1"),
        ("def test_f(): yield", "bad_value", "yield"),
        ("while True: pass\ndef test_f(): pass", "bad_value", "does not collect them"),
    ):
        answer = await graded(suites, tests, ADD, case_s=min(4.0, scaled(1.0)))
        assert answer.status == status and text in answer.error, answer


@pytest.mark.asyncio(loop_scope="module")
async def test_which_runner(suites: Suites) -> None:
    logged = "import logging\nfrom solution import add\n"
    logged += "def test_f(caplog):\n    logging.warning('x')\n"
    logged += "    assert caplog.text and add(1, 1) == 2\n"
    assert (await graded(suites, logged, ADD, runner="auto")).value == 1.0
    refused = await graded(suites, logged, ADD, runner="isolated")
    assert refused.status == "unsupported" and "fixture caplog" in refused.error
    before = suites.launcher.started
    assert (await graded(suites, JUDGE, ADD, runner="auto")).value == 1.0
    assert suites.launcher.started == before + 2  # solution and tests, a jail each


@pytest.mark.asyncio(loop_scope="module")
async def test_what_the_tests_do_goes_over_to_pytest(suites: Suites) -> None:
    tests = "import pytest\nfrom solution import add\n"
    tests += "def test_f():\n    assert getattr(pytest, 'ExitCode').OK == 0 and add(1, 1) == 2\n"
    assert (await graded(suites, tests, ADD, runner="auto")).value == 1.0


@pytest.mark.asyncio(loop_scope="module")
async def test_no_program_chooses_the_runner_that_it_can_forge(suites: Suites) -> None:
    tests = "from solution import Money\ndef test_money(): assert Money(5) == 5\n"
    money = "class Money:\n    def __init__(self, n): self.n = n\n"
    money += "    def __eq__(self, other): return self.n == other\n"
    for runner in ("auto", "isolated"):
        refused = await graded(suites, tests, money, runner=runner)
        assert refused.status == "unsupported" and "equality of a Money" in refused.error
    claims = "class Money:\n    def __init__(self, n): self.n = n\n"
    for forging in (
        "__eq__ = lambda self, other: type(other) is int",
        "__lt__ = lambda self, other: type(other) is int",
    ):
        tests = f"from solution import Money\ndef test_money(): assert Money(5) {forging[2:4]} 8\n"
        tests = tests.replace(" eq ", " == ").replace(" lt ", " < ")
        answer = await graded(suites, tests, f"{claims}    {forging}\n", runner="auto")
        assert answer.status == "unsupported" and answer.value is None


@pytest.mark.asyncio(loop_scope="module")
async def test_answers_to_one_row_look_at_its_tests_once(suites: Suites) -> None:
    tests, before = JUDGE + "# another row\n", suites.launcher.started
    answers = await asyncio.gather(*(graded(suites, tests, ADD) for _ in range(3)))
    assert [answer.value for answer in answers] == [1.0] * 3
    assert suites.launcher.started == before + 1 + 3
