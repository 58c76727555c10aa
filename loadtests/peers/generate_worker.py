"""Worker with transformers' `generate` behind a pipe: one process, one thread, static batches.

Usage:

    python -m loadtests.peers.generate_worker --model DIR --dtype float32

The protocol is that of `vllm_worker`: a ready line, then one answer per request line. All prompts
of a request are one batch, padded on the left to the longest, which runs until its longest answer
is done; `tokens` counts what was asked for. It computes no log-probabilities, which the others do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # read when torch is imported

import torch
import transformers
from transformers import AutoModelForCausalLM

PADDING = 0  # any id of the vocabulary: the attention mask hides it
WARM_UP_SEQUENCES = 32
WARM_UP_TOKENS = 8


def load(model: Path, dtype: str) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    loaded.generation_config.update(
        eos_token_id=None, pad_token_id=PADDING, top_k=0, top_p=1.0, temperature=1.0
    )
    return loaded.eval()


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], new_tokens: list[int], greedy: bool) -> int:
    """Generate `max(new_tokens)` tokens for every prompt; return the requested number."""
    longest, steps = max(map(len, prompts)), max(new_tokens)
    ids = torch.full((len(prompts), longest), PADDING)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=not greedy,
        max_new_tokens=steps,
        use_cache=True,
    )
    if out.shape != (len(prompts), longest + steps):
        raise RuntimeError(f"asked for {longest} + {steps} tokens, got {tuple(out.shape)}")
    return sum(new_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()

    began = time.perf_counter()
    model = load(args.model, args.dtype)
    for n in (1, WARM_UP_SEQUENCES):
        generate(model, [[1] * 4] * n, [WARM_UP_TOKENS] * n, greedy=False)
    start = {
        "ready": True,
        "peer": f"transformers {transformers.__version__} generate",
        "dtype": str(model.dtype).removeprefix("torch."),
        "start_s": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(start), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = generate(model, request["prompts"], request["new_tokens"], request["greedy"])
        answer = {
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "tokens": tokens,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
