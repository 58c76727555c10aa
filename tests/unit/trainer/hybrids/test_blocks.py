"""Blocks of rounds: who computes them, and sums that do not depend on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.services.trainer.compute.gradient_transfer import (
    cut_pieces,
    decode_piece,
    encode_piece,
)
from meshrl.services.trainer.hybrids.block_sizes import choose_block_rounds
from meshrl.services.trainer.hybrids.round_board import MAX_BLOCKS_AHEAD, RoundBoard
from meshrl.services.trainer.learner.gradient_sum import BlockSum, GradientSum


def create_board(count: int, block_rounds: int = 1) -> RoundBoard:
    board = RoundBoard(block_rounds)
    board.add_rounds(count)
    board.close()
    return board


def test_core_and_hybrids_lease_from_the_front() -> None:
    board = create_board(4)
    assert board.take_round(now_s=0.0) == 0
    assert board.lease_block("g1", expires_s=5.0) == 1
    assert board.lease_block("g2", expires_s=5.0) == 2
    assert board.take_round(now_s=0.0) == 3
    assert board.take_round(now_s=0.0) is None
    assert board.lease_block("g3", expires_s=5.0) is None


def test_hybrid_computes_its_block_to_the_end() -> None:
    board = create_board(7, block_rounds=3)
    assert board.take_round(now_s=0.0) == 0
    assert board.lease_block("g1", expires_s=5.0) == 1
    assert [board.get_round(1, done) for done in range(4)] == [3, 4, 5, None]
    assert board.lease_block("g1", expires_s=5.0) == 1  # a lost answer is repeated
    assert not board.claim_result(1, "g1", rounds=2) and not board.claim_result(1, "g2", rounds=3)
    assert board.lease_block("g1", expires_s=5.0, sent_block=1) == 2  # while it sends
    assert board.get_round(2, 0) == 6 and board.is_last_round(2, 1)
    assert board.claim_result(1, "g1", rounds=3) and not board.claim_result(1, "g1", rounds=3)
    board.complete_block(1)
    assert [board.take_round(now_s=9.0) for _ in range(3)] == [1, 2, 6]


def test_last_block_is_complete_when_the_board_is_closed() -> None:
    board = RoundBoard(block_rounds=3)
    board.add_rounds(1)
    assert board.lease_block("g1", expires_s=5.0) == 0 and not board.is_last_round(0, 1)
    assert not board.claim_result(0, "g1", rounds=1)
    board.add_rounds(3)
    assert board.take_round(now_s=0.0) == 3
    board.complete_round(3)
    assert not board.is_complete
    board.close()
    assert board.completed_blocks == {1}
    assert board.claim_result(0, "g1", rounds=3)
    board.complete_block(0)
    assert board.is_complete


def test_expired_block_is_computed_by_the_core_and_counted_once() -> None:
    board = create_board(2, block_rounds=2)
    assert board.lease_block("g1", expires_s=5.0) == 0
    assert board.take_round(now_s=4.0) is None
    assert board.next_expiry() == 5.0
    assert board.take_round(now_s=5.0) == 0
    assert not board.claim_result(0, "g1", rounds=2)  # late, and equal to the core's
    assert board.take_round(now_s=5.0) == 1
    board.complete_round(0)
    board.complete_round(1)
    assert board.is_complete


def test_blocks_of_a_departed_hybrid_are_free() -> None:
    board = create_board(2)
    assert board.lease_block("g1", expires_s=5.0) == 0
    assert board.release_blocks("g1") and not board.release_blocks("g1")
    assert board.lease_block("g2", expires_s=5.0) == 0


def test_late_block_is_taken_first_and_limits_the_lookahead() -> None:
    board = RoundBoard()
    board.add_rounds(50)
    assert board.lease_block("silent", expires_s=5.0) == 0
    taken = []
    while (index := board.take_round(now_s=1.0)) is not None:
        taken.append(index)
        board.complete_round(index)
    assert taken == list(range(1, MAX_BLOCKS_AHEAD))
    assert board.lease_block("g2", expires_s=9.0) is None
    assert board.take_round(now_s=5.0) == 0
    board.complete_round(0)
    assert board.take_round(now_s=5.0) == MAX_BLOCKS_AHEAD


def test_unsaved_result_is_computed_again() -> None:
    board = create_board(1)
    assert board.lease_block("g1", expires_s=5.0) == 0
    assert board.claim_result(0, "g1", rounds=1) and not board.is_complete
    assert board.take_round(now_s=9.0) is None
    board.release_claim(0)
    assert board.take_round(now_s=1.0) == 0
    board.complete_round(0)
    assert board.is_complete


NUMBERS = 96
RANGES = [  # of two ranks, whose rows alternate
    np.array([[0, 10], [40, 41], [50, 96]], np.int64),
    np.array([[10, 40], [41, 50], [96, 96]], np.int64),
]


def compute_gradient(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(NUMBERS, generator=generator) * 10.0 ** (index % 5)


def send(total: torch.Tensor) -> list[torch.Tensor]:
    """Return each rank's rows as they arrive."""
    rows = []
    for ranges in RANGES:
        pieces = []
        for numbers in cut_pieces(total, ranges):
            room = np.empty(len(numbers), np.float32)
            decode_piece(bytes(encode_piece(numbers)), room)
            pieces.append(room)
        rows.append(torch.from_numpy(np.concatenate(pieces)))
    return rows


