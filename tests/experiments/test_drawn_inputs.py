"""Whatever comes from outside is used or refused with a message: never a traceback, never a hang.

Five kinds of input, drawn from a fixed seed; `make faults` draws more and counts them for
docs/evidence/surviving.md.
"""

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time

import drawn
import pytest
from drawn_inputs import SECONDS, DrawnInputs
from main_job import PICO
from ports import free_port

from sparse_dataflow.cluster import rendezvous
from sparse_dataflow.commands import command_line, devices
from sparse_dataflow.commands.request import NAMED
from sparse_dataflow.core.config import settings
from sparse_dataflow.data import tokens
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.tokenizer import train_tokenizer
from sparse_dataflow.evaluation import run_files, trained
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.model_card import model_card
from sparse_dataflow.monitoring import goodput
from sparse_dataflow.monitoring.metrics import MetricsWriter
from sparse_dataflow.runs.run_config import RunConfig

VALUES = (
    "", "-1", "0", "1", "2", "3", "7", "64", "0.5", "1e308", "-1e308", "1e-308", "nan", "inf",
    "1" * 400, "9" * 5000, "~", "~x", "a\0b", "\udce9", "a" * 300, "x/" * 3000, "é", ",", ":",
    "1,2", "1,,2", "=", "qkv", "qkv:0.5", "all", "none", "yes", "no", "auto", "relay",
    "pipeline", "rigl", "rigl:every=1", "data:2", "stage:2,fsdp", "fsdp:0", "[]", "{}", "null",
    "../..", "/etc/passwd", "/dev/zero", "%s%n", "$(id)", "--", "-", "\n", "0x10", "1_000", "١",
)  # fmt: skip


def command(draw):
    """A random command line of the main job."""
    legal, words = settings.by_path(RunConfig), []
    for _ in range(draw.randint(1, 6)):
        path = draw.choice(sorted(legal))
        choices = list(legal[path].choices) or ["1"]
        value = draw.choice(VALUES + tuple(choices) * 5)
        name = draw.choice(sorted(NAMED))
        words.append(
            draw.choice(
                [f"--set={path}={value}", f"--{name}={value}", f"--{name}", f"--no{name}", value]
                + [f"--set={path}={value}"] * 4
                + [f"--{name}={value}"] * 3
            )
        )
    return ["gpt13b_sparse", *words]


