"""Compares executors with a single device; prints JSON.

Run as a process, because the number of devices is fixed at start; `compared.py` has the bounds.
Arguments: the task; the name of the model, or of the evolution, with "+OPTION" for what changes its
training; then executors. A mesh is "data:2,tensor:4/ZERO/MICRO_BATCHES", with "exchange," before it
to send tokens to experts and "halves," for two sub-batches. Pipelines add "/SCHEDULE/CHUNKS", and
optionally "/2+3", the layers of each virtual stage. The relay is "relay/STASH/MICRO_BATCHES",
"relay,eager/..." with eager clipping, or "relay,data:2/..." over devices.
"""

import contextlib
import dataclasses
import functools
import json
import math
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))

import jax
import jax.numpy as jnp
import kronecker  # noqa: F401 - registers its kind.
import numpy as np
import pytest
import small_models
from jax import lax
from jax.sharding import Mesh

from sparse_dataflow.compile import hlo
from sparse_dataflow.compile.programs import abstract_arguments
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.core.config.layer_groups import split_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.core.layouts.evolution import PhaseSpec, phase_specs
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.optim.optimizers import map_moments
from sparse_dataflow.core.step_metrics import Max, Mean, Norm, Sum
from sparse_dataflow.core.training import hooks
from sparse_dataflow.core.training.loop import Trainer
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.core.training.programs import TrainingData, compile_programs, run_step
from sparse_dataflow.core.training.saved_state import SavedState
from sparse_dataflow.core.training.step import abstract_state, initial_state, jitted_train_step
from sparse_dataflow.core.training.teacher import Teacher
from sparse_dataflow.data.batches import EvalBatches, TrainBatches
from sparse_dataflow.data.masking import Masking
from sparse_dataflow.monitoring.metrics import MetricsWriter
from sparse_dataflow.pipeline.pipelined import Pipelined
from sparse_dataflow.pipeline.stages import Division, divide
from sparse_dataflow.pruning.changes import change_of
from sparse_dataflow.relay import probe, relay_programs
from sparse_dataflow.relay.relay import Relay, RelayConfig
from sparse_dataflow.relay.relay_executor import RelayExecutor
from sparse_dataflow.runs import adapted_model
from sparse_dataflow.runs.families import FAMILIES

STEPS, BATCH, SEQUENCE, CLIP = 3, 16, 8, 0.5
DENSE = ModelConfig(num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=48, max_len=8)


def sparse(pattern, rank=0, hadamard=0, **changes):
    spec = LinearSpec("block_sparse", pattern, 0.5, 8, rank, hadamard)
    return dataclasses.replace(DENSE, linears=dict.fromkeys(DENSE.projections, spec), **changes)


