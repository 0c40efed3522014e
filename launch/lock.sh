#!/bin/sh
# lock.sh PYTHON: updates constraints.txt, the versions that CI and the images install, for every
# supported Python on Linux and macOS. PYTHON belongs to an environment with uv.
#
# Markers such as `python_full_version < '3.12'` select the versions of one Python. `make env` uses
# the file only with LOCKED=1.

set -eu
cd "$(dirname "$0")/.."
new=$(mktemp)
trap 'rm -f "$new"' EXIT
{
    echo "# Versions that CI tests, for each Python; made by \`make lock\`."
    "$1" -m uv pip compile setup.cfg --extra dev --extra aot --universal --python-version 3.11 \
        --fork-strategy requires-python --upgrade --quiet --no-header --no-annotate \
        --no-emit-index-url --no-emit-find-links
} >"$new"
mv "$new" constraints.txt
trap - EXIT
