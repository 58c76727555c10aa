"""Writes a committed version as a Hugging Face directory, from the store's files alone.

`python -m services.weights.export --run RUN --out DIR` takes a run's last committed checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from common.api.weights import Manifest
from common.blob import unpack
from common.bulk import ChunkStore
from common.checkpoints import committed
from common.errors import NotFound
from common.model.config import ModelConfig
from common.model.hf import save_model
from common.model.transfer import tensor_of


def export(run: Path, bundle: Path, hf_config: dict[str, object], out: Path) -> Path:
    """Writes config.json, model.safetensors and tokenizer.json of the last commit to `out`."""
    found = committed(run)
    if found is None:
        raise NotFound(f"{run} has no checkpoint", fix="the run ended before version 0")
    checkpoint = json.loads(found.read_text())
    chunks = ChunkStore(run / "store")
    manifest = unpack(Manifest, chunks.read(checkpoint["weights"]))
    content = {t.chunk: chunks.read(t.chunk) for t in manifest.tensors}
    state = {t.name: tensor_of(t, content[t.chunk]) for t in manifest.tensors}
    out.mkdir(parents=True, exist_ok=True)
    save_model(str(out), ModelConfig.from_hf(hf_config), state, str(bundle / "tokenizer.json"))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    document = json.loads((arguments.run / "job.json").read_text())["document"]
    bundle = Path(document["bundle"]["dir"])
    hf_config = document["model"]["config"]
    if document["model"]["path"]:
        hf_config = json.loads((bundle / document["model"]["path"] / "config.json").read_text())
    scratch = arguments.out.with_name(arguments.out.name + ".partial")
    export(arguments.run, bundle, hf_config, scratch)
    if arguments.out.exists():
        shutil.rmtree(arguments.out)
    scratch.rename(arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