MODELS = {
    "dense": DENSE,
    "dense_odd": dataclasses.replace(DENSE, vocab_size=45, norm="rmsnorm", remat="full"),
    "sparse": sparse("monarch"),
    "sparse_mlp": DENSE.with_linears(
        LinearSpec("block_sparse", "monarch", 0.5, 8), ["mlp_in", "mlp_out"]
    ),
    "sparse_rank": sparse("random", rank=4, hadamard=8, positions="rotary", remat="keep"),
    "sparse_depth": sparse(
        "shuffle",
        num_layers=3,
        density_by_depth=(2.0, 2.0, 1.0),
        remat="offload+full:1,none:1",
    ),
    "shared": sparse("monarch", num_layers=3, shared_layers=True),
    "low_rank": DENSE.with_linears(LinearSpec("low_rank", "low_rank", 0.5)),
    "block_tensor_train": DENSE.with_linears(
        LinearSpec("block_tensor_train", "block_tensor_train", 0.5, 8)
    ),
    "low_rank_experts": dataclasses.replace(DENSE, experts=2, top_k=1).with_linears(
        LinearSpec("low_rank", "low_rank", 0.5), ["qkv", "attn_out"]
    ),
    # The first and the last layer have one density, and other groups.
    "rotated_depth": dataclasses.replace(
        DENSE, num_layers=3, density_by_depth=(1.0, 0.5, 1.0)
    ).with_linears(LinearSpec("block_sparse", "butterfly", 0.25, 4), ["qkv", "attn_out", "mlp_in"]),
    "bidirectional": sparse("monarch", bidirectional=True, mask_documents=True),
    "masked": DENSE.with_linears(LinearSpec("masked", "masked", 0.5, 1, span=4)),
    "masked_and_stored": sparse("monarch").with_linears(
        LinearSpec("masked", "masked", 0.5, 4), ["attn_out", "mlp_in"]
    ),
    # A kind of somebody else, which "tensor" and "feature" do not cut.
    "kronecker": DENSE.with_linears(LinearSpec("kronecker", "kronecker")),
    "sparse_gated": sparse("monarch", num_heads=8, gated_mlp=True),
    "sparse_gated_full": sparse("monarch", num_heads=8, gated_mlp=True, remat="full"),
    "dense_deep": dataclasses.replace(DENSE, num_layers=8),
    "sparse_deep": sparse("monarch", num_layers=5),
    "llama": dataclasses.replace(
        DENSE, **FAMILIES["llama"], num_kv_heads=2, vocab_size=45, remat="full", window=5
    ).with_linears(LinearSpec("block_sparse", "monarch", 0.5, 8)),
    "packed": dataclasses.replace(
        DENSE,
        **FAMILIES["gemma2"] | {"window": 3, "attention_cap": 0.7},
        num_kv_heads=2,
        vocab_size=7,
        mask_documents=True,
    ),
    "documents": dataclasses.replace(
        DENSE,
        **FAMILIES["llama"],
        num_kv_heads=2,
        vocab_size=7,
        mask_documents=True,
        remat="full",
    ).with_linears(LinearSpec("block_sparse", "monarch", 0.5, 8), ["mlp_in", "mlp_out"]),
    # Rows have four blocks; a layer of one kind lacks some, and one of the other has all.
    "blocks": dataclasses.replace(
        DENSE,
        positions="rotary",
        vocab_size=7,
        mask_documents=True,
        attention_cap=0.7,
        attention_blocks="window:1,global:1,block:2",
        layer_types="sliding+full",
    ),
    "qwen3": dataclasses.replace(DENSE, **FAMILIES["qwen3"], num_kv_heads=2, head_dim=12),
    "gemma2": dataclasses.replace(DENSE, **small_models.GEMMA2).with_linears(
        LinearSpec("block_sparse", "monarch", 0.5, 8)
    ),
    **{name: dataclasses.replace(DENSE, **fields) for name, fields in small_models.NEWER.items()},
    "gemma3": dataclasses.replace(DENSE, num_layers=3, **small_models.GEMMA3),
    "multi_query": dataclasses.replace(
        DENSE, **FAMILIES["llama"] | {"biases": ("q", "k", "v")}, num_kv_heads=1, remat="keep"
    ).with_linears(LinearSpec("block_sparse", "random", 0.5, 4, rank=4, hadamard=8)),
    **{
        precision: dataclasses.replace(DENSE, precision=precision).with_linears(
            LinearSpec("block_sparse", "monarch", 0.5, 8), ["mlp_in", "mlp_out"]
        )
        for precision in ("fp8", "int8")
    },
    "experts": dataclasses.replace(DENSE, experts=4, top_k=2, shared_expert=True, gated_mlp=True),
    "experts_alone": dataclasses.replace(
        DENSE,
        experts=4,
        top_k=2,
        shared_expert=2,
        shared_gate=True,
        raw_gates=True,
        balance_loss=0.0,
        router_z_loss=0.0,
    ),
    "experts_sparse": dataclasses.replace(
        DENSE, experts=4, prototypes=2, shared_expert=True
    ).with_linears(LinearSpec("block_sparse", "monarch", 0.5, 8)),
    "experts_capacity": dataclasses.replace(
        DENSE, experts=8, top_k=2, expert_capacity=0.5, biases=("mlp_in", "mlp_out"), remat="full"
    ),
    # Adafactor factors matrices of 128 and more, such as the embedding, and leaves blocks whole.
    "wide": dataclasses.replace(DENSE, d_model=128, d_ff=256, vocab_size=257).with_linears(
        LinearSpec("block_sparse", "monarch", 0.5, 32), ["mlp_in", "mlp_out"]
    ),
    "block_a_projection": DENSE.with_linears(LinearSpec("block_sparse", "random", 1.0, 32)),
    "sparse_deep_full": sparse("random", rank=4, hadamard=4, num_layers=5, remat="full"),
}


