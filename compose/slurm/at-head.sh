#!/bin/bash
# `meshrl` with the current node of the head's job, for a login node or a job.
#
#     compose/slurm/at-head.sh submit job.toml
#     compose/slurm/at-head.sh wait NAME
#
# $MESHRL_SECRETS, $MESHRL_PORTS, $MESHRL_HEAD_JOB: as in workers.sbatch

port=${MESHRL_PORTS:-7100-7199}
name=${MESHRL_HEAD_JOB:-meshrl-head}
node=$(squeue --me --name="$name" --states=RUNNING -h -o %B | tail -1)
if [ -z "$node" ]; then
    echo "at-head.sh: no job $name of yours runs: see \`squeue --me\`, and \`sbatch head.sbatch\`" >&2
    exit 1
fi
export MESHRL_GATEWAY=$node:${port##*-}
export MESHRL_TOKEN=${MESHRL_SECRETS:-$HOME/meshrl-secrets}/submit.token
exec meshrl "$@"
