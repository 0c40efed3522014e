"""Checkpoints: same bits on every sharding, newest and best kept, other configs refused."""

import errno
import logging
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging as absl_logging
from checkpoint_states import (
    CONFIG,
    abstract,
    assert_same_bits,
    full_state,
    in_new_process,
    restored_step,
    saved,
    small_state,
)
from marks import some

from sparse_dataflow.core.checkpoint import checkpoint, named_arrays
from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.files import manifest
from sparse_dataflow.files.errors import UserError


def test_everything_comes_back_to_the_same_bits(tmp_path):
    state, extra = full_state(), {"tokenizer": "ab12", "position": 11, "nested": [1, {"x": None}]}
    with Checkpoints(tmp_path, config=CONFIG) as checkpoints:
        assert checkpoints.restore(abstract(state)) is None
        assert checkpoints.save(11, state, extra, metric=2.5)
    restored, restored_extra = Checkpoints(tmp_path, config=CONFIG).restore(abstract(state))
    assert_same_bits(restored, state)
    config = restored_extra.pop("config")
    assert (restored_extra, config["model"]["heads"]) == (extra, [2, 4])
    assert not restored["params"]["odd"].committed  # As in a freshly initialised state.


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"a.b": 1, "a": {"b": 2}}, "a.b"),
        ({"a": [3], "a.0": 4}, "a.0"),
        ({"x": {"a.b.c": 5, "a": {"b.c": 6}}}, "x.a.b.c"),
    ],
)
def test_arrays_with_one_name_are_refused(state, name):
    with pytest.raises(ValueError, match=f"both named {name}"):
        named_arrays.flatten(jax.tree.map(np.asarray, state))


def test_later_changes_of_the_state_do_not_reach_the_checkpoint(tmp_path):
    """Later steps reuse donated buffers, and numpy arrays are changed in place."""
    step = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
    first = jax.random.normal(jax.random.key(0), (1 << 22,))
    expected = np.asarray(first + 0).copy()
    step(jnp.copy(first)).block_until_ready()  # Compiles, so that the steps below start at once.
    host = np.arange(1000)
    checkpoints = Checkpoints(tmp_path, config={})
    checkpoints.save(1, {"device": first, "host": host}, {})
    host[:] = -1
    for _ in range(3):
        first = step(first)
    first.block_until_ready()
    checkpoints.wait()
    like = {"device": jax.ShapeDtypeStruct(expected.shape, expected.dtype), "host": host}
    restored, _ = checkpoints.restore(like)
    assert np.asarray(restored["device"]).tobytes() == expected.tobytes()
    np.testing.assert_array_equal(restored["host"], np.arange(1000))


