"""The profile of a rank's accelerator, measured once and kept on the host."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import ConfigError, MeshError
from meshrl.common.hardware.profiles import kind_of
from meshrl.common.hardware.zebra.profile import AcceleratorCosts, CostCurve, kind_of_table
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import model_config
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.network.moe import Experts
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.initial.beginning import DTYPES
from meshrl.services.trainer.models.forward import Placed, fuse, outputs, placed
from meshrl.services.trainer.zebra.pieces import Cut, PieceInputs, PieceOutputs, Pieces

REPEATS = 3  # of each size, of which the fastest counts
EXPERTS = 8  # whose products are measured together
SHORTEST, FEWEST = 128, 16  # tokens of a sequence, rows of an expert
BUDGET_S = 20.0  # of a curve: what is longer then goes on as it did before
USABLE = 0.9  # of a memory; the rest is for buffers and what one task needs


@dataclass(frozen=True, slots=True)
class Profiled:
    kind: AcceleratorCosts
    backward: float  # times a forward, of layers whose activations are kept

    def told(self) -> dict[str, Any]:
        return {"kind": asdict(self.kind), "backward": self.backward}


def profiled(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    longest: int,
    clock: Clock,
    name: str = "",
) -> Profiled:
    """What the accelerator `name` takes for bins of up to `longest` tokens; it blocks."""
    layer = _one_layer(config)
    with torch.device(device):
        model = Decoder(layer, dtype, longest + 1)
    model.initialise(torch.Generator(device).manual_seed(0))
    fuse(model)
    measure = _Measure(model, device, clock)
    lengths = _doubled(SHORTEST, longest)
    most = longest * config.experts_per_token
    attention, back = measure.curve(measure.attention, lengths)
    experts, experts_back = measure.curve(measure.experts, _doubled(FEWEST, max(FEWEST, most)))
    head, _ = measure.curve(measure.head, lengths)
    memory = float(psutil.virtual_memory().total)  # of a CPU that of its host
    if device.type == "cuda":
        memory = float(torch.cuda.mem_get_info(device)[1])
    return Profiled(
        AcceleratorCosts(name, USABLE * memory, experts, attention, head),
        mean((back, experts_back)),
    )


def _one_layer(config: ModelConfig) -> ModelConfig:
    """A model of one layer, which is a mixture of no more experts than are measured."""
    first = config.sparse_layers[0]
    return replace(
        config,
        layers=1,
        dense_layers=(),
        sliding_layers=(0,) if first in config.sliding_layers else (),
        unrotated_layers=(0,) if first in config.unrotated_layers else (),
        experts=max(config.experts_per_token, min(config.experts, EXPERTS)),
    )


def _doubled(least: int, most: int) -> list[int]:
    """From `least`, which may be more than `most`, to `most`."""
    found = [min(least, most)]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return found


class _Measure:
    """Seconds of passes on one device."""

    def __init__(self, model: Decoder, device: torch.device, clock: Clock) -> None:
        self._model, self._device, self._clock = model, device, clock
        self._pieces = Pieces(model)

    def curve(
        self, measured: Callable[[int], tuple[float, float]], sizes: Sequence[int]
    ) -> tuple[CostCurve, float]:
        """Seconds forward of each size, and how many times as long the largest takes backward."""
        until = self._clock.monotonic() + BUDGET_S
        found: list[float] = []
        times = 0.0
        for size in sizes:
            forward_s, backward_s = measured(size)
            found.append(forward_s)
            times = backward_s / forward_s
            if self._clock.monotonic() > until:
                break
        # Of two sizes whose times are as good as the same, the larger one may seem faster.
        return CostCurve(tuple(sizes[: len(found)]), tuple(accumulate(found, max))), times

    def attention(self, length: int) -> tuple[float, float]:
        """Of a piece, on one sequence."""
        given = self._given(length)
        config = self._model.config

        def pass_() -> Callable[[], object]:
            cut = Cut(lambda _: self._pieces.first(given), None, again=False)
            ends = PieceOutputs(*cut.ends)
            ones = PieceOutputs(
                torch.ones_like(ends.residual),
                torch.ones_like(ends.shares),
                torch.ones_like(ends.x),
                torch.full_like(ends.balance, config.balance_coefficient),
            )
            return partial(cut.backward, ones)

        return self._fastest(pass_)

    def experts(self, rows: int) -> tuple[float, float]:
        """Of one expert, on so many rows."""
        experts = self._pieces.layer(0).experts
        count = experts.config.experts
        x = self._normal(rows * count, experts)
        ends = torch.arange(1, count + 1, device=self._device) * rows

        def pass_() -> Callable[[], object]:
            leaf = x.clone().requires_grad_(True)
            made = experts.made(leaf, ends, experts.gate_up, experts.down)
            return lambda: torch.autograd.backward(made, torch.ones_like(made))

        forward_s, backward_s = self._fastest(pass_)
        return forward_s / count, backward_s / count

    def head(self, tokens: int) -> tuple[float, float]:
        """Of the last piece: norm, head and log-probabilities."""
        given, experts = self._given(tokens), self._pieces.layer(0).experts
        k = experts.config.experts_per_token
        residual, apart = self._normal(tokens, experts), self._normal(tokens * k, experts)
        shares = torch.ones(tokens, k, device=self._device) / k

        def pass_() -> Callable[[], object]:
            leaves = (residual, shares, apart.view(tokens, k, -1))
            coming = PieceInputs(*(one.clone().requires_grad_(True) for one in leaves))
            hidden = self._pieces.last(given, coming)
            found = outputs(self._model, given, hidden, 1.0, None).logprobs
            return lambda: torch.autograd.backward(found.sum())

        return self._fastest(pass_)

    def _fastest(self, pass_: Callable[[], Callable[[], object]]) -> tuple[float, float]:
        """Seconds forward and backward, of a few passes after one that is not counted."""
        times = []
        for _ in range(1 + REPEATS):
            began_s = self._now()
            with torch.enable_grad():
                back = pass_()
            between_s = self._now()
            back()
            times.append((between_s - began_s, self._now() - between_s))
            self._model.zero_grad(set_to_none=True)
        forward, backward = zip(*times[1:], strict=True)
        return min(forward), min(backward)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock.monotonic()

    def _given(self, length: int) -> Placed:
        tokens = (np.arange(length) % self._model.config.vocab_size).astype(np.int32)
        nothing = np.zeros(length, np.float32)
        whole = Bin(
            tokens=tokens,
            targets=tokens,
            positions=np.arange(length, dtype=np.int32),
            starts=np.array([0, length], np.int32),
            mask=np.ones(length, np.bool_),
            fresh=np.ones(length, np.bool_),
            behaviour=nothing,
            advantage=nothing,
            weight=nothing,
        )
        return placed(whole, self._device)

    def _normal(self, rows: int, like: Experts) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(rows)
        width = like.config.hidden_size
        return torch.randn(rows, width, generator=generator, device=self._device).to(like.down)


MEASURE_S = 300.0  # three curves, of which each takes up to its budget and one more pass


async def profile_of(mesh: Mesh, data: JobData) -> dict[str, Any]:
    """Return what a rank publishes of its accelerator, for the planner; or nothing."""
    accelerator = mesh.settings.accelerator
    name = kind_of(accelerator) or accelerator
    about = _about(data, name)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    path = Path(mesh.settings.run_root) / "mesh" / "profiles" / f"{digest}.json"
    if (kept := _kept(path)) is not None:
        return {"profile": kept}
    training = data.config.training
    try:
        found = await mesh.host.run_blocking(
            profiled,
            model_config(data),
            torch.device(data.config.mesh.device),
            DTYPES[training.dtype],
            training.bin_tokens,
            mesh.clock,
            name,
            deadline_s=MEASURE_S,
        )
    except (RuntimeError, MeshError) as error:  # as where memory is too small
        mesh.telemetry.log.warning("no profile of this accelerator", kind=name, error=str(error))
        return {}
    told = found.told()
    path.parent.mkdir(parents=True, exist_ok=True)
    mesh.host.replace_file(path, json.dumps(told).encode())
    mesh.telemetry.log.info("profile", kind=name, backward=round(found.backward, 2))
    return {"profile": told}


def _about(data: JobData, name: str) -> dict[str, Any]:
    config, training = model_config(data), data.config.training
    shape = {key: value for key, value in asdict(config).items() if key != "source"}
    return {
        "model": shape,
        "dtype": training.dtype,
        "longest": training.bin_tokens,
        "kind": name,
        "torch": torch.__version__,
    }


def _kept(path: Path) -> dict[str, Any] | None:
    """What was measured before; None: nothing that can be read."""
    try:
        told: dict[str, Any] = json.loads(path.read_text())
        kind_of_table(told["kind"], "a kept profile")
        return told if float(told["backward"]) > 0 else None
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
