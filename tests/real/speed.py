"""Tokens a second of one text on one core, ours and llama.cpp's of the same model, in turns.

taskset -c 0 python tests/real/speed.py --model=smollm2 --rows=FOLDER --out=FILE.json

Each round reads a prompt and writes some tokens with every program once.  Seconds are those of a
core, which other programs change less than the time that passes.  llama.cpp has its default
settings, and one thread.  FOLDER is the model pruned to rows of 16, as `table.py` leaves it.
"""

import argparse
import dataclasses
import functools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

import sparse_dataflow as sd
from sparse_dataflow.commands import measurement
from sparse_dataflow.evaluation import kv_cache
from sparse_dataflow.evaluation.sampling import Sampler, Sampling
from sparse_dataflow.hardware import detect
from tests.real import models, results
from tests.real.llama_logits import Logits

FILES = {
    "llama.cpp F16": ("F16", "F16"),
    "llama.cpp Q8_0": ("Q8_0", "Q8_0"),
    "llama.cpp Q4_0": ("Q4_0", "Q8_0"),
    "llama.cpp, the file": (),
}


class Ours:
    """A model as `sd.generate` runs it, in a dtype."""

    def __init__(self, model, dtype, length):
        config = self.config = dataclasses.replace(model.model, compute_dtype=dtype)
        self.weights, self.length = kv_cache.prepare(config, model.weights), length
        program = functools.partial(kv_cache.program, config=config)
        self.prefill, self.decode = program(kv_cache.prefill), program(kv_cache.decode_tokens)
        self.sampler = Sampler.of(Sampling(), 1)

    def seconds(self, ids, count):
        """(seconds of a core of the prompt, the same of each token after it)"""
        start = time.process_time()
        lengths = np.full(1, len(ids), np.int32)
        logits, caches = jax.block_until_ready(
            self.prefill(
                self.config,
                self.weights,
                jnp.asarray(ids)[None],
                lengths,
                cache_tokens=self.length,
            )
        )
        middle, last = time.process_time(), self.sampler(logits, 0)
        for step in range(count):
            written, caches = self.decode(
                self.config, self.weights, caches, last, lengths + np.int32(step), self.sampler,
                np.int32(step), np.int32(1), most=1,
            )  # fmt: skip
            last = written[0]
        jax.block_until_ready(last)
        return middle - start, (time.process_time() - middle) / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", default="", help="folder of the model in rows of 16")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", default=str(results.FOLDER))
    options = parser.parse_args()
    path = getattr(models, options.model)()
    model = sd.load(path)
    ids = np.random.default_rng(0).integers(1000, 20_000, options.prompt).astype(np.int32)
    length = options.prompt + options.tokens
    programs = {
        "ours, bfloat16": Ours(model, "bfloat16", length),
        "ours, float32": Ours(model, "float32", length),
    }
    if options.rows:
        programs["ours, rows of 16, bfloat16"] = Ours(sd.load(options.rows), "bfloat16", length)
    for name, types in FILES.items():
        file = models.as_type(path, models.FOLDER, *types) if types else path
        programs[name] = Logits(file, context=length, threads=1)
    seconds = {name: [] for name in programs}
    for turn in range(options.rounds + 1):
        for name, program in programs.items():
            pair = program.seconds(ids, options.tokens)
            if turn:  # The first compiles, and reads the file.
                seconds[name].append(pair)
    seconds = {name: np.array(pairs) for name, pairs in seconds.items()}
    rows = {}
    for name, pairs in seconds.items():
        prompt, token = np.median(pairs, axis=0)
        ratio = np.median(seconds["llama.cpp F16"][:, 1] / pairs[:, 1])
        rows[name] = {
            "tokens_per_second": 1 / token,
            "prompt_tokens_per_second": options.prompt / prompt,
            "speed_over_f16": float(ratio),
        }
        print(
            f"{name:28} {1 / token:7.1f} tokens/s, {options.prompt / prompt:7.0f} of a prompt, "
            f"{ratio:.2f}x llama.cpp F16",
            flush=True,
        )
    facts = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    facts |= {"prompt": options.prompt, "tokens": options.tokens, "rounds": options.rounds}
    result = [facts | {"rows": rows}]
    measurement.keep(options.out, f"speed_{options.model}", detect.cpu_name(), result)


if __name__ == "__main__":
    main()
