#!/bin/bash
# One run on several hosts, without a scheduler: torchrun, with the settings of the run. On each host:
#   LLMEXP_RDZV_ENDPOINT=HOST1:29400 launchers/torchrun.sh RUN_DIR
# RUN_DIR is made by `llmexp train --create-only parallelism.nnodes=2 ...`, which prints this line, and is on a disk that all
# hosts share. HOST1 is one of the hosts, by a name or address that all of them reach; the port is any that is free there,
# another one for each run. $PYTHON: the interpreter that has llmexp.
# The hosts have parallelism.start_timeout_s to come. After a failure torchrun starts the ranks again, from the newest
# checkpoint, up to parallelism.max_restarts times; a lost host that comes back (the same line) joins them, unless it is
# HOST1: then start all again. torchrun exits with 1 whatever happened; RUN_DIR/status.json has the run's exit code.

python="${PYTHON:-python}"
settings=$("$python" -P - "$1" <<'END'
import math, os, sys
from pathlib import Path
from llmexp.folders.rundir import read_config
p = read_config(Path(sys.argv[1]))["parallelism"]
ranks, seconds = p["nproc_per_node"] or 1, math.ceil(p["start_timeout_s"])
logs = ",".join(f"{rank}:3" for rank in range(1, ranks)) or "0"  # the others than rank 0 print there
print(
    p["nnodes"], os.environ.get("OMP_NUM_THREADS", max(1, len(os.sched_getaffinity(0)) // ranks)),
    f"--nnodes={p['nnodes']} --nproc-per-node={ranks} --max-restarts={p['max_restarts']}",
    f"--redirects={logs} --rdzv-conf=join_timeout={seconds},read_timeout={seconds}",
)
END
) || exit 2
read -r hosts threads options <<< "$settings"
[ "$hosts" = 1 ] && exec "$python" -P -u -m llmexp.train "$1"
case "$LLMEXP_RDZV_ENDPOINT" in
  ?*:*[0-9]) ;;
  *) echo "LLMEXP_RDZV_ENDPOINT=$LLMEXP_RDZV_ENDPOINT: where the hosts meet, HOST:PORT, is needed; for example host1:29400" >&2
     exit 2 ;;
esac
export OMP_NUM_THREADS="$threads"
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"  # else a lost host is told by traces of C++ first
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1                 # else a restarted group reads the old group's keys
# shellcheck disable=SC2086
exec "$python" -P -m torch.distributed.run $options --rdzv-backend=c10d --rdzv-endpoint="$LLMEXP_RDZV_ENDPOINT" \
  --rdzv-id="$(basename "$1")" --log-dir="$1/logs" -m llmexp.train "$1"
