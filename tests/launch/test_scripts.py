"""The shell scripts with fake schedulers, clouds and Pythons."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from object_store import object_store
from places import ROOT

LAUNCH = ROOT / "launch"
SCRIPTS = [*sorted(LAUNCH.glob("*.sh")), LAUNCH / "slurm.sbatch"]
# A fake run that saves on SIGTERM; $WHAT=finish ends it at once, fail lets it fail.
RUN = """#!/bin/sh
trap 'echo saved >>"$LOG"; exit 0' TERM
echo "$$ $*" >>"$LOG"
for word; do case $word in --out=* | --resume=*) folder=${word#*=} ;; esac; done
mkdir -p "$folder"
touch "$folder/config.json"
case $WHAT in
    finish) touch "$folder/report.html" ;;
    fail) exit 3 ;;
    *) while :; do sleep 0.05; done ;;
esac
"""


# A shell cannot trap a signal that is ignored when it starts, as SIGINT is in the background.
WITH_SIGINT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Desk:
    """A folder of fake programs, their log, and the environment variables that select them."""

    def __init__(self, folder):
        self.folder, self.log = folder, folder / "log"
        self.log.touch()
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.program("run", RUN)
        self.variables = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(folder),
            "LOG": str(self.log),
            "PYTHON": str(self.bin / "run"),
            "WHAT": "finish",
        }

    def program(self, name, text):
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *words, **variables):
        return subprocess.Popen(
            [sys.executable, "-c", WITH_SIGINT, *map(str, words)],
            cwd=self.folder,
            env=self.variables | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words, **variables):
        process = self.start(*words, **variables)
        out, err = process.communicate(timeout=600)
        return process.returncode, out, err

    def wait_for(self, text):
        end = time.monotonic() + 600
        while text not in self.log.read_text():
            assert time.monotonic() < end
            time.sleep(0.02)


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_reports_nothing(script):
    # The Python package installs it in the interpreter's folder.
    shellcheck = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}") or (
        shutil.which("shellcheck")
    )
    if not shellcheck:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_run_is_started_and_then_resumed(desk):
    command = ("sh", LAUNCH / "start_or_resume.sh", "a run", "gpt13b_sparse", "--corpus=a b")
    assert desk.run(*command)[0] == 0
    assert desk.run(*command)[0] == 0
    first, second = (line.split(" ", 1)[1] for line in desk.log.read_text().splitlines())
    assert first == "-m experiments.gpt13b_sparse --out=a run --corpus=a b"
    assert second == "-m experiments.gpt13b_sparse --resume=a run --corpus=a b"


PYTHON_OF_A_RUN = f"""#!/bin/sh
[ "$1" = -c ] && exec {sys.executable} "$@"
echo "$*" >>"$LOG"
"""


@pytest.mark.slow
def test_a_run_at_an_address_is_started_then_resumed_and_finished_with_its_report(desk):
    desk.program("run", PYTHON_OF_A_RUN)
    command = ("sh", LAUNCH / "start_or_resume.sh", "s3://runs/a", "gpt13b_sparse")
    with object_store() as store:
        store.make_bucket("runs")
        variables = store.environment | {"PYTHONPATH": str(ROOT)}
        assert desk.run(*command, **variables)[0] == 75
        store.write("runs", "a/config.json", b"{}")
        store.write("runs", "a/report.html", b"")
        assert desk.run(*command, **variables)[0] == 0
    assert desk.log.read_text().splitlines() == [
        "-m experiments.gpt13b_sparse --out=s3://runs/a",
        "-m experiments.gpt13b_sparse --resume=s3://runs/a",
    ]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_saved_before_its_end_does_not_count_as_finished(desk, sent):
    command = ("sh", LAUNCH / "start_or_resume.sh", "run", "gpt13b_sparse")
    process = desk.start(*command, WHAT="train")
    desk.wait_for("--out=run")
    process.send_signal(sent)
    process.communicate(timeout=600)
    assert process.returncode == 75 and "saved" in desk.log.read_text()
    assert desk.run(*command, WHAT="fail")[0] == 3
    assert desk.run("sh", LAUNCH / "start_or_resume.sh", "run")[0] == 2


# A slow shell, as on a busy machine: the signalled process ends before `kill` returns.
SLOW = 'kill() { command kill "$@" || return; sleep 1; }'


def test_the_status_is_kept_if_the_run_ends_first(desk):
    script = LAUNCH / "start_or_resume.sh"
    process = desk.start(
        "sh", "-c", f'{SLOW}; . "$0"', script, "run", "gpt13b_sparse", WHAT="train"
    )
    desk.wait_for("--out=run")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=600)
    assert process.returncode == 75


SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""


def slurm(desk, *words, **variables):
    desk.program("srun", SRUN)
    desk.program("scontrol", '#!/bin/sh\necho "scontrol $*" >>"$LOG"\n')
    (desk.folder / "launch").symlink_to(LAUNCH)
    more = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(desk.folder)}
    return desk.start("bash", LAUNCH / "slurm.sbatch", *words, **more, **variables)


def test_a_slurm_job_ends_with_its_run(desk):
    process = slurm(desk, "--scale=nano", "--mesh=data:2")
    _, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (0, "")
    assert "--out=runs/slurm-7 --scale=nano --mesh=data:2" in desk.log.read_text()
    assert "scontrol" not in desk.log.read_text()


@pytest.mark.parametrize("shell", ["", SLOW])
def test_a_slurm_job_at_its_time_limit_saves_and_is_requeued(desk, shell):
    (desk.folder / "shell").write_text(shell)
    startup = str(desk.folder / "shell")
    process = slurm(desk, WHAT="train", EXPERIMENT="gpt13b_dense", BASH_ENV=startup)
    desk.wait_for("-m experiments.gpt13b_dense --out=runs/slurm-7")
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 75 and "requeueing" in out
    assert desk.log.read_text().endswith("saved\nscontrol requeue 7\n")


def test_a_slurm_job_that_is_stopped_or_fails_is_not_requeued(desk):
    process = slurm(desk, WHAT="train")
    desk.wait_for("--out=")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=600)
    assert process.returncode == 75
    assert desk.run("bash", LAUNCH / "slurm.sbatch", WHAT="fail", SLURM_JOB_ID="7")[0] == 3
    assert "saved" in desk.log.read_text() and "scontrol" not in desk.log.read_text()


# A fake gcloud with two workers; each has its own home folder.
GCLOUD = """#!/bin/sh
echo "gcloud $1 $2 $3 $4 $5 $6" >>"$LOG"
case "$*" in *--zone=Z*) ;; *) exit 9 ;; esac
for word; do
    case $word in --worker=*) which=${word#*=} ;; --command=*) command=${word#*=} ;; esac
done
[ "$which" = all ] && which='0 1'
status=0
for worker in $which; do
    mkdir -p "$HOME/w$worker"
    cd "$HOME/w$worker"
    case $4 in
        scp) cp "$5" "${6#*:}" ;;
        ssh) HOME=$PWD sh -c "$command" ;;
    esac || status=1
