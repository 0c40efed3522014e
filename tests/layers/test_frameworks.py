"""Models of other libraries become block-sparse, train, evolve, and are saved and restored.

`make optional` installs those that pip has together.  EasyDeL, bonsai and jax2onnx, which wants an
older jax, have environments of their own: install one there, and run this file.
"""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from places import ROOT

import sparse_dataflow as sd

TOKENS = np.arange(32).reshape(2, 16) % 29


def is_inner(path, linear):
    """Returns whether a linear is no head."""
    return not any(name in path for name in ("lm_head", "classifier"))


def positions():
    causal = np.tril(np.ones((16, 16), bool))
    return np.broadcast_to(np.arange(16), (2, 16)), np.broadcast_to(causal, (2, 16, 16))


def tunix(family):
    module = pytest.importorskip(f"tunix.models.{family}.model")
    sizes = dict(num_layers=2, vocab_size=32, embed_dim=64, hidden_dim=128, num_heads=4)
    sizes |= dict(head_dim=16, num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5)
    kind = {"llama3": "Llama3", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    if family == "qwen3":
        sizes |= dict(dtype=jnp.float32, param_dtype=jnp.float32)
    make = lambda: getattr(module, kind)(module.ModelConfig(**sizes), rngs=nnx.Rngs(0))  # noqa: E731
    where, mask = positions()
    return make, lambda model: model(TOKENS, where, None, mask)[0], 2 * 7


def mamba2():
    library = pytest.importorskip("mamba2_jax")
    config = library.Mamba2Config(
        vocab_size=32, hidden_size=64, state_size=16, head_dim=16, num_hidden_layers=2, chunk_size=8
    )
    make = lambda: library.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))  # noqa: E731

    def apply(model):
        result = model(TOKENS)
        return result["logits"] if isinstance(result, dict) else result

    return make, apply, 2 * 2


def bonsai_qwen3():
    module = pytest.importorskip("bonsai.models.qwen3.modeling")
    config = module.ModelConfig(
        num_layers=2, vocab_size=32, emb_dim=64, mlp_dim=128, num_heads=4, head_dim=16,
        num_kv_heads=2, rope_theta=10_000, rope_scaling_factor=8.0, local_rope_theta=1e4,
        norm_eps=1e-5, tie_word_embeddings=True,
    )  # fmt: skip
    make = lambda: module.Qwen3(config, rngs=nnx.Rngs(0))  # noqa: E731

    def apply(model):
        cache = module.init_cache(config, 2, 16, 0, jnp.float32)
        return model(TOKENS, cache=cache, segment_ids=np.ones((2, 16), np.int32))

    return make, apply, 2 * 7


def bonsai_vit():
    module = pytest.importorskip("bonsai.models.vit.modeling")
    config = module.ModelConfig(
        image_size=(16, 16), patch_size=(4, 4), num_channels=3, hidden_dim=64, mlp_dim=128,
        attn_dropout_prob=0.0, dropout_prob=0.0, num_heads=4, eps=1e-6, num_layers=2, num_labels=32,
    )  # fmt: skip
    kind = next(k for n, k in vars(module).items() if n.startswith("ViT") and callable(k))
    images = np.linspace(-1, 1, 2 * 16 * 16 * 3, dtype=np.float32).reshape(2, 16, 16, 3)
    make = lambda: kind(config, rngs=nnx.Rngs(0))  # noqa: E731
    return make, lambda model: model(images, rngs=None), 2 * 6


