"""Contents of files as nobody wrote them: torn, flipped, replaced, and JSON with other values."""

import copy
import json

from hypothesis import strategies as st

EXTREMES = [
    None, True, False, -1, 0, 10**6, 10**30, -(10**30), 1e308, -1e308, float("nan"), float("inf"),
    "", "x" * 5000, "\0", "../../../etc/passwd", "/etc/passwd", "\ud800", [], {}, [[]], [{}],
    {"": 0}, [None] * 300, "1e999", 0.5,
]  # fmt: skip
WHOLE = {
    "nothing": b"",
    "another encoding": b"\xff\xfe",
    "an open brace": b"{",
    "100,000 open brackets": b"[" * 100_000,
    "zeros": b"\0" * 4096,
    "null": b"null",
}


def damaged(content: bytes, leave: int = 0):
    """A strategy of contents made from `content`, whose first `leave` bytes stay."""
    ways = [
        _truncated(content),
        _flipped(content, leave),
        _spliced(content),
        st.binary(max_size=200),
        st.sampled_from(sorted(WHOLE)).map(WHOLE.get),
    ]
    try:
        tree = json.loads(content)
    except ValueError:
        return st.one_of(ways)
    return st.one_of(*ways, _other_values(tree), _other_values(tree), _other_values(tree))


def _truncated(content):
    return st.integers(0, max(0, len(content) - 1)).map(lambda size: content[:size])


def _flipped(content, leave):
    last = max(leave * 8, len(content) * 8 - 1)

    def flip(bits):
        changed = bytearray(content)
        for bit in bits:
            if bit // 8 < len(changed):
                changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    return st.lists(st.integers(leave * 8, last), min_size=1, max_size=8).map(flip)


def _spliced(content):
    return st.tuples(st.integers(0, len(content)), st.integers(0, 40), st.binary(max_size=40)).map(
        lambda cut: content[: cut[0]] + cut[2] + content[cut[0] + cut[1] :]
    )


@st.composite
def _other_values(draw, tree):
    """JSON of `tree` where one or two values are others, gone, or under another name."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(1, 2))):
        holder, key = draw(st.sampled_from(_places(tree) or [([tree], 0)]))
        how = draw(st.integers(0, 5))
        if how == 0 and isinstance(holder, dict):
            holder.pop(key, None)
        elif how == 1 and isinstance(holder, dict) and key in holder:
            holder[key + "x"] = holder.pop(key)
        elif key in holder if isinstance(holder, dict) else key < len(holder):
            holder[key] = copy.deepcopy(draw(st.sampled_from(EXTREMES)))
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def _places(tree, deepest=400):
    """(container, key or index) of values in a tree, near ones first."""
    found, rest = [], [tree]
    while rest and len(found) < deepest:
        here = rest.pop(0)
        if not isinstance(here, dict | list):
            continue
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        found += [(here, key) for key in keys[:20]]
        rest += [here[key] for key in keys[:20]]
    return found
