"""A guessing game: the model finds a hidden letter with the help of hints.

The prompt is the range of the hidden letter, such as `c-h:`. Each turn of the model is one letter.
The game answers `<` if the hidden letter comes before it, and `>` if it comes after it. The game
ends when the letter is found or no guesses are left. Run this file to write data and tokenizer.
"""

import json
import random
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijkl"
GUESSES = 3
WIDEST = 7  # letters in a range: bisection finds one of seven with three guesses
HELD_OUT = 8  # ranges that are never trained on

# ---- the environment -----------------------------------------------------------------------------


class Game:
    """One game, which is one trajectory."""

    def open(self, row: dict[str, Any]) -> str:
        """Return the text that the trajectory begins with."""
        self.hidden = str(row["hidden"])
        self.guesses = 0
        return str(row["prompt"])

    def step(self, text: str) -> dict[str, Any]:
        """Return what follows a turn in which the model wrote `text`."""
        self.guesses += 1
        if text == self.hidden or text not in tuple(LETTERS) or self.guesses == GUESSES:
            return {"done": True}
        return {"append": "<" if self.hidden < text else ">"}

    def result(self, value: Any) -> dict[str, Any]:
        """Return what follows a tool's answer. This game has no tools."""
        raise NotImplementedError

    def close(self) -> None:
        """Release resources. This game has none."""


def game() -> Game:
    """Return an environment; called once per trajectory."""
    return Game()


# ---- the reward ----------------------------------------------------------------------------------


def reward(row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
    """Return 1 for the hidden letter, else 0.1 per guess that the hints allowed."""
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
    """Return one JSON row per range and hidden letter."""
    games = [
        {"prompt": f"{LETTERS[first]}-{LETTERS[last]}:", "hidden": hidden}
        for first, last in ranges
        for hidden in LETTERS[first : last + 1]
    ]
    return "".join(json.dumps(game) + "\n" for game in games)


def main() -> None:
    """Write train.jsonl, held_out.jsonl and tokenizer.json beside this file."""
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
