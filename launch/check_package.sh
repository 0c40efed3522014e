#!/bin/sh
# check_package.sh PYTHON: builds the source distribution, the wheel from it, installs the wheel in
# a new environment without the source tree, and trains one step there. A tag has to be "v" and the
# version. With LOCKED=1 the versions
# are those of constraints.txt. PYTHON is that of an environment with the extra dev.

set -eu
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
here=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# The build makes folders in its source.
mkdir "$folder/source" "$folder/texts"
(cd "$here" && tar cf - --exclude __pycache__ --exclude experiments/results \
    setup.cfg setup.py pyproject.toml README.md LICENSE sparse_dataflow experiments) |
    tar xf - -C "$folder/source"
"$python" -m build --no-isolation --outdir "$folder/dist" "$folder/source" > "$folder/log" 2>&1 ||
    { cat "$folder/log" >&2; exit 1; }

new=$folder/env/bin
"$python" -m uv venv -q --python "$python" "$folder/env"
set --
[ -n "${LOCKED:-}" ] && set -- -c "$here/constraints.txt"
wheel=$(echo "$folder"/dist/*.whl)
tag=$(git -C "$here" describe --exact-match --tags 2> /dev/null || true)
case ${wheel##*/} in
sparse_dataflow-"${tag#v}"*) ;;
*) echo "the tag $tag is not the version of $wheel" >&2; exit 1 ;;
esac
"$python" -m uv pip install -q --python "$new/python" "$@" "$wheel"

cd "$folder"
number=0
while [ "$number" -lt 40 ]; do
    number=$((number + 1))
    seq "$number" 700 > "texts/$number.txt"
done
# The README's example of a layer needs no extra.
# shellcheck disable=SC2016  # Backticks of Markdown.
sed -n '/^## A sparse layer/,/^## [^A]/{/^```python/,/^```$/p;}' "$here/README.md" |
    sed '/^```/d' > example.py
test -s example.py
JAX_PLATFORMS=cpu "$new/python" example.py
if "$new/sparse-dataflow" train --describe 2> train.log; then
    echo "the wheel alone trains, so layers install more than they need" >&2
    exit 1
fi
grep "pip install 'sparse_dataflow\[train\]'" train.log > /dev/null
"$python" -m uv pip install -q --python "$new/python" "$@" "${wheel}[train]"
"$new/sparse-dataflow" --version
"$new/python" -c 'import sparse_dataflow as sd; sd.BlockSparseLinear, sd.train'
if "$new/python" -Pc 'import experiments' 2> /dev/null; then
    echo "the wheel installs a package experiments" >&2
    exit 1
fi
"$new/sparse-dataflow" train --help | grep '^usage: sparse-dataflow train \[' > /dev/null
JAX_PLATFORMS=cpu "$new/sparse-dataflow" train --scale=pico --block=16 --mesh=fsdp:2,tensor:2 \
    --describe | grep '4 chips' > /dev/null
JAX_PLATFORMS=cpu XDG_CACHE_HOME=$folder/cache "$new/sparse-dataflow" train --quiet --scale=pico \
    --block=16 --notwin --steps=1 --corpus=texts --out=run
test -s run/report.html