def executor(text, model):
    axes, zero, micro, *pipeline = text.split("/")
    if axes.startswith("relay"):
        mesh = Mesh(np.array(jax.devices()[:2]), ("data",)) if axes == "relay,data:2" else None
        clipping = "eager" if axes == "relay,eager" else "exact"
        return RelayExecutor(RelayConfig(zero, clipping), mesh=mesh), int(micro)
    exchange, axes = axes.startswith("exchange,"), axes.removeprefix("exchange,")
    parts, axes = 1 + axes.startswith("halves,"), axes.removeprefix("halves,")
    # "on:4,data:2,tensor:2" is a mesh over four of the eight devices.
    devices = jax.devices()
    if axes.startswith("on:"):
        count, axes = axes.removeprefix("on:").split(",", 1)
        devices = devices[: int(count)]
    mesh, zero = meshes.make(meshes.parse(axes, len(devices)), devices), int(zero)
    if not pipeline:
        return Sharded(mesh, zero, exchange, parts), int(micro)
    schedule, chunks, *layer_counts = pipeline
    layers = tuple(int(n) for n in "".join(layer_counts).split("+") if n)
    stages = mesh.shape["stage"], int(chunks)
    division = Division(*stages, layers) if layers else divide(model.num_layers, *stages)
    return Pipelined(mesh, zero, exchange, parts, division=division, schedule=schedule), int(micro)


OPTIONS = {
    "": {},
    "bfloat16": {"state_dtype": "bfloat16"},
    "muon": {"optimizer": "muon"},
    "bfloat16_muon": {"state_dtype": "bfloat16", "optimizer": "muon"},
    "adafactor": {"optimizer": "adafactor"},
    "lion": {"optimizer": "lion"},
    "schedule_free": {"optimizer": "schedule_free"},
    "adapters": {"adapter_rank": 4},
    # As many as tokens, so that meshes cut a row where its tokens begin.
    "prompt": {"prompt_vectors": 8},
    "side": {"side_width": 8},
    "side_int8": {"side_width": 8, "frozen_dtype": "int8"},
    "int8": {"adapter_rank": 4, "frozen_dtype": "int8"},
    "teacher": {"teacher": "folder"},
    # Two steps of these rows alone, then one of all weights. Axes of two and four cut the rows.
    "new_rows": {"new_rows": (10, 30), "new_rows_first": 0.67},
    "new_rows_lion": {"new_rows": (10, 30), "new_rows_first": 0.67, "optimizer": "lion"},
    # The second step is a spike.
    "spikes": {"skip_spikes": 4.0},
    "spikes_unclipped": {"skip_spikes": 4.0, "clip": 1e6},
    "answers": {"padded": True},
    "measured": {"measured": True},
    # Hidden tokens, which the model predicts from both sides.
    "hidden": {"objective": "masked", "mask_share": 0.4},
}
"""What follows "+" in the name of a model -> changes of its training; rows are `padded` or not, and
sections have metrics of `measured` or not."""

ADAPTED = ("adapter_rank", "frozen_dtype", "prompt_vectors", "side_width")
"""Settings of a training that its model follows."""

RUN_OPTIONS = ("padded", "measured")
"""Those of OPTIONS that are no settings."""


@contextlib.contextmanager
def measured():
    """Adds a metric of each kind to the sections."""
    residuals, head_loss = gpt.Block.residuals, gpt.head_loss

    def with_metrics(block, x, *arguments, **named):
        middle, after, metrics = residuals(block, x, *arguments, **named)
        y = lax.stop_gradient(after.astype(jnp.float32))
        counts = {
            "largest_stream": Max(jnp.abs(y).max()),
            "mean_square": Mean(jnp.square(y).sum(), jnp.float32(y.size)),
            "block_tokens": Sum(jnp.float32(y[..., 0].size)),
            "first_feature": Norm({"even": jnp.square(y[..., 0]).sum()}),
        }
        return middle, after, {**metrics, **counts}

    def with_head_metrics(config, params, embedding, x, *arguments, **named):
        loss, metrics = head_loss(config, params, embedding, x, *arguments, **named)
        y = lax.stop_gradient(x.astype(jnp.float32))
        return loss, {**metrics, "head_square": Mean(jnp.square(y).sum(), jnp.float32(y.size))}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.Block, "residuals", with_metrics)
        patch.setattr(gpt, "head_loss", with_head_metrics)
        patch.setattr(relay_programs, "_compiled", relay_programs._compiled.__wrapped__)
        yield


