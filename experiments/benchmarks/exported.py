"""Tokens a second of exported models in jax and in PyTorch, for `decode_bench --exports`."""

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import sparse_dataflow as sd
from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.request import Request
from sparse_dataflow.interchange.serving import run_in_jax

from . import benchmark, paired

PROMPT, NEW = "prompt", "new"


def measure_exports(request: Request, options) -> None:
    """Measures, prints and writes; see `experiments.decode_bench`."""
    models = benchmark.models_of(request)
    has_torch = importlib.util.find_spec("torch") is not None
    print("" if has_torch else "PyTorch is not installed: jax alone is measured.")
    models.announce(f"scale {models.scale}, exported, batch {models.training.batch}")
    batch, cached = models.training.batch, options.cached
    models.by_name["sparse"].check_context(cached + options.tokens, "--cached with --tokens")
    drawn = {"dense": sd.init(models.config.dense(), jax.random.key(0))}
    drawn["sparse"] = sd.init(models.config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 256, (batch, cached), np.int32)
    runs: dict[tuple[str, str, str], Callable] = {}
    rows, sizes = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in drawn.items():
            programs = sd.save(model, Path(folder) / name, form="program")
            sizes[name] = (programs / "model.safetensors").stat().st_size
            readers = {"jax": _in_jax(programs, tokens, options.tokens)}
            if has_torch:
                stored = sd.save(model, Path(folder) / f"{name} blocks", form="sparse")
                readers["torch"] = _in_torch(stored, tokens, options.tokens)
            for reader, pair in readers.items():
                runs |= {(reader, kind, name): function for kind, function in pair.items()}
    seconds = paired.paired_seconds(runs, options.rounds)
    counts = {PROMPT: batch * cached, NEW: batch * options.tokens}
    for reader, kind in dict.fromkeys(key[:2] for key in runs):
        ratio = paired.paired_ratio(seconds[reader, kind, "dense"], seconds[reader, kind, "sparse"])
        rates = {
            name: counts[kind] / float(np.median(seconds[reader, kind, name])) for name in drawn
        }
        rows[f"{reader}, {kind}"] = {**ratio, "tokens_per_second": rates}
        print(
            f"{reader:>5}, {kind:>6} tokens: dense {rates['dense']:9,.1f}/s, sparse "
            f"{rates['sparse']:9,.1f}/s; dense / sparse time {paired.ratio_text(ratio)}"
        )
    byte_ratio = sizes["dense"] / sizes["sparse"]
    print(f"bytes of the weights, dense / sparse: {byte_ratio:.2f}x")
    facts = models.facts(
        inputs="random weights", cached=cached, rows=rows, byte_ratio=byte_ratio, file_bytes=sizes
    )
    name = f"decode_bench_exports_{models.chip.name}_{models.scale}_batch{batch}"
    measurement.keep(options.keep, name, models.chip.name, [facts])


def _in_jax(folder, tokens, count):
    """Returns functions that read prompts, and that write tokens after them."""
    model = run_in_jax.Model(folder)
    lengths = np.full(len(tokens), tokens.shape[1], np.int32)
    _, caches = model.prefill(model.arrays, tokens, lengths)
    state = {"caches": [jnp.pad(c, [(0, 0), (0, 0), (0, count), (0, 0)]) for c in caches]}

    def write():
        ids = tokens[:, -1]
        for step in range(count):
            at = lengths + np.int32(step)
            logits, state["caches"] = model.decode(model.arrays, state["caches"], ids, at)
            ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return ids

    return {PROMPT: lambda: model.prefill(model.arrays, tokens, lengths)[0], NEW: write}


def _in_torch(folder, tokens, count):
    """Returns functions that read prompts, and that write tokens after them."""
    import torch

    from sparse_dataflow.interchange.serving import run_in_torch

    model, ids = run_in_torch.Model(folder), torch.tensor(tokens, dtype=torch.long)
    caches: list[dict] = [{} for _ in model.config["layers"]]

    @torch.no_grad()
    def read(caches=None):
        return model(ids, caches).numpy()

    @torch.no_grad()
    def write():
        mine, last = [dict(cache) for cache in caches], ids[:, -1:]
        for _ in range(count):
            last = model(last, mine)[:, -1:].argmax(-1)
        return last.numpy()

    read(caches)
    return {PROMPT: read, NEW: write}
