#!/bin/bash
# gpt: exactly what was submitted, by hpctrain 0.0.0.
#SBATCH --constraint='[a100*2&(v100&big)*1]'
#SBATCH --dependency=afterany:7:9
#SBATCH --exclusive
#SBATCH --gpus-per-node=tesla:4
#SBATCH --job-name=gpt
#SBATCH --kill-on-invalid-dep=no
#SBATCH --mail-type=END,FAIL,REQUEUE
#SBATCH --mail-user=anna@example.org
#SBATCH --mem=0
#SBATCH --no-kill
#SBATCH --nodes=3
#SBATCH --open-mode=append
#SBATCH --output='/shared/it'"'"'s/run'/logs/%j.job.log
#SBATCH --requeue
#SBATCH --reservation=course
#SBATCH --signal=USR2@120
#SBATCH --cpus-per-task=8

# Signals are for the steps: their agents save a checkpoint and leave. This script only waits for them.
trap : TERM USR2 CONT
# The nodes have no internet: Hugging Face libraries use what is on disk instead of waiting for a time-out.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1

HPCTRAIN_ATTEMPT=$(/usr/bin/python3 /lib/hpctrain/base/start.py hpctrain.node begin --folder '/shared/it'"'"'s/run' --again new_job) || exit $?
# No number: the run is over, this job was queued in case it would not be.
[ -n "$HPCTRAIN_ATTEMPT" ] || exit 0
export HPCTRAIN_ATTEMPT
export SUBMITIT_EXECUTOR=slurm
export HPCTRAIN_NODES=$SLURM_JOB_NODELIST
# srun would read it and ask each node for the GPUs of all nodes (--gpus).
unset SLURM_GPUS

# What srun says is kept for the end of the attempt too: why Slurm started no step stands nowhere else.
exec 3> >(trap '' HUP INT TERM USR1 USR2; exec tee -a '/shared/it'"'"'s/run'/logs/"$HPCTRAIN_ATTEMPT"/srun.txt >&2)
teller=$!

finished='/shared/it'"'"'s/run'/finished
left='/shared/it'"'"'s/run'/left/$HPCTRAIN_ATTEMPT

# This script is lost with its node, and then nothing here ends the job or queues the next one: one of the other nodes
# does, outside any image, where Slurm's commands are. Slurm ends a job whose first node comes back without the script,
# unless the job started a step in the last seconds or has one on that node. So the first four of the other nodes start
# a step as soon as their agents miss that node's; and when this script touches its file no more, the first of them
# goes on with it, and starts that node's task again. If it does not, the next does.
export HPCTRAIN_BATCH_HOST=$SLURMD_NODENAME
task='task=
# Where cgroups track processes, Slurm signals this shell alone.
trap "[ -z \"\$task\" ] || kill -TERM \"\$task\" 2>/dev/null" TERM
trap "[ -z \"\$task\" ] || kill -USR2 \"\$task\" 2>/dev/null" USR2
trap : CONT
start=$1 folder=$2 again=$3 log=$4
shift 4
left=$folder/left/$HPCTRAIN_ATTEMPT
since=$left.since-$SLURMD_NODENAME lost=$left.lost-$SLURMD_NODENAME begun=$left.begun-$SLURMD_NODENAME
create_step() { srun --overlap --export=ALL --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none --nodelist="$SLURMD_NODENAME" --output=/dev/null true; }
keep_job() {
  trap : TERM USR2 CONT
  turn=$(scontrol show hostnames "$HPCTRAIN_NODES" | grep -vxF "$HPCTRAIN_BATCH_HOST" | head -n 4 |
    grep -nxF "$SLURMD_NODENAME") || return
  turn=${turn%%:*} idle=0
  while : > "$since"; do
    for _ in 1 2 3 4 5; do
      sleep 1
      if [ "$lost" -nt "$since" ]; then
        create_step
        continue 2
      fi
      # That srun would end its task at once when this step gets TERM. The task goes on without srun and its helper.
      if [ -n "$returned" ] && [ "$left.returned" -nt "$begun" ]; then kill -KILL -- "-$returned"; returned=; fi
    done
    if [ "$left.alive" -nt "$since" ] || [ "$left.kept" -nt "$since" ]; then idle=0; continue; fi
    idle=$((idle + 1))
    if [ "$idle" -lt $((2 * turn - 1)) ]; then continue; fi
    nodes=$(squeue -h -j "$SLURM_JOB_ID" -o %N) || continue
    scontrol show hostnames "$nodes" | grep -qxF "$HPCTRAIN_BATCH_HOST" || return
    create_step
    : > "$left.kept"
    if [ -n "$returned" ] && kill -0 "$returned" 2>/dev/null; then continue; fi
    : > "$begun"
    setsid srun --overlap --export=ALL --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none --nodelist="$HPCTRAIN_BATCH_HOST" \
      --output="$log" --no-kill --kill-on-bad-exit=0 --wait=0 --unbuffered --open-mode=append \
      ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} --gpu-bind=none bash -c "$BASH_EXECUTION_STRING" "$0" "$start" "$folder" "$again" "$log" "$@" &
    returned=$!
  done
}
returned=
keeper=
if [ "$SLURMD_NODENAME" != "$HPCTRAIN_BATCH_HOST" ]; then
  keep_job "$@" 2>/dev/null &
  keeper=$!