class Rows(NamedTuple):
    """A batch as the first of a data set, for `compile_programs`."""

    example: Batch
    batch_size: int


def train(model, executor, micro_batches, start=None, padded=False, measured=False, **changes):
    """Returns the results of `train_once`, with the metrics of `measured` or not."""
    with globals()["measured"]() if measured else contextlib.nullcontext():
        return train_once(model, executor, micro_batches, start, padded, **changes)


def train_once(model, executor, micro_batches, start=None, padded=False, **changes):
    """Returns losses, norms, canonical moments and params, eval loss and program text by name.

    `start` is a state on one device; None draws it with the executor. Gradients are clipped, and
    sparse weights learn faster.
    """
    training = TrainingConfig(
        STEPS, BATCH, SEQUENCE, micro_batches, learning_rate=1e-3, sparse_rate=2.0,
        **{"clip": CLIP, **changes},
    )  # fmt: skip
    model = adapted_model.with_adapters(model, *(getattr(training, name) for name in ADAPTED))
    model = dataclasses.replace(model, bidirectional=training.hides_tokens)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.vocab_size, (STEPS, BATCH, SEQUENCE + 1)).astype(np.int32)
    weights = rng.uniform(size=(BATCH, SEQUENCE)).astype(np.float32)
    if padded:
        ends = rng.integers(1, SEQUENCE - 2, BATCH)
        padding = np.arange(SEQUENCE) >= ends[:, None]
        tokens %= model.vocab_size - 1  # An end of text in front of padding would be padding.
        tokens[:, :, 1:] = np.where(padding, model.vocab_size - 1, tokens[:, :, 1:])
        weights = np.where(padding, 0, weights).astype(np.float32)
    counted = weights / weights.sum() if training.freezes or padded else None
    batches = [Rows(Batch.from_windows(rows, counted), BATCH) for rows in tokens]
    held_out = Rows(Batch.from_windows(tokens[0], weights), BATCH)
    if training.hides_tokens:
        text = model.vocab_size - 2
        masking = Masking(text, text, text + 1, training)
        numbers = range(BATCH)
        batches = [
            Rows(masking.training_batch(rows[:, :-1], numbers, BATCH), BATCH) for rows in tokens
        ]
        held_out = batches[0]
    teacher_model = dataclasses.replace(DENSE, vocab_size=model.vocab_size)
    params = gpt.init(teacher_model, jax.random.key(1))
    teacher = Teacher(teacher_model, params) if training.teacher else None
    data = TrainingData(batches[0], held_out, 1, held_out, 1, "none", teacher=teacher)
    [programs] = compile_programs([PhaseSpec(0.0, model)], training, data, executor=executor)
    if start is None:
        state = initial_state(model, training, executor)
    else:
        # Copies, as the step donates its state, and placed arrays share memory with `start`.
        state = jax.tree.map(jnp.copy, start.without_layouts())
        state = executor.place(state.with_layouts_of(start), model)
    reports, first = [], None
    for step, rows in enumerate(batches):
        batch = executor.put(rows.example, BATCH)
        limit = np.float32(0 if step == 1 else np.inf) if training.skip_spikes else None
        state, report = run_step(programs, state, batch, np.float32(1e-3), limit)
        reports.append(jax.device_get(report))
        first = first or canonical(executor, state, model)["moments"]
    rows = executor.put(held_out.example, BATCH)
    metrics = programs.eval_step(state.params, programs.rest(state), rows)
    return {
        "losses": [float(report.loss) for report in reports],
        "norms": [report.gradient_norms for report in reports],
        "metrics": [
            {name: {"": metric.number(), **metric.by_part()} for name, metric in r.metrics.items()}
            for r in reports
        ],
        "first moments": first,
        **canonical(executor, state, model),
        "eval": {name: metric.number() for name, metric in metrics.items()},
        "text": getattr(programs.train_step, "as_text", str)(),
    }


