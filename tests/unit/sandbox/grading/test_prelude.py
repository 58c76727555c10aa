"""Programs written for judges that import names for them are graded with these names."""

from __future__ import annotations

import pytest

from meshrl.services.sandbox.grading.code.programs import prelude_of
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from tests.unit.sandbox.grading.graded import Judge

LINES = {  # a program, and the names of its prelude in their order
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
UNIT = "from solution import Solution\ndef test(): assert Solution().steps(4) == 5"
BARE = "def f(nums: List[int]) -> int:\n    return max(accumulate(nums), default=-inf)"
PLAIN = "def total(nums: List[int]) -> int: return sum(nums)"


def test_prelude_imports_only_names_that_a_program_lacks() -> None:
    for program, names in LINES.items():
        prelude = prelude_of(program)
        found = [line.split()[-1] for line in prelude.splitlines() if "import" in line]
        assert " ".join(sorted(found)) == names, program
        exec(prelude, {})


@pytest.mark.needs("bwrap")
async def test_solutions_without_imports_are_graded(launcher: JailLauncher) -> None:
    cases = [{"args": [[1, 2, 3]], "output": [[1, 2], [1, 3], [2, 3]]}]
    graded = {
        "method": ({"function": "Solution.pairs", "cases": cases}, SOLUTION),
        "bare name": ({"function": "steps", "cases": [{"args": [5], "output": 8}]}, SOLUTION),
        "function": ({"function": "f", "cases": [{"args": [[1, -2]], "output": 1}]}, BARE),
        "unit": (UNIT, SOLUTION),
        "wrong": ({"function": "total", "cases": [{"args": [[1]], "output": 2}]}, PLAIN),
    }
    scores = dict.fromkeys(graded, 1.0) | {"wrong": 0.0}
    assert await Judge(launcher).all(graded) == scores
