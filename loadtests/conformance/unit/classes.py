"""Classes by their protocols: subclasses, descriptors, class methods, registries."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "template_method",
        """
class Report:
    title = "Report"

    def rows(self):
        raise NotImplementedError

    def line(self, row):
        return ", ".join(str(cell) for cell in row)

    def render(self):
        lines = [self.line(row) for row in self.rows()]
        return "\\n".join([self.title, *lines, f"({len(lines)} rows)"])
""",
        """
import pytest
from solution import Report


class Sales(Report):
    title = "Sales"

    def rows(self):
        return [("a", 1), ("b", 2)]


class Loud(Sales):
    def line(self, row):
        return super().line(row).upper()


def test_base():
    with pytest.raises(NotImplementedError):
        Report().render()


def test_subclass():
    assert Sales().render() == "Sales\\na, 1\\nb, 2\\n(2 rows)"


def test_super():
    assert Loud().render().splitlines()[1] == "A, 1"
    assert isinstance(Loud(), Report)


def test_empty():
    class Empty(Report):
        def rows(self):
            return iter(())

    assert Empty().render() == "Report\\n(0 rows)"
""",
        ("[self.title, *lines,", '["Report", *lines,'),
        ("({len(lines)} rows)", "({len(list(self.rows())) or 1} rows)"),
    ),
    unit(
        "descriptor_checks",
        """
class Positive:
    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, instance, owner=None):
        return self if instance is None else getattr(instance, self.name)

    def __set__(self, instance, value):
        if value <= 0:
            raise ValueError(f"{self.name[1:]} must be positive")
        setattr(instance, self.name, value)


class Parcel:
    weight = Positive()
    height = Positive()

    def __init__(self, weight, height):
        self.weight, self.height = weight, height
""",
        """
import pytest
from solution import Parcel, Positive


def test_values():
    one, other = Parcel(1, 2), Parcel(3, 4)
    assert (one.weight, one.height) == (1, 2)
    assert (other.weight, other.height) == (3, 4)


def test_refused():
    with pytest.raises(ValueError, match="height must be positive"):
        Parcel(1, 0)
    parcel = Parcel(1, 1)
    with pytest.raises(ValueError, match="weight"):
        parcel.weight = -1
    assert parcel.weight == 1


def test_class_attribute():
    assert isinstance(Parcel.weight, Positive)
    assert Parcel.weight is not Parcel.height
""",
        ("if value <= 0", "if value < 0"),
        ("setattr(instance, self.name, value)", "setattr(type(instance), self.name, value)"),
    ),
    unit(
        "static_and_class_methods",
        """
class Temperature:
    count = 0

    def __init__(self, kelvin):
        if not self.valid(kelvin):
            raise ValueError(kelvin)
        self.kelvin = kelvin
        type(self).count += 1

    @staticmethod
    def valid(kelvin):
        return kelvin >= 0

    @classmethod
    def parse(cls, text):
        number, unit = float(text[:-1]), text[-1]
        return cls(number + {"K": 0, "C": 273.15}[unit])


class Sensor(Temperature):
    count = 0
""",
        """
import pytest
from solution import Sensor, Temperature


@pytest.fixture(autouse=True)
def reset():
    Temperature.count = Sensor.count = 0


def test_parse():
    assert Temperature.parse("1.5K").kelvin == 1.5
    assert Temperature.parse("-0.15C").kelvin == pytest.approx(273)
    with pytest.raises(KeyError):
        Temperature.parse("1F")


def test_subclass():
    assert isinstance(Sensor.parse("1K"), Sensor)
    assert (Temperature.count, Sensor.count) == (0, 1)


def test_valid():
    assert Temperature.valid(0) and not Temperature.valid(-1)
    with pytest.raises(ValueError):
        Sensor(-0.1)
    assert Sensor.count == 0
""",
        ("type(self).count += 1", "Temperature.count += 1"),
        ("return cls(number", "return Temperature(number"),
    ),
    unit(
        "matrix_operators",
        """
class Matrix:
    def __init__(self, rows):
        self.rows = [list(row) for row in rows]
        if len({len(row) for row in self.rows}) > 1:
            raise ValueError("rows differ in length")

    @classmethod
    def identity(cls, n):
        return cls([[int(i == j) for j in range(n)] for i in range(n)])

    @property
    def shape(self):
        return len(self.rows), len(self.rows[0]) if self.rows else 0

    def __matmul__(self, other):
        if self.shape[1] != other.shape[0]:
            raise ValueError(f"{self.shape} @ {other.shape}")
        columns = list(zip(*other.rows))
        return Matrix([[sum(a * b for a, b in zip(row, c)) for c in columns] for row in self.rows])

    def __pow__(self, n):
        out = Matrix.identity(len(self.rows))
        for _ in range(n):
            out = out @ self
        return out

    def __eq__(self, other):
        return isinstance(other, Matrix) and self.rows == other.rows

    def __getitem__(self, place):
        row, column = place
        return self.rows[row][column]
""",
        """
import pytest
from solution import Matrix


def test_product():
    a, b = Matrix([[1, 2], [3, 4]]), Matrix([[0, 1], [1, 0]])
    assert a @ b == Matrix([[2, 1], [4, 3]])
    assert b @ a == Matrix([[3, 4], [1, 2]])


def test_power():
    fib = Matrix([[1, 1], [1, 0]]) ** 90
    assert fib[0, 1] == 2880067194370816120
    assert Matrix([[2]]) ** 0 == Matrix.identity(1)


def test_shape():
    assert Matrix([[1, 2, 3]]).shape == (1, 3)
    assert Matrix([]).shape == (0, 0)
    with pytest.raises(ValueError, match="differ"):
        Matrix([[1], [2, 3]])


def test_misfit():
    with pytest.raises(ValueError):
        Matrix([[1, 2]]) @ Matrix([[1, 2]])


def test_copies():
    rows = [[1]]
    matrix = Matrix(rows)
    rows[0][0] = 9
    assert matrix[0, 0] == 1
""",
        ("[list(row) for row in rows]", "list(rows)"),
        ("sum(a * b for", "sum(float(a * b) for"),
    ),
    unit(
        "singleton_and_registry",
        """
class Registered:
    kinds = {}

    def __init_subclass__(cls, key=None, **kwargs):
        super().__init_subclass__(**kwargs)
        Registered.kinds[key or cls.__name__.lower()] = cls

    @classmethod
    def make(cls, key, *args):
        if key not in Registered.kinds:
            raise LookupError(f"unknown: {key}; known: {', '.join(sorted(Registered.kinds))}")
        return Registered.kinds[key](*args)


class Csv(Registered):
    def __init__(self, sep=","):
        self.sep = sep

    def dump(self, rows):
        return "\\n".join(self.sep.join(map(str, row)) for row in rows)


class Lines(Registered, key="txt"):
    def dump(self, rows):
        return "\\n".join(" ".join(map(str, row)) for row in rows)
""",
        """
import pytest
from solution import Csv, Lines, Registered


@pytest.mark.parametrize("key,kind", [("csv", Csv), ("txt", Lines)])
def test_make(key, kind):
    assert isinstance(Registered.make(key), kind)


def test_dump():
    assert Registered.make("csv", ";").dump([(1, 2), ("a", None)]) == "1;2\\na;None"
    assert Lines().dump([]) == ""


def test_unknown():
    with pytest.raises(LookupError, match="unknown: lines; known: csv, txt"):
        Registered.make("lines")
""",
        ("key or cls.__name__.lower()", "cls.__name__.lower()"),
        ("', '.join(sorted(Registered.kinds))", "' '.join(sorted(Registered.kinds))"),
    ),
]