def gathers(name, texts, measure=lambda text: gathered(text)):
    """Returns {text: shapes that the step gathers}, or another function of its text; runs none."""
    name, _, option = name.partition("+")
    model, shapes = MODELS[name], {}
    for text in texts:
        runs, micro = executor(text, model)
        training = TrainingConfig(STEPS, BATCH, SEQUENCE, micro, **OPTIONS[option])
        arguments, _ = abstract_arguments(runs, model, training, changing=False)
        step = jitted_train_step(model, training, runs, arguments[0]).lower(*arguments).compile()
        shapes[text] = measure(step.as_text())
    return shapes


def collectives(name, texts):
    """Returns {text: [kind, devices, bytes, times] of the collectives of a step}; nothing runs."""
    tuples = lambda text: [(c.kind, c.group, c.bytes, c.times) for c in hlo.collectives(text)]  # noqa: E731
    return gathers(name, texts, tuples)


def products(name, texts):
    """Returns {text: products of a traced step}; nothing runs."""
    model, counts = MODELS[name], {}
    for text in texts:
        runs, micro = executor(text, model)
        training = TrainingConfig(STEPS, BATCH, SEQUENCE, micro)
        arguments, _ = abstract_arguments(runs, model, training, changing=False)
        step = jitted_train_step(model, training, runs, arguments[0])
        counts[text] = str(step.trace(*arguments).jaxpr).count("dot_general")
    return counts


def scores(name, texts):
    """Returns {text: largest difference of `token_scores` on the mesh and on one device}."""
    model, places, results = MODELS[name], np.arange(0, SEQUENCE * 2, 2), {}
    training = TrainingConfig(STEPS, BATCH, SEQUENCE)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (BATCH, SEQUENCE + 1), np.int32)
    start = initial_state(model, training)
    weights = stacks.weights_of(model, start.params, start.rest)
    for text in texts:
        sharded, _ = executor(text, model)
        placed = sharded.place(start, model)
        rest = sharded.place_layouts(placed.rest, model, changing=False)
        shards = meshes.batch_shards(sharded.mesh)
        rows = sharded.put(Batch(tokens[:, :-1]), BATCH)
        shard_targets = tokens[:, 1:].reshape(shards, -1)[:, places]
        shard_places = np.tile(places.astype(np.int32), (shards, 1))
        score = jax.jit(functools.partial(sharded.token_scores, model))
        mine = score(placed.params, rest, rows, shard_places, shard_targets)[0]
        alone = jax.jit(functools.partial(whole.token_scores, model))
        shard_rows = zip(np.split(tokens[:, :-1], shards), shard_places, shard_targets)
        right = [alone(weights, Batch(shard), *selected)[0] for shard, *selected in shard_rows]
        results[text] = float(np.abs(mine - np.stack(right)).max())
    return results


def norms(name, texts):
    """Returns the errors of the block norms of the dense gradient, which methods grow by."""
    model, training = MODELS[name], TrainingConfig(STEPS, BATCH, SEQUENCE)
    shape = BATCH, SEQUENCE + 1
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, shape, np.int32)
    start = initial_state(model, training)

    def measured(runs):
        placed = runs.place(start, model)
        trees = placed.params, runs.place_layouts(placed.rest, model, changing=True)
        rows = runs.put(Batch.from_windows(tokens), BATCH)
        if isinstance(runs, RelayExecutor):
            fetch = functools.partial(Relay(model, training).to_first_device, *trees)
            return probe.block_gradient_norms(model, fetch, rows)
        return jax.device_get(jax.jit(functools.partial(runs.growth_norms, model))(*trees, rows))

    right = measured(SINGLE_DEVICE)
    return {text: error(measured(executor(text, model)[0]), right) for text in texts}


