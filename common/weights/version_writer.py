"""Writer of a job's version as a Hugging Face directory."""

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
    """Write config.json, safetensors and tokenizer to `out`, which will be moved to `final_path`.

    Adapters are merged, and also written in PEFT's layout to `out/adapter`.
    """
    writer = VersionWriter(data, config, tensors, out, final_path)
    for names in group_by_layer(tensors):
        writer.add_layers({name: tensors[name] for name in names})
    writer.finish()


class VersionWriter:
    """Writer for callers that have some of the tensors at a time. Blocking."""

    def __init__(
        self,
        data: JobData,
        config: ModelConfig,
        meta_tensors: Mapping[str, Tensor],
        out: Path,
        final_path: Path,
    ) -> None:
        """Create the writer.

        Args:
            meta_tensors: Tensors of which only dtypes and shapes are read.
        """
        self._data, self._config, self._out, self._final_path = data, config, out, final_path
        plain = {
            name: tensor for name, tensor in meta_tensors.items() if not is_adapter_tensor(name)
        }
        to = config, plain, data.tokenizer_file
        self._merged_writer = ModelWriter(out, *to, origin=data.initial_model_dir)
        self._adapter_tensors: dict[str, Tensor] | None = (
            None if len(plain) == len(meta_tensors) else {}
        )
        # The base is written if no other directory has it.
        own = data.initial_model_dir is None or data.config.warm_start.demonstrations
        self._base_writer: ModelWriter | None = None
        if self._adapter_tensors is not None and own:
            self._base_writer = ModelWriter(out / BASE_FOLDER, *to, origin=data.initial_model_dir)

    def add_layers(self, tensors: Mapping[str, Tensor]) -> None:
        """Write some tensors, in whole layers as `group_by_layer` returns them."""
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
        """Finish the files after all tensors were added."""
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
        """Close files that were not finished."""
        for writer in (self._merged_writer, self._base_writer):
            if writer is not None:
                writer.close()
