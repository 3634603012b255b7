#!/usr/bin/env bash
# A real Slurm on this one machine for tests: loopback only, no systemd, no accounting database. Needs root.
#   slurm-local.sh start   munged, slurmctld and two slurmd: nodes n1 and n2
#   slurm-local.sh stop    ends exactly the daemons it started, by their pid files
# Environment: SLURM_DIR (a folder of its own, with a short name: it holds sockets), BASE_PORT (and the two after it),
#   CPUS per node (4; more than the machine has are pretended). Clients need SLURM_CONF=$SLURM_DIR/slurm.conf.
set -euo pipefail
D=$SLURM_DIR C=${CPUS:-4} P=$BASE_PORT HOST=$(hostname -s)
export SLURM_CONF=$D/slurm.conf PATH=$PATH:/usr/sbin

configure() {
  mkdir -p "$D"/{state,log,spool/n1,spool/n2,run,munge}
  chmod 755 "$D" # munged has a user of its own
  for i in $(seq 0 $((C - 1))); do [ -e "$D/gpu$i" ] || mknod "$D/gpu$i" c 1 3; done # GPUs: null devices
  cat > "$D/slurm.conf" << EOF
ClusterName=local
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$P
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$D/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
MinJobAge=3600
JobRequeue=1
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,preempt_youngest_first
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/run/slurmctld.pid
SlurmdPidFile=$D/run/slurmd-%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd-%n.log
NodeName=n[1-2] NodeHostname=$HOST NodeAddr=127.0.0.1 Port=[$((P + 1))-$((P + 2))] CPUs=$C RealMemory=8000 Gres=gpu:$C
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=REQUEUE GraceTime=10
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=20 PreemptMode=OFF
EOF
  echo "NodeName=n[1-2] Name=gpu File=$D/gpu[0-$((C - 1))]" > "$D/gres.conf"
}

start() {
  configure
  dd if=/dev/urandom of="$D/munge/key" bs=64 count=2 status=none
  chmod 400 "$D/munge/key"
  chown -R munge:munge "$D/munge"
  runuser -u munge -- munged --force --key-file="$D/munge/key" --socket="$D/munge/socket" --pid-file="$D/munge/pid" \
    --log-file="$D/munge/log" --seed-file="$D/munge/seed"
  slurmctld -c
  for node in n1 n2; do slurmd -c -N $node; done
  for _ in $(seq 60); do
    [ "$(timeout 5 sinfo -h -t idle -o %D 2> /dev/null | head -1)" = 2 ] && return 0
    sleep 0.5
  done
  echo "the nodes did not become idle" >&2
  tail -n 20 "$D"/log/*.log >&2
  return 1
}

stop() {
  pids=$(cat "$D"/run/slurmd-n[12].pid "$D/run/slurmctld.pid" "$D/munge/pid" 2> /dev/null) || true
  for pid in $pids; do kill "$pid" 2> /dev/null || true; done
  for pid in $pids; do
    for _ in $(seq 50); do
      kill -0 "$pid" 2> /dev/null || continue 2
      sleep 0.1
    done
    kill -9 "$pid" 2> /dev/null || true # a slurmd that never registered ignores TERM
  done
}

"$1"
