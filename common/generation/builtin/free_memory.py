"""Reading of the memory that is free for an engine on its device."""

from __future__ import annotations

from pathlib import Path

import torch

from meshrl.common.mesh.process.diagnosis.host_limits import measure_free_space


def measure_free_bytes(device: torch.device) -> int:
    """Measure the free memory of a GPU, or of this host within its control groups.

    On a GPU this creates the process's CUDA context. Blocks that PyTorch has reserved count as
    free.
    """
    if device.type != "cuda":
        return measure_free_space(Path()).memory_bytes
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes)
