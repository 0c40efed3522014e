"""A language model in a loop of one's own: a pytree that is drawn, trained, saved and loaded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from marks import some

import sparse_dataflow as sd
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model.partition import trained_and_rest
from sparse_dataflow.core.model.stacks import fixed_layouts, layouts_by_place, map_placed_layouts

CONFIG = sd.preset("pico").change(
    model__num_layers=1, model__vocab_size=300, sparsity__block=32, sparsity__density=0.5
)


def draw(config=CONFIG, seed=0, **options):
    return sd.init(config, jax.random.key(seed), **options)


def tokens(rows=4, length=17):
    return np.random.default_rng(0).integers(0, 256, (rows, length), np.int32)


def equal(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_loss_and_gradients_are_those_of_the_trainer():
    model, batch = draw(), tokens()
    loss, gradients = jax.value_and_grad(sd.loss)(model, batch)
    params, rest = trained_and_rest(model.model, model.params)
    rest = fixed_layouts(rest)
    expected = whole.loss_and_gradients(model.model, params, rest, Batch.from_windows(batch))
    np.testing.assert_allclose(loss, expected[0]["loss"].number(), rtol=1e-6)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6)  # noqa: E731
    jax.tree.map(close, trained_and_rest(gradients.model, gradients.params)[0], expected[1])


def test_the_loss_is_the_cross_entropy_of_the_logits():
    model, batch = draw(), tokens()
    logits = sd.logits(model, batch[:, :-1])
    assert logits.dtype == jnp.float32 and logits.shape == (4, 16, 300)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
    np.testing.assert_allclose(sd.loss(model, batch), expected, rtol=1e-5)


def test_an_optax_loop_learns_and_is_compiled_once():
    model, batch, optimizer, traces = draw(), tokens(), optax.adam(1e-2), []

    @jax.jit
    def step(model, state, batch):
        traces.append(1)
        loss, gradients = jax.value_and_grad(sd.loss)(model, batch)
        updates, state = optimizer.update(gradients, state, model)
        return optax.apply_updates(model, updates), state, loss

    state = optimizer.init(model)
    losses = []
    for _ in range(8):
        model, state, loss = step(model, state, batch)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 1 and len(traces) == 1
    assert isinstance(model, sd.Model) and model.step == 0 and model.record is None


def test_models_of_equal_content_have_equal_structure():
    structure = jax.tree.structure(draw())
    assert structure == jax.tree.structure(draw(seed=1))
    assert hash(structure) == hash(jax.tree.structure(draw(seed=1)))
    denser = CONFIG.change(sparsity__density=1.0)
    other = sd.Tokenizer.from_texts(["some words"] * 9, 300)
    for model in (draw(denser), draw(CONFIG.dense()), draw(tokenizer=other)):
        assert structure != jax.tree.structure(model)


def test_models_of_other_layouts_have_another_structure():
    first, second = draw_two_layouts()
    layouts = layouts_by_place(second.params)
    params = map_placed_layouts(lambda place, _: layouts[place], first.params)
    swapped = dataclasses.replace(first, params=params)
    assert jax.tree.structure(first) != jax.tree.structure(swapped)


def draw_two_layouts():
    random = CONFIG.change(sparsity__pattern="random")
    return [draw(random.change(training__seed=seed), seed=seed) for seed in (0, 1)]


def test_orbax_restores_a_model_and_its_moments_to_the_same_layouts_alone(tmp_path):
    models = draw_two_layouts()
    trees = [{"model": model, "moments": optax.adam(1e-2).init(model)} for model in models]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", trees[0])
    shapes = [jax.tree.map(ocp.utils.to_shape_dtype_struct, tree) for tree in trees]
    with ocp.StandardCheckpointer() as checkpointer:
        equal(checkpointer.restore(tmp_path / "state", shapes[0]), trees[0])
    keys = [jax.tree.leaves_with_path(model)[0][0][0].name for model in models]
    assert keys[0] != keys[1] and all(key.startswith("params_layout_") for key in keys)
    with ocp.StandardCheckpointer() as checkpointer, pytest.raises(ValueError) as refusal:
        checkpointer.restore(tmp_path / "state", shapes[1])
    assert all(key in str(refusal.value) for key in keys)


def test_the_preset_of_a_folder_begins_with_its_weights(tmp_path):
    folder = sd.save(draw(), tmp_path / "model")
    config = sd.preset(folder)
    assert config.run.init_from == str(folder) and config.model.num_layers == 1
    assert config.sparsity.block == 32 and config.sparsity.density == 0.5
    dense = sd.save(draw(), tmp_path / "dense", form="dense")
    assert sd.preset(dense).model == config.model
    with pytest.raises(sd.UserError, match="neither a run folder nor a Hugging Face directory"):
        sd.preset(tmp_path)
    with pytest.raises(sd.UserError, match="no scale 'nowhere'; legal: pico, 3m"):
        sd.preset("nowhere")


@pytest.mark.slow
def test_a_model_without_a_run_is_saved_dense_in_the_architecture_that_is_named(tmp_path):
    model = draw()
    batch = tokens() % 256
    for architecture, kind in (("auto", "gpt2"), ("opt", "opt")):
        folder = tmp_path / architecture
        loaded = sd.load(sd.save(model, folder, form="dense", architecture=architecture))
        assert f'"model_type": "{kind}"' in (folder / "config.json").read_text()
        np.testing.assert_allclose(sd.logits(loaded, batch), sd.logits(model, batch), atol=1e-5)
    with pytest.raises(sd.UserError, match="LlamaForCausalLM has no norm=layernorm"):
        sd.save(model, tmp_path / "llama", form="dense", architecture="llama")
    assert not (tmp_path / "llama").exists()
    with pytest.raises(sd.UserError, match="The export form 'both' is unknown"):
        sd.save(model, tmp_path / "both", form="both")


@pytest.mark.parametrize(
    "config", some({"sparse": (CONFIG,), "dense": (CONFIG.dense(),)}, "sparse")
)
def test_a_saved_model_is_loaded_with_its_layouts_and_tokenizer(config, tmp_path):
    tokenizer = sd.Tokenizer.from_texts(["to be or not to be"] * 9, 280)
    model = draw(config, tokenizer=tokenizer)
    again = sd.load(sd.save(model, tmp_path / "model"))
    equal(again.params, model.params)
    assert again.tokenizer == tokenizer and again.model == model.model
    assert again.context == model.context and again.variant == model.variant
    np.testing.assert_array_equal(
        sd.logits(again, tokens() % 280), sd.logits(model, tokens() % 280)
    )


def test_a_byte_is_a_token_without_a_tokenizer():
    model = draw()
    text = "naïve\n"
    assert model.tokenizer.encode(text).tolist() == list(text.encode())
    assert model.tokenizer.decode(list(text.encode())) == text
    both = sd.generate(model, ["de", list(b"de")], max_new_tokens=3)
    assert both[0].tokens == both[1].tokens


def test_what_does_not_fit_is_refused_in_words(tmp_path):
    model = draw()
    for wrong, message in (
        (np.zeros((2, 3)), r"tokens are float.* legal: integers \[batch, sequence\]"),
        (np.zeros(3, np.int32), r"of shape \(3,\)"),
        (np.zeros((2, 1), np.int32), "at least 2"),
        (np.zeros((1, 99), np.int32), "longer than the model's 64 positions"),
    ):
        with pytest.raises(sd.UserError, match=message):
            sd.loss(model, wrong)
    with pytest.raises(sd.UserError, match=r"evolution.method=rigl .* legal for sd.init: static"):
        draw(CONFIG.change(evolution__method="rigl"))
    with pytest.raises(sd.UserError, match=r"prompts=.* must be a list of texts or"):
        sd.generate(model, "def ", max_new_tokens=1)
    with pytest.raises(sd.UserError, match=r"texts=.* must be a list of texts"):
        sd.Tokenizer.from_texts("one string", 300)
    with pytest.raises(sd.UserError, match="257 or more"):
        sd.Tokenizer.from_texts(["a"], 100)
    blocks = draw(CONFIG.change(model__attention_blocks="window:1,block:8"))
    for form in ("sparse", "program", "dense", "gguf"):
        with pytest.raises(sd.UserError, match="attention_blocks"):
            sd.save(blocks, tmp_path / "blocks", form=form)
    folder = sd.save(model, tmp_path / "model")
    with pytest.raises(sd.UserError, match="exists already"):
        sd.save(model, folder)
    other = sd.save(draw_two_layouts()[0], tmp_path / "other")
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(sd.UserError, match="the tables of another layout than its config"):
        sd.load(other)
    with pytest.raises(sd.UserError, match="no variant 'dense'; legal: sparse"):
        sd.load(folder, "dense")
    with pytest.raises(sd.UserError, match="nowhere"):
        sd.load(tmp_path / "nowhere")
