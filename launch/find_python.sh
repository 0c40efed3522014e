#!/bin/sh
# Prints the path of the newest Python that this project supports.
#
#   find_python.sh          newest of all supported versions
#   find_python.sh 3.11     newest 3.11
#
# $PYTHON restricts the search: a path means that file, a name such as python3.11 means any Python
# 3.11. Every candidate is started, because a file may be a version manager's shim without a Python,
# or a system Python that cannot create environments.

supported='3.13 3.12 3.11'
root=${FIND_PYTHON_ROOT:-} # Prefix of the machine-wide folders; only tests set it.

# Prints three lines: version, missing features, and the interpreter outside any environment.
# Runs on Python 2 too.
probe='
import sys
missing = []
for name in ("venv", "ensurepip", "ssl"):
    try:
        __import__(name)
    except ImportError:
        missing.append(name)
if not hasattr(sys, "implementation") or sys.implementation.name != "cpython":
    missing.append("CPython")
elif sys.version_info >= (3, 13) and not sys._is_gil_enabled():
    missing.append("the global interpreter lock, which most packages need")
print("%d.%d" % sys.version_info[:2])
print(", ".join(missing))
print(getattr(sys, "_base_executable", None) or sys.executable)
'

versions=${1:-$supported}
request=${PYTHON:-}
case $request in
    python3.[0-9] | python3.[0-9][0-9])
        versions=${request#python}
        request=
        ;;
esac
for each in $versions; do
    case " $supported " in
        *" $each "*) ;;
        *)
            echo "error: Python $each is not supported; legal: $supported." >&2
            exit 1
            ;;
    esac
done

# Prints one candidate per line, those of the user's PATH first.
candidates() {
    if [ -n "$request" ]; then
        command -v -- "$request" || printf '%s\n' "$request"
        return
    fi
    (
        set -f
        IFS=:
        for folder in $PATH; do
            for name in python3.13 python3.12 python3.11 python3 python; do
                printf '%s\n' "${folder:-.}/$name"
            done
        done
    )
    for python in \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3 \
        "$HOME"/.pyenv/versions/*/bin/python3 \
        "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}"/*/bin/python3 \
        "$HOME"/.local/bin/python3.1[123] \
        "$HOME"/.local/share/mise/installs/python/*/bin/python3 \
        "$HOME"/.asdf/installs/python/*/bin/python3 \
        "$HOME"/miniconda3/bin/python3 "$HOME"/miniforge3/bin/python3 "$HOME"/anaconda3/bin/python3 \
        "$HOME"/miniconda3/envs/*/bin/python3 "$HOME"/miniforge3/envs/*/bin/python3 \
        "$root"/opt/homebrew/bin/python3.1[123] "$root"/usr/local/bin/python3.1[123] \
        "$root"/usr/bin/python3.1[123] "$root"/opt/local/bin/python3.1[123] \
        "$root"/opt/python/*/bin/python3 "$root"/opt/conda/bin/python3 \
        "$root"/Library/Frameworks/Python.framework/Versions/3.1[123]/bin/python3; do
        printf '%s\n' "$python"
    done
}

# Sets $version, $missing and $base from one candidate; fails if it cannot be started.
start() {
    answer=$("$1" -c "$probe" 2>/dev/null </dev/null) || return 1
    { read -r version && read -r missing && read -r base; } <<EOF
$answer
EOF
}

# Prints the position of $1 in $versions, 1 for the first; 0 if it is not there.
rank() {
    n=0
    for each in $versions; do
        n=$((n + 1))
        [ "$each" = "$1" ] && echo "$n" && return
    done
    echo 0
}

best=
best_rank=99
rejected=
tested='
'
all=$(candidates)
while IFS= read -r candidate; do
    case $tested in *"
$candidate
"*) continue ;; esac
    tested="$tested$candidate
"
    # macOS without its developer tools opens a window when this file is started.
    [ "$candidate" = /usr/bin/python3 ] && [ -d /System/Library ] &&
        ! xcode-select -p >/dev/null 2>&1 && continue
    if [ ! -f "$candidate" ] || [ ! -x "$candidate" ]; then
        [ -n "$request" ] && rejected="  $candidate is not a program"
        continue
    fi
    if ! start "$candidate"; then
        reason='cannot be started'
    elif [ "$(rank "$version")" = 0 ]; then
        reason="is Python $version"
    elif [ -n "$missing" ]; then
        reason="is Python $version without $missing"
    else
        new_rank=$(rank "$version")
        if [ "$new_rank" -lt "$best_rank" ]; then
            best=$base
            best_rank=$new_rank
        fi
        [ "$best_rank" = 1 ] && break
        continue
    fi
    rejected="$rejected
  $candidate $reason"
done <<EOF
$all
EOF

if [ -n "$best" ]; then
    printf '%s\n' "$best"
    exit 0
fi

newest=${versions%% *}
{
    if [ "$request" ]; then
        echo "error: PYTHON=$PYTHON cannot be used."
    else
        echo "error: found no Python $(echo "$versions" | sed 's/ /, /g') that can create an environment."
    fi
    [ -n "$rejected" ] && printf 'Candidates:\n%s\n' "$rejected" | sed '/^$/d'
    cat <<EOF
What to do, then run make again:
  Debian, Ubuntu   apt install python3 python3-venv
  Fedora           dnf install python$newest
  macOS            brew install python@$newest
  any system       uv python install $newest, or pyenv install $newest
  installed        make PYTHON=/path/to/python$newest
EOF
} >&2
exit 1
