"""Writer of a Hugging Face checkpoint of random weights, on which the engines are measured.

Usage:

    python -m loadtests.peers.make_model FOLDER            # Qwen2, 4.07M parameters

The same seed writes the same weights. The initialisation is transformers' own (normal, standard
deviation 0.02). The folder has no tokenizer: prompts are token ids.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURES = {"qwen2": "Qwen2", "llama": "Llama"}  # in names of transformers


@dataclass(frozen=True)
class Shape:
    architecture: str = "qwen2"
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 1024
    vocabulary: int = 512
    positions: int = 8192


def write_model(folder: Path, shape: Shape, seed: int = 0) -> int:
    """Write `config.json` and `model.safetensors` (float32); return the parameter count."""
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
    folder = Path(sys.argv[1])
    parameters = write_model(folder, Shape())
    print(f"{folder}: {parameters:,} parameters")


if __name__ == "__main__":
    main()
