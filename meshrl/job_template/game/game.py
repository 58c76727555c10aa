"""A guessing game: the model finds a hidden letter, told after each guess which way it lies.

The prompt says among which letters it is hidden, as in `c-h:`. Each turn of the model is a letter.
The game answers `<` when the hidden one comes before it, `>` when after it, and ends when it is
found or the guesses are used up. Run as a script, this file writes data and tokenizer anew.
"""

import json
import random
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijkl"
GUESSES = 3
WIDEST = 7  # letters to choose among: as many as halving finds with three guesses
HELD_OUT = 8  # ranges that are never trained on

# ---- the environment -----------------------------------------------------------------------------


class Game:
    """One game, which is one trajectory."""

    def open(self, row: dict[str, Any]) -> str:
        """The text that the trajectory begins with."""
        self.hidden = str(row["hidden"])
        self.guesses = 0
        return str(row["prompt"])

    def step(self, text: str) -> dict[str, Any]:
        """What follows a turn of the model, which wrote `text`."""
        self.guesses += 1
        if text == self.hidden or text not in tuple(LETTERS) or self.guesses == GUESSES:
            return {"done": True}
        return {"append": "<" if self.hidden < text else ">"}

    def result(self, value: Any) -> dict[str, Any]:
        """What follows a tool's answer; this game has no tools."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to let go."""


def game() -> Game:
    """The environment: called once for each trajectory."""
    return Game()


# ---- the reward ----------------------------------------------------------------------------------


def reward(row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
    """1 for the hidden letter; else 0.1 for each guess that could have been right."""
    first, last = row["prompt"][0], row["prompt"][2]
    sensible = 0
    for guess in (turn["text"] for turn in turns if turn["role"] == "model"):
        if guess == row["hidden"]:
            return 1.0
        if guess not in tuple(LETTERS) or not first <= guess <= last:
            break
        sensible += 1
        if row["hidden"] < guess:
            last = chr(ord(guess) - 1)
        else:
            first = chr(ord(guess) + 1)
    return 0.1 * sensible


# ---- data and tokenizer --------------------------------------------------------------------------


def rows(ranges: list[tuple[int, int]]) -> str:
    """A row for every letter that may be hidden in each of the ranges, one a line."""
    games = [
        {"prompt": f"{LETTERS[first]}-{LETTERS[last]}:", "hidden": hidden}
        for first, last in ranges
        for hidden in LETTERS[first : last + 1]
    ]
    return "".join(json.dumps(game) + "\n" for game in games)


def main() -> None:
    """Writes train.jsonl, held_out.jsonl and tokenizer.json beside this file."""
    from tokenizers import Tokenizer, decoders, models

    here = Path(__file__).parent
    count = len(LETTERS)
    ranges = [(i, j) for i in range(count) for j in range(i + 2, min(i + WIDEST, count))]
    random.Random(0).shuffle(ranges)
    (here / "held_out.jsonl").write_text(rows(ranges[:HELD_OUT]))
    (here / "train.jsonl").write_text(rows(ranges[HELD_OUT:]))

    vocabulary = {character: token for token, character in enumerate("<>-:" + LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))  # each character is a token
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(here / "tokenizer.json"))


if __name__ == "__main__":
    main()
