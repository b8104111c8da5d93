"""Writes made-up conversations and preference pairs about the articles of the declaration to a folder.

python recipes/small/chats.py data/chats
"""

import json
import sys
from pathlib import Path

TEXTS = Path(__file__).parent / "texts"
LANGUAGES = {"en": "English", "fi": "Finnish", "it": "Italian", "nl": "Dutch", "pl": "Polish", "sv": "Swedish"}
MAX_CHARS = 60


def beginnings(language: str) -> list[str]:
    """The first words of each article."""
    lines = (TEXTS / f"udhr-{language}.jsonl").read_text().splitlines()
    return [json.loads(line)["text"][:MAX_CHARS].rpartition(" ")[0] for line in lines]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    articles = {language: beginnings(language) for language in LANGUAGES}
    chats, pairs = [], []
    for language, name in LANGUAGES.items():
        for number, text in enumerate(articles[language]):
            question = {"role": "user", "content": f"Article {number} in {name}?"}
            chats.append({"messages": [question, {"role": "assistant", "content": text}]})
            other = articles["sv" if language == "en" else "en"][number]
            pairs.append({"prompt": [question], "chosen": text, "rejected": other})
    for file, records in (("chats", chats), ("pairs", pairs)):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
        print(f"{folder / file}.jsonl: {len(records)}")  # noqa: T201 - a script


if __name__ == "__main__":
    main(Path(sys.argv[1]))
