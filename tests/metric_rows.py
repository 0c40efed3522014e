"""Rows of metrics.jsonl."""


def train_row(step, **changed):
    numbers = {"tokens": 8 * step, "seconds": 0.5 * step, "loss": 3.0, "learning_rate": 1e-3}
    speed = {"gradient_norm": 1.0, "tokens_per_second": 16.0, "mfu": None}
    return {"kind": "train", "step": step, **numbers, **speed, **changed}


def eval_row(step, kind="eval"):
    return {
        "kind": kind, "step": step, "tokens": 8, "seconds": 0.5, "loss": 3.0, "bits_per_byte": 1.5
    }  # fmt: skip
