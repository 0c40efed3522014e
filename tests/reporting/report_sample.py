"""A synthetic run for the tests of the report; no number is measured."""

import numpy as np

from sparse_dataflow.reporting.report_data import Continuation, LayoutData, ReportData, VariantData

BITS_PER_NAT = 0.42


def history(seed: int, steps: int, rate: float, tokens_per_step: int, seconds_per_step: float):
    """Returns metrics rows of a noisy power-law loss with eight evaluations."""
    rng = np.random.default_rng(seed)
    rows = []
    every = max(steps // 8, 1)
    for step in range(1, steps + 1):
        loss = 1.6 + 6.0 * (1 + step / 6) ** -rate
        progress = {
            "step": step,
            "tokens": step * tokens_per_step,
            "seconds": step * seconds_per_step,
        }
        noisy = loss + 0.08 * rng.standard_normal()
        rates = {"tokens_per_second": tokens_per_step / seconds_per_step, "mfu": 0.4}
        optimizer = {"learning_rate": 1e-3, "gradient_norm": 1.0}
        rows.append({"kind": "train", **progress, "loss": noisy, **optimizer, **rates})
        if step % every == 0 or step == steps:
            bits = (loss + 0.05) * BITS_PER_NAT
            rows.append({"kind": "eval", **progress, "loss": loss + 0.05, "bits_per_byte": bits})
    return rows


def variant(name: str, **changes) -> VariantData:
    """Returns a synthetic variant; sparse makes 2.4 times as many steps in the same 150 s."""
    sparse = name == "sparse"
    steps, step_seconds = (480, 0.3125) if sparse else (200, 0.75)
    rows = history(1 + sparse, steps, 0.42 if sparse else 0.45, 1024, step_seconds)
    end = [row for row in rows if row["kind"] == "eval"][-1]
    density = 1 / 8 if sparse else 1
    fields = {
        "name": name,
        "loss": end["loss"],
        "bits_per_byte": end["bits_per_byte"],
        "stored_parameters": int(2_228_224 + 25_165_824 * density),
        "training_bytes": int(2**28 * (0.6 + 1.7 * density)),
        "tokens_per_second": 1024 / step_seconds,
        "step_seconds": step_seconds,
        "flops_per_token": 6 * (3.2e6 + 25_165_824 * density),
        "steps": steps,
        "tokens": end["tokens"],
        "train_seconds": end["seconds"],
        "mfu": 0.31 if sparse else 0.52,
        "weight_bytes": 4 * int(2_228_224 + 25_165_824 * density),
        "token_seconds": 0.011 if sparse else 0.034,
        "history": rows,
        "section_seconds": {
            "embed": 0.004,
            "qkv": 0.17 * (0.3 if sparse else 1),
            "attention": 0.031,
            "attn_out": 0.06 * (0.3 if sparse else 1),
            "mlp": 0.39 * (0.29 if sparse else 1),
            "head + loss": 0.052,
            "optimizer": 0.04 * (0.4 if sparse else 1),
            "other": 0.012,
        },
        "memory": {
            "weights": int(110e6 * (0.2 if sparse else 1)),
            "gradients": int(110e6 * (0.2 if sparse else 1)),
            "moments": int(220e6 * (0.2 if sparse else 1)),
            "activations": 92_000_000,
            "logits": 8_400_000,
        },
    }
    return VariantData(**{**fields, **changes})


def layout(projection: str, rows: int, columns: int, layer: int | None, fan_in: int) -> LayoutData:
    """Returns a balanced cyclic layout with power-of-two strides."""
    strides = [0, *(2**i for i in range(fan_in - 1))]
    if columns >= rows:
        mask = [[(c + s) % rows, c] for c in range(columns) for s in strides]
    else:
        per_row = fan_in * columns // rows or 1
        mask = [[r, (r + s) % columns] for r in range(rows) for s in strides[:per_row]]
    fan_in, fan_out = len(mask) // columns, len(mask) // rows
    return LayoutData(projection, layer, rows, columns, 64, mask, fan_in, fan_out, True)


def report(*names: str, **changes) -> ReportData:
    """Returns a synthetic report of the named variants, by default both."""
    code = '        if not isinstance(value, int):\n            raise TypeError("an integer'
    fields = {
        "title": "gpt13b_sparse at the scale 'nano'",
        "command": "python -m experiments.gpt13b_sparse --scale=nano --density=0.125 --block=64 "
        "--run=runs/demo",
        "date": "2025-01-31 12:00",
        "machine": "Synthetic CPU, 2 cores, 15.6 GiB",
        "versions": {"python": "3.13.1", "jax": "0.12.0", "flax": "0.13.0"},
        "corpus": "python_stdlib (1,204 files, 19.4 MiB; 61 files held out)",
        "tokenizer": "byte-level BPE of 2,048 tokens",
        "notes": [
            "Training 13B needs 208 GiB and this machine has 15.6 GiB, so this is the 'nano' "
            "scale; on a pod pass --scale=13b.",
            "Both models were trained on the same documents in the same order.",
        ],
        "variants": [variant(name) for name in names or ("sparse", "dense")],
        "layouts": [
            layout(projection, rows, columns, layer, fan_in)
            for layer in (0, 1)
            for projection, rows, columns, fan_in in (
                ("qkv", 16, 48, 2),
                ("attn_out", 16, 16, 2),
                ("mlp_in", 16, 64, 2),
                ("mlp_out", 64, 16, 8),
            )
        ],
        "flop_ceiling": 4.47,
        "projection_share": 0.887,
        "continuations": [
            Continuation(
                f'def check_{i}(self, value, limit=None):\n    """Reject any other type."""\n'
                f"    if limit is None:\n        limit = self.limit\n    for {'xyz'[i % 3]} in "
                "range(limit):\n",
                code + ' was expected")\n        return value % self.limit\n',
                {
                    "sparse": code + ' is required")\n        return self._check(value)\n',
                    "dense": "        if value is None:\n            return value\n" * 2,
                },
            )
            for i in range(10)
        ],
    }
    return ReportData(**{**fields, **changes})


def bare(**changes) -> ReportData:
    """Returns a report without figures, which renders fast."""
    empty = {"history": [], "section_seconds": {}, "memory": {}}
    variants = [variant(name, **empty) for name in ("sparse", "dense")]
    return report(**{"variants": variants, "layouts": [], **changes})
