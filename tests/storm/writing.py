"""Documents of several kinds, and corpora of all formats that have them."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

WORDS = (
    "the of and to in is it was for on are as with his they at be this have from block weight "
    "sparse layout river stone green seven house under water light paper begin never again"
).split()
ODD = (
    "dünn 疎な через λ\tx = f(y)\n 'q' 🙂 e\u0301 <|endoftext|> [END] </s> \u200b ﬁ ｆｕｌｌ "
    "\u00a0 12345 4.5e-6 {% if %} \\n \x7f"
).split(" ")


def _sentence(draw, words):
    return " ".join(draw.choices(words, k=draw.randint(5, 14))) + draw.choice(
        ". .\n ,\n\n !".split(" ")
    )


def _text(draw, words, least, most):
    return " ".join(_sentence(draw, words) for _ in range(draw.randint(least, most)))


def plain(draw, number):
    return _text(draw, WORDS, 3, 9) + f" number {number}"


def odd(draw, number):
    return _text(draw, [*WORDS[:9], *ODD], 3, 9) + f" number {number}"


def uneven(draw, number):
    sizes = draw.choice([(1, 1), (1, 2), (3, 9), (40, 60)])
    return _text(draw, WORDS, *sizes) + f" number {number}"


def repeated(draw, number):
    """Half of the documents are copies of another one."""
    chosen = random.Random(draw.randrange(6)) if number % 2 else draw
    return _text(chosen, WORDS, 3, 9)


WRITINGS = {"plain": plain, "odd": odd, "uneven": uneven, "repeated": repeated}
"""Name -> function (source of random numbers, number) -> a document."""


def documents(kind: str, count: int, seed: int) -> list[str]:
    """Returns documents, the same ones for the same arguments."""
    draw = random.Random(f"{kind} {seed}")
    return [WRITINGS[kind](draw, number).strip() for number in range(count)]


def _rows(texts):
    """Rows with other text in other columns, in which a reader may look by mistake."""
    return [
        {"id": number, "text": text, "content": text[::-1], "größe": text.upper()}
        for number, text in enumerate(texts)
    ]


def folder(place: Path, texts):
    place.mkdir(parents=True)
    for number, text in enumerate(texts):
        (place / f"{number:03}.txt").write_bytes(text.encode())
    return place


def _lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def jsonl(place: Path, texts):
    place.mkdir(parents=True)
    (place / "rows.jsonl").write_bytes(_lines(_rows(texts)))
    return place / "rows.jsonl"


def zipped(place: Path, texts):
    place.mkdir(parents=True)
    half = len(texts) // 2
    rows = _rows(texts)
    (place / "a.jsonl.gz").write_bytes(gzip.compress(_lines(rows[:half]), mtime=0))
    (place / "b.jsonl.gz").write_bytes(gzip.compress(_lines(rows[half:]), mtime=0))
    return place


def parquet(place: Path, texts):
    import pyarrow as pa
    import pyarrow.parquet as pq

    place.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(_rows(texts)), place / "rows.parquet", row_group_size=7)
    return place


def saved(place: Path, texts):
    import datasets

    place.parent.mkdir(parents=True, exist_ok=True)
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(_rows(texts)).save_to_disk(place)
    return place


def chat(place: Path, texts):
    place.mkdir(parents=True)
    rows = []
    for text in texts:
        words = text.split(" ")
        half = max(1, min(6, len(words) // 2))
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": " ".join(words[:half])},
                    {"role": "assistant", "content": " ".join(words[half : half + 8]) or "yes"},
                ]
            }
        )
    (place / "rows.jsonl").write_bytes(_lines(rows))
    return place / "rows.jsonl"


def answers(place: Path, texts):
    place.mkdir(parents=True)
    rows = [{"prompt": text[:20], "answer": text[20:50] or "yes"} for text in texts]
    (place / "rows.jsonl").write_bytes(_lines(rows))
    return place / "rows.jsonl"


def ids(place: Path, texts, dtype="<u2"):
    """Ids of bytes, 256 after each document."""
    place.mkdir(parents=True)
    joined = [number for text in texts for number in (*text.encode(), 256)]
    np.array(joined, dtype).tofile(place / "train.bin")
    return place


FORMATS: dict[str, Callable] = {
    each.__name__: each for each in (folder, jsonl, zipped, parquet, saved, chat, answers, ids)
}
"""Name -> function (place, texts) -> what `data.corpus` names."""

TEXT_FORMATS = ("folder", "jsonl", "zipped", "parquet", "saved")
"""Those that have the documents as they are."""
