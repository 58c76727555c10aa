"""Cases of the benchmark by name, each of which measures once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from loadtests.memory.generation import measure_engine
from loadtests.memory.training import DENSE, MIXTURE, measure_core

RECOMPUTE = {"training": {"activation_checkpointing": True}}
TWO = {"training": {"ranks": 2}}
CORES: Mapping[str, Callable[[], dict[str, float]]] = {
    "dense": partial(measure_core, DENSE, {}),
    "untied, AdamW": partial(
        measure_core, replace(DENSE, tie_embeddings=False), {"optimizer": {"muon_lr": 0.0}}
    ),
    "recomputed": partial(measure_core, DENSE, RECOMPUTE | {"optimizer": {"muon_lr": 0.0}}),
    "bfloat16": partial(measure_core, DENSE, {"training": {"dtype": "bfloat16"}}),
    "adapters": partial(measure_core, DENSE, {"lora": {"rank": 8}}),
    "adapters, bfloat16, recomputed": partial(
        measure_core,
        DENSE,
        {"lora": {"rank": 8}, "training": {"dtype": "bfloat16", "activation_checkpointing": True}},
    ),
    "critic": partial(measure_core, replace(DENSE, num_layers=4), {"algorithm": {"name": "ppo"}}),
    "experts": partial(measure_core, MIXTURE, {}),
    "experts, AdamW, recomputed": partial(
        measure_core, MIXTURE, RECOMPUTE | {"optimizer": {"muon_lr": 0.0}}
    ),
}
RANKS: Mapping[str, Callable[[], dict[str, float]]] = {
    "2 ranks": partial(measure_core, DENSE, TWO),
    "2 ranks, by layer": partial(measure_core, DENSE, TWO, large=True),
    "2 ranks, by layer, bfloat16, recomputed": partial(
        measure_core,
        DENSE,
        {"training": {"ranks": 2, "dtype": "bfloat16", "activation_checkpointing": True}},
        large=True,
    ),
    "2 ranks, adapters": partial(measure_core, DENSE, TWO | {"lora": {"rank": 8}}),
}
ENGINES: Mapping[str, Callable[[], dict[str, float]]] = {
    "engine, native": partial(measure_engine, DENSE, "native"),
    "engine, native, bfloat16": partial(measure_engine, DENSE, "native", "bfloat16"),
    "engine, native, experts": partial(measure_engine, MIXTURE, "native"),
    "engine, graphs": partial(measure_engine, DENSE, "graphs"),
    "engine, graphs, bfloat16": partial(measure_engine, DENSE, "graphs", "bfloat16"),
}
CASES = {**CORES, **RANKS, **ENGINES}