def test_another_sharding_changes_no_bit(tmp_path):
    in_new_process(
        """
        import sys
        import jax, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
        from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints

        four = Mesh(np.array(jax.devices()), ("x",))
        grid = Mesh(np.array(jax.devices()).reshape(2, 2)[::-1], ("x", "y"))
        host = {
            "w": np.random.default_rng(0).normal(size=(8, 12)).astype("float32"),
            "half": np.random.default_rng(1).normal(size=(8, 4)).astype(jax.numpy.bfloat16),
            "table": np.arange(16, dtype=np.int32),
        }
        keys = jax.random.split(jax.random.key(3), 4)
        alone = {name: SingleDeviceSharding(jax.devices()[3]) for name in [*host, "keys"]}
        rows = {name: NamedSharding(four, P("x")) for name in alone}
        tiles = {
            "w": NamedSharding(grid, P("y", "x")), "half": NamedSharding(grid, P(None, "y")),
            "table": NamedSharding(grid, P(("x", "y"))), "keys": NamedSharding(grid, P("y")),
        }
        checkpoints = Checkpoints(sys.argv[1], config={}, keep=9)
        for step, placed in enumerate([alone, rows, tiles]):
            checkpoints.save(step, jax.device_put(host | {"keys": keys}, placed), {})
            for other in (alone, rows, tiles, None):
                like = {
                    name: jax.ShapeDtypeStruct(
                        leaf.shape, leaf.dtype, sharding=other and other[name]
                    )
                    for name, leaf in (host | {"keys": keys}).items()
                }
                restored, _ = checkpoints.restore(like)
                for name, leaf in host.items():
                    assert np.asarray(restored[name]).tobytes() == leaf.tobytes(), name
                assert (jax.random.key_data(restored["keys"]) == jax.random.key_data(keys)).all()
                for name, leaf in restored.items():
                    assert not other or leaf.sharding.is_equivalent_to(other[name], leaf.ndim)
        """,
        tmp_path,
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, config=CONFIG)
    metrics = [3.0, 1.0, float("nan"), 1.0, 2.0, None, float("-inf"), 4.0]
    steps = []
    for step, metric in enumerate(metrics):
        checkpoints.save(step, small_state(step), {"position": step}, metric)
        checkpoints.wait()
        steps.append(checkpoints.steps())
    assert steps == [[0], [0, 1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [3, 5, 6], [3, 6, 7]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "6", "7"]
    state, _ = checkpoints.restore(abstract(small_state(0)), step=3)
    assert_same_bits(state, small_state(3))
    with pytest.raises(UserError, match=r"no checkpoint of step 4; it has: 3, 6, 7"):
        checkpoints.restore(abstract(small_state(0)), step=4)


def test_a_finished_checkpoint_is_not_overwritten(tmp_path):
    saved(tmp_path, [1, 2])
    checkpoints = Checkpoints(tmp_path, config=CONFIG)
    checkpoints.restore(abstract(small_state(0)))
    assert not checkpoints.save(2, small_state(99), {"position": 99})
    assert not checkpoints.save(1, small_state(99), {"position": 99})
    assert checkpoints.save(3, small_state(3), {"position": 3})
    checkpoints.wait()
    assert restored_step(tmp_path) == 3
    with pytest.raises(UserError, match="d_model"):
        Checkpoints(tmp_path, config={"model": {"d_model": 1}}).save(3, small_state(3), {})


def test_other_folders_and_unfinished_saves_are_no_checkpoints(tmp_path):
    saved(tmp_path, [1, 2])
    (tmp_path / "999999").mkdir()
    (tmp_path / "777").write_text("a file")
    (tmp_path / "007").mkdir()
    (tmp_path / "888").symlink_to(tmp_path / "2")
    (tmp_path / "notes").mkdir()
    for name in ("3.saving/state.orbax-checkpoint-tmp", "0.pruning/state"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copytree(tmp_path / "1", tmp_path / "5")
    checkpoints = Checkpoints(tmp_path, config=CONFIG)
    assert checkpoints.steps() == [1, 2]
    assert restored_step(tmp_path) == 2
    assert {"5.damaged", "999999.damaged", "007", "777", "888", "notes"} <= set(
        os.listdir(tmp_path)
    )
    assert not set(os.listdir(tmp_path)) & {"3.saving", "0.pruning", "999999", "5"}
    checkpoints.save(777, small_state(777), {"position": 777})
    checkpoints.wait()
    assert restored_step(tmp_path) == 777


def test_an_unfinished_save_alone_is_no_checkpoint(tmp_path):
    (tmp_path / "3.saving" / "state").mkdir(parents=True)
    assert Checkpoints(tmp_path, config=CONFIG).restore(small_state(0)) is None
    assert Checkpoints(tmp_path / "new", config=CONFIG, read_only=True).restore({}) is None
    assert os.listdir(tmp_path) == []


def test_a_reader_changes_nothing(tmp_path):
    saved(tmp_path, [1])
    (tmp_path / "2.saving").mkdir()
    reader = Checkpoints(tmp_path, config=CONFIG, read_only=True)
    assert reader.restore(small_state(0)) is not None
    with pytest.raises(ValueError, match="read-only"):
        reader.save(2, small_state(2), {})
    assert sorted(os.listdir(tmp_path)) == ["1", "2.saving"]


def test_a_reader_follows_the_writer_that_prunes_what_it_reads(tmp_path, monkeypatch, caplog):
    writer = saved(tmp_path, [1], keep=1)
    verify = manifest.verify

    def late(folder):
        if folder.name == "1":
            writer.save(2, small_state(2), {"position": 2})
            writer.wait()
        return verify(folder)

    monkeypatch.setattr(manifest, "verify", late)
    assert restored_step(tmp_path, read_only=True) == 2
    assert "cannot be used" not in caplog.text


def test_another_config_is_refused_before_an_array_is_read(tmp_path, monkeypatch):
    saved(tmp_path, [4])
    monkeypatch.setattr(checkpoint.named_arrays, "read", lambda *_: pytest.fail("arrays were read"))
    other = {"model": {"d_model": 128, "heads": [2, 4], "bias": True}, "optimizer": {}}
    with pytest.raises(UserError) as refusal:
        Checkpoints(tmp_path, config=other).restore(small_state(0))
    assert "/4 was made under another config" in str(refusal.value)
    assert "model.d_model is 64 there and 128 here" in str(refusal.value)
    assert "model.bias is absent there and true here" in str(refusal.value)
    assert "optimizer.learning_rate is 0.001 there and absent here" in str(refusal.value)
    assert (tmp_path / "4").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": np.zeros((32, 4), np.float32)}, r"w.shape is \[32, 8\] there and \[32, 4\] here"),
        ({"half": np.zeros(40, np.float32)}, 'half.dtype is "bfloat16" there and "float32" here'),
        ({"more": np.zeros(1)}, "more is absent there"),
    ],
)
def test_other_arrays_are_refused(tmp_path, change, message):
    saved(tmp_path, [4])
    with pytest.raises(UserError, match=message):
        Checkpoints(tmp_path, config=CONFIG).restore(small_state(0) | change)


