"""Where an engine's throughput stops growing with its batch."""

from hypothesis import given
from hypothesis import strategies as st

from meshrl.services.engine.measurement.throughput import Throughput, context_class, size_class


def measured(plateau: int, sizes: range) -> Throughput:
    """Of an engine whose steps take 10 ms up to `plateau` sequences, and in proportion beyond."""
    table = Throughput()
    for batch in sizes:
        for _ in range(20):
            table.stepped(batch, batch, 0.01 * max(1.0, batch / plateau))
    return table


@given(st.integers(2, 40))
def test_the_plateau_of_a_flat_curve_is_found_from_what_ran(plateau: int) -> None:
    found = measured(plateau, range(1, 4 * plateau)).plateau
    assert 0.6 * plateau <= found <= 1.5 * plateau


def test_there_is_no_plateau_before_throughput_was_seen_to_stay() -> None:
    assert Throughput().plateau == 0
    assert measured(64, range(1, 40)).plateau == 0
    assert measured(64, range(8, 9)).plateau == 0


def test_a_size_seen_once_or_without_tokens_says_nothing() -> None:
    table = Throughput()
    table.stepped(4, 4, 0.01)
    table.stepped(0, 0, 0.01)
    table.stepped(4, 0, 0.01)
    assert table.table == {}


@given(st.integers(1, 10_000))
def test_size_classes_are_at_most_a_third_below(batch: int) -> None:
    size = size_class(batch)
    assert size <= batch < 1.5 * size + 1


def test_a_table_by_batch_and_context_has_what_was_seen_often_enough() -> None:
    table = Throughput()
    for _ in range(7):
        for context, rate in ((10.0, 400.0), (700.0, 200.0), (800.0, 200.0)):
            table.stepped(4, 4, 4 / rate, context)
    assert table.by_context == {"4x512": 200.0}
    table.stepped(5, 5, 5 / 400.0, 12.0)
    assert table.by_context == {"4x0": 400.0, "4x512": 200.0}
    assert [context_class(n) for n in (0, 31, 32, 63, 64, 1000.5)] == [0, 0, 32, 32, 64, 512]
