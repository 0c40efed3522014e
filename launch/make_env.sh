#!/bin/sh
# make_env.sh FOLDER [EXTRAS]: makes the virtual environment FOLDER with this project in it, or
# brings it up to date with setup.cfg; EXTRAS are setup.cfg's, without a space (dev).  With LOCKED=1
# the versions are those of constraints.txt, which CI tests; else the newest that fit.
#
# FOLDER/.complete says that an environment is whole.  It is away while one is being changed, so
# whatever Ctrl-C, a full disk or a lost network leaves behind is made anew the next time.

set -u
env=$1
extras=${2:-dev}
here=$(dirname "$0")
complete=$env/.complete

started=$(date +%s)
if [ -e "$complete" ] && "$env/bin/python" -c '' 2>/dev/null; then
    echo "bringing $env up to date with setup.cfg"
    saved=$env/.complete.before
    mv "$complete" "$saved"
else
    # What follows empties the folder, so never somebody's folder that is no environment.
    if [ -e "$env" ] && [ ! -e "$env/pyvenv.cfg" ] && [ -n "$(ls -A "$env")" ]; then
        echo "error: $env exists and is not an environment; pass another one as VENV=folder." >&2
        exit 1
    fi
    python=$(sh "$here/find_python.sh") || exit 1
    version=$("$python" -c 'import platform; print(platform.python_version())')
    echo "making $env with Python $version (first time only, about a minute)"
    saved=
    "$python" -m venv --clear "$env" || exit 1
fi

# pip ends on Ctrl-C as it does on an error; here the two differ.
trap 'echo "stopped; make starts $env anew next time" >&2; exit 130' INT TERM

set --
[ -n "${LOCKED:-}" ] && set -- -c "$here/../constraints.txt"
if ! "$env/bin/python" -m pip install -qq --disable-pip-version-check --no-compile "$@" -e "$here/..[$extras]"; then
    # pip downloads and resolves before it installs, so what was whole most likely still is.
    [ -n "$saved" ] && mv "$saved" "$complete"
    echo "error: pip could not install what setup.cfg names; its own message is above." >&2
    exit 1
fi
[ -n "$saved" ] && rm -f "$saved"
touch "$complete"
echo "$env is ready after $(($(date +%s) - started)) s"