def canonical(executor, state, model):
    state = executor.canonical(state, model)
    moments: list = []
    map_moments(lambda tree: moments.append(tree) or tree, state.moments)
    arrays = {"params": without_key_bias(jax.device_get(state.params)), "moments": moments}
    # Copies, as the relay updates its arrays in place.
    return jax.tree.map(np.copy, jax.device_get(arrays))


def without_key_bias(params):
    """Drops the key biases: their gradient is rounding error, which Adam scales to a full step."""

    def without(blocks):
        if "bias" not in blocks.get("qkv", {}):
            return blocks
        bias = blocks["qkv"]["bias"]
        bias = bias.reshape(len(bias), DENSE.num_heads, 3, -1)
        return {**blocks, "qkv": {**blocks["qkv"], "bias": bias[:, :, [0, 2]]}}

    return {
        **params,
        "blocks": [without(blocks) for blocks in split_groups(params.get("blocks", {}))],
    }


def error(mine, right):
    """Returns the largest difference in any leaf, relative to the leaf's largest value."""
    pairs = list(zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True))
    assert all(np.asarray(a).dtype == np.asarray(b).dtype for a, b in pairs)
    return max(float(np.abs(a - b).max() / (np.abs(b).max() + 1e-9)) for a, b in pairs)


def gathered(text):
    """Returns the shapes "BxTxD" of gathered, permuted or exchanged arrays in the program text."""
    kinds = "all-gather|all-to-all|collective-permute|ragged-all-to-all"
    matches = re.findall(rf"= (\S+?)\[([\d,]*)\]\S* (?:{kinds})(?:-start)?\(", text)
    return sorted({shape.replace(",", "x") for _, shape in matches})


def exchanged(text):
    """Returns the bytes of each all-to-all in the program text, ascending."""
    sizes = []
    for shapes in re.findall(r"= (.*?) all-to-all(?:-start)?\(", text):
        arrays = re.findall(r"(f32|s32)\[([\d,]*)\]", shapes)
        sizes.append(sum(4 * math.prod(map(int, shape.split(","))) for _, shape in arrays))
    return sorted(sizes)


def compare(name, texts):
    name, _, option = name.partition("+")
    model, changes, errors = MODELS[name], OPTIONS[option], {}
    start = initial_state(
        adapted_model.with_adapters(
            model, *(changes.get(name, getattr(TrainingConfig(), name)) for name in ADAPTED)
        ),
        TrainingConfig(
            STEPS, BATCH, SEQUENCE, **{n: v for n, v in changes.items() if n not in RUN_OPTIONS}
        ),
    )
    right: dict = {}
    for text in texts:
        sharded, micro = executor(text, model)
        reference = SINGLE_DEVICE, micro if model.experts else 1
        if model.expert_capacity:  # Devices drop what exceeds their share of it.
            reference = dataclasses.replace(sharded, exchange=False), micro
        if reference not in right:
            right[reference] = train(model, *reference, start, **changes)
        # One mesh draws the state; to place it costs less.
        mine = train(model, sharded, micro, start if errors else None, **changes)
        names, expected_names = (set(run["metrics"][0]) for run in (mine, right[reference]))
        assert names == expected_names, (text, names ^ expected_names)
        # The gradients of adapters are small.
        adapted = {"adapter_rank", "prompt_vectors", "side_width"} & set(changes)
        assert adapted or max(max(each.values()) for each in mine["norms"]) > CLIP
        errors[text] = {
            key: error(mine[key], right[reference][key]) for key in mine if key != "text"
        }
        errors[text]["gathered"] = gathered(mine["text"])
        errors[text]["exchanged"] = exchanged(mine["text"])
    return errors


