"""Tests in Python as people write them, each with a solution, and which of them it passes."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    name: str
    solution: str
    tests: str
    passed: str  # "1" or "0" for each test; "all"; or "unsupported"


ROWS = [
    Row(
        "values",
        """
from decimal import Decimal
from fractions import Fraction
from datetime import date, datetime, timedelta, timezone
from collections import *
import enum, dataclasses

def same(x):
    return x

def half(x):
    return Decimal(x) / 2

def big(n):
    return 7 ** n
Point = namedtuple('Point', 'x y')

class Color(enum.Enum):
    RED = 1
    BLUE = 2

class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2

@dataclasses.dataclass
class User:
    name: str
    tags: list = dataclasses.field(default_factory=list)

def mk(n):
    return User(n)

def mkp():
    return Point(1, 2)

def count(s):
    return Counter(s)

def group():
    d = defaultdict(list)
    d['a'].append(1)
    return d
""",
        r"""
from solution import *
import solution, math
from decimal import Decimal
from fractions import Fraction
from datetime import date, datetime, timedelta, time
from collections import Counter, deque, OrderedDict

def test_same():
    plain = [1, -5, 10 ** 5000, 1.5, float('inf'), 'é\ud800', b'ab', None, True, ..., int, 1j]
    held = [(1, (2,)), [1, [2]], {1: 2}, {1, 2}, frozenset([1]), deque([1], 3), Counter('abc')]
    dates = [date(2020, 1, 2), datetime(2020, 1, 2, 3, 4), timedelta(1, 2), time(1, 2)]
    others = [Decimal('1.10'), Fraction(1, 3), range(5), slice(1, 2), bytearray(b'x'), ValueError]
    for v in [*plain, *held, *dates, *others, OrderedDict(a=1)]:
        got = same(v)
        assert got == v
        assert type(got) is type(v)
    assert math.isnan(same(float('nan')))

def test_half():
    assert half('3') == Decimal('1.5')

def test_big():
    assert big(20000) == 7 ** 20000

def test_namedtuple():
    p = mkp()
    assert p == (1, 2)
    assert p.x == 1
    assert p == Point(1, 2)
    assert p._asdict() == {'x': 1, 'y': 2}
    assert isinstance(p, tuple)
    assert isinstance(p, Point)
    x, y = p
    assert repr(p) == 'Point(x=1, y=2)'

def test_enum():
    assert Color.RED is Color.RED
    assert Color.RED != Color.BLUE
    assert Color.RED.value == 1
    assert Color('RED' and 1) is Color.RED
    assert Color['BLUE'].name == 'BLUE'
    assert [c.name for c in Color] == ['RED', 'BLUE']
    assert {Color.RED: 1}[Color.RED] == 1
    assert isinstance(Color.RED, Color)

def test_int_enum():
    assert Level.LOW == 1
    assert Level.HIGH > Level.LOW
    assert Level.HIGH.name == 'HIGH'
    assert Level(1) is Level.LOW

def test_dataclass():
    assert mk('a') == User('a')
    assert mk('a') != User('b')
    assert mk('a').tags == []
    u = User('x', [1])
    assert u.name == 'x'
    u.name = 'y'
    assert u.name == 'y'
    assert mk('a') == mk('a')
    assert repr(mk('a')) == "User(name='a', tags=[])"
    assert isinstance(mk('q'), User)
    assert type(mk('q')) is User
    u.tags.append(5)
    assert u.tags == [1, 5]

def test_collections():
    assert count('aab') == {'a': 2, 'b': 1}
    assert count('aab')['zz'] == 0
    assert count('aab').most_common(1) == [('a', 2)]
    assert group() == {'a': [1]}

def test_module():
    assert solution.same(3) == 3
""",
        "all",
    ),
    Row(
        "mutation",
        """
def sort(a):
    a.sort()

def deep(m):
    m[0].append(9)
    m.append(m[0])

def clear(d):
    d.clear()

def add(s):
    s.add(3)

def ident(a):
    return a

def apply(f, xs):
    return [f(x) for x in xs]

def key_sort(xs, key):
    return sorted(xs, key=key)

def whole(it):
    return list(it)

def take(it, n):
    return [next(it) for _ in range(n)]

def gen(n):
    for i in range(n):
        yield i

def visit(t, f):
    for x in t:
        f(x)

class Stack(list):

    def push(self, x):
        self.append(x)

    def peek(self):
        return self[-1]
""",
        """
from solution import *

def test_sort():
    a = [3, 1, 2]
    assert sort(a) is None
    assert a == [1, 2, 3]

def test_deep():
    inner = [1]
    m = [inner]
    deep(m)
    assert inner == [1, 9]
    assert m[1] is inner
    assert m == [[1, 9], [1, 9]]

def test_clear():
    d = {1: 2}
    clear(d)
    assert d == {}

def test_add():
    s = {1}
    add(s)
    assert s == {1, 3}

def test_ident():
    a = []
    assert ident(a) is a

