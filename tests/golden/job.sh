#!/bin/bash
# gpt: exactly what was submitted, by hpctrain 0.0.0.
#SBATCH --account='my project'
#SBATCH --constraint='a100|h100'
#SBATCH --exclusive
#SBATCH --gpus-per-node=4
#SBATCH --job-name=gpt
#SBATCH --mem=0
#SBATCH --nodes=3-4
#SBATCH --open-mode=append
#SBATCH --output='/shared/runs/gpt 1'/logs/%j.job.log
#SBATCH --partition=gpu
#SBATCH --qos=normal
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=1:30:00
#SBATCH --mem=0

# Signals are for the steps: their agents save a checkpoint and leave. This script only waits for them.
trap : TERM USR2 CONT
module load cuda
source ~/venv/bin/activate

HPCTRAIN_ATTEMPT=$(/usr/bin/python3 /lib/hpctrain/base/start.py hpctrain.node begin --folder '/shared/runs/gpt 1' --again new_job) || exit $?
# No number: the run is over, this job was queued in case it would not be.
[ -n "$HPCTRAIN_ATTEMPT" ] || exit 0
export HPCTRAIN_ATTEMPT
export SUBMITIT_EXECUTOR=slurm

# What srun says is kept for the end of the attempt too: why Slurm ended the step stands nowhere else.
exec 3> >(trap '' HUP INT TERM USR1 USR2; exec tee -a '/shared/runs/gpt 1'/logs/"$HPCTRAIN_ATTEMPT"/srun.txt >&2)
teller=$!

# This script is lost with its node. When the others finish the run without it, nothing here ends the job: then one of
# them does, outside any image, where Slurm's commands are.
export HPCTRAIN_BATCH_HOST=$SLURMD_NODENAME
task='trap : TERM USR2 CONT
start=$1 folder=$2 again=$3
shift 3
"$@" &
task=$!
while :; do
  wait "$task"
  code=$?
  if [ "$code" -le 128 ] || ! kill -0 "$task" 2>/dev/null; then break; fi
done
# A signal may have cut the last wait short.
wait "$task" 2>/dev/null
late=$?
if [ "$late" != 127 ]; then code=$late; fi
left=$folder/left/$HPCTRAIN_ATTEMPT
if [ "$code" = 0 ] && [ "$(cat "$left.closer" 2>/dev/null)" = "$SLURMD_NODENAME" ]; then
  "$0" "$start" hpctrain.node close --folder "$folder" --attempt "$HPCTRAIN_ATTEMPT" --again "$again"
fi
exit "$code"'

# The logs of an array's task are named as squeue names the task.
job=%j
[ -z "$SLURM_ARRAY_TASK_ID" ] || job=%A_%a
# One task a node with everything of it. A lost node does not end the step: the agents on the others go on without it
# for as long as Slurm leaves the job alive.
# The numbers are said, as salloc's own (-n 16) would start several tasks on a node.
srun --export=ALL --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
  --kill-on-bad-exit=0 --wait=0 --unbuffered --open-mode=append --cpu-bind=none \
  --output='/shared/runs/gpt 1'/logs/"$job".%N.agent.log ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} --gpu-bind=none bash -c "$task" /usr/bin/python3 /lib/hpctrain/base/start.py '/shared/runs/gpt 1' new_job /usr/bin/python3 -u /lib/hpctrain/base/start.py submitit.core._submit '/shared/runs/gpt 1/submitit' 2>&3 &
step=$!
exec 3>&-

# srun would wait for the task of a node that died, which never answers: when the run is finished, or too few are left
# to go on with it, nobody waits for that task.
finished='/shared/runs/gpt 1'/finished
left='/shared/runs/gpt 1'/left/$HPCTRAIN_ATTEMPT.code
while kill -0 "$step" 2>/dev/null && [ ! -e "$finished" ] && [ ! -e "$left" ]; do sleep 1; done
# The one that would end the job in this script's place hears that it is here.
[ ! -e "$finished" ] || : > '/shared/runs/gpt 1'/left/"$HPCTRAIN_ATTEMPT".seen
for _ in 1 2 3 4 5 6 7 8 9 10; do
  kill -0 "$step" 2>/dev/null || break
  sleep 1
done
if kill "$step" 2>/dev/null; then
  if [ -e "$finished" ]; then code=0; else code=$(cat "$left"); fi
else
  wait "$step"
  code=$?
  wait "$teller"
fi

# What ends the job does not end this: it may have to queue the next one.
trap '' INT TERM USR2
/usr/bin/python3 /lib/hpctrain/base/start.py hpctrain.node end --folder '/shared/runs/gpt 1' --attempt "$HPCTRAIN_ATTEMPT" --code "$code" --again new_job >&2
exit $?