def maxtext():
    """Returns Llama's decoder layer, which has seven of MaxText's `DenseGeneral`."""
    module = pytest.importorskip("maxtext.models.llama2")
    from maxtext.configs import pyconfig

    config = pyconfig.initialize(
        ["", str(pathlib.Path(pyconfig.__file__).with_name("base.yml"))],
        base_emb_dim=64, base_mlp_dim=128, base_num_query_heads=4, base_num_kv_heads=2, head_dim=16,
        max_target_length=16, per_device_batch_size=2, vocab_size=32, attention="dot_product",
        dtype="float32", weight_dtype="float32", matmul_precision="highest", hardware="cpu",
        enable_checkpointing=False, skip_jax_distributed_system=True, log_config=False,
    )  # fmt: skip
    kinds = (jax.sharding.AxisType.Auto,) * len(config.mesh_axes)
    mesh = jax.make_mesh((1,) * len(kinds), config.mesh_axes, axis_types=kinds)
    x = jax.random.normal(jax.random.key(1), (2, 16, 64))
    make = lambda: module.LlamaDecoderLayer(config, "train", mesh, nnx.Rngs(0))  # noqa: E731
    return make, lambda layer: layer(x, None, positions()[0], True, "train")[0], 7


class EasyDelMlp(nnx.Module):
    """Linears that EasyDeL shards by column and by row."""

    def __init__(self, linears):
        self.up = linears.ColumnParallelLinear(64, 128, rngs=nnx.Rngs(0))
        self.down = linears.RowParallelLinear(128, 64, use_bias=False, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(nnx.silu(self.up(x)))


def easydel():
    linears = pytest.importorskip("easydel.layers.linears")
    x = jax.random.normal(jax.random.key(1), (2, 16, 64))
    return lambda: EasyDelMlp(linears), lambda model: model(x), 2


class Cnn(nnx.Module):
    """The model of flax's mnist example."""

    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(32, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm2 = nnx.BatchNorm(64, rngs=rngs)
        self.avg_pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(3136, 256, rngs=rngs)
        self.dropout = nnx.Dropout(rate=0.025, rngs=rngs)
        self.classifier = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        x = self.avg_pool(nnx.relu(self.batch_norm1(self.conv1(x))))
        x = self.avg_pool(nnx.relu(self.batch_norm2(self.conv2(x))))
        return self.classifier(self.dropout(nnx.relu(self.linear1(x.reshape(len(x), -1)))))


def mnist():
    images = np.linspace(0, 1, 4 * 28 * 28, dtype=np.float32).reshape(4, 28, 28, 1)

    def make():
        model = Cnn(nnx.Rngs(0))
        model.eval()
        return model

    return make, lambda model: model(images), 1


MODELS = {
    "flax mnist": mnist,
    "tunix llama3": functools.partial(tunix, "llama3"),
    "tunix qwen2": functools.partial(tunix, "qwen2"),
    "tunix qwen3": functools.partial(tunix, "qwen3"),
    "mamba2-jax": mamba2,
    "bonsai qwen3": bonsai_qwen3,
    "bonsai vit": bonsai_vit,
    "maxtext llama2 layer": maxtext,
    "easydel linears": easydel,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_at_density_1_a_model_of_a_library_computes_the_same(name):
    make, apply, linears = MODELS[name]()
    model = make()
    sparse = sd.sparsify(model, density=1.0, block=16, where=is_inner)
    kind = sd.BlockSparseLinear
    assert sum(isinstance(m, kind) for _, m in nnx.iter_modules(sparse)) == linears
    expected = np.asarray(apply(model), np.float32)
    tolerance = 1e-4 if apply(model).dtype == jnp.float32 else 3e-2
    np.testing.assert_allclose(apply(sparse), expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("evolving", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_at_density_a_quarter_it_trains_evolves_and_is_restored(name, evolving, tmp_path):
    make, apply, _ = MODELS[name]()
    sparsify = functools.partial(
        sd.sparsify, density=0.25, block=8, evolving=evolving, where=is_inner
    )
    model = sparsify(make())
    target = jnp.asarray(jax.random.normal(jax.random.key(5), apply(model).shape))
    loss_fn = lambda model: jnp.mean((apply(model).astype(jnp.float32) - target) ** 2)  # noqa: E731
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(4)]
    assert losses[-1] < losses[0]
    before = sd.layouts(model)
    sd.evolve(model, optimizer, "set", share=0.2, seed=1)
    after = sd.layouts(model)
    assert all((before[path] != after[path]).any() for path in before)
    assert float(step(model, optimizer)) < losses[0]
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", nnx.state(model, nnx.Param, nnx.Variable))
    fresh = sparsify(make())
    sd.set_layouts(fresh, after)
    with ocp.StandardCheckpointer() as saver:
        state = nnx.state(fresh, nnx.Param, nnx.Variable)
        restored = saver.restore(tmp_path / "state", state)
    nnx.update(fresh, *restored)
    np.testing.assert_array_equal(apply(fresh), apply(model))


@pytest.mark.slow
@pytest.mark.parametrize("evolving", [False, True])
def test_the_trainer_of_tunix_trains_resumes_and_samples_an_evolved_model(evolving, tmp_path):
    trainers = pytest.importorskip("tunix.sft.peft_trainer")
    make, apply, _ = tunix("llama3")
    where, mask = positions()
    inputs = trainers.TrainingInput(TOKENS, np.ones_like(TOKENS))
    as_arguments = lambda batch: {  # noqa: E731
        "input_tokens": batch.input_tokens, "input_mask": batch.input_mask,
        "positions": where, "attention_mask": mask,
    }  # fmt: skip

    def trainer(model, steps):
        config = trainers.TrainingConfig(
            eval_every_n_steps=100, max_steps=steps, gradient_accumulation_steps=2,
            checkpoint_root_directory=str(tmp_path / "run"),
            checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=1),
        )  # fmt: skip
        made = trainers.PeftTrainer(model, optax.adam(1e-2), config)
        return made.with_gen_model_input_fn(as_arguments)

    sparsify = functools.partial(
        sd.sparsify, density=0.25, block=8, evolving=evolving, where=is_inner
    )
    model = sparsify(make())
    entropy = optax.softmax_cross_entropy_with_integer_labels
    loss = lambda model: entropy(apply(model)[:, :-1], TOKENS[:, 1:]).mean()  # noqa: E731
    first = float(loss(model))
    one = trainer(model, 3)
    sd.evolve(model, one.optimizer, "set", share=0.2, seed=1)
    one.train([inputs] * 6)
    one.close()
    trained = float(loss(model))
    assert trained < first
    resumed = sparsify(make())
    sd.set_layouts(resumed, sd.layouts(model))
    two = trainer(resumed, 4)
    np.testing.assert_allclose(apply(resumed), apply(model), atol=1e-6)
    two.train([inputs] * 8)
    two.close()
    assert float(loss(resumed)) < trained


@pytest.mark.slow
@pytest.mark.parametrize("evolving", [False, True])
def test_a_hook_of_tunix_changes_layouts_while_its_step_is_cached(evolving, tmp_path):
    trainers = pytest.importorskip("tunix.sft.peft_trainer")
    from tunix.sft import hooks

    class Evolving(hooks.TrainingHooks):
        def on_train_step_end(self, context, train_step, train_loss):
            losses.append(float(train_loss))
            if len(losses) == 2:
                sd.evolve(context.model, context.optimizer, "set", share=0.4, seed=1)

        on_train_start = on_train_end = on_train_step_start = lambda *_: None
        on_eval_step_start = on_eval_step_end = lambda *_: None

    x = jax.random.normal(jax.random.key(1), (16, 32))

    def trainer(model, name):
        config = trainers.TrainingConfig(
            eval_every_n_steps=100, max_steps=4, checkpoint_root_directory=str(tmp_path / name),
            checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=1),
        )  # fmt: skip
        made = trainers.PeftTrainer(model, optax.adam(3e-2), config)
        made = made.with_loss_fn(lambda model, x: jnp.mean((model(x) - 1) ** 2))
        return made.with_gen_model_input_fn(lambda batch: {"x": batch})

    curves = []
    for cached in (False, True):
        losses, model = [], small_model(evolving)
        run = trainer(model, f"run {cached}")
        run.with_training_hooks(Evolving())
        if cached and not evolving:
            with pytest.raises(sd.UserError, match="after this handle"):
                run.train([x] * 4, cache_nnx_graph=cached)
            return
        run.train([x] * 4, cache_nnx_graph=cached)
        curves.append(losses)
        resumed = small_model(evolving)
        sd.set_layouts(resumed, sd.layouts(model))
        trainer(resumed, f"run {cached}").close()
        np.testing.assert_array_equal(resumed(x), model(x))
    np.testing.assert_allclose(*curves, rtol=1e-5)


def small_model(evolving):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(32, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 16, rngs=rngs))
    return sd.sparsify(model, density=0.5, block=8, evolving=evolving)


@pytest.mark.parametrize("evolving", [False, True])
def test_treescope_shows_the_layers(evolving):
    treescope = pytest.importorskip("treescope")
    text = treescope.render_to_text(small_model(evolving))
    assert text.count("BlockSparseLinear(") == 2 and "values=Param(" in text
    assert ("LayoutTable(" in text) == evolving
    assert len(treescope.render_to_html(small_model(evolving))) > 1000


@pytest.mark.parametrize("evolving", [False, True])
def test_assertions_of_chex_hold_and_an_evolution_traces_an_evolving_layer_once(evolving):
    chex = pytest.importorskip("chex")
    model = small_model(evolving)
    state, copy = nnx.state(model), nnx.state(nnx.clone(model))
    chex.assert_tree_all_finite(state)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, copy)
    chex.assert_trees_all_close(state, copy)
    chex.clear_trace_counter()
    apply = nnx.jit(chex.assert_max_traces(lambda model, x: model(x), 1))
    x = jnp.ones((4, 32))
    apply(model, x)
    sd.evolve(model, None, "set", share=0.3, seed=1)
    if evolving:
        chex.assert_shape(apply(model, x), (4, 16))
    else:
        with pytest.raises(AssertionError, match="traced > 1 times"):
            apply(model, x)