elif [ -e "$left.kept" ]; then
  # The first node is back, without the script: if this node still has it, nothing was lost.
  : > "$since"
  sleep 3
  if [ "$left.alive" -nt "$since" ]; then exit 0; fi
  : > "$left.returned"
  (trap : TERM USR2 CONT; while :; do : > "$left.kept"; sleep 1; done) 2>/dev/null &
  keeper=$!
fi
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
script_is_silent() {
  local gone=$left.gone-$SLURMD_NODENAME
  : > "$gone"
  for _ in 1 2 3 4 5 6 7 8 9 10; do
    if [ -e "$left.seen" ] || [ "$left.alive" -nt "$gone" ]; then return 1; fi
    if [ -e "$left/$HPCTRAIN_BATCH_HOST" ] && [ ! -e "$left.returned" ]; then return 1; fi
    sleep 1
  done
}
# Those that watched the script also stay at the end of a finished run, in case that the one which closes is lost.
if [ "$(cat "$left.closer" 2>/dev/null)" = "$SLURMD_NODENAME" ] ||
  { { [ "$code" != 0 ] || { [ -e "$left.kept" ] && [ -e "$since" ]; }; } && script_is_silent; }; then
  "$0" "$start" hpctrain.node close --folder "$folder" --attempt "$HPCTRAIN_ATTEMPT" --code "$code" --again "$again"
fi
[ -z "$keeper" ] || kill -KILL "$keeper" 2>/dev/null
exit "$code"'

# The logs of an array's task are named as squeue names the task.
job=%j
[ -z "$SLURM_ARRAY_TASK_ID" ] || job=%A_%a
log='/shared/it'"'"'s/run'/logs/$job.%N.agent.log
# One task a node with everything of it, and one srun a node: srun ends a step on all of its nodes when one of them comes
# back without its task. The numbers are said, as salloc's own (-n 16) would start several tasks on a node.
start() {
  local node=$1
  shift
  srun --export=ALL --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none --nodelist="$node" "$@" \
    --output="$log" --no-kill --kill-on-bad-exit=0 --wait=0 --unbuffered --open-mode=append \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} --gpu-bind=none bash -c "$task" /usr/bin/python3 /lib/hpctrain/base/start.py '/shared/it'"'"'s/run' new_job "$log" /usr/bin/python3 -u /lib/hpctrain/base/start.py submitit.core._submit '/shared/it'"'"'s/run/submitit' 2>&3 &
  step[$node]=$!
}
declare -A step=()
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do start "$node"; done

# Beside the training: whatever happens to it, the run goes on.
(trap '' USR2; exec nice /usr/bin/python3 /lib/hpctrain/base/start.py hpctrain track '/shared/it'"'"'s/run' --follow) > '/shared/it'"'"'s/run'/logs/"$HPCTRAIN_ATTEMPT"/tracking.txt 2>&1 3>&- &
tracker=$!

# Takes note of each srun that has ended: `code` is the highest exit code of all. That of a lost node ends with 0, when
# Slurm gives the node up or the node comes back; a task that is then started on it counts no more.
code=0
declare -A lost=()
collect() {
  local node ended
  for node in "${!step[@]}"; do
    if kill -0 "${step[$node]}" 2>/dev/null; then continue; fi
    wait "${step[$node]}"
    ended=$?
    unset "step[$node]"
    if [ "$ended" = 0 ]; then
      lost[$node]=$SECONDS
    elif [ -z "${lost[$node]}" ] && [ "$ended" -gt "$code" ]; then
      code=$ended
    fi
  done
}
# Starts the task of a node that came back, beside the step that Slurm still counts there. Slurm refuses a node that is
# not of the job any more.
rejoin() {
  local node
  for node in "${!lost[@]}"; do
    if [ "${lost[$node]}" = tried ] || [ $((SECONDS - ${lost[$node]})) -lt 5 ]; then continue; fi
    lost[$node]=tried
    start "$node" --overlap
  done
}

# srun would wait for the task of a node that died, which never answers: when the run is finished, or too few are left
# to go on with it, nobody waits for that task.
while collect; [ -n "${!step[*]}" ] && [ ! -e "$finished" ] && [ ! -e "$left.code" ]; do
  rejoin
  : > "$left.alive"
  sleep 1
done
exec 3>&-
# The one that would end the job in this script's place hears that it is here.
: > "$left.seen"
for _ in 1 2 3 4 5 6 7 8 9 10; do
  collect
  [ -n "${!step[*]}" ] || break
  sleep 1
done
if [ -n "${!step[*]}" ]; then
  kill "${step[@]}" 2>/dev/null
  if [ ! -e "$finished" ]; then code=$(cat "$left.code"); fi
else
  wait "$teller"
fi
if [ -e "$finished" ]; then code=0; fi
kill -TERM "$tracker" 2>/dev/null
for _ in 1 2 3 4 5 6 7 8 9 10; do
  kill -0 "$tracker" 2>/dev/null || break
  sleep 1
done

# What ends the job does not end this: it may have to queue the next one.
trap '' INT TERM USR2
/usr/bin/python3 /lib/hpctrain/base/start.py hpctrain.node end --folder '/shared/it'"'"'s/run' --attempt "$HPCTRAIN_ATTEMPT" --code "$code" --again new_job >&2
exit $?
