"""Weights in engines: mapped from chunk files, read back, and quarantined if incomplete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.errors import Refused
from meshrl.common.generation.builtin.engine_builder import BuiltinEngine, build_engine
from meshrl.common.generation.engine_contract import NO_VERSION, Quarantined, TokenEngine
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.services.engine.sglang.engine import SGLangEngine
from tests.sglang import counterpart
from tests.sglang.counterpart import Counterpart
from tests.unit.common.generation.engines_under_test import (
    BUILT_IN,
    MOE,
    TINY,
    Listener,
    built_in,
    decoder,
    request,
    simulated,
)
from tests.unit.common.weights.test_version_image import Cut, Files

NEW = 60  # tokens that a request gets
STATE = decoder(1).state_dict()
TENSORS = len(STATE)
KINDS = (
    *(
        pytest.param(kind, marks=pytest.mark.needs("compiler") if kind == "native" else ())
        for kind in BUILT_IN
    ),
    "simulated",
    "sglang",
)
PROMPT = np.arange(1, 20, dtype=np.int32)
READ_BACK = [
    pytest.param(kind, marks=pytest.mark.needs("compiler") if kind == "native" else ())
    for kind in BUILT_IN
]
# nothing fills a panel of the kernels
ODD = replace(TINY, vocab_size=43, ffn_size=40, qk_norm=False, attention_bias=True)


class LazyWeights(Mapping[str, Tensor]):
    """Weights of which each tensor is a file that is read on access. The file of `lost` disappears
    once all tensors have been read, or has never existed if `looks` is False.
    """

    def __init__(
        self, directory: Path, state: Mapping[str, Tensor], lost_name: str, starts_complete: bool
    ) -> None:
        self._directory, self._names, self._lost_name = directory, list(state), lost_name
        directory.mkdir()
        for name, tensor in state.items():
            torch.save(tensor, directory / name)
        self._unread = set(self._names) if starts_complete else {lost_name}
        if not starts_complete:
            (directory / lost_name).unlink()

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = torch.load(self._directory / name, weights_only=True)
        self._unread.discard(name)
        if not self._unread:
            (self._directory / self._lost_name).unlink(missing_ok=True)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Bench:
    """Engine whose weight updates can be interrupted."""

    def __init__(self, kind: str, directory: Path, stack: ExitStack) -> None:
        self.kind, self._directory, self._versions = kind, directory, 0
        self.server: Counterpart | None = None
        if kind == "simulated":
            self.listener = simulated()[1]
        elif kind == "sglang":
            self.server = Counterpart(4, 128)
            stack.callback(self.server.close)
            sglang_engine = counterpart.engine(self.server, directory / "server", 4, 128)
            stack.callback(sglang_engine.close)
            self.listener = Listener(sglang_engine)
        else:
            self.listener = Listener(built_in(kind))
        self.engine: TokenEngine = self.listener.engine

    def make_broken_weights(self, tensor: int) -> Mapping[str, Tensor]:
        """Return a version whose update fails at this tensor."""
        if self.server is not None:
            self.server.fails_at = tensor
            return STATE
        self._versions += 1
        directory = self._directory / str(self._versions)
        return LazyWeights(directory, STATE, list(STATE)[tensor], self.kind != "simulated")

    def generate(self, tokens: int) -> None:
        target_count = self.engine.tokens_generated + tokens
        while self.engine.tokens_generated < target_count:
            self.engine.step()
            self.listener.advance()


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(request.param, tmp_path, stack)


def assert_serves_no_request(bench: Bench) -> None:
    engine = bench.engine
    assert engine.version == NO_VERSION
    bench.listener.drain()  # all outputs of the previous version
    token_count = engine.tokens_generated
    for _ in range(3):
        bench.listener.advance()
        assert not engine.step()
    assert engine.tokens_generated == token_count and engine.drain_outputs() is None
    with pytest.raises(Refused):
        engine.score(np.array([1, 2, 3], np.int32))
    assert engine.describe_session_cache(3) is None


@pytest.mark.rotating(4)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_partial_version_serves_no_request_and_a_complete_one_continues(
    bench: Bench, share: float
) -> None:
    engine, listener = bench.engine, bench.listener
    engine.submit([request(1, max_new=NEW, temperature=0.0, session=3)])
    bench.generate(5)
    with pytest.raises(Quarantined, match="version 5"):
        engine.update_weights(bench.make_broken_weights(round(share * (TENSORS - 1))), 5)
    assert_serves_no_request(bench)
    engine.submit([request(2, max_new=7)])  # it waits, as the running one does
    with pytest.raises(Quarantined, match="version 6"):
        engine.update_weights(bench.make_broken_weights(TENSORS // 2), 6)
    assert_serves_no_request(bench)

    engine.update_weights(STATE, 7)
    assert engine.version == 7
    outputs = listener.run(request(3, [4, 5], max_new=NEW, temperature=0.0))
    assert [len(outputs[i].tokens) for i in (1, 2, 3)] == [NEW, 7, NEW]
    assert all(outputs[i].finish == [FinishReason.LENGTH] for i in (1, 2, 3))
    old_count = outputs[1].versions.count(0)
    assert 0 < old_count < NEW and outputs[1].versions == [0] * old_count + [7] * (NEW - old_count)
    assert set(outputs[2].versions) == set(outputs[3].versions) == {7}
    if bench.kind != "simulated":
        reference = Listener(built_in("eager", seed=1))
        expected = reference.run(request(3, [4, 5], max_new=NEW, temperature=0.0))[3]
        assert outputs[3].tokens == expected.tokens


@pytest.mark.rotating(3)
def test_failure_at_any_tensor_quarantines_the_engine(bench: Bench) -> None:
    """Check that no tensor is taken for the last one."""
    bench.engine.submit([request(1, max_new=5, temperature=0.0)])
    for tensor in range(0, TENSORS, 1 if bench.kind in BUILT_IN else 5):
        with pytest.raises(Quarantined):
            bench.engine.update_weights(bench.make_broken_weights(tensor), 5)
        assert bench.engine.version == NO_VERSION and not bench.engine.step()
        bench.engine.update_weights(STATE, 6)
        assert bench.engine.version == 6
    assert len(bench.listener.run()[1].tokens) == 5


def test_misshapen_version_is_rejected_and_the_old_one_serves(bench: Bench) -> None:
    if bench.kind == "simulated":
        pytest.skip("it has no shapes")
    state = dict(STATE)
    state["final_norm"] = state["final_norm"][:-1]
    with pytest.raises(Refused, match="final_norm"):
        bench.engine.update_weights(state, 1)
    output = bench.listener.run(request(1, max_new=9))[1]
    assert output.versions == [0] * 9


@pytest.mark.rotating(3)
def test_quarantined_engine_sleeps_and_wakes_with_complete_weights(bench: Bench) -> None:
    engine = bench.engine
    engine.submit([request(1, max_new=NEW, temperature=0.0)])
    bench.generate(3)
    with pytest.raises(Quarantined):
        engine.update_weights(bench.make_broken_weights(2), 5)
    engine.sleep()
    assert not engine.step()
    with pytest.raises(Quarantined):
        engine.wake(bench.make_broken_weights(2), 6)
    assert_serves_no_request(bench)
    engine.wake(STATE, 7)
    assert len(bench.listener.run()[1].tokens) == NEW
    assert not isinstance(engine, SGLangEngine) or engine.requests.relabelled_tokens == 0


def make_cuts(state: dict[str, torch.Tensor], max_elements: int) -> list[list[Cut]]:
    """Return chunks of `most` elements each, cut in the middle of rows and tensors."""
    chunks: list[list[Cut]] = [[]]
    chunk_elements = 0
    for name, tensor in state.items():
        begin = 0
        while begin < tensor.numel():
            if chunk_elements == max_elements:
                chunks.append([])
                chunk_elements = 0
            end = min(tensor.numel(), begin + max_elements - chunk_elements)
            chunks[-1].append((name, begin, end))
            chunk_elements, begin = chunk_elements + end - begin, end
    return chunks


@pytest.mark.rotating(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [TINY, MOE], ids=["dense", "mixture"])
@pytest.mark.parametrize("path", ["native", "eager"])
def test_weights_mapped_in_pieces_give_the_same_scores(
    path: str, config: ModelConfig, dtype: torch.dtype, tmp_path: Path
) -> None:
    state = {name: t.to(dtype) for name, t in decoder(3, config).state_dict().items()}
    files = Files(tmp_path, state)
    for chunk in make_cuts(state, 333):
        files.add_chunk(*chunk)
    image = files.map_image()
    engine = build_engine(config, 2, 64, backend=path)
    scores: list[Sequence[float]] = []
    for tensors in (state, decoder(4, config).state_dict(), image.tensors):
        engine.wake(tensors, len(scores))
        scores.append(engine.score(PROMPT).tolist())
    assert scores[2] == scores[0] != scores[1]
    assert not image.is_contiguous("embedding") and image.joined_bytes == (
        # The native backend pads its kernels' narrow heads with zeros.
        sum(
            state[n].nbytes
            for n in state
            if n.endswith(("qkv", "output")) and not image.is_contiguous(n)
        )
        if path == "native"
        else 0
    )


@pytest.fixture(params=READ_BACK)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_engine(path: str, config: ModelConfig, dtype: str = "float32") -> BuiltinEngine:
    return built_in(path, config=config, dtype=dtype, verify_weights=True)


@pytest.mark.parametrize("config", [TINY, MOE, ODD], ids=["dense", "experts", "odd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_read_back_accepts_complete_weights(path: str, config: ModelConfig, dtype: str) -> None:
    engine = make_engine(path, config, dtype)
    engine.update_weights(decoder(1, config).state_dict(), 1)
    assert engine.version == 1
    engine.sleep()
    engine.wake(decoder(2, config).state_dict(), 2)
    assert engine.version == 2


@pytest.mark.parametrize("config", [TINY, MOE, ODD], ids=["dense", "experts", "odd"])
def test_single_differing_bit_of_any_tensor_is_found(path: str, config: ModelConfig) -> None:
    engine, state = make_engine(path, config), decoder(0, config).state_dict()
    assert engine._compute.find_differing_weights(state) == []
    for name, tensor in state.items():
        changed = tensor.clone()
        changed.view(-1).view(torch.int32)[changed.numel() // 2] ^= 1
        assert engine._compute.find_differing_weights({**state, name: changed}) == [name]


def test_weights_that_change_during_an_update_quarantine_the_engine(path: str) -> None:
    class ChangingWeights(dict[str, torch.Tensor]):
        read_count = 0

        def __getitem__(self, name: str) -> torch.Tensor:
            tensor = super().__getitem__(name)
            if name == "final_norm":
                self.read_count += 1
            return tensor + 1 if name == "final_norm" and self.read_count > 2 else tensor

        def items(self):  # type: ignore[no-untyped-def]
            return [(name, self[name]) for name in self]

    engine = make_engine(path, TINY)
    with pytest.raises(Quarantined, match="final_norm"):
        engine.update_weights(ChangingWeights(decoder(1).state_dict()), 5)
    assert engine.version == NO_VERSION
    engine.update_weights(decoder(1).state_dict(), 6)
    assert engine.version == 6
