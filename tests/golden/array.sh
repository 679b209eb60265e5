#!/bin/bash
# gpt: exactly what was submitted as a sweep, by hpctrain 0.0.0.
#SBATCH --array=0-1%1
#SBATCH --job-name=gpt
#SBATCH --output='/shared/it'"'"'s/runs/100%% gpt'/logs/%a/%A_%a.job.log
#SBATCH --dependency=afterok:7:8_1
#SBATCH --exclusive
#SBATCH --gpus-per-node=4
#SBATCH --kill-on-invalid-dep=no
#SBATCH --mem=0
#SBATCH --no-kill
#SBATCH --nodes=3-4
#SBATCH --open-mode=append
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=1:30:00
#SBATCH --comment=half

# Each task of the array is a run of its own: its folder has its job script, and everything that the run writes.
runs=(
  '/shared/it'"'"'s/runs/gpt-lr1e-3'
  '/shared/it'"'"'s/runs/gpt-lr3e-4'
)
exec bash "${runs[$SLURM_ARRAY_TASK_ID]}/job.sh"
