"""Writes a small classification task (the language of an article of the declaration) as train.tsv and test.tsv to a folder.

python recipes/small/languages.py data/languages
"""

import csv
import json
import sys
from pathlib import Path

TEXTS = Path(__file__).parent / "texts"
HELD_OUT = 5
"""Every fifth article is a test article in all languages, so that no article is in both files."""


def rows(test: bool) -> list[tuple[str, str]]:
    found = []
    for path in sorted(TEXTS.glob("udhr-*.jsonl")):
        language = path.stem.removeprefix("udhr-")
        for number, line in enumerate(path.read_text().splitlines()):
            if (number % HELD_OUT == 0) == test:
                found.append((json.loads(line)["text"].replace("\n", " ")[:300], language))
    return found


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "test"):
        found = rows(name == "test")
        with (folder / f"{name}.tsv").open("w", newline="") as file:
            csv.writer(file, delimiter="\t").writerows([("text", "label"), *found])
        print(f"{folder / name}.tsv: {len(found)} texts")  # noqa: T201 - a script


if __name__ == "__main__":
    main(Path(sys.argv[1]))
