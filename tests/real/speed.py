"""Tokens a second of one text on one core, ours and llama.cpp's of the same model, in turns.

taskset -c 0 python tests/real/speed.py --model=smollm2

Each round reads a prompt and writes some tokens with every program once.  Seconds are those of a
core, which other programs change less than the time that passes.  llama.cpp has its default
settings, and one thread.  Half of the weights in rows of 16 are the largest by their squares, which
are as fast as those that pruning chooses.
"""

import argparse
import dataclasses
import functools
import os
import shlex
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import sparse_dataflow as sd
from sparse_dataflow.commands import measurement
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.evaluation import decoded_form, kv_cache
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


def in_rows(model, density=0.5, outputs=16):
    """The model with a share of its weights in rows of 1 x `outputs`, the largest by squares."""
    spec = LinearSpec("masked", density=density, block=1, block_outputs=outputs)

    def masked(arrays):
        mask = spec.weight.best(spec.weight.scores(arrays["kernel"] ** 2, spec), spec)
        return {**arrays, "kernel": arrays["kernel"] * mask, "mask": mask}

    blocks = {
        name: masked(arrays) if "kernel" in arrays else arrays
        for name, arrays in model.params["blocks"].items()
    }
    config = model.model.with_linears(spec)
    return dataclasses.replace(model, model=config, params={**model.params, "blocks": blocks})


class Ours:
    """A model as `sd.generate` runs it, in a dtype and a form."""

    def __init__(self, model, dtype, length, form=decoded_form.AUTO):
        config = self.config = dataclasses.replace(model.model, compute_dtype=dtype)
        self.weights, self.length = kv_cache.prepare(config, model.params, form), length
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
    rows = in_rows(model)
    programs |= {
        "ours, int8": Ours(model, "bfloat16", length, decoded_form.INT8),
        "ours, half, bfloat16": Ours(rows, "bfloat16", length),
        "ours, half, int8": Ours(rows, "bfloat16", length, decoded_form.INT8),
    }
    del rows, model
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
        over_f16, over_q8 = (
            float(np.median(seconds[f"llama.cpp {kind}"][:, 1] / pairs[:, 1]))
            for kind in ("F16", "Q8_0")
        )
        rows[name] = {
            "tokens_per_second": 1 / token,
            "prompt_tokens_per_second": options.prompt / prompt,
            "speed_over_f16": over_f16,
            "speed_over_q8_0": over_q8,
        }
        print(
            f"{name:28} {1 / token:7.1f} tokens/s, {options.prompt / prompt:7.0f} of a prompt, "
            f"{over_f16:.2f}x llama.cpp F16, {over_q8:.2f}x Q8_0",
            flush=True,
        )
    facts = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    facts |= {"prompt": options.prompt, "tokens": options.tokens, "rounds": options.rounds}
    # `keep` names modules of the package and of experiments.
    facts["command"] = shlex.join(["python", "tests/real/speed.py", *sys.argv[1:]])
    result = [facts | {"rows": rows}]
    measurement.keep(options.out, f"speed_{options.model}", detect.cpu_name(), result)


if __name__ == "__main__":
    main()