def own_rows(full: torch.Tensor, rank: int) -> torch.Tensor:
    return torch.cat([full[start:end] for start, end in RANGES[rank].tolist()])


class SharedStep:
    """Step whose rounds a core of two ranks and hybrids compute."""

    def __init__(self, rounds: int, block_rounds: int, dtype: torch.dtype) -> None:
        self.dtype, self.now_s = dtype, 0.0
        self.board = RoundBoard(block_rounds)
        self.sums = [GradientSum(block_rounds, dtype) for _ in RANGES]
        self.held: dict[str, tuple[int, BlockSum]] = {}
        self.unoffered = rounds

    def offer(self, count: int) -> None:
        count = min(count, self.unoffered)
        self.board.add_rounds(count)
        self.unoffered -= count
        if not self.unoffered and not self.board.is_closed:
            self.board.close()

    def run_core(self) -> bool:
        index = self.board.take_round(self.now_s)
        if index is None:
            return False
        for rank, total in enumerate(self.sums):
            total.add(index, own_rows(compute_gradient(index), rank))
        self.board.complete_round(index)
        return True

    def run_hybrid(self, name: str) -> None:
        block = self.board.lease_block(name, self.now_s + 4.0)
        if block is None:
            return
        held, partial = self.held.get(name, (-1, BlockSum()))
        if held != block:
            partial = BlockSum()
        self.held[name] = block, partial
        index = self.board.get_round(block, partial.rounds)
        if index is not None:
            partial.add(compute_gradient(index))
        elif self.board.is_last_round(block, partial.rounds):
            self.send(name)

    def send(self, name: str) -> None:
        block, partial = self.held.pop(name)
        if partial.rounds and self.board.claim_result(block, name, partial.rounds):
            for total, rows in zip(self.sums, send(partial.close(self.dtype)), strict=True):
                total.add_block(block, rows)
            self.board.complete_block(block)


def compute_alone(rounds: int, block_rounds: int, dtype: torch.dtype) -> list[torch.Tensor]:
    step = SharedStep(rounds, block_rounds, dtype)
    step.offer(rounds)
    while step.run_core():
        pass
    return [total.get_total(rounds) for total in step.sums]


events = st.tuples(st.sampled_from("oochhhsxlw"), st.integers(0, 2))


@settings(max_examples=60)
@given(st.integers(1, 13), st.integers(1, 5), st.booleans(), st.lists(events, max_size=60))
def test_update_has_the_same_bits_whoever_computes_its_blocks(
    rounds: int, block_rounds: int, narrow: bool, history: list[tuple[str, int]]
) -> None:
    """Hybrids join, send early or late, lose their sums, leave and are late, in any order."""
    dtype = torch.bfloat16 if narrow else torch.float32
    step = SharedStep(rounds, block_rounds, dtype)
    for kind, number in history:
        name = f"g{number}"
        step.now_s += 1.0
        if kind == "o":
            step.offer(1 + number)
        elif kind == "c":
            step.run_core()
        elif kind == "h":
            step.run_hybrid(name)
        elif kind == "s" and name in step.held:
            step.send(name)
        elif kind == "x":
            step.held.pop(name, None)
        elif kind == "l":
            step.board.release_blocks(name)
        elif kind == "w":
            step.now_s += 4.0
    step.offer(rounds)
    step.now_s += 1e6
    while step.run_core():
        pass
    assert step.board.is_complete
    expected = compute_alone(rounds, block_rounds, dtype)
    for total, alone in zip(step.sums, expected, strict=True):
        assert torch.equal(total.get_total(rounds), alone)


def test_blocks_change_the_order_of_additions_and_not_their_number() -> None:
    one, four = (torch.cat(compute_alone(13, size, torch.float32)) for size in (1, 4))
    assert not torch.equal(one, four)
    torch.testing.assert_close(one, four, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("rounded", [True, False])
def test_piece_is_half_as_large_if_no_bit_is_lost(rounded: bool) -> None:
    numbers = torch.randn(5000, generator=torch.Generator().manual_seed(3))
    if rounded:
        numbers = numbers.bfloat16().float()
    content = encode_piece(numbers.numpy())
    assert content.nbytes == (2 if rounded else 4) * 5000
    room = np.empty(5000, np.float32)
    decode_piece(bytes(content), room)
    assert torch.equal(torch.from_numpy(room), numbers)


def test_hybrid_sends_once_a_step_if_transfers_take_long() -> None:
    assert choose_block_rounds(16, 1, 3, transfer_s=20.0, round_s=5.0) == 4
    assert choose_block_rounds(16, 8, 1, transfer_s=20.0, round_s=40.0) == 1  # 8 bins a round
    assert choose_block_rounds(160, 1, 1, transfer_s=0.02, round_s=1.0) == 1
    assert choose_block_rounds(160, 1, 1, transfer_s=1.0, round_s=1.0) == 4
    assert choose_block_rounds(16, 1, 0, transfer_s=20.0, round_s=5.0) == 1
    assert choose_block_rounds(16, 1, 3, transfer_s=0.0, round_s=0.0) == 1
