#!/bin/sh
# start_or_resume.sh FOLDER EXPERIMENT [--flag=value ...]: goes on with the run in FOLDER where one
# has begun there, else begins it; so a launcher has one command for both.
#
# EXPERIMENT trains (gpt13b_sparse, gpt13b_dense); FOLDER must be the same on every host; $PYTHON is
# the Python that runs it (python).  SIGTERM and SIGINT have the run save and end.  Then, with no
# report written yet, the status is 75 (EX_TEMPFAIL of sysexits.h), also after a SIGINT, which the
# run itself ends with 0: a scheduler which starts failed jobs again must not take it for finished.

set -eu
if [ $# -lt 2 ]; then
    echo "usage: start_or_resume.sh FOLDER EXPERIMENT [--flag=value ...]" >&2
    exit 2
fi
folder=$1
experiment=$2
shift 2
if [ -e "$folder/config.json" ]; then
    set -- "--resume=$folder" "$@"
else
    set -- "--out=$folder" "$@"
fi

# A signal that comes before the run is known waits for it: nothing is left behind.
run='' early='' heard=''
trap 'heard=1; if [ -n "$run" ]; then kill -TERM "$run" 2>/dev/null || :; else early=1; fi' TERM INT
"${PYTHON:-python}" -m "experiments.$experiment" "$@" &
run=$!
[ -z "$early" ] || kill -TERM "$run" 2>/dev/null || :
# A trapped signal ends a wait early, with a status of its own; the run's is told once only, and
# after that each wait says 127.
wait "$run" && status=0 || status=$?
while [ -n "$heard" ]; do
    heard=''
    wait "$run" 2>/dev/null && again=0 || again=$?
    [ "$again" = 127 ] || status=$again
done
if [ "$status" = 0 ] && [ ! -e "$folder/report.html" ]; then
    exit 75
fi
exit "$status"
