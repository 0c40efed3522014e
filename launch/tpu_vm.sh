#!/bin/sh
# Controls a run on all workers of a TPU VM from your own machine; see tpu_vm.md.
#
#   tpu_vm.sh setup NAME ZONE                  copy this checkout and make an environment
#   tpu_vm.sh start NAME ZONE FOLDER EXPERIMENT [--flag=value ...]   start or resume a run
#   tpu_vm.sh watch NAME ZONE                  show the output of worker 0
#   tpu_vm.sh stop  NAME ZONE                  save and end the run, on all workers

set -eu

usage() {
    sed -n '3,7s/^# *//p' "$0" >&2
    exit 2
}
[ $# -ge 3 ] || usage
verb=$1
name=$2
zone=$3
shift 3

# on_workers WHICH COMMAND
on_workers() {
    gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker="$1" --command="$2"
}

# Prints the arguments quoted for a shell.
quoted() {
    for word; do
        printf " '%s'" "$(printf '%s' "$word" | sed "s/'/'\\\\''/g")"
    done
}

case $verb in
    setup)
        archive=$(mktemp)
        trap 'rm -f "$archive"' EXIT
        git -C "$(dirname "$0")/.." archive --format=tar.gz -o "$archive" HEAD
        gcloud compute tpus tpu-vm scp "$archive" "$name:sparse_dataflow.tar.gz" \
            --zone="$zone" --worker=all
        # The base images are Ubuntu 22.04, whose Python is too old.
        on_workers all 'set -e
            mkdir -p sparse_dataflow && cd sparse_dataflow && tar -xzf ../sparse_dataflow.tar.gz
            sh launch/find_python.sh >/dev/null 2>&1 || {
                sudo apt-get -qq update && sudo apt-get -qq install -y python3.11-venv; }
            sh launch/make_env.sh .venv tpu,data'
        ;;
    start)
        [ $# -ge 2 ] || usage
        on_workers all "set -e
            cd sparse_dataflow
            if [ -e run.pid ] && kill -0 \"\$(cat run.pid)\" 2>/dev/null; then
                echo 'error: a run is still active; end it with tpu_vm.sh stop.' >&2
                exit 1
            fi
            PYTHON=.venv/bin/python nohup setsid sh launch/start_or_resume.sh$(quoted "$@") \
                >run.log 2>&1 </dev/null &
            echo \$! >run.pid"
        ;;
    watch)
        on_workers 0 'cd sparse_dataflow && tail -n 50 -F run.log'
        ;;
    stop)
        # shellcheck disable=SC2016 # The worker's shell expands the variables.
        on_workers all 'cd sparse_dataflow
            pid=$(cat run.pid 2>/dev/null) && kill -TERM "$pid" 2>/dev/null || {
                echo "no run is active"; exit 0; }
            while kill -0 "$pid" 2>/dev/null; do sleep 1; done
            tail -n 2 run.log'
        ;;
    *) usage ;;
esac