done
exit $status
"""


def test_a_tpu_vm_is_set_up_started_watched_and_stopped(desk):
    if not shutil.which("setsid") or not (ROOT / ".git").exists():
        pytest.skip("needs setsid and a clone")
    desk.program("gcloud", GCLOUD)
    script = LAUNCH / "tpu_vm.sh"
    assert desk.run("sh", script)[0] == 2
    desk.program("sudo", "#!/bin/sh\n")
    status, _, err = desk.run("sh", script, "setup", "pod", "Z", PYTHON="/nowhere")
    assert status == 1 and err.count("/nowhere is not a program") == 2
    assert (desk.folder / "w1" / "sparse_dataflow" / "setup.cfg").exists(), err
    for worker in ("w0", "w1"):
        place = desk.folder / worker / "sparse_dataflow"
        shutil.copy(LAUNCH / "start_or_resume.sh", place / "launch")
        (place / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        shutil.copy(desk.bin / "run", place / ".venv/bin/python")
    odd = '--corpus=it\'s "$HOME" here'
    start = ("sh", script, "start", "pod", "Z", desk.folder / "shared", "gpt13b_sparse", odd)
    status, _, err = desk.run(*start, WHAT="train")
    assert status == 0, err
    desk.wait_for(odd)
    end = time.monotonic() + 600
    while desk.log.read_text().count(odd) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    status, _, err = desk.run(*start, WHAT="train")
    assert status != 0 and "a run is still active" in err
    status, _, err = desk.run("sh", script, "stop", "pod", "Z")
    assert status == 0 and desk.log.read_text().count("saved") == 2, err
    assert "no run is active" in desk.run("sh", script, "stop", "pod", "Z")[1]


@pytest.mark.parametrize(
    "platform, extras", [("cpu", "data"), ("gpu", "cuda,data"), ("tpu", "tpu,data")]
)
def test_the_images_use_existing_files_and_extras(platform, extras):
    text = (LAUNCH / "docker" / f"{platform}.Dockerfile").read_text(encoding="utf-8")
    assert f"docker build -f launch/docker/{platform}.Dockerfile" in text
    assert f'-e ".[{extras}]"' in text and "FROM python:3.13" in text
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for pattern in (line[1:] for line in patterns if line.startswith("!")):
        assert list(ROOT.glob(pattern)), pattern
    assert (ROOT / re.search(r"-c (\S+)", text)[1]).exists()
    entry = re.search(r'ENTRYPOINT \["sh", "(.*)"\]', text)[1]
    assert (ROOT / entry).exists()
    assert text.index("\nRUN pip") < text.index("\nUSER 1000:1000\n") < text.index("\nENTRYPOINT")
    assert text.count("\nUSER ") == 1 and "useradd --uid 1000" in text
    written = re.search(r"chmod 1777 (.*)", text)[1].split()
    assert written == ["/runs", "/cache"] and "XDG_CACHE_HOME=/cache" in text
    for extra in extras.split(","):
        assert re.search(rf"^{extra} =$", (ROOT / "setup.cfg").read_text(), re.M)


def test_tpu_vms_get_the_packages_of_the_image():
    """Corpora of the Hugging Face hub, which the pages name, need the extra data."""
    image = (LAUNCH / "docker" / "tpu.Dockerfile").read_text(encoding="utf-8")
    extras = re.search(r'-e "\.\[(.*)\]"', image)[1]
    assert f"make_env.sh .venv {extras}" in (LAUNCH / "tpu_vm.sh").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted(LAUNCH.glob("*.md")), ids=lambda path: path.name)
def test_every_page_has_the_five_headings(page):
    text = page.read_text(encoding="utf-8")
    places = [
        text.find(f"**{heading}**")
        for heading in ("Prerequisites", "The one command", "Watch", "Stop", "Resume")
    ]
    assert -1 not in places and places == sorted(places) and "```" in text
