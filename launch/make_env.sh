#!/bin/sh
# make_env.sh FOLDER [EXTRAS]: creates the virtual environment FOLDER with this project, or updates
# it to setup.cfg. EXTRAS are extras of setup.cfg, separated by commas (default: dev). With LOCKED=1
# the versions are those of constraints.txt, which CI tests; else the newest legal ones.
#
# FOLDER/.complete marks a complete environment. It does not exist during a change, so an
# environment that Ctrl-C, a full disk or a lost network left incomplete is created again.

set -u
env=$1
extras=${2:-dev}
here=$(dirname "$0")
complete=$env/.complete

started=$(date +%s)
if [ -e "$complete" ] && "$env/bin/python" -c '' 2>/dev/null; then
    echo "updating $env to setup.cfg"
    saved=$env/.complete.before
    mv "$complete" "$saved"
else
    # venv --clear empties the folder, so it must be an environment, empty or new.
    if [ -e "$env" ] && [ ! -e "$env/pyvenv.cfg" ] && [ -n "$(ls -A "$env")" ]; then
        echo "error: $env exists and is not an environment; pass another folder as VENV=FOLDER." >&2
        exit 1
    fi
    python=$(sh "$here/find_python.sh") || exit 1
    version=$("$python" -c 'import platform; print(platform.python_version())')
    echo "creating $env with Python $version (first time only, about a minute)"
    saved=
    "$python" -m venv --clear "$env" || exit 1
fi

# pip's exit status does not distinguish Ctrl-C from an error.
trap 'echo "stopped; the next make creates $env again" >&2; exit 130' INT TERM

set --
[ -n "${LOCKED:-}" ] && set -- -c "$here/../constraints.txt"
if ! "$env/bin/python" -m pip install -qq --disable-pip-version-check --no-compile "$@" -e "$here/..[$extras]"; then
    # pip resolves and downloads before it installs, so the environment is most likely unchanged.
    [ -n "$saved" ] && mv "$saved" "$complete"
    echo "error: pip could not install the requirements of setup.cfg; see its message above." >&2
    exit 1
fi
[ -n "$saved" ] && rm -f "$saved"
touch "$complete"
echo "$env is ready after $(($(date +%s) - started)) s"