def test_callbacks():
    assert apply(lambda x: x + 1, [1, 2]) == [2, 3]
    assert key_sort(['bb', 'a'], key=len) == ['a', 'bb']
    assert key_sort([1, 3, 2], key=lambda x: -x) == [3, 2, 1]
    assert take(iter([1, 2, 3]), 2) == [1, 2]
    assert whole((x for x in [1, 2])) == [1, 2]
    assert whole(map(str, [1])) == ['1']

    def g():
        yield 1
        yield 2
    assert take(g(), 2) == [1, 2]
    seen = []
    visit([1, 2], seen.append)
    assert seen == [1, 2]

def test_gen():
    assert list(gen(3)) == [0, 1, 2]
    g = gen(1)
    assert next(g) == 0
    import pytest, types
    with pytest.raises(StopIteration):
        next(g)
    assert isinstance(gen(1), types.GeneratorType)
    assert iter(g) is g
    assert sum(gen(4)) == 6
    assert 3 in gen(4)

def test_stack():
    s = Stack()
    s.push(1)
    s.push(2)
    assert s == [1, 2]
    assert s.peek() == 2
    assert len(s) == 2
    assert isinstance(s, list)
    assert list(s) == [1, 2]
    assert s[0] == 1
""",
        "all",
    ),
    Row(
        "errors",
        """
class AppError(Exception):
    code = 3

    def __init__(self, msg, detail=None):
        super().__init__(msg)
        self.detail = detail

class Sub(AppError, ValueError):
    pass

class Many(Exception):

    def __init__(self, *found):
        super().__init__('many')
        self.found = found

    def __len__(self):
        return len(self.found)

    def __eq__(self, other):
        return isinstance(other, Many) and self.found == other.found
    __hash__ = Exception.__hash__

def boom(k):
    if k == 'many':
        raise Many(1, 2)
    if k == 'value':
        raise ValueError('bad value 3')
    if k == 'key':
        raise KeyError('zz')
    if k == 'app':
        raise AppError('app!', detail={'a': 1})
    if k == 'sub':
        raise Sub('sub')
    if k == 'cause':
        try:
            1 / 0
        except ZeroDivisionError as e:
            raise RuntimeError('x') from e
    if k == 'exit':
        import sys
        sys.exit(3)
    if k == 'os':
        open('/nope')
    if k == 'dec':
        'é'.encode('ascii')
""",
        r"""
import pytest, re
from solution import boom, AppError, Sub

def test_value():
    with pytest.raises(ValueError, match='value \\d') as e:
        boom('value')
    assert str(e.value) == 'bad value 3'
    assert e.value.args == ('bad value 3',)
    assert e.type is ValueError

def test_key():
    with pytest.raises(KeyError) as e:
        boom('key')
    assert str(e.value) == "'zz'"
    assert e.value.args[0] == 'zz'

def test_app():
    with pytest.raises(AppError) as e:
        boom('app')
    assert e.value.detail == {'a': 1}
    assert e.value.code == 3
    assert str(e.value) == 'app!'
    assert e.type is AppError
    assert AppError.code == 3

def test_sub():
    assert issubclass(Sub, AppError)
    assert issubclass(Sub, ValueError)
    assert issubclass(AppError, Exception)
    with pytest.raises(ValueError):
        boom('sub')
    with pytest.raises((KeyError, AppError)):
        boom('sub')
    try:
        boom('sub')
    except AppError as e:
        assert isinstance(e, Sub)
        assert e.args == ('sub',)

def test_cause():
    with pytest.raises(RuntimeError) as e:
        boom('cause')
    assert isinstance(e.value.__cause__, ZeroDivisionError)

def test_exit():
    with pytest.raises(SystemExit) as e:
        boom('exit')
    assert e.value.code == 3

def test_os():
    with pytest.raises(FileNotFoundError):
        boom('os')
    with pytest.raises(UnicodeEncodeError):
        boom('dec')

def test_make():
    e = AppError('m')
    assert str(e) == 'm'
    assert isinstance(e, AppError)
    with pytest.raises(AppError):
        raise e

def test_special():
    from solution import Many
    with pytest.raises(Many) as e:
        boom('many')
    assert len(e.value) == 2
    assert e.value == Many(1, 2)
    assert e.value != Many(1)
    assert e.value != 3

def test_legacy():
    pytest.raises(ValueError, boom, 'value')
""",
        "all",
    ),
    Row(
        "fixtures",
        """
class Stack:

    def __init__(self, xs=()):
        self.xs = list(xs)

    def push(self, x):
        self.xs.append(x)

    def pop(self):
        return self.xs.pop()

    def __len__(self):
        return len(self.xs)
""",
        """
import pytest
from solution import Stack
log = []

@pytest.fixture
def stack():
    s = Stack()
    yield s
    log.append('end')

@pytest.fixture(scope='module')
def shared():
    return Stack([1])

@pytest.fixture(autouse=True)
def auto():
    log.append('auto')

@pytest.fixture(params=[1, 2], ids=['one', 'two'])
def sized(request):
    return (Stack(range(request.param)), request.param)