@pytest.mark.parametrize("evolving", [False, True])
def test_a_program_of_onnx_computes_the_same(evolving):
    jax2onnx = pytest.importorskip("jax2onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = small_model(evolving)
    program = jax2onnx.to_onnx(model, [("batch", 32)])
    session = onnxruntime.InferenceSession(program.SerializeToString())
    for batch in (1, 3, 8):
        x = np.asarray(jax.random.normal(jax.random.key(batch), (batch, 32)))
        [y] = session.run(None, {session.get_inputs()[0].name: x})
        np.testing.assert_allclose(y, model(x), atol=1e-5)


EXAMPLES = {"plain_optax": (), "linen_layer": (), "equinox_layer": ("equinox",),
            "haiku_layer": ("haiku",)}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_framework_learns_evolves_and_is_restored(name, tmp_path, monkeypatch):
    for package in EXAMPLES[name]:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.delitem(sys.modules, name, raising=False)
    losses = __import__(name).main(steps=12)
    assert losses[-1] < 0.9 * losses[0] and np.isfinite(losses).all()


def test_linear_layers_of_a_model_of_equinox_are_replaced_by_hand(monkeypatch):
    eqx, equimo = pytest.importorskip("equinox"), pytest.importorskip("equimo.core.layers.ffn")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from equinox_layer import from_dense

    mlp = equimo.Mlp(32, hidden_features=64, key=jax.random.key(0))
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)  # noqa: E731

    def replaced(node):
        if not is_linear(node):
            return node
        sides = node.in_features, node.out_features
        return from_dense(node, sd.make_layout("random", *sides, block=16, density=1.0))

    sparse = jax.tree.map(replaced, mlp, is_leaf=is_linear)
    x = jax.random.normal(jax.random.key(1), (5, 32))
    apply = lambda model: model(x, key=jax.random.key(0), inference=True)  # noqa: E731
    np.testing.assert_allclose(apply(sparse), apply(mlp), atol=1e-5)
