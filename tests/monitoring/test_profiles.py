"""Traces: the steps that a setting names, a request on loopback, and what is read from them."""

import threading
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import pytest

from sparse_dataflow.files import loopback
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.monitoring import goodput
from sparse_dataflow.runs.run_config import RunSettings


def step():
    x = jnp.ones((64, 64))
    return jax.block_until_ready(jax.jit(lambda x: jnp.tanh(x @ x))(x))


def test_the_setting_names_steps():
    assert RunSettings(profile="10:5").profiled_steps == range(10, 15)
    assert RunSettings().profiled_steps is None
    for text in ("10", "1:0", "-1:5", "a:b", "1:2:3", "1:99999999999"):
        with pytest.raises(UserError, match=r"run\.profile=.* legal: START:STEPS"):
            RunSettings(profile=text)


def test_the_named_steps_are_traced_and_their_kernels_are_read(tmp_path):
    step()
    profile = goodput.StepProfile(tmp_path, range(2, 4))
    for done in range(6):
        profile.update(done)
        assert goodput._busy.locked() == (done in (2, 3))
        step()
    profile.close()
    (trace,) = (tmp_path / "profile").glob("plugins/profile/*/perfetto_trace.json.gz")
    assert trace.stat().st_size > 0
    kernels = goodput.traced_kernels(tmp_path)
    assert kernels and kernels[0].seconds >= kernels[-1].seconds > 0
    assert all(kernel.count % 2 == 0 for kernel in kernels)


def test_a_resumed_run_after_the_steps_traces_nothing(tmp_path):
    profile = goodput.StepProfile(tmp_path, range(2, 4))
    for done in (7, 8):
        profile.update(done)
    profile.close()
    assert not (tmp_path / "profile").exists() and goodput.traced_kernels(tmp_path) == []


def test_a_profiler_that_fails_ends_no_run(tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("no profiler here")

    monkeypatch.setattr(jax.profiler, "trace", fail)
    profile = goodput.StepProfile(tmp_path, range(0, 4))
    for done in range(6):
        profile.update(done)
    assert capsys.readouterr().err.count("the profile failed: no profiler here") == 1
    assert not goodput._busy.locked()


def test_a_damaged_trace_has_no_kernels(tmp_path):
    folder = tmp_path / "profile" / "plugins" / "profile" / "now"
    folder.mkdir(parents=True)
    (folder / "host.xplane.pb").write_bytes(b"\xff" * 100)
    assert goodput.traced_kernels(tmp_path) == []


@pytest.mark.parametrize("seconds", [0, -1, 61, float("nan")])
def test_a_trace_on_request_has_a_limit(tmp_path, seconds):
    with pytest.raises(UserError, match="legal: above 0, up to 60"):
        goodput.trace_now(tmp_path, seconds)


def request(port, path="/", method="GET", **headers):
    message = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    for name, value in headers.items():
        message.add_header(name, value)
    try:
        with urllib.request.urlopen(message, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def refuse(path, query):
    raise UserError("seconds is wrong.")


def test_a_server_answers_this_machine_alone():
    methods = {"GET": lambda path, query: ("text/plain", query["x"]) if path == "/a" else None}
    with loopback.served(0, {**methods, "POST": refuse}) as port:
        assert request(port, "/a?x=3") == (200, "3")
        assert request(port, "/b")[0] == 404
        assert request(port, "/a")[0] == 500
        assert request(port, method="POST") == (400, "seconds is wrong.")
        assert request(port, "/a?x=3", Host="evil.example")[0] == 403
        assert request(port, "/a?x=3", Origin="http://evil.example")[0] == 403
        assert request(port, "/a?x=3", Origin="null")[0] == 403
        with pytest.raises(UserError, match=f"Port {port}"), loopback.served(port, {}):
            pass
    assert not [t for t in threading.enumerate() if t.name == "loopback"]


def test_a_running_job_is_traced_on_request(tmp_path):
    def respond(path, query):
        return "text/plain", goodput.trace_now(tmp_path, float(query["seconds"]))

    with loopback.served(0, {"POST": respond}) as port:
        status, text = request(port, "/trace?seconds=0.2", method="POST")
    assert status == 200 and "profile" in text
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
