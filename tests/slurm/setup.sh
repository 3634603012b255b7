#!/usr/bin/env bash
# Debian's Slurm and munge, which tests/sweep/test_slurm.py needs. Quick when they are there. Where they cannot be had it says
# so and is content: the tests skip themselves then.
export PATH=$PATH:/usr/sbin DEBIAN_FRONTEND=noninteractive
installed() { command -v slurmctld && command -v slurmd && command -v sbatch && command -v munged; } > /dev/null

if installed; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "Slurm is not installed, and installing it needs root and apt-get: tests/sweep/test_slurm.py will be skipped"
  exit 0
fi
# RUNLEVEL=1 keeps the packages from starting their services: the tests start daemons of their own.
timeout 300 apt-get -q update &&
  RUNLEVEL=1 timeout 600 apt-get -q install -y --no-install-recommends slurmctld slurmd slurm-client munge
installed || echo "Slurm could not be installed: tests/sweep/test_slurm.py will be skipped"
exit 0
