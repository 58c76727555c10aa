"""Profile of a rank's accelerator, measured once and cached on the host."""

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
from meshrl.common.hardware.accelerators import match_kind
from meshrl.common.hardware.zebra.profile import (
    AcceleratorCosts,
    CostCurve,
    parse_accelerator_costs,
)
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import load_model_config
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.network.moe import MixtureOfExperts
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.initialization.initial_weights import DTYPES
from meshrl.services.trainer.models.forward import (
    DeviceBin,
    compute_outputs,
    fuse_pointwise,
    move_bin_to_device,
)
from meshrl.services.trainer.zebra.decoder_pieces import (
    DecoderPieces,
    PieceInputs,
    PieceOutputs,
    PiecePass,
)

REPEATS = 3  # of each size; the fastest counts
MEASURED_EXPERTS = 8  # measured together
MIN_SEQUENCE_TOKENS, MIN_EXPERT_ROWS = 128, 16  # tokens of a sequence, rows of an expert
BUDGET_S = 20.0  # of a curve: larger sizes are then extrapolated
USABLE_MEMORY_SHARE = 0.9  # of a memory; the rest is for buffers and a task's working set


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    costs: AcceleratorCosts
    backward_factor: float  # backward / forward seconds, of layers whose activations are retained

    def encode(self) -> dict[str, Any]:
        return {"kind": asdict(self.costs), "backward": self.backward_factor}


def measure_profile(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    max_tokens: int,
    clock: Clock,
    name: str = "",
) -> MeasuredProfile:
    """Measure the accelerator `name` for bins of up to `max_tokens` tokens; it blocks."""
    layer = _make_one_layer_config(config)
    with torch.device(device):
        model = Decoder(layer, dtype, max_tokens + 1)
    model.initialise(torch.Generator(device).manual_seed(0))
    fuse_pointwise(model)
    measure = _PassTimer(model, device, clock)
    lengths = _list_doubled_sizes(MIN_SEQUENCE_TOKENS, max_tokens)
    most = max_tokens * config.num_experts_per_token
    attention, back = measure.measure_curve(measure.measure_attention, lengths)
    experts, experts_back = measure.measure_curve(
        measure.measure_experts, _list_doubled_sizes(MIN_EXPERT_ROWS, max(MIN_EXPERT_ROWS, most))
    )
    head, _ = measure.measure_curve(measure.measure_head, lengths)
    memory = float(psutil.virtual_memory().total)  # on a CPU the host's memory
    if device.type == "cuda":
        memory = float(torch.cuda.mem_get_info(device)[1])
    return MeasuredProfile(
        AcceleratorCosts(name, USABLE_MEMORY_SHARE * memory, experts, attention, head),
        mean((back, experts_back)),
    )


def _make_one_layer_config(config: ModelConfig) -> ModelConfig:
    """Return a model of one MoE layer with no more experts than are measured."""
    first = config.sparse_layers[0]
    return replace(
        config,
        num_layers=1,
        dense_layers=(),
        sliding_layers=(0,) if first in config.sliding_layers else (),
        no_rope_layers=(0,) if first in config.no_rope_layers else (),
        num_experts=max(config.num_experts_per_token, min(config.num_experts, MEASURED_EXPERTS)),
    )


def _list_doubled_sizes(minimum: int, maximum: int) -> list[int]:
    """Return sizes from `minimum`, each twice the last, to `maximum`; `minimum` may exceed it."""
    found = [min(minimum, maximum)]
    while found[-1] < maximum:
        found.append(min(2 * found[-1], maximum))
    return found


