"""Benchmark of the memory of a core's ranks: the peak at start, while staging a version, and during
checkpoints.

Usage:

    OMP_NUM_THREADS=1 python -m loadtests.ranks --ranks 4

The ranks are forks of one process that has imported everything, and meet over gloo. Each makes the
learner of a job with a new model, and of one with the same model as a Hugging Face directory. In
bytes, each rank's:

- `drawn`, `read`: the most resident memory above that before it began, until its learner is there;
- `rows`: what the learner's tensors then take: parameters and the optimizer's moments;
- `whole`: of all parameters in float32, the same for all;
- `staged`, `staged_half`: the most that any of them has above its rows while it lays these into the
  chunks of a version that is published in float32, or in bfloat16;
- `saved`: the same while its rows of a checkpoint's state are written to files, and read again.

`above_rows` is the largest share of `whole` that any rank has had beside its rows; `largest` of the
tensors takes that many bytes.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch._dynamo  # which FSDP imports in each process
import torch.distributed as dist

from loadtests.measuring.entry import options, report
from loadtests.measuring.processes import forked
from meshrl.common.api.ranks import Rendezvous
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf_writer import save_model
from meshrl.common.model.files.tensor_source import BATCH_BYTES, batch_by_bytes
from meshrl.common.model.files.tensor_storages import trim_heap
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.tokens.tokenizer import build_character_tokenizer
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.weights.layout.chunk_builder import ChunkBuilder, plan_copies
from meshrl.common.weights.layout.chunk_builder import make_staging_options as how
from meshrl.services.trainer.gang.rank_process import make_rank
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.ranks.row_tasks import write_rows
from meshrl.services.trainer.rows.saved_rows import MASTER_PREFIX, SavedRows

MODEL: dict[str, object] = {  # 200,828,928 parameters
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
SIZES = {  # option -> key of MODEL
    "layers": "num_hidden_layers",
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
}
MEET_S = 600.0


class Peak:
    """Peak memory of this process since the object was created."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present memory
        self.before = resident("VmRSS")

    @property
    def bytes(self) -> int:
        """Peak since the object was created, above the memory at that time."""
        return resident("VmHWM") - self.before


def resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def job(bundle: Path, path: str, ranks: int, shape: dict[str, object]) -> JobData:
    build_character_tokenizer("abc", bundle / "tokenizer.json")
    document = {
        "name": "ranks",
        "model": {"path": path} if path else {"config": shape},
        "training": {"ranks": ranks},
        "mesh": {"workers": ranks + 1},
    }
    return JobData("ranks", JobConfig.from_document(document), bundle, bundle)


@torch.no_grad()
def begin_rank(data: JobData, number: int, ranks: int, meeting: Path) -> dict[str, int]:
    peak = Peak()
    rank = make_rank(data, Placement("g0", "g0.0", data.id, 1, core=True, rank=number, ranks=ranks))
    rank.join(Rendezvous(1, str(meeting), MEET_S, form_timeout_s=MEET_S))
    rank.create_model()
    found = {"peak": peak.bytes, "rows": rank.learner.size_bytes}
    for tensor in rank.learner.get_tensors().values():
        tensor.zero_()  # moments take no memory before they are written to
    found |= {"staged": staged(rank, "F32"), "staged_half": staged(rank, "BF16")}
    found |= {"saved": moved(rank, meeting.with_suffix(".state"))}
    rank.leave()
    return found


@torch.no_grad()
def staged(rank: Rank, dtype: str) -> int:
    """Return the peak memory of this rank above its rows while it stages them as a version's
    chunks.
    """
    outline = rank.learner.get_meta_tensors(False)
    laying = ChunkBuilder(how(outline, dtype))
    trim_heap()
    peak = Peak()
    for names, part, parts in plan_copies(outline, BATCH_BYTES):
        laying.add_rows(
            rank.learner.get_rows(names, part, parts)
        )  # chunks go as soon as they are full
    laying.take_partial_chunk()
    return peak.bytes


@torch.no_grad()
def moved(rank: Rank, directory: Path) -> int:
    """Return the same while its rows of weights and optimizer state go to files and back."""
    weights = {
        MASTER_PREFIX + name: tensor
        for name, tensor in rank.learner.get_meta_tensors(False).items()
    }
    trim_heap()
    peak = Peak()
    for number, names in enumerate(
        batch_by_bytes(weights | dict(rank.learner.get_meta_tensors(True)), BATCH_BYTES)
    ):
        write_rows(rank, directory, names, number, include_masters=True)
    dist.barrier()
    saved = SavedRows(directory)
    rank.learner.restore(saved, lambda name, part: saved.fill(MASTER_PREFIX + name, part))
    return peak.bytes


def all_ranks(data: JobData, ranks: int, directory: Path, name: str) -> list[dict[str, int]]:
    """Return the results of every rank in order, each run as a fork of this process."""

    def work(number: int) -> dict[str, int]:
        torch.set_num_threads(1)
        return begin_rank(data, number, ranks, directory / name)

    return forked(ranks, work)


def measure(ranks: int, shape: dict[str, object], directory: Path) -> dict[str, object]:
    config = ModelConfig.from_hf(shape)
    pid = os.fork()
    if not pid:  # the process that writes the model has it whole
        model = Decoder(config)
        model.initialise(torch.Generator().manual_seed(0))
        save_model(directory / "model", config, model.state_dict())
        os._exit(0)
    os.waitpid(pid, 0)
    with torch.device("meta"):
        sizes = [4 * parameter.numel() for parameter in Decoder(config).parameters()]
    whole = sum(sizes)
    drawn = all_ranks(job(directory, "", ranks, shape), ranks, directory, "drawn")
    read = all_ranks(job(directory, "model", ranks, shape), ranks, directory, "read")
    above = max(one["peak"] - one["rows"] for one in drawn + read)
    return {
        "ranks": ranks,
        "whole": whole,
        "rows": [one["rows"] for one in drawn],
        "drawn": [one["peak"] for one in drawn],
        "read": [one["peak"] for one in read],
        "above_rows": round(above / whole, 3),
        "largest": max(sizes),
        **{
            what: max(one[what] for one in drawn + read)
            for what in ("staged", "staged_half", "saved")
        },
    }


def main() -> None:
    parser = options(__doc__, ranks=4)
    for option, key in SIZES.items():
        parser.add_argument(f"--{option}", type=int, default=MODEL[key], dest=key)
    a = parser.parse_args()
    shape = MODEL | {key: getattr(a, key) for key in SIZES.values()}
    with tempfile.TemporaryDirectory() as directory:
        report(measure(a.ranks, shape, Path(directory)))


if __name__ == "__main__":
    main()
