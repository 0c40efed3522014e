"""Experts in host memory write the tokens that experts on the device write."""

import dataclasses
import gc
from pathlib import Path

import jax
import numpy as np
import pytest
from decoded import BYTES, DENSE
from marks import some
from small_models import shapes_of, tables_of

from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.evaluation import kv_cache, offloaded_experts
from sparse_dataflow.evaluation.generate import generate_tokens
from sparse_dataflow.evaluation.offloaded_experts import OffloadedExperts
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.families import FAMILIES

MIXTURE = dataclasses.replace(DENSE, experts=6, top_k=2)
MONARCH = LinearSpec("block_sparse", "monarch", density=0.5, block=8)
LLAMA = dataclasses.replace(MIXTURE, **FAMILIES["llama"], top_k=1, shared_expert=True)
CASES = {
    "dense": (MIXTURE, 3, [1]),
    "block-sparse": (
        dataclasses.replace(MIXTURE, prototypes=3, top_k=1).with_linears(MONARCH),
        4,
        [1, 7, 4],
    ),
    "llama": (
        dataclasses.replace(LLAMA, compute_dtype="bfloat16").with_linears(MONARCH, ["mlp_out"]),
        1,
        [5],
    ),
}
"""Name -> (model, slots, lengths of the prompts)."""


def drawn(config):
    """Returns a model whose next tokens are certain, with parameters in numpy."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        values = rng.normal(size=leaf.shape).astype(np.float32)
        names = [key.key for key in path]
        # A bias of a norm favours the same token, and the same experts, everywhere.
        return 0 * values if names[-1] == "bias" and "experts" not in names else values

    params = jax.tree_util.tree_map_with_path(draw, shapes_of(config))
    tables = tables_of(config)
    training = TrainingConfig(steps=1, batch=1, sequence=16)
    return Model(Path(), "dense", config, merged(params, tables), BYTES, 0, training, None, {})


def tokens_of(model, weights, lengths):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, model.model.vocab_size, length).tolist() for length in lengths]
    return [*generate_tokens(model.model, weights, prompts, 8, 16)]


@pytest.mark.parametrize(("config", "slots", "lengths"), some(CASES, "block-sparse"))
def test_tokens_are_those_of_experts_on_the_device(config, slots, lengths):
    model = drawn(config)
    expected = tokens_of(model, kv_cache.prepare(config, model.params), lengths)
    offloaded = OffloadedExperts(model, slots)
    assert tokens_of(model, offloaded, lengths) == expected
    assert len(np.unique(expected)) > 2  # guards against a constant output
    assert offloaded.prompt.tokens == sum(lengths)
    assert offloaded.writing.tokens == 7 * len(lengths)
    if len(lengths) > 1:  # Some layer needed several turns.
        assert offloaded.prompt.chosen > slots * config.num_layers


def test_traffic_is_that_of_the_least_recently_used_experts(monkeypatch):
    config, slots, lengths = CASES["dense"]
    routed, predicted = [], []

    def recorded(function, *lists):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            choices = result[1][2:] if isinstance(result[1], tuple) else result[1:]
            for choice, record in zip(choices, lists, strict=True):
                record.append(np.asarray(choice)[0].tolist())  # Of the only token.
            return result

        return call

    attention, embed = offloaded_experts._attention, offloaded_experts._embed
    monkeypatch.setattr(offloaded_experts, "_attention", recorded(attention, routed, predicted))
    monkeypatch.setattr(offloaded_experts, "_embed", recorded(embed, predicted))
    model = drawn(config)
    offloaded = OffloadedExperts(model, slots)
    tokens_of(model, offloaded, lengths)
    # The last prediction of a step is of no layer.
    predicted = [p for i, p in enumerate(predicted) if i % (config.num_layers + 1) < 2]
    recent: dict[int, list[int]] = {layer: [] for layer in range(config.num_layers)}
    resident = ahead = unused = 0
    for step, (experts, guess) in enumerate(zip(routed, predicted, strict=True)):
        slot_of = recent[step % config.num_layers]
        fetched_ahead = set(guess) - set(slot_of)
        resident += len(set(experts) & set(slot_of))
        ahead += len(set(experts) & fetched_ahead)
        unused += len(fetched_ahead - set(experts))
        order = sorted(experts, key=lambda e: (e not in slot_of, e not in fetched_ahead, e))
        slot_of[:] = ([e for e in slot_of if e not in experts] + order)[-slots:]
    traffic = [offloaded.prompt, offloaded.writing]
    assert sum(t.chosen for t in traffic) == 8 * config.num_layers * config.top_k
    assert sum(t.resident for t in traffic) == resident > 0
    assert sum(t.ahead for t in traffic) == ahead > 0
    assert sum(t.unused for t in traffic) == unused > 0
    assert sum(t.fetched for t in traffic) == 16 * config.num_layers - resident + unused


def test_the_device_holds_the_slots_and_host_memory_all_experts():
    config, slots, lengths = CASES["dense"]
    model = drawn(config)

    def live():
        gc.collect()
        sizes = {"device": 0, "pinned_host": 0}
        for array in jax.live_arrays():
            sizes[array.sharding.memory_kind] += array.nbytes
        return np.array([*sizes.values()])

    before = live()
    offloaded = OffloadedExperts(model, slots)
    tokens_of(model, offloaded, lengths)
    layers, size = config.num_layers, offloaded.expert_bytes
    on_device, on_host = live() - before
    assert on_device == offloaded.other_bytes + layers * slots * size
    assert on_host == layers * config.experts * size
    assert on_device < offloaded.device_bytes <= on_device + 2 * slots * size
    assert offloaded.other_bytes + on_host == offloaded.total_bytes


def test_tokens_with_equal_experts_fetch_them_once_and_ahead():
    config, slots, lengths = CASES["dense"]
    model = drawn(config)
    model.params["blocks"]["experts"]["router"] *= 0  # All experts are equally likely.
    offloaded = OffloadedExperts(model, slots)
    tokens_of(model, offloaded, lengths)
    assert offloaded.prompt.fetched == offloaded.prompt.ahead == config.num_layers * config.top_k
    assert offloaded.prompt.hit_rate == 1 and offloaded.writing.fetched == 0


def test_a_text_that_is_stopped_while_a_slot_is_written_leaves_the_next_one_right(monkeypatch):
    config, slots, lengths = CASES["dense"]
    model = drawn(config)
    offloaded = OffloadedExperts(model, slots)
    expected = tokens_of(model, offloaded, lengths)
    write, left = offloaded_experts._write, iter([None] * 2)

    def interrupted(*args):
        written = write(*args)
        if next(left, True):
            raise KeyboardInterrupt
        return written

    offloaded._empty_slots()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(offloaded_experts, "_write", interrupted)
        tokens_of(model, offloaded, lengths)
    assert tokens_of(model, offloaded, lengths) == expected


@pytest.mark.parametrize(
    ("config", "slots", "message"),
    [
        (DENSE, 2, "expert_slots=2 is for a mixture of experts, and model.experts is 0; legal: 0"),
        (MIXTURE, 1, "a token has 2 of 6 experts in each layer; legal: 2 to 6"),
        (CASES["block-sparse"][0], 2, "a token has 3 of 6 experts in each layer; legal: 3 to 6"),
        (MIXTURE, 7, "legal: 2 to 6"),
    ],
)
def test_what_has_no_slots_is_refused(config, slots, message):
    with pytest.raises(UserError, match=message):
        OffloadedExperts(drawn(config), slots)
