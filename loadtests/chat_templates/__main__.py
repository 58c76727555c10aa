"""Comparison of conversations in published chat templates with the output of `transformers`.

`python -m loadtests.chat_templates FOLDER...` takes each `*.jinja` under the folders, such as those
of an unpacked wheel of TRL or Axolotl, and holds conversations in it, with a small tokenizer that
has the template's special tokens. Prints a line of JSON for each template, then the counts:

- `equal`: every prompt, and every sequence that turns were appended to, is token by token what
  `apply_chat_template` gives for the whole conversation;
- `kept`: the same, but for earlier turns that the template writes otherwise later; what is appended
  is equal, and what was sampled is kept;
- `unread`: the ids are right, but the turn's text or call is in a form that no parser knows;
- `refused`: the template refuses such messages, tells of no tools, or teaches calls that no parser
  knows; said by name, before a token is sampled;
- `unequal`: none of these; exits with 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from loadtests.chat_templates.comparing import OUTCOMES, compared, directory_of
from loadtests.measuring.entry import report
from meshrl.common.base.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    counts = Counter(dict.fromkeys(OUTCOMES, 0))
    for folder in parser.parse_args().folders:
        for file in sorted(folder.rglob("*.jinja")):
            with tempfile.TemporaryDirectory() as place:
                directory_of(file.read_text(encoding="utf-8"), Path(place))
                try:
                    found = compared(Path(place))
                except ConfigError as error:
                    found = {"all": f"refused: {error.message}"}
            counts.update(outcome.partition(":")[0] for outcome in found.values())
            counts["templates"] += 1
            report({"template": f"{folder.name}/{file.name}", **found})
    report(counts)
    sys.exit(bool(counts["unequal"]))


if __name__ == "__main__":
    main()
