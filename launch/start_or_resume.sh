#!/bin/sh
# start_or_resume.sh FOLDER EXPERIMENT [--flag=value ...]: resumes the run in FOLDER if it exists,
# else starts it, so that a launcher needs one command for both.
#
# EXPERIMENT is an experiment that trains (gpt13b_sparse, gpt13b_dense). FOLDER must be the same on
# every host; for a run on one host it may be an address, such as gs://BUCKET/RUN. $PYTHON is the Python that runs it (default: python).
#
# On SIGTERM and SIGINT the run saves and ends. The status is then 75 (EX_TEMPFAIL of sysexits.h) if
# the run has no report yet, even after a SIGINT, for which the run's own status is 0: a scheduler
# that restarts failed jobs must not count the run as finished.

set -eu
if [ $# -lt 2 ]; then
    echo "usage: start_or_resume.sh FOLDER EXPERIMENT [--flag=value ...]" >&2
    exit 2
fi
folder=$1
experiment=$2
shift 2

# Whether the run has a file of this name.
has() {
    case $folder in
    *://*)
        "${PYTHON:-python}" -c 'import sys
from sparse_dataflow.files.addresses import Address
sys.exit(Address(sys.argv[1]).entry() is None)' "$folder/$1" 2>/dev/null
        ;;
    *) [ -e "$folder/$1" ] ;;
    esac
}

if has config.json; then
    set -- "--resume=$folder" "$@"
else
    set -- "--out=$folder" "$@"
fi

# A signal before the run has a process id is sent once it has one.
run='' early='' signal=''
trap 'signal=1; if [ -n "$run" ]; then kill -TERM "$run" 2>/dev/null || :; else early=1; fi' TERM INT
"${PYTHON:-python}" -m "experiments.$experiment" "$@" &
run=$!
[ -z "$early" ] || kill -TERM "$run" 2>/dev/null || :
# A trapped signal ends `wait` early with a status of its own. `wait` returns the run's status only
# once; after that it returns 127.
wait "$run" && status=0 || status=$?
while [ -n "$signal" ]; do
    signal=''
    wait "$run" 2>/dev/null && again=0 || again=$?
    [ "$again" = 127 ] || status=$again
done
if [ "$status" = 0 ] && ! has report.html; then
    exit 75
fi
exit "$status"
