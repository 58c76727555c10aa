"""Writes a version of a job as a directory that Hugging Face's tools read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf_writer import ModelWriter, group_by_layer
from meshrl.common.model.network.lora import is_adapter_tensor, merge_adapters, save_adapter

ADAPTER_FOLDER, BASE_FOLDER = "adapter", "base"


def write_version(
    data: JobData, config: ModelConfig, tensors: Mapping[str, Tensor], out: Path, final_path: Path
) -> None:
    """Writes config.json, safetensors and tokenizer to `out`, which is to become `final_path`; for
    a run with adapters merged, with the adapters in PEFT's layout in `out/adapter`.
    """
    writer = VersionWriter(data, config, tensors, out, final_path)
    for names in group_by_layer(tensors):
        writer.add_layers({name: tensors[name] for name in names})
    writer.finish()


class VersionWriter:
    """Does so for who has some of the tensors at a time. It blocks."""

    def __init__(
        self,
        data: JobData,
        config: ModelConfig,
        meta_tensors: Mapping[str, Tensor],
        out: Path,
        final_path: Path,
    ) -> None:
        """Of `meta_tensors` only types and shapes are looked at."""
        self._data, self._config, self._out, self._final_path = data, config, out, final_path
        plain = {
            name: tensor for name, tensor in meta_tensors.items() if not is_adapter_tensor(name)
        }
        to = config, plain, data.tokenizer_file
        self._merged_writer = ModelWriter(out, *to, origin=data.initial_model_dir)
        self._adapter_tensors: dict[str, Tensor] | None = (
            None if len(plain) == len(meta_tensors) else {}
        )
        # Where nobody else has what the adapters were trained on.
        own = data.initial_model_dir is None or data.config.warm_start.demonstrations
        self._base_writer: ModelWriter | None = None
        if self._adapter_tensors is not None and own:
            self._base_writer = ModelWriter(out / BASE_FOLDER, *to, origin=data.initial_model_dir)

    def add_layers(self, tensors: Mapping[str, Tensor]) -> None:
        """Some tensors, whole layers of them: see `by_layer`."""
        self._merged_writer.write_tensors(
            merge_adapters(self._config, tensors, self._data.config.lora.scale)
        )
        if self._adapter_tensors is not None:
            self._adapter_tensors |= {
                name: tensor for name, tensor in tensors.items() if is_adapter_tensor(name)
            }
        if self._base_writer is not None:
            self._base_writer.write_tensors(
                {name: t for name, t in tensors.items() if not is_adapter_tensor(name)}
            )

    def finish(self) -> None:
        """All were added."""
        self._merged_writer.finish()
        if self._base_writer is not None:
            self._base_writer.finish()
        if self._adapter_tensors is not None:
            there = self._final_path / BASE_FOLDER
            if self._base_writer is None:
                there = self._data.shared_bundle / self._data.config.model.path
            about = self._config, self._adapter_tensors, self._data.config.lora.alpha
            save_adapter(self._out / ADAPTER_FOLDER, *about, str(there))

    def close(self) -> None:
        """What was begun and not finished is of no use."""
        for writer in (self._merged_writer, self._base_writer):
            if writer is not None:
                writer.close()
