"""Layers in turn, and in other processes, write the tokens of layers on one device."""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE, Popen

import numpy as np
import pytest
from decoded import BYTES, CONFIGS
from marks import some
from places import ROOT
from small_models import arbitrary_params, tables_of

from sparse_dataflow.cluster import lines
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.evaluation import kv_cache, remote_stages
from sparse_dataflow.evaluation.generate import generate_tokens
from sparse_dataflow.evaluation.sampling import Sampling
from sparse_dataflow.evaluation.sampling_settings import AUTO
from sparse_dataflow.evaluation.stages import Layers, LayersInTurn, Staged, StageLost
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError

PROMPTS = [[32], [7, 8, 9], [1] * 9]
SAMPLING = Sampling(temperature=3.0, seed=(1, 2, 3))


def model_of(name, scale=0.3):
    config = CONFIGS[name]
    params = merged(arbitrary_params(config, scale=scale), tables_of(config))
    training = TrainingConfig(steps=1, batch=4, sequence=16)
    return Model(Path(), "sparse", config, params, BYTES, 0, training, None, {})


def tokens_of(model, weights):
    # Rows end at the context of 16 at different steps.
    return [*generate_tokens(model.model, weights, PROMPTS, 12, 16, SAMPLING)]


def stage(model, layers, kind=Layers):
    weights = kv_cache.prepare(model.model, model.params, AUTO, layers).layers
    assert len(weights) == len(layers)
    return kind(model.model, weights, layers.start)


def ends(model):
    return kv_cache.prepare(model.model, model.params, AUTO, range(0))


class Unreliable:
    """A stage that is lost before its calls of some numbers."""

    def __init__(self, inner, losses):
        self.inner, self.losses, self.calls, self.is_here = inner, losses, 0, True

    def _call(self, name, *arguments):
        self.calls += 1
        if self.calls in self.losses:
            self.is_here = False
        if not self.is_here:
            self.inner._caches = ()
            raise StageLost(f"call {self.calls}")
        return getattr(self.inner, name)(*arguments)

    def read_prompts(self, *arguments):
        return self._call("read_prompts", *arguments)

    def append(self, *arguments):
        return self._call("append", *arguments)

    def revive(self):
        self.is_here = True


@pytest.mark.parametrize("name", some(list(CONFIGS), "sparse", "gemma2"))
def test_layers_in_turn_and_on_the_device_write_the_same_tokens(name):
    model = model_of(name)
    expected = tokens_of(model, kv_cache.prepare(model.model, model.params))
    count = model.model.num_layers
    first, second = range(count // 2), range(count // 2, count)
    stages = [stage(model, first, LayersInTurn), stage(model, second)]
    assert tokens_of(model, Staged(model.model, ends(model), stages)) == expected
    # Again, as what writes texts does: the caches begin again.
    assert tokens_of(model, Staged(model.model, ends(model), stages)) == expected
    assert len(np.unique([token for step in expected for token in step if token])) > 5


@pytest.mark.parametrize("losses", [{1}, {2}, {5, 6}, {12}, {1, 2, 3, 9}])
def test_a_lost_stage_comes_back_and_the_tokens_are_the_same(losses):
    model = model_of("sparse")
    expected = tokens_of(model, kv_cache.prepare(model.model, model.params))
    count, words = model.model.num_layers, []
    unreliable = Unreliable(stage(model, range(1, count)), losses)
    stages = [stage(model, range(1)), unreliable]
    assert tokens_of(model, Staged(model.model, ends(model), stages, words.append)) == expected
    assert len(words) == len(losses)


class Server:
    """A thread that serves the stages of a model at a free port."""

    def __init__(self, model, token):
        with lines.listen("127.0.0.1", 0, 1) as listener:
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        facts = remote_stages.facts_of(model)

        def serve():
            remote_stages.serve(
                self.address, facts, model.model, lambda chosen: stage(model, chosen), token
            )

        threading.Thread(target=serve, daemon=True).start()

    def stage(self, model, layers, token):
        facts = remote_stages.facts_of(model)
        return remote_stages.RemoteStage(self.address, layers, facts, 5.0, token)


def test_another_process_serves_one_writer_after_another_and_refuses_other_models():
    model, token = model_of("sparse"), "secret"
    server = Server(model, token)
    expected = tokens_of(model, kv_cache.prepare(model.model, model.params))
    count = model.model.num_layers
    for first in (0, 1):
        stages = [stage(model, range(first))] if first else []
        remote = server.stage(model, range(first, count), token)
        assert tokens_of(model, Staged(model.model, ends(model), [*stages, remote])) == expected
        # The connection breaks: the process goes on, and its layers come back.
        remote._connection.close()
        assert tokens_of(model, Staged(model.model, ends(model), [*stages, remote])) == expected
        remote._connection.close()
    with pytest.raises(UserError, match="weights"):
        server.stage(model_of("sparse", scale=0.2), range(1), token)
    with pytest.raises(UserError, match="SPARSE_DATAFLOW_TOKEN"):
        server.stage(model, range(1), "guessed")
    with pytest.raises(UserError, match="not layers of this model"):
        server.stage(model, range(count + 1), token)
    assert server.stage(model, range(count), token) is not None


@pytest.mark.parametrize("address", ["", "host", "host:", "host:x", "host:99999", ":80"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(UserError, match="legal: host:port"):
        remote_stages.refuse_no_address(address, "--stage_at=")


def test_a_stage_at_a_public_address_needs_a_secret():
    model = model_of("dense")
    with pytest.raises(UserError, match="set SPARSE_DATAFLOW_TOKEN"):
        remote_stages.serve("8.8.8.8:0", {}, model.model, lambda chosen: None, "")


@pytest.mark.slow
def test_a_killed_process_is_replaced_and_the_text_goes_on(run_folder):
    command = [sys.executable, "-m", "sparse_dataflow", "generate", f"--run={run_folder.path}"]
    command += ["--prompt=ab", "--temperature=1", "--max_new_tokens=20"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    def start(*more):
        return Popen([*command, *more], env=environment, stdout=PIPE, stderr=PIPE, bufsize=0)

    expected = start().communicate(timeout=300)[0]
    assert expected
    writer = start("--stages=2")
    first = writer.stdout.read(3)  # The prompt and a token.
    os.kill(_children(writer.pid)[-1], signal.SIGKILL)
    rest, words = writer.communicate(timeout=300)
    assert writer.returncode == 0 and first + rest == expected
    assert re.search(rb"the stage at 127.0.0.1:\d+ was lost", words)
    time.sleep(1)
    assert not _children(writer.pid)


def _children(pid):
    """Process ids of the processes that a process started, the oldest first."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            pids.append(int(folder.name))
    return sorted(pids)