@pytest.mark.parametrize(
    "shape", some({"wide": ((3200, 8000),), "short": ((16, 8),), "deep": ((32, 8, 1),)}, "short")
)
def test_arrays_of_other_shapes_than_described_are_refused_unread(tmp_path, monkeypatch, shape):
    """A forged checkpoint could exhaust memory while its manifest and description fit."""
    saved(tmp_path / "forged", [4])
    forged = tmp_path / "forged" / "4"
    with Checkpoints(tmp_path / "other", config=CONFIG) as others:
        others.save(4, small_state(4) | {"w": jnp.zeros(shape)}, {})
    shutil.rmtree(forged / "state")
    shutil.copytree(tmp_path / "other" / "4" / "state", forged / "state")
    (forged / manifest.NAME).unlink()
    manifest.write(forged, {"step": 4, "metric": None})
    checkpoints = Checkpoints(tmp_path / "forged", config=CONFIG)
    monkeypatch.setattr(checkpoints._orbax, "restore", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(UserError, match=r"cannot be read: w is float32\[.*not float32\[32, 8\]"):
        checkpoints.restore(small_state(0))


def test_leaving_the_block_raises_a_failed_save_unless_the_block_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "write", lambda *_: 1 / 0)
    with pytest.raises(UserError, match=r"step 1 .*division"):
        with Checkpoints(tmp_path, config={}) as checkpoints:
            checkpoints.save(1, small_state(1), {})
    with pytest.raises(KeyboardInterrupt):
        with Checkpoints(tmp_path, config={}) as checkpoints:
            checkpoints.save(1, small_state(1), {})
            raise KeyboardInterrupt


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written to .*Not a directory"):
        Checkpoints(tmp_path / "file" / "checkpoints", config={})
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(UserError, match="Permission denied"):
            Checkpoints(tmp_path, config={})
    with pytest.raises(UserError, match="at least 1"):
        Checkpoints(tmp_path, keep=0, config={})


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    saved(tmp_path, [1, 2])

    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(manifest.hashlib, "file_digest", refuse)
    with pytest.raises(UserError, match="/2 cannot be read: Permission denied"):
        Checkpoints(tmp_path, config=CONFIG).restore(small_state(0))
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_orbax_logs_warnings_only(tmp_path):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger, level = absl_logging.get_absl_logger(), absl_logging.get_verbosity()
    logger.addHandler(handler)
    absl_logging.set_verbosity(absl_logging.INFO)
    try:
        saved(tmp_path, [1])
        restored_step(tmp_path)
        assert records == []
        place = "/lib/orbax/checkpoint/any.py"
        logger.handle(logging.LogRecord("absl", logging.WARNING, place, 1, "slow disk", (), None))
        logger.handle(logging.LogRecord("absl", logging.INFO, __file__, 1, "ours", (), None))
        assert [record.getMessage() for record in records] == ["slow disk", "ours"]
    finally:
        absl_logging.set_verbosity(level)
        logger.removeHandler(handler)
