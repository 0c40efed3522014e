"""Task files that somebody else wrote are read or refused."""

import json

import drawn
from drawn_inputs import DrawnInputs

from sparse_dataflow.evaluation.tasks.items import Item, read_items

ITEM = {"context": "a", "choices": ["b", "c"], "answer": 1, "document": "d"}
EXAMPLE = {"input": "a", "target_scores": {"b": 0, "c": 1}, "target": ["c"]}


def test_a_foreign_task_file_is_read_or_refused(tmp_path):
    counts, path = DrawnInputs("tasks"), tmp_path / "task.jsonl"
    for _ in counts:
        draw = counts.draw
        lines = [
            drawn.json_bytes(draw, ITEM) if draw.random() < 0.3 else json.dumps(ITEM).encode()
            for _ in range(draw.randint(0, 4))
        ]
        if draw.random() < 0.3:  # Of BIG-bench.
            lines = [drawn.json_bytes(draw, {"examples": [EXAMPLE]})]
        path.write_bytes(draw.choice([b"", b"\xef\xbb\xbf"]) + b"\n".join(lines))
        with counts.one(path.read_bytes()):
            assert all(isinstance(item, Item) for item in read_items(path))
