"""Draw a toy corpus and toy conversations about it, for docs/data.md.

    python examples/chat/draw.py FOLDER

FOLDER/corpus.jsonl is text about the colours of 48 things. FOLDER/chat.jsonl has conversations about 36 of them, and
FOLDER/unseen.jsonl a question about each of the other 12, without an answer.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

THINGS = (
    "lamp chair boat kite drum bell coat shoe door gate cup bowl plate spoon book desk bed rug wall roof car bus train "
    "bike truck tent rope ball doll ring hat scarf glove clock phone piano flute horse goat duck fish crow frog snail "
    "rose fern oak pine"
)
COLOURS = ("red", "blue", "green", "white", "black", "yellow", "grey", "brown")
ASKED = 36


def lines(rows: Sequence[object]) -> str:
    """Return JSON Lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def main(folder: Path) -> None:
    """Write the three files, the same ones each time."""
    draw = random.Random(0)
    things = THINGS.split()
    draw.shuffle(things)
    colour = {thing: draw.choice(COLOURS) for thing in things}
    question = {thing: f"What colour is the {thing}?" for thing in things}
    answer = {thing: f"The {thing} is {colour[thing]}." for thing in things}
    corpus = [
        " ".join(f"{question[t]} {answer[t]}" for t in draw.sample(things, 6))
        for _ in range(4000)
    ]
    chats = []
    for _ in range(2000):
        asked = draw.sample(things[:ASKED], draw.randint(1, 3))
        turns = (("user", question), ("assistant", answer))
        chats.append([{"role": role, "content": of[t]} for t in asked for role, of in turns])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.jsonl").write_text(lines([{"text": text} for text in corpus]))
    (folder / "chat.jsonl").write_text(lines([{"messages": chat} for chat in chats]))
    unseen = [{"messages": [{"role": "user", "content": question[t]}]} for t in things[ASKED:]]
    (folder / "unseen.jsonl").write_text(lines(unseen))
    print("\n".join(answer[t] for t in things[ASKED:]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