class _PassTimer:
    """Timer of forward and backward passes on one device, seconds."""

    def __init__(self, model: Decoder, device: torch.device, clock: Clock) -> None:
        self._model, self._device, self._clock = model, device, clock
        self._pieces = DecoderPieces(model)

    def measure_curve(
        self, measure: Callable[[int], tuple[float, float]], sizes: Sequence[int]
    ) -> tuple[CostCurve, float]:
        """Return each size's forward seconds, and the backward/forward ratio of the largest."""
        until = self._clock.monotonic() + BUDGET_S
        found: list[float] = []
        times = 0.0
        for size in sizes:
            forward_s, backward_s = measure(size)
            found.append(forward_s)
            times = backward_s / forward_s
            if self._clock.monotonic() > until:
                break
        # Of two sizes with almost equal times, the larger one may seem faster.
        return CostCurve(tuple(sizes[: len(found)]), tuple(accumulate(found, max))), times

    def measure_attention(self, length: int) -> tuple[float, float]:
        """Measure a piece on one sequence; return forward and backward seconds."""
        given = self._make_device_bin(length)
        config = self._model.config

        def pass_() -> Callable[[], object]:
            cut = PiecePass(lambda _: self._pieces.run_first(given), None, recompute=False)
            ends = PieceOutputs(*cut.outputs)
            ones = PieceOutputs(
                torch.ones_like(ends.residual),
                torch.ones_like(ends.routing_weights),
                torch.ones_like(ends.expert_inputs),
                torch.full_like(ends.balance_loss, config.router_aux_loss_coef),
            )
            return partial(cut.backward, ones)

        return self._time_fastest_pass(pass_)

    def measure_experts(self, rows: int) -> tuple[float, float]:
        """Measure one expert on `rows` rows; return forward and backward seconds."""
        experts = self._pieces.get_moe_layer(0).experts
        count = experts.config.num_experts
        x = self._draw_normal(rows * count, experts)
        ends = torch.arange(1, count + 1, device=self._device) * rows

        def pass_() -> Callable[[], object]:
            leaf = x.clone().requires_grad_(True)
            outputs = experts.compute_experts(leaf, ends, experts.gate_up, experts.down)
            return lambda: torch.autograd.backward(outputs, torch.ones_like(outputs))

        forward_s, backward_s = self._time_fastest_pass(pass_)
        return forward_s / count, backward_s / count

    def measure_head(self, tokens: int) -> tuple[float, float]:
        """Measure the last piece: norm, head and log-probabilities."""
        given, experts = self._make_device_bin(tokens), self._pieces.get_moe_layer(0).experts
        k = experts.config.num_experts_per_token
        residual, apart = self._draw_normal(tokens, experts), self._draw_normal(tokens * k, experts)
        shares = torch.ones(tokens, k, device=self._device) / k

        def pass_() -> Callable[[], object]:
            leaves = (residual, shares, apart.view(tokens, k, -1))
            coming = PieceInputs(*(one.clone().requires_grad_(True) for one in leaves))
            hidden = self._pieces.run_last(given, coming)
            found = compute_outputs(self._model, given, hidden, 1.0, None).logprobs
            return lambda: torch.autograd.backward(found.sum())

        return self._time_fastest_pass(pass_)

    def _time_fastest_pass(self, pass_: Callable[[], Callable[[], object]]) -> tuple[float, float]:
        """Return forward and backward seconds of the fastest pass, after one warm-up pass."""
        times = []
        for _ in range(1 + REPEATS):
            began_s = self._read_clock_s()
            with torch.enable_grad():
                back = pass_()
            between_s = self._read_clock_s()
            back()
            times.append((between_s - began_s, self._read_clock_s() - between_s))
            self._model.zero_grad(set_to_none=True)
        forward, backward = zip(*times[1:], strict=True)
        return min(forward), min(backward)

    def _read_clock_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock.monotonic()

    def _make_device_bin(self, length: int) -> DeviceBin:
        tokens = (np.arange(length) % self._model.config.vocab_size).astype(np.int32)
        nothing = np.zeros(length, np.float32)
        host_bin = Bin(
            tokens=tokens,
            targets=tokens,
            positions=np.arange(length, dtype=np.int32),
            cu_seqlens=np.array([0, length], np.int32),
            loss_mask=np.ones(length, np.bool_),
            fresh_mask=np.ones(length, np.bool_),
            behaviour_logprobs=nothing,
            advantages=nothing,
            weight=nothing,
        )
        return move_bin_to_device(host_bin, self._device)

    def _draw_normal(self, rows: int, like: MixtureOfExperts) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(rows)
        width = like.config.hidden_size
        return torch.randn(rows, width, generator=generator, device=self._device).to(like.down)


MEASURE_TIMEOUT_S = 300.0  # three curves, of which each takes up to its budget and one more pass


async def load_or_measure_profile(mesh: Mesh, data: JobData) -> dict[str, Any]:
    """Return the profile that a rank publishes for the planner; empty if measuring failed."""
    accelerator = mesh.settings.accelerator
    name = match_kind(accelerator) or accelerator
    about = _build_profile_key(data, name)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    path = Path(mesh.settings.run_root) / "mesh" / "profiles" / f"{digest}.json"
    if (saved_profile := _read_profile(path)) is not None:
        return {"profile": saved_profile}
    training = data.config.training
    try:
        found = await mesh.host.run_blocking(
            measure_profile,
            load_model_config(data),
            torch.device(data.config.mesh.device),
            DTYPES[training.dtype],
            training.bin_tokens,
            mesh.clock,
            name,
            deadline_s=MEASURE_TIMEOUT_S,
        )
    except (RuntimeError, MeshError) as error:  # for instance if memory is too small
        mesh.telemetry.log.warning(
            "the accelerator could not be profiled", kind=name, error=str(error)
        )
        return {}
    document = found.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    mesh.host.replace_file(path, json.dumps(document).encode())
    mesh.telemetry.log.info("profile", kind=name, backward=round(found.backward_factor, 2))
    return {"profile": document}


def _build_profile_key(data: JobData, name: str) -> dict[str, Any]:
    config, training = load_model_config(data), data.config.training
    shape = {key: value for key, value in asdict(config).items() if key != "source_config"}
    return {
        "model": shape,
        "dtype": training.dtype,
        "longest": training.bin_tokens,
        "kind": name,
        "torch": torch.__version__,
    }


def _read_profile(path: Path) -> dict[str, Any] | None:
    """Return the cached profile; None if it is missing or unreadable."""
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        parse_accelerator_costs(document["kind"], "a saved profile")
        return document if float(document["backward"]) > 0 else None
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
