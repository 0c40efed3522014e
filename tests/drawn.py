"""Inputs from outside, drawn from a `random.Random`: bytes, text, JSON values, damaged files."""

import json

CHARACTERS = (
    "aZ09 _-=:,./\\'\"[]{}()<>%$#@!~\n\r\t\0\x1b\x07\x7f\x85"
    "é漢\u0301\u200b\u202e\u2028\ufeff\uffff😀\ud800\udcff"
)
TEXTS = ("", "null", "NaN", "1e999", "-0", "../..", "a" * 9000, "é" * 300, "\x1b[2J\nerror: x")
NUMBERS = (0, 1, -1, 2, 255, 2**31, 2**63, -(2**64), 10**40, 10**400, 0.5, -1e308, 5e-324)
SPECIAL = (float("nan"), float("inf"), float("-inf"))
DEPTHS = (99, 100, 101, 900, 990, 9_990, 100_000)
PIECES = (
    b"\0", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\n", b"\r\n", b'"', b"\\",
    b"\\ud800", b"[", b"]", b"{", b"}", b":", b",", b"null", b"true", b"NaN", b"Infinity", b"-",
    b"1e999", b"9" * 5000, b" " * 999,
)  # fmt: skip


def text(draw, longest=12):
    """Returns text of any characters, lone surrogates included."""
    if draw.random() < 0.2:
        return draw.choice(TEXTS)
    return "".join(draw.choices(CHARACTERS, k=draw.randint(0, longest)))


def value(draw, depth=3):
    """Returns a JSON value."""
    kind = draw.randrange(10 if depth else 6)
    if kind < 2:
        return text(draw)
    if kind < 6:
        return draw.choice([None, True, False, *NUMBERS, *SPECIAL])
    if kind < 7 and draw.random() < 0.2:
        return nested(draw.choice(DEPTHS[:3]))
    size = draw.randint(0, 3)
    if kind < 9:
        return [value(draw, depth - 1) for _ in range(size)]
    return {text(draw): value(draw, depth - 1) for _ in range(size)}


def nested(depth):
    """Returns lists inside each other."""
    tower = []
    for _ in range(depth - 1):
        tower = [tower]
    return tower


def json_bytes(draw, example):
    """Returns the bytes of a JSON object like an example: fields changed, missing or added, and
    sometimes damaged or nested more deeply than Python's parser follows."""
    changed = dict(example)
    for name in draw.sample(sorted(changed), draw.randint(0, min(3, len(changed)))):
        if draw.random() < 0.2:
            del changed[name]
        elif isinstance(changed[name], dict) and draw.random() < 0.5:
            changed[name] = {**changed[name], text(draw): value(draw)}
        else:
            changed[name] = value(draw)
    if draw.random() < 0.1:
        changed[text(draw)] = value(draw)
    data = json.dumps(changed, ensure_ascii=draw.random() < 0.5).encode(errors="surrogatepass")
    if draw.random() < 0.1:
        deep = draw.choice(DEPTHS)
        tower = draw.choice([b"[" * deep + b"]" * deep, b'{"a":' * deep + b"1" + b"}" * deep])
        data = data[:-1] + b', "deep": ' + tower + b"}"
    return damaged(draw, data) if draw.random() < 0.4 else data


def damaged(draw, data):
    """Returns bytes with some flipped, deleted, repeated, inserted or cut off."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        start = draw.randint(0, len(data))
        end = min(len(data), start + draw.choice([1, 2, 8, 100]))
        kind = draw.randrange(6)
        if kind == 0 and start < len(data):
            data[start] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[start:end]
        elif kind == 2:
            data[start:start] = data[start:end]
        elif kind == 3:
            data[start:start] = draw.choice(PIECES)
        elif kind == 4:
            data[start:end] = draw.randbytes(end - start)
        elif draw.random() < 0.3:
            del data[start:]
    return bytes(data)
