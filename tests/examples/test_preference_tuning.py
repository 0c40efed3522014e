"""Tunix's DPO trainer tunes models and layers of this project; its GRPO needs static layouts."""

import importlib.util

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from places import ROOT

import sparse_dataflow as sd

dpo = pytest.importorskip("tunix.sft.dpo.dpo_trainer")
PATH = ROOT / "examples" / "preference_tuning.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model():
    config = sd.preset("pico").change(sparsity__block=16, model__num_layers=1)
    return sd.init(config, jax.random.key(0))


def llama(evolving, **sizes):
    """A small Llama of Tunix whose linears are block-sparse."""
    module = pytest.importorskip("tunix.models.llama3.model")
    config = module.ModelConfig(
        num_layers=1, vocab_size=512, embed_dim=32, hidden_dim=64, num_heads=2, head_dim=16,
        num_kv_heads=1, rope_theta=10_000, norm_eps=1e-5,
    )  # fmt: skip
    dense = module.Llama3(config, rngs=nnx.Rngs(0))
    inner = lambda path, linear: "lm_head" not in path  # noqa: E731
    return sd.sparsify(dense, density=0.5, block=8, evolving=evolving, where=inner)


def test_margins_of_held_out_pairs_rise_and_the_export_has_the_tuned_weights(
    example, model, tmp_path
):
    folder = sd.save(model, tmp_path / "model")
    before, after, path, margins = example.main(folder, tmp_path / "out", steps=8)
    assert np.mean(margins) > 0.02 and np.mean(margins > 0) > 0.9
    # The reference is as it was; every stored weight may change, and no other weight is there.
    for old, loaded in zip(jax.tree.leaves(before), jax.tree.leaves(sd.load(folder)), strict=True):
        np.testing.assert_array_equal(old, loaded)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert any((x != y).any() for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after)))
    for tuned, loaded in zip(jax.tree.leaves(after), jax.tree.leaves(sd.load(path)), strict=True):
        np.testing.assert_array_equal(tuned, loaded)


def test_padding_does_not_change_what_a_policy_computes(example, model):
    pairs = example.draw_pairs(16, seed=2)
    shifted = jax.tree.map(lambda x: x + 0.02 * np.sin(np.arange(x.size)).reshape(x.shape), model)
    (batch,) = example.make_batches(model.tokenizer, pairs)
    config = dpo.DPOTrainingConfig(beta=example.BETA, eval_every_n_steps=1)
    policies = example.Policy(shifted), example.Policy(model)
    trainer = dpo.DPOTrainer(*policies, optax.sgd(0.0), config)
    _, rewards = dpo.dpo_loss_fn(policies[0], trainer._prepare_inputs(batch), beta=example.BETA)
    expected = np.mean(example.margins(shifted, model, pairs))
    assert abs(expected) > 1e-3
    np.testing.assert_allclose(rewards["rewards/margin"], expected, rtol=1e-3)


@pytest.mark.parametrize("evolving", [False, True])
def test_layers_in_a_model_of_tunix_learn_preferences_with_their_layouts(example, model, evolving):
    policy, reference = llama(evolving), llama(evolving)
    before = sd.layouts(policy)
    config = dpo.DPOTrainingConfig(beta=0.1, eval_every_n_steps=100, max_steps=6)
    trainer = dpo.DPOTrainer(policy, reference, optax.adam(3e-3), config)
    trainer.train(example.make_batches(model.tokenizer, example.draw_pairs(96, seed=0)))
    (batch,) = example.make_batches(model.tokenizer, example.draw_pairs(16, seed=1))
    _, rewards = dpo.dpo_loss_fn(policy, trainer._prepare_inputs(batch))
    assert rewards["rewards/margin"] > 0.01 and rewards["rewards/accuracy"] > 0.9
    after = sd.layouts(policy)
    assert all((before[path] == after[path]).all() for path in before)


def test_grpo_gives_weights_to_its_sampler_only_with_static_layouts():
    samplers = pytest.importorskip("tunix.generate.sampler")
    rollouts = pytest.importorskip("tunix.rl.rollout.vanilla_rollout")

    class Bytes:
        encode, decode = list, bytes
        bos_id = eos_id = pad_id = lambda self: 0

    def sync(model):
        rollout = object.__new__(rollouts.VanillaRollout)
        size = samplers.CacheConfig(cache_size=8, num_layers=1, num_kv_heads=1, head_dim=16)
        rollout._sampler = samplers.Sampler(model, Bytes(), size)
        rollout.update_params(nnx.state(model, nnx.Param))

    sync(llama(evolving=False))
    evolving = llama(evolving=True)
    with pytest.raises(ValueError, match="same structure"):
        sync(evolving)
    sd.evolve(evolving, None, "static")
    sync(evolving)