@pytest.fixture
def filled(stack):
    stack.push(1)
    return stack

def test_a(stack):
    assert len(stack) == 0
    assert log == ['auto']

def test_b(filled):
    assert len(filled) == 1
    assert 'end' in log

def test_shared1(shared):
    shared.push(2)

def test_shared2(shared):
    assert len(shared) == 2

def test_sized(sized):
    s, n = sized
    assert len(s) == n

class TestClass:

    @classmethod
    def setup_class(cls):
        cls.n = 1

    def setup_method(self, method):
        self.s = Stack([1, 2])
        self.m = method.__name__

    def teardown_method(self):
        log.append('td')

    @pytest.fixture
    def three(self):
        return Stack([1, 2, 3])

    def test_m(self):
        assert len(self.s) == 2
        assert self.n == 1
        assert self.m == 'test_m'

    def test_three(self, three):
        assert len(three) == 3
        assert 'td' in log

    class TestInner:

        def test_inner(self, stack):
            assert len(stack) == 0

    @pytest.mark.parametrize('a,b', [(1, 2), pytest.param(2, 3, id='x')])
    @pytest.mark.parametrize('c', [5, 6], ids=str)
    def test_p(self, a, b, c):
        assert b == a + 1
        assert c in (5, 6)

@pytest.mark.parametrize('stack', [3], indirect=True)
def test_ind(stack):
    assert len(stack) == 0

@pytest.mark.xfail
def test_x():
    assert 0

@pytest.mark.skip
def test_skipped():
    pass
""",
        "1111111111111100",
    ),
    Row(
        "marks",
        """
def f():
    return 1
""",
        """
import pytest, sys
from solution import f

@pytest.mark.skipif(sys.version_info < (3, 0), reason='x')
def test_a():
    assert f() == 1

@pytest.mark.skipif(True, reason='x')
def test_b():
    assert f() == 1

@pytest.mark.xfail(strict=True)
def test_c():
    assert f() == 1

@pytest.mark.xfail(raises=ValueError)
def test_d():
    raise ValueError

@pytest.mark.xfail(raises=KeyError)
def test_d2():
    raise ValueError

def test_e():
    pytest.skip('no')

def test_f():
    assert f() == 1
""",
        "1000001",
    ),
    Row(
        "yields",
        """
def f():
    return 1
""",
        """
from solution import f

def test_a():
    yield (f() == 1)

async def test_b():
    assert f() == 1
""",
        "00",
    ),
    Row(
        "stop",
        """
def pred(x):
    raise StopIteration

class It:

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration
""",
        """
from solution import pred, It
import pytest

def test_a():
    assert all(map(pred, [1, 2]))

def test_b():
    with pytest.raises(StopIteration):
        pred(1)
    try:
        pred(1)
    except StopIteration:
        pass
    assert list(It()) == []

def test_c():
    for x in map(pred, [1]):
        assert False
""",
        "010",
    ),
    Row(
        "unittest",
        """
class Calc:

    @staticmethod
    def add(a, b):
        return a + b

    @staticmethod
    def div(a, b):
        return a / b

def items():
    return [1, 2]
""",
        """
import unittest
from solution import Calc, items

