"""Writes a Hugging Face checkpoint of random weights for the engines to be measured on.

    python -m loadtests.peers.make_model FOLDER            # Qwen2, 4.07M parameters
    python -m loadtests.peers.make_model FOLDER --demo     # the demo's Llama, 0.30M

The same seed writes the same weights. The initialisation is transformers' own (normal, standard
deviation 0.02). The folder has no tokenizer: prompts are token ids.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from pathlib import Path

ARCHITECTURES = {"qwen2": "Qwen2", "llama": "Llama"}  # in names of transformers


@dataclass(frozen=True)
class Shape:
    """A decoder's shape; the head's width is `hidden / heads`."""

    architecture: str = "qwen2"
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 1024
    vocabulary: int = 512
    positions: int = 8192


DEMO = Shape("llama", hidden=96, layers=3, heads=3, kv_heads=1, ffn=256, vocabulary=64)


def write_model(folder: Path, shape: Shape, seed: int = 0) -> int:
    """Writes `config.json` and `model.safetensors` (float32) and returns the parameter count."""
    import torch
    import transformers  # with torch's compiler it takes three CPU-seconds to import

    name = ARCHITECTURES[shape.architecture]
    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(seed)
    model = model_class(
        config_class(
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            intermediate_size=shape.ffn,
            vocab_size=shape.vocabulary,
            max_position_embeddings=shape.positions,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    model.save_pretrained(folder)
    return int(sum(p.numel() for p in model.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--demo", action="store_true", help="start from the demo's shape")
    parser.add_argument("--seed", type=int, default=0)
    for f in fields(Shape):
        kind = str if f.name == "architecture" else int
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=kind)
    args = vars(parser.parse_args())
    given = {f.name: args[f.name] for f in fields(Shape) if args[f.name] is not None}
    shape = replace(DEMO if args["demo"] else Shape(), **given)
    parameters = write_model(args["folder"], shape, args["seed"])
    print(f"{args['folder']}: {shape.architecture}, {parameters:,} parameters")


if __name__ == "__main__":
    main()
