#!/bin/bash
# One run on several hosts, without a scheduler. On each host, as often as it has to be started again:
#   LLMEXP_RDZV_ENDPOINT=HOST1:29400 launchers/torchrun.sh RUN_DIR
# RUN_DIR is made by `llmexp train --queue parallelism.nnodes=2 ...`, which prints this line, and is on a disk that all
# hosts share. HOST1 is one of the hosts, by a name or address that all of them reach; the port is any that is free there,
# another one for each run. $PYTHON: the interpreter that has llmexp.
# A host that was lost and is started again within parallelism.start_timeout_s brings the run back, from its newest
# checkpoint, up to parallelism.max_restarts times.
#
# What runs here is torchrun's own elastic agent with the settings of the run. Plain torchrun works as well, with
# restarts only where TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set, and says less when something goes wrong:
#   torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST1:29400 -m llmexp.train RUN_DIR

# Else a lost host is told by traces of C++ before it is told in words.
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"

exec "${PYTHON:-python}" -P -u -m llmexp.train "$1"
