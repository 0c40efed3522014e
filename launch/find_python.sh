#!/bin/sh
# Prints the path of the newest Python that this project can use.
#
#   find_python.sh          the newest of all supported versions
#   find_python.sh 3.11     the newest 3.11
#
# With $PYTHON set, only that one is considered: a path, or a name such as python3.11, which means
# any Python 3.11.  Every candidate is started, because a file that is there may be a version
# manager's shim with nothing behind it, or a system Python that cannot make environments.

supported='3.13 3.12 3.11'
root=${FIND_PYTHON_ROOT:-} # before the machine-wide folders; empty but in a test

# Answers in three lines: version, what is missing, and the interpreter outside of any environment.
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
    missing.append("the global lock, without which few packages are built")
print("%d.%d" % sys.version_info[:2])
print(", ".join(missing))
print(getattr(sys, "_base_executable", None) or sys.executable)
'

wanted=${1:-$supported}
request=${PYTHON:-}
case $request in
    python3.[0-9] | python3.[0-9][0-9])
        wanted=${request#python}
        request=
        ;;
esac
for each in $wanted; do
    case " $supported " in
        *" $each "*) ;;
        *)
            echo "error: Python $each is not supported; use one of $supported." >&2
            exit 1
            ;;
    esac
done

# One candidate a line, the user's own PATH first.
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

# Sets $version, $missing and $base from one candidate; fails where it cannot be started.
start() {
    answer=$("$1" -c "$probe" 2>/dev/null </dev/null) || return 1
    { read -r version && read -r missing && read -r base; } <<EOF
$answer
EOF
}

# Where $1 stands among the wanted versions, 1 for the newest; 0 where it is none of them.
place() {
    n=0
    for each in $wanted; do
        n=$((n + 1))
        [ "$each" = "$1" ] && echo "$n" && return
    done
    echo 0
}

found=
found_place=99
tried=
seen='
'
all=$(candidates)
while IFS= read -r candidate; do
    case $seen in *"
$candidate
"*) continue ;; esac
    seen="$seen$candidate
"
    # Without its developer tools, macOS answers this one by opening a window.
    [ "$candidate" = /usr/bin/python3 ] && [ -d /System/Library ] &&
        ! xcode-select -p >/dev/null 2>&1 && continue
    if [ ! -f "$candidate" ] || [ ! -x "$candidate" ]; then
        [ -n "$request" ] && tried="  $candidate is not a program"
        continue
    fi
    if ! start "$candidate"; then
        why='cannot be started'
    elif [ "$(place "$version")" = 0 ]; then
        why="is Python $version"
    elif [ -n "$missing" ]; then
        why="is Python $version without $missing"
    else
        here=$(place "$version")
        if [ "$here" -lt "$found_place" ]; then
            found=$base
            found_place=$here
        fi
        [ "$found_place" = 1 ] && break
        continue
    fi
    tried="$tried
  $candidate $why"
done <<EOF
$all
EOF

if [ -n "$found" ]; then
    printf '%s\n' "$found"
    exit 0
fi

newest=${wanted%% *}
{
    if [ "$request" ]; then
        echo "error: PYTHON=$PYTHON cannot be used."
    else
        echo "error: found no Python $(echo "$wanted" | sed 's/ /, /g') that can make an environment."
    fi
    [ -n "$tried" ] && printf 'Looked at:\n%s\n' "$tried" | sed '/^$/d'
    cat <<EOF
What to do, then run make again:
  Debian, Ubuntu   apt install python3 python3-venv
  Fedora           dnf install python$newest
  macOS            brew install python@$newest
  any system       uv python install $newest, or pyenv install $newest
  already there    make PYTHON=/path/to/python$newest
EOF
} >&2
exit 1