def test_flags(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    counts = DrawnInputs("command lines and flagfiles", 300, 5000)
    draw = counts.draw
    for _ in counts:
        argv = command(draw)
        if draw.random() < 0.2:
            argv = [argv[0], flagfile(draw, argv[1:], tmp_path / "flags")]
        with counts.one(argv):
            [request] = command_line.arguments(argv, tuple(NAMED), None)
            devices.executor(request.config())
    assert not list((tmp_path / "here").iterdir())


def flagfile(draw, words, path):
    """--flagfile of a file with these words, some of which stand in another one."""
    inner = path.with_name("inner")
    inner.write_bytes("\n".join(words[1:]).encode(errors="surrogateescape"))
    nested = draw.choice([inner, path, "/dev/zero", path.parent, "missing", ""])
    text = "\n".join([*words[:1], f"--flagfile={nested}"]).encode(errors="surrogateescape")
    path.write_bytes(drawn.damaged(draw, text) if draw.random() < 0.3 else text)
    return f"--flagfile={path}"


def corpus(draw, folder):
    """A random corpus."""
    folder.mkdir()
    for number in range(draw.randint(0, 3)):
        path = os.fsencode(folder / f"{number}") + draw.choice([b"", b"\xff", b" ", b"\n"])
        path += draw.choice([b".txt", b".txt", b".jsonl", b".md"])
        unit = draw.choice(["a", " ", "\n", "e\u0301", "some words\n", "\u202e", "1", "{}", "漢"])
        size = draw.choice([0, 1, 100, 10_000, 600_000])
        content = draw.choice(
            [
                (unit * size).encode(),
                "".join(
                    json.dumps({"text": unit * (size // 50)}) + "\n" for _ in range(40)
                ).encode(),
                draw.randbytes(size),
                b'{"text": ' + b"[" * size,
                b'{"text": 1e999}\n' * 3,
                b"\xef\xbb\xbf" + unit.encode() * size,
            ]
        )
        kind = draw.choice(["file"] * 8 + ["pipe", "folder", "link", "loop"])
        if kind == "file":
            with open(path, "wb") as file:
                file.write(content)
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            os.mkdir(path)
        else:
            os.symlink("/dev/zero" if kind == "link" else path, path)
    if draw.random() < 0.3 and (files := sorted(folder.iterdir())):
        return draw.choice(files)
    return folder


def test_corpora(tmp_path):
    counts = DrawnInputs("folders of text", 25, 200)
    draw = counts.draw
    for number in counts:
        path = corpus(draw, tmp_path / f"{number}")
        with counts.one(path):
            loaded = load_corpus(str(path), tmp_path / "cache")
            tokenizer = train_tokenizer(loaded, 300, tmp_path / "cache")
            tokens.prepare_tokens(loaded, tokenizer, tmp_path / "cache")


def damage(draw, folder):
    """Damages some files of a run; returns how."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    done = []
    for path in draw.sample(files, draw.randint(1, 3)):
        kind = draw.choice(
            ["gone", "pipe", "folder", "empty", "half", "flip", "json", "zeros", "link"]
        )
        done.append((str(path.relative_to(folder)), kind))
        content = bytearray(path.read_bytes())
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(draw.choice(["/dev/zero", "/etc/passwd", path.name, "nowhere"]))
        elif kind != "gone":
            if kind == "flip" and content:
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            half = content[: len(content) // 2]
            other = draw.choice([b"{}", b"[]", b"null", b"[" * 9000, b'{"kind": 1}', b"NaN"])
            contents = {"empty": b"", "half": half, "json": other, "zeros": bytes(len(content))}
            path.write_bytes(contents.get(kind, content))
    return done


@pytest.mark.slow
def test_run_folders(undisturbed, tmp_path):
    """As --resume, export and the reports read them."""
    counts = DrawnInputs("damaged run folders", 10, 150)
    draw = counts.draw
    for number in counts:
        folder = tmp_path / f"{number}"
        shutil.copytree(undisturbed, folder)
        damaged = damage(draw, folder)
        with counts.one(damaged):
            record = run_files.read_record(folder, run_files.read_config(folder))
            run_files.read_tokenizer(folder, record)
            goodput.read(folder / goodput.NAME)
            MetricsWriter(folder / "sparse", 6).close()
            model_card(trained.load(folder, "sparse"), "dense", {})
        shutil.rmtree(folder)


def environment(draw):
    """Variables, and limits that a new process sets itself."""
    path = draw.choice(
        ["", "/nowhere", "/dev/null", "/proc", "~", "a" * 300, "relative", "/tmp/\xe9"]
    )
    variables = {
        name: draw.choice([path, "", "1", "-1", "x", "9" * 30])
        for name in draw.sample(
            [
                "HOME", "XDG_CACHE_HOME", "TMPDIR", "LANG", "LC_ALL", "TERM", "COLUMNS",
                "TFDS_DATA_DIR",
                "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS", "SLURM_PROCID",
                "SPARSE_DATAFLOW_TOKEN", "MPLCONFIGDIR", "TZ", "NO_COLOR",
            ],
            draw.randint(0, 4),
        )
    }  # fmt: skip
    descriptors = draw.choice([None, 10, 16, 24, 40, 64])
    closed = draw.sample([0, 1, 2], draw.choice([0, 0, 1, 3]))

    def limit():
        for number in closed:
            os.close(number)
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    return variables, limit, f"{variables} descriptors={descriptors} closed={closed}"


@pytest.mark.nightly
def test_environments(job, tmp_path):
    """Of a process that is started as a user does."""
    counts = DrawnInputs("environments of a process", 6, 20)
    draw = counts.draw
    for number in counts:
        variables, limit, words = environment(draw)
        out = tmp_path / f"{number}"
        with counts.one(words):
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "experiments.gpt13b_sparse", *PICO, "--steps=1"),
                    *("--notwin", f"--corpus={job.corpus}", f"--out={out}"),
                    "--set=parallel.join_timeout=1",
                ],
                env=job.environment | variables,
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                preexec_fn=limit,
                timeout=SECONDS * 5,
            )
            text = done.stderr.decode(errors="replace")
            assert "Traceback" not in text and done.returncode in (0, 2), (done.returncode, text)
            if done.returncode:
                raise UserError(text[-1000:] or "standard error is closed")


def test_sockets():
    """Connections to process 0 while the others join."""
    counts = DrawnInputs("connections", 300, 3000)
    draw = counts.draw
    port, met = free_port(), []

    def meet(number):
        met.append(rendezvous.meet(f"127.0.0.1:{port}", 2, number, {"a": 1}, SECONDS, "secret"))

    first = threading.Thread(target=meet, args=(0,))
    first.start()
    silent = []
    for _ in counts:
        with counts.one("connection"):
            connection = connected(port)
            message = {"process": 1, "processes": 2, "facts": {"a": 1}, "nonce": "", "proof": ""}
            text = drawn.json_bytes(draw, message)
            with contextlib.suppress(OSError):
                connection.sendall(
                    draw.choice(
                        [text + b"\n", text, text[:30], draw.randbytes(99), b"[" * 9**5, b""]
                    )
                )
            if draw.random() < 0.05:
                silent.append(connection)
                continue
            connection.close()
            raise UserError("turned away")
    assert not met
    meet(1)
    first.join()
    assert len(met) == 2
    for connection in silent:
        connection.close()


def connected(port):
    for _ in range(500):
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        time.sleep(0.02)
    raise AssertionError("nobody listens")