class TestCalc(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.k = 1

    def setUp(self):
        self.c = Calc()

    def tearDown(self):
        pass

    def test_add(self):
        self.assertEqual(self.c.add(1, 2), 3)

    def test_almost(self):
        self.assertAlmostEqual(self.c.div(1, 3), 0.3333333333)

    def test_items(self):
        self.assertEqual(items(), [1, 2])
        self.assertIn(1, items())
        self.assertIsInstance(items(), list)
        self.assertCountEqual(items(), [2, 1])
        self.assertIsInstance(self.c, Calc)
        self.assertIsNone(None)
        self.assertTrue(self.k)

    def test_raises(self):
        with self.assertRaises(ZeroDivisionError) as cm:
            self.c.div(1, 0)
        self.assertIn('division', str(cm.exception))
        self.assertRaises(ZeroDivisionError, self.c.div, 1, 0)
        with self.assertRaisesRegex(ZeroDivisionError, 'div'):
            self.c.div(1, 0)

    def test_sub(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertEqual(self.c.add(i, 1), i + 1)

class A(unittest.IsolatedAsyncioTestCase):

    async def test_z(self):
        self.assertEqual(Calc.add(1, 1), 2)

class B(unittest.TestCase):

    def test_fine(self):
        self.assertEqual(Calc.add(1, 1), 2)

    @unittest.skip('x')
    def test_skip(self):
        pass
if __name__ == '__main__':
    unittest.main()
""",
        "11111110",
    ),
    Row(
        "output",
        """
def hello(n):
    print('Hello', n)
    import sys
    print('err', file=sys.stderr)

def ask():
    return int(input('n? ')) + 1

def lines():
    import sys
    return [l.strip() for l in sys.stdin]

def env():
    import os
    return os.environ.get('KEY')

def helper():
    return 1

def uses():
    return helper() + 1
import time, random

def slow():
    time.sleep(60)
    return time.time()

def roll():
    return random.randint(1, 6)

class Svc:

    def get(self):
        return 1

    def twice(self):
        return self.get() * 2
""",
        r"""
import io, sys, os, pytest, contextlib
from unittest.mock import patch, Mock, MagicMock
import solution
from solution import hello, ask, lines, env, uses, Svc, slow, roll

def test_capsys(capsys):
    hello('x')
    print('mine')
    out, err = capsys.readouterr()
    assert out == 'Hello x\nmine\n'
    assert err == 'err\n'
    hello('y')
    assert capsys.readouterr().out == 'Hello y\n'

def test_redirect():
    with contextlib.redirect_stdout(io.StringIO()) as buf:
        hello('z')
    assert buf.getvalue() == 'Hello z\n'

@patch('sys.stdout', new_callable=io.StringIO)
def test_patch_stdout(out):
    hello('q')
    assert out.getvalue() == 'Hello q\n'

def test_input(monkeypatch):
    monkeypatch.setattr('builtins.input', lambda *_: '5')
    assert ask() == 6

def test_input2():
    with patch('builtins.input', return_value='7'):
        assert ask() == 8
    with patch('builtins.input', side_effect=['1', '2']):
        assert ask() == 2
        assert ask() == 3

def test_stdin(monkeypatch):
    monkeypatch.setattr('sys.stdin', io.StringIO('a\nb\n'))
    assert lines() == ['a', 'b']

def test_stdin_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'stdin', io.StringIO('41\n'))
    assert ask() == 42

def test_env(monkeypatch):
    monkeypatch.setenv('KEY', 'v')
    assert env() == 'v'

def test_env2():
    assert env() is None

def test_env3():
    with patch.dict(os.environ, {'KEY': 'w'}):
        assert env() == 'w'

def test_patch():
    with patch('solution.helper', return_value=9) as h:
        assert uses() == 10
        h.assert_called_once_with()
    assert uses() == 2

def test_setattr(monkeypatch):
    monkeypatch.setattr(solution, 'helper', lambda: 4)
    assert uses() == 5
    monkeypatch.setattr('solution.helper', lambda: 5)
    assert uses() == 6

def test_after():
    assert uses() == 2

def test_method(monkeypatch):
    monkeypatch.setattr(Svc, 'get', lambda self: 21)
    assert Svc().twice() == 42

def test_method2():
    assert Svc().twice() == 2
    with patch.object(Svc, 'get', return_value=5):
        assert Svc().twice() == 10
    assert Svc().twice() == 2

@patch('time.sleep')
@patch('time.time', return_value=5)
def test_time(t, s):
    assert slow() == 5
    s.assert_called_once_with(60)

def test_roll():
    with patch('random.randint', return_value=3):
        assert roll() == 3
""",
        "all",
    ),
    Row(
        "mocks",
        """
def notify(sender, users):
    for u in users:
        sender.send(u, subject='hi')
    return len(users)

def use(repo):
    repo.save('k', 1)
    return repo.find('k')

class Node:

    def __init__(self, v, n=None):
        self.val, self.next = (v, n)

def rev(head):
    prev = None
    while head:
        head.next, prev, head = (prev, head, head.next)
    return prev

def memo(f):
    import functools
    cache = {}

    @functools.wraps(f)
    def w(*a):
        if a not in cache:
            cache[a] = f(*a)
        return cache[a]
    w.cache = cache
    return w

class Base:

    def __init__(self, n):
        self.n = n

    def area(self):
        raise NotImplementedError

    def describe(self):
        return f'{self.n}:{self.area()}'
from abc import ABC, abstractmethod

class Shape(ABC):

    @abstractmethod
    def area(self):
        ...

    def twice(self):
        return self.area() * 2
""",
        """
from unittest.mock import Mock, call
import pytest
from solution import *
import solution

def test_mock():
    m = Mock()
    assert notify(m, ['a', 'b']) == 2
    assert m.send.call_count == 2
    m.send.assert_any_call('a', subject='hi')
    assert m.send.call_args_list == [call('a', subject='hi'), call('b', subject='hi')]

class Fake:

    def __init__(self):
        self.d = {}

    def save(self, k, v):
        self.d[k] = v

    def find(self, k):
        return self.d.get(k)

def test_fake():
    assert use(Fake()) == 1

class ListNode:

    def __init__(self, val, next=None):
        self.val = val
        self.next = next

def test_list():
    h = ListNode(1, ListNode(2, ListNode(3)))
    r = rev(h)
    out = []
    while r:
        out.append(r.val)
        r = r.next
    assert out == [3, 2, 1]

def test_list2():
    h = Node(1, Node(2))
    r = rev(h)
    assert r.val == 2
    assert r.next.val == 1
    assert r.next.next is None

def test_memo():
    calls = []

    @memo
    def sq(x):
        'doc'
        calls.append(x)
        return x * x
    assert sq(3) == 9
    assert sq(3) == 9
    assert calls == [3]
    assert sq.__name__ == 'sq'
    assert sq.__doc__ == 'doc'

    @memo
    def fib(n):
        return n if n < 2 else fib(n - 1) + fib(n - 2)
    assert fib(20) == 6765

def test_sub():

    class Sq(Base):

        def __init__(self, n):
            super().__init__(n)
            self.k = 2

        def area(self):
            return self.n ** 2
    s = Sq(3)
    assert s.area() == 9
    assert s.describe() == '3:9'
    assert s.k == 2
    assert isinstance(s, Base)
    assert isinstance(s, Sq)
    assert issubclass(Sq, Base)

def test_abc():
    with pytest.raises(TypeError):
        Shape()

    class Sq(Shape):

        def area(self):
            return 4
    assert Sq().twice() == 8

    class Bad(Shape):
        pass
    with pytest.raises(TypeError):
        Bad()
""",
        "all",
    ),
    Row(
        "async",
        """
import asyncio

async def one(x):
    await asyncio.sleep(0)
    return x + 1

async def fail():
    raise ValueError('a')

async def agen(n):
    for i in range(n):
        yield i

class Conn:

    async def __aenter__(self):
        return self

    async def __aexit__(self, *a):
        return False

    async def q(self):
        return 5

async def cb(f):
    return await f(2)
""",
        """
import asyncio, pytest
from solution import *
from unittest.mock import AsyncMock

def test_run():
    assert asyncio.run(one(1)) == 2

@pytest.mark.asyncio
async def test_await():
    assert await one(2) == 3
    assert await asyncio.gather(one(1), one(2)) == [2, 3]
    with pytest.raises(ValueError):
        await fail()

@pytest.mark.asyncio
async def test_agen():
    assert [x async for x in agen(3)] == [0, 1, 2]
    async with Conn() as c:
        assert await c.q() == 5

@pytest.mark.asyncio
async def test_cb():

    async def f(x):
        await asyncio.sleep(0.001)
        return x * 2
    assert await cb(f) == 4
    assert await cb(AsyncMock(return_value=7)) == 7
""",
        "all",
    ),
    Row(
        "warn",
        """
import warnings

def old():
    warnings.warn('old one', DeprecationWarning)
    return 1
""",
        """
import pytest, warnings
from solution import old

def test_w():
    with pytest.warns(DeprecationWarning, match='old'):
        assert old() == 1

def test_w2():
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        old()
    assert len(w) == 1
    assert 'old' in str(w[0].message)
""",
        "all",
    ),
    Row(
        "approx",
        """
from decimal import Decimal

def f():
    return 0.1 + 0.2

def l():
    return [0.1 + 0.2, 1.0]

def d():
    return {'a': 0.1 + 0.2}

def dec():
    return Decimal('1.0000001')
""",
        """
import pytest
from pytest import approx
from decimal import Decimal
from solution import f, l, d, dec

def test_a():
    assert f() == approx(0.3)
    assert l() == approx([0.3, 1])
    assert d() == approx({'a': 0.3})
    assert f() != approx(0.4)
    assert dec() == approx(Decimal('1.0'))
    assert tuple(l()) == approx((0.3, 1.0))
    assert approx(0.3) == f()
    assert 1.0 == approx(1.1, abs=0.2)
    assert not f() == approx(0.31, rel=0.001)
""",
        "all",
    ),
    Row(
        "vectors",
        """
class Vector:

    def __init__(self, x, y):
        self.x, self.y = (x, y)

    def __add__(self, o):
        return Vector(self.x + o.x, self.y + o.y)

    def __mul__(self, k):
        if isinstance(k, (int, float)):
            return Vector(self.x * k, self.y * k)
        return self.x * k.x + self.y * k.y
    __rmul__ = __mul__

    def __eq__(self, o):
        return isinstance(o, Vector) and (self.x, self.y) == (o.x, o.y)

    def __hash__(self):
        return hash((self.x, self.y))

    def __abs__(self):
        return (self.x ** 2 + self.y ** 2) ** 0.5

    def __bool__(self):
        return bool(self.x or self.y)

    def __getitem__(self, i):
        return (self.x, self.y)[i]

    def __iter__(self):
        return iter((self.x, self.y))

    def __lt__(self, o):
        return abs(self) < abs(o)

    def __neg__(self):
        return Vector(-self.x, -self.y)

    def __iadd__(self, o):
        self.x += o.x
        self.y += o.y
        return self

    def __contains__(self, v):
        return v in (self.x, self.y)

    def __call__(self, k):
        return self * k

    def __len__(self):
        return 2

    def __format__(self, s):
        return 'V' + s

    def __enter__(self):
        return self

    def __exit__(self, *a):
        return True

    @property
    def norm(self):
        return abs(self)

    @classmethod
    def zero(cls):
        return cls(0, 0)

    class Inner:

        def __init__(self, v):
            self.v = v

        def __eq__(self, o):
            return self.v == o.v

def mk():
    return Vector(1, 2)
""",
        """
from solution import Vector, mk
import copy

def test_all():
    v = Vector(1, 2)
    assert v + Vector(1, 1) == Vector(2, 3)
    assert v * 2 == Vector(2, 4)
    assert 2 * v == Vector(2, 4)
    assert v * Vector(3, 4) == 11
    assert abs(Vector(3, 4)) == 5
    assert not Vector(0, 0)
    assert v[0] == 1
    assert list(v) == [1, 2]
    assert len(v) == 2
    assert Vector(0, 1) < v
    assert sorted([v, Vector(0, 0)])[0] == Vector(0, 0)
    assert -v == Vector(-1, -2)
    assert len({Vector(1, 2), Vector(1, 2)}) == 1
    assert 2 in v
    assert 5 not in v
    assert v(3) == Vector(3, 6)
    assert f'{v:x}' == 'Vx'
    assert v.norm == 5 ** 0.5
    assert Vector.zero() == Vector(0, 0)
    assert v != 5
    assert v != (1, 2)
    w = v
    w += Vector(1, 1)
    assert w is v
    assert v == Vector(2, 3)
    with v:
        raise ValueError
    assert Vector.Inner(1) == Vector.Inner(1)
    assert mk() == mk()
    assert mk() * 2 == Vector(2, 4)
    assert mk() in [Vector(1, 2)]
    a, b = v
    assert (a, b) == (2, 3)
    c = copy.deepcopy(v)
    c.x = 9
    assert v.x == 2
    assert c != v
    assert v.__class__.__name__ == 'Vector'
    assert type(v).__name__ == 'Vector'
    assert Vector.__name__ == 'Vector'
    assert hasattr(v, 'x')
    assert not hasattr(v, 'zz')
    assert getattr(v, 'zz', 3) == 3
    assert callable(mk)
    assert vars(mk()) == {'x': 1, 'y': 2}
""",
        "all",
    ),
    Row(
        "refused",
        """
class Money:

    def __init__(self, n):
        self.n = n

    def __eq__(self, o):
        return self.n == getattr(o, 'n', o)
""",
        """
from solution import Money

def test_a():
    assert Money(5) == 5
""",
        "unsupported",
    ),
    Row(
        "handed",
        """
def f(x):
    return 1
""",
        """
from solution import f
import asyncio

def test_a():
    assert f(asyncio.Queue()) == 1
""",
        "unsupported",
    ),
    Row(
        "files",
        """
import os, pathlib

def save(path, text):
    with open(path, 'w') as f:
        f.write(text)

def load(path):
    return pathlib.Path(path).read_text()

def count(folder):
    return sorted(os.listdir(folder))

def remove(path):
    os.remove(path)

def here():
    save('x.txt', 'here')
    return os.getcwd()
""",
        """
import os, tempfile, pytest
from solution import *

def test_save(tmp_path):
    p = tmp_path / 'a.txt'
    save(p, 'abc')
    assert p.read_text() == 'abc'
    save(str(p), 'abd')
    assert p.read_text() == 'abd'
    p.write_text('abe')
    assert load(p) == 'abe'
    assert count(tmp_path) == ['a.txt']
    remove(p)
    assert not p.exists()

def test_other(tmp_path):
    assert list(tmp_path.iterdir()) == []
    (tmp_path / 'sub').mkdir()
    (tmp_path / 'sub' / 'b').write_bytes(b'1')
    assert count(tmp_path / 'sub') == ['b']
    with pytest.raises(FileNotFoundError):
        load(tmp_path / 'none')

def test_tempfile():
    with tempfile.TemporaryDirectory() as d:
        save(os.path.join(d, 'q'), '1')
        with open(os.path.join(d, 'q')) as f:
            assert f.read() == '1'
    with tempfile.NamedTemporaryFile('w', suffix='.csv') as f:
        f.write('1,2')
        f.flush()
        assert load(f.name) == '1,2'

def test_chdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert here() == str(tmp_path)
    assert open('x.txt').read() == 'here'

def test_back():
    assert os.getcwd() == '/tmp'
""",
        "all",
    ),
    Row(
        "looks",
        """
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Generic, TypeVar
from enum import Enum, auto, Flag, IntFlag
from abc import ABC, abstractmethod
import random, json

@dataclass(order=True, frozen=True)
class P:
    x: int
    y: int = 0

class N(NamedTuple):
    a: int
    b: str = 'z'

class Sh(ABC):

    @abstractmethod
    def area(self) -> float:
        ...

def f(a: int, b: str='x', *args, c=3, **kw) -> bool:
    'doc text'

async def g():
    pass

def roll():
    return random.randint(0, 10 ** 9)

class Perm(Flag):
    R = auto()
    W = auto()
ITEMS = {'a': 1}

def get(k):
    return ITEMS[k]

class Enc(json.JSONEncoder):

    def default(self, o):
        return sorted(o) if isinstance(o, set) else super().default(o)

class Temp:

    def __init__(self):
        self._c = 0

    @property
    def c(self):
        return self._c

    @c.setter
    def c(self, v):
        if v < -273:
            raise ValueError('low')
        self._c = v

class Matrix:

    def __init__(self, rows):
        self.rows = rows

    def __matmul__(self, o):
        columns = list(zip(*o.rows))
        return Matrix([[sum((a * b for a, b in zip(r, c))) for c in columns] for r in self.rows])

    def __eq__(self, o):
        return isinstance(o, Matrix) and self.rows == o.rows

    def __getitem__(self, ij):
        return self.rows[ij[0]][ij[1]]

    def __setitem__(self, ij, v):
        self.rows[ij[0]][ij[1]] = v

class Chain:

    def __init__(self):
        self.v = []

    def add(self, x):
        self.v.append(x)
        return self

    def build(self):
        return self.v

class Single:
    _i = None

    def __new__(cls):
        if cls._i is None:
            cls._i = super().__new__(cls)
        return cls._i

class Vec(NamedTuple):
    x: float
    y: float

    def __add__(self, o):
        return Vec(self.x + o.x, self.y + o.y)

    def __mul__(self, k):
        return Vec(self.x * k, self.y * k)

    def __abs__(self):
        return (self.x ** 2 + self.y ** 2) ** 0.5

    def __lt__(self, o):
        return abs(self) < abs(o)

    def count(self):
        return 7

class Mode(IntFlag):
    A = 1
    B = 2

class Bus:

    def __init__(self):
        self.h = {}

    def on(self, n, f):
        self.h.setdefault(n, []).append(f)

    def emit(self, n, *a):
        return [f(*a) for f in self.h.get(n, [])]

class Ctx:

    def __enter__(self):
        self.open = True
        return self

    def __exit__(self, t, e, tb):
        self.open = False
        self.err = t
        return t is KeyError
""",
        """
import dataclasses, inspect, pytest, random, json, copy, pickle
import typing, itertools, functools, operator
from dataclasses import asdict, is_dataclass, FrozenInstanceError
from solution import *
import solution

def test_dataclass():
    assert asdict(P(1, 2)) == {'x': 1, 'y': 2}
    assert is_dataclass(P)
    assert [q.name for q in dataclasses.fields(P)] == ['x', 'y']
    assert P(1) < P(2)
    assert sorted([P(2), P(1)]) == [P(1), P(2)]
    assert max(P(1), P(3)) == P(3)
    assert hash(P(1)) == hash(P(1))
    assert dataclasses.replace(P(1), y=5) == P(1, 5)
    with pytest.raises(FrozenInstanceError):
        P(1).x = 3
    with pytest.raises(AttributeError):
        P(1).x = 3
    with pytest.raises(TypeError):
        P()

def test_inspect():
    s = inspect.signature(f)
    assert list(s.parameters) == ['a', 'b', 'args', 'c', 'kw']
    assert s.parameters['b'].default == 'x'
    assert s.return_annotation is bool
    assert inspect.isabstract(Sh)
    assert inspect.iscoroutinefunction(g)
    assert inspect.isfunction(f)
    assert inspect.isclass(P)
    assert f.__doc__ == 'doc text'
    assert f.__annotations__['a'] is int
    assert typing.get_type_hints(f)['b'] is str
    assert P.__name__ == 'P'
    assert issubclass(P, object)
    assert isinstance(f, type(test_dataclass))

def test_seed():
    random.seed(4)
    a = roll()
    random.seed(4)
    assert roll() == a == random.Random(4).randint(0, 10 ** 9)

def test_copy():
    assert pickle.loads(pickle.dumps(P(1))) == P(1)
    assert copy.copy(P(1)) == P(1)
    assert pickle.loads(pickle.dumps([1])) == [1]

def test_flag():
    rw = Perm.R | Perm.W
    assert Perm.R in rw
    assert rw & Perm.W == Perm.W
    assert rw & ~Perm.R == Perm.W
    assert len(list(Perm)) == 2

def test_items():
    solution.ITEMS['b'] = 2
    assert get('b') == 2
    ITEMS['c'] = 3
    assert get('c') == 3

def test_json():
    assert json.dumps({'a': {2, 1}}, cls=Enc) == '{"a": [1, 2]}'

def test_property():
    t = Temp()
    t.c = 5
    assert t.c == 5
    with pytest.raises(ValueError, match='low'):
        t.c = -300

def test_matrix():
    m = Matrix([[1, 2], [3, 4]]) @ Matrix([[1, 0], [0, 1]])
    assert m == Matrix([[1, 2], [3, 4]])
    assert m[0, 1] == 2
    m[0, 1] = 7
    assert m.rows == [[1, 7], [3, 4]]

def test_chain():
    c = Chain()
    assert c.add(1) is c
    assert c.add(2).build() == [1, 2]

def test_single():
    assert Single() is Single()
    assert id(Single()) == id(Single())

def test_bus():
    got = []
    b = Bus()
    b.on('x', got.append)
    b.on('x', lambda v: v * 2)
    assert b.emit('x', 4) == [None, 8]
    assert got == [4]

def test_ctx():
    with Ctx() as c:
        assert c.open
    assert not c.open
    with Ctx() as c:
        raise KeyError('x')
    assert c.err is KeyError
    with pytest.raises(ValueError):
        with Ctx():
            raise ValueError

def test_named():
    n = N(1)
    assert n == (1, 'z')
    assert n._replace(a=2).a == 2
    assert N._fields == ('a', 'b')
    assert n == N(1)
    assert sorted([N(2), N(1)])[0].a == 1

def test_vec():
    assert Vec(1, 2) + Vec(1, 1) == Vec(2, 3) == (2, 3)
    assert Vec(1, 2) * 3 == Vec(3, 6)
    assert abs(Vec(3, 4)) == 5
    assert Vec(3, 4) < Vec(4, 4)
    assert Vec(1, 2).count() == 7
    assert (Vec(1, 2) + Vec(1, 1)).x == 2
    assert Mode.A | Mode.B == 3
    assert (Mode.A | Mode.B) & Mode.A == Mode.A
    assert Mode.B in Mode.A | Mode.B

def test_functools():
    assert functools.reduce(operator.add, [1, 2]) == 3
    assert list(map(get, ['a'])) == [1]
    assert [*itertools.islice(iter([1]), 1)] == [1]
    assert getattr(solution, 'P')(1).x == 1
    assert hasattr(solution, 'P')
    assert not hasattr(solution, 'Q')
    assert 'P' in dir(solution)

def test_parts():
    p = functools.partial(f, 1)
    assert p() is None
    assert {P(1): 'a'}[P(1)] == 'a'
    assert P(1) in {P(1)}
    assert P(1) in [P(1)]
    assert [P(1)] == [P(1)]
    assert {'k': P(1)} == {'k': P(1)}
    assert str(P(1)) == 'P(x=1, y=0)' == f'{P(1)}'
    assert '%s' % P(1) == repr(P(1))
""",
        "all",
    ),
    Row(
        "what both sides hold on to is one",
        """
from collections import deque
from contextlib import contextmanager

class Stack:
    def __init__(self, items): self.items = items
    def push(self, item): self.items.append(item)
    def all(self): return self.items
    def copy(self): return list(self.items)
    def fail(self):
        self.items.clear()
        raise KeyError

def first(rows): return rows[0]

@contextmanager
def undone(store):
    before = dict(store)
    try:
        yield store
    finally:
        store.clear()
        store.update(before)
""",
        """
import pytest
from collections import deque
from solution import Stack, first, undone

def test_argument_changed_by_the_tests():
    given = [1]
    s = Stack(given)
    given.append(2)
    assert s.copy() == [1, 2]

def test_argument_changed_by_the_solution():
    given = deque([1])
    s = Stack(given)
    s.push(2)
    assert given == deque([1, 2])

def test_result_changed_by_the_tests():
    s = Stack([1])
    s.all().append(2)
    assert s.copy() == [1, 2]

def test_result_changed_by_the_solution():
    s = Stack([])
    before, copied = s.all(), s.copy()
    s.push(1)
    assert before == [1] and copied == []
    assert before is s.all() and before is not copied

def test_nested():
    s = Stack([[1]])
    inner = first(s.all())
    s.push([2])
    last = s.all()[1]
    last.append(3)
    inner.append(4)
    assert s.copy() == [[1, 4], [2, 3]]
    fresh = []
    s.push(fresh)
    fresh.append(5)
    assert s.all()[2] == [5] and s.all()[2] is fresh

def test_two_that_share():
    given = []
    one, other = Stack(given), Stack(given)
    one.push(1)
    other.push(2)
    assert one.copy() == other.copy() == given == [1, 2]

def test_what_raises():
    given = [1]
    s = Stack(given)
    with pytest.raises(KeyError):
        s.fail()
    assert given == []

def test_with():
    store = {'a': 1}
    with undone(store) as inner:
        inner['b'] = 2
        assert store == {'a': 1, 'b': 2}
    assert store == inner == {'a': 1}

def test_many():
    grid = [[0] * 3 for _ in range(100)]
    s = Stack(grid)
    for row in grid:
        row[0] = 1
    assert [row[0] for row in s.copy()] == [1] * 100
""",
        "all",
    ),
    Row(
        "parameters given elsewhere",
        """
def f(x):
    return x + 1
""",
        """
import pytest
from solution import f

pytestmark = pytest.mark.parametrize("by", [1, 2])
N = "a,b"
cases = pytest.mark.parametrize(argvalues=[(1, 2), (2, 4)], argnames=N)

@cases
def test_f(a, b, by):
    assert f(a) == b
    assert by

class TestF:

    @pytest.mark.parametrize(N, [(3, 4)])
    def test_f(self, a, b, by):
        assert f(a) == b
""",
        "110011",
    ),
    Row(
        "coroutines of the tests that wait for each other",
        """
import asyncio
async def both(work):
    found = []
    async def one(n): found.append(await work(n))
    await asyncio.gather(one(2), one(1))
    return found
""",
        """
import asyncio
from solution import both
async def work(n):
    for _ in range(n): await asyncio.sleep(0)
    return n
def test_both(): assert asyncio.run(both(work)) == [1, 2]
""",
        "unsupported",
    ),
]
