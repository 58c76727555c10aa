"""Random checkpoints, saved by `transformers` and read by MeshRL: whether both compute the same.

    OMP_NUM_THREADS=1 python -m loadtests.models --configs 150 --seed 0

Each has an architecture, widths, heads, rotary embedding, windows, mixture and biases drawn at
random, random weights, and in a quarter of the cases a config.json without the keys whose values
are the architecture's defaults. Most sequences are short, every tenth pair is of 2,048 tokens.
Compared are log-probabilities of every token: the trainer's packed forward pass, and of each path
of the built-in engine its scores and what it says of the tokens that it samples.

- `unequal`: checkpoints where one of them differs from `transformers` by more than 1e-4, or that
  are refused; `worst`: the largest difference;
- `silent`: of as many checkpoints with one thing changed that means something else (a key, a type,
  a number), those that are read all the same, and not as `transformers` reads them; `refused`.
"""

from __future__ import annotations

from loadtests.measuring.entry import options, report
from loadtests.models.comparing import PATHS, run

if __name__ == "__main__":
    parser = options(__doc__, configs=150, seed=0)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS, help="of the engine")
    asked = parser.parse_args()
    report(run(asked.configs, asked.seed, asked.paths))
