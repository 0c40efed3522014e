"""Tokens that torch writes with a dense GPT from a cache, for `decode_bench --torch`.

It runs in its own process, by any Python that has torch: threads of torch and XLA would wait for
each other in one.  It reads the shape as JSON from its arguments.  For each line of its input it
writes some tokens with each text and prints the seconds of a core.

The GPT has learned positions, layernorms, biases and a tied output layer, as `torch_step` trains.
Shapes in names: B texts, D d_model, H heads, K head width.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

READY = "ready\n"


def start(python: str, shape: dict[str, Any]) -> Callable[[], float]:
    """Starts the process; returns a function that writes the tokens and returns the seconds of a
    core.

    Args:
      python: path of an interpreter with torch.
      shape: see `main`.

    Raises:
      ValueError: the interpreter does not start or has no torch.
    """
    command = [python, "-u", str(Path(__file__).resolve()), json.dumps(shape)]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    except OSError as error:
        raise ValueError(f"{python} does not start ({error.strerror})") from error
    lines, answers = process.stdin, process.stdout
    assert lines is not None and answers is not None
    if answers.readline() != READY:
        _, errors = process.communicate()
        raise ValueError(f"{python} has no torch: {(errors.splitlines() or ['it ended'])[-1]}")

    def seconds() -> float:
        lines.write("\n")
        lines.flush()
        return float(answers.readline())

    return seconds


def main(shape: dict[str, Any]) -> None:
    """Decodes for each line of the input.

    Args:
      shape: "layers", "width", "heads", "hidden", "vocabulary", "activation", "dtype", "batch",
        "cached" and "tokens".
    """
    import torch
    from torch.nn import functional as F

    D, H, B = shape["width"], shape["heads"], shape["batch"]
    dtype = getattr(torch, shape["dtype"])

    def draw(*sides):
        return (torch.randn(*sides) * 0.02).to(dtype)

    def linear(inputs, outputs):
        return draw(outputs, inputs), torch.zeros(outputs, dtype=dtype)

    def norm():
        return torch.ones(D, dtype=dtype), torch.zeros(D, dtype=dtype)

    hidden = shape["hidden"]
    layers = [
        (norm(), linear(D, 3 * D), linear(D, D), norm(), linear(D, hidden), linear(hidden, D))
        for _ in range(shape["layers"])
    ]
    length = shape["cached"] + shape["tokens"]
    embedding, positions, last = draw(shape["vocabulary"], D), draw(length, D), norm()
    caches = [torch.zeros(2, B, H, length, D // H, dtype=dtype) for _ in layers]

    def decode(tokens_B, at):
        x_BxD = F.embedding(tokens_B, embedding) + positions[at]
        for (norm1, qkv, out, norm2, mlp_in, mlp_out), cache in zip(layers, caches):
            y = F.linear(F.layer_norm(x_BxD, (D,), *norm1), *qkv).view(B, 3, H, D // H)
            q, cache[0, :, :, at], cache[1, :, :, at] = y.unbind(1)
            keys, values = cache[:, :, :, : at + 1]
            attended = F.scaled_dot_product_attention(q[:, :, None], keys, values)
            x_BxD = x_BxD + F.linear(attended.reshape(B, D), *out)
            y = F.linear(F.layer_norm(x_BxD, (D,), *norm2), *mlp_in)
            y = F.relu(y) if shape["activation"] == "relu" else F.gelu(y, approximate="tanh")
            x_BxD = x_BxD + F.linear(y, *mlp_out)
        return F.linear(F.layer_norm(x_BxD, (D,), *last), embedding).argmax(-1)

    print(READY, end="")
    with torch.inference_mode():
        for _ in sys.stdin:
            begin = time.process_time()
            tokens_B = torch.zeros(B, dtype=torch.int64)
            for step in range(shape["tokens"]):
                tokens_B = decode(tokens_B, shape["cached"] + step)
            tokens_B.tolist()
            print(time.process_time() - begin)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
