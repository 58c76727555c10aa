"""Writes a version of a job as a directory that Hugging Face's tools read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf import ModelWriter, by_layer
from meshrl.common.model.network.lora import is_adapter, merged, save_adapter

ADAPTER, BASE = "adapter", "base"


def write_version(
    data: JobData, config: ModelConfig, tensors: Mapping[str, Tensor], out: Path, final: Path
) -> None:
    """Writes config.json, safetensors and tokenizer to `out`, which is to become `final`; for a run
    with adapters merged, with the adapters in PEFT's layout in `out/adapter`.
    """
    writer = VersionWriter(data, config, tensors, out, final)
    for names in by_layer(tensors):
        writer.add({name: tensors[name] for name in names})
    writer.finish()


class VersionWriter:
    """Does so for who has some of the tensors at a time. It blocks."""

    def __init__(
        self,
        data: JobData,
        config: ModelConfig,
        outline: Mapping[str, Tensor],
        out: Path,
        final: Path,
    ) -> None:
        """Of `outline` only types and shapes are looked at."""
        self._data, self._config, self._out, self._final = data, config, out, final
        plain = {name: tensor for name, tensor in outline.items() if not is_adapter(name)}
        to = config, plain, data.tokenizer
        self._whole = ModelWriter(out, *to, origin=data.origin)
        self._adapters: dict[str, Tensor] | None = None if len(plain) == len(outline) else {}
        # Where nobody else has what the adapters were trained on.
        own = data.origin is None or data.config.warm_start.demonstrations
        self._base: ModelWriter | None = None
        if self._adapters is not None and own:
            self._base = ModelWriter(out / BASE, *to, origin=data.origin)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Some tensors, whole layers of them: see `by_layer`."""
        self._whole.add(merged(self._config, tensors, self._data.config.lora.scale))
        if self._adapters is not None:
            self._adapters |= {name: tensor for name, tensor in tensors.items() if is_adapter(name)}
        if self._base is not None:
            self._base.add({name: t for name, t in tensors.items() if not is_adapter(name)})

    def finish(self) -> None:
        """All were added."""
        self._whole.finish()
        if self._base is not None:
            self._base.finish()
        if self._adapters is not None:
            there = self._final / BASE
            if self._base is None:
                there = self._data.bundle_at_home / self._data.config.model.path
            about = self._config, self._adapters, self._data.config.lora.alpha
            save_adapter(self._out / ADAPTER, *about, str(there))

    def close(self) -> None:
        """What was begun and not finished is of no use."""
        for writer in (self._whole, self._base):
            if writer is not None:
                writer.close()