def move(name, texts):
    """Saves a state on each mesh and restores it on the next; returns {text: bits are equal}."""
    model, results = MODELS[name], {}
    training = TrainingConfig(STEPS, BATCH, SEQUENCE)
    right = initial_state(model, training)
    key = jax.random.key_data(right.key)
    noise = lambda tree: jax.tree.map(lambda a: a + jnp.arange(a.size).reshape(a.shape), tree)  # noqa: E731
    right = jax.device_get(right._replace(moments=map_moments(noise, right.moments), key=key))
    state, before = SINGLE_DEVICE.place(right, model), SINGLE_DEVICE
    state = state._replace(key=jax.random.wrap_key_data(key))
    for text in (*texts, None):
        after = SINGLE_DEVICE if text is None else executor(text, model)[0]
        with tempfile.TemporaryDirectory() as folder:
            with Checkpoints(Path(folder), config={}) as checkpoints:
                checkpoints.save(1, SavedState.of(before.canonical(state, model)), {})
            shapes = abstract_state(model, training, after)
            target = SavedState.of(shapes._replace(rest=stacks.with_layouts(model, shapes.rest)))
            restored, _ = Checkpoints(Path(folder), config={}).restore(target)
        state, before = after.place(restored.state(model), model), after
        mine = after.canonical(state, model)
        mine = jax.device_get(mine._replace(key=jax.random.key_data(mine.key)))
        same = jax.tree.map(
            lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), mine, right
        )
        results[str(text)] = all(jax.tree.leaves(same))
        if not isinstance(after, RelayExecutor):  # Its arrays are in host memory.
            assert len(jax.tree.leaves(state.params)[0].devices()) == after.devices
    return results


def evolve(name, texts):
    """Runs a training whose layouts or model change; returns errors as `compare`.

    `name` is the method, with "+depth" for a density that varies with depth, or "+llama" for the
    model of that name.
    """
    method, _, option = name.partition("+")
    dense = method in ("gradual", "sparse_to_dense")
    # One block is all layers, so `runs.variants` refuses layouts that differ between them.
    pattern = "monarch" if method == "shared_to_own" else "random"
    model = sparse(pattern)
    if dense:
        spec = LinearSpec("block_sparse", "random", 0.25, 8)
        model = dataclasses.replace(DENSE, linears=dict.fromkeys(DENSE.projections, spec))
    if option == "depth":
        model = dataclasses.replace(model, density_by_depth=(2.0, 1.0) if dense else (1.0, 0.5))
    if option == "llama":
        model = dataclasses.replace(MODELS["llama"], vocab_size=DENSE.vocab_size)
        model = model.with_linears(LinearSpec("block_sparse", "random", 0.5, 8))
    steps, at = 6, 0.0
    if method == "omit_features":
        model, steps, at = DENSE, 12, 0.9
    training = TrainingConfig(steps, BATCH, SEQUENCE, learning_rate=1e-3)
    evolution = EvolutionConfig(method, every=2, at=at, row_shards=4 if option == "llama" else 2)
    text = np.random.default_rng(0).integers(0, 48, 3000).astype(np.uint16)

    def run(executor):
        rows = executor.local_rows(BATCH)
        held_out = EvalBatches(text[:400], BATCH, SEQUENCE, 16, rows)
        batches = TrainBatches(text, BATCH, SEQUENCE, rows=rows)
        data = TrainingData(batches, held_out, 1, held_out, 1, "none")
        specs, change = phase_specs(model, evolution), change_of(evolution, training)
        programs = compile_programs(
            specs, training, data, evolution, executor=executor, change=change
        )
        with tempfile.TemporaryDirectory() as folder:
            variant = Variant("sparse", model, training, evolution)
            usual = hooks.usual(3, 3, change=change)
            trainer = Trainer(
                variant,
                Path(folder),
                data,
                programs,
                usual,
                executor=executor,
                metrics=MetricsWriter,
            )
            while not trainer.finished:
                trainer.advance()
            trainer.close()
            rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
        losses = [row["loss"] for row in rows if "loss" in row]
        state = jax.device_get(executor.canonical(trainer.state, trainer.model))
        return losses, without_key_bias(state.params), state.rest

    right, errors = run(SINGLE_DEVICE), {}
    for text_of_mesh in texts:
        mine = run(executor(text_of_mesh, model)[0])
        errors[text_of_mesh] = {
            "losses": error(mine[0], right[0]),
            "params": error(mine[1], right[1]),
            "layouts": error(mine[2], right[2]) if right[2] else 0.0,
        }
    return errors


if __name__ == "__main__":
    task, name, *texts = sys.argv[1:]
    tasks = (compare, gathers, collectives, products, move, evolve, norms, scores)
    run = {function.__name__: function for function in tasks}[task]
    print(json.dumps(run(name, texts)))
