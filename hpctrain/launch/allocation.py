"""A run inside an allocation that is there already (salloc): the same script, run here instead of submitted."""

from __future__ import annotations

from hpctrain.base.atomic import write_text
from hpctrain.base.process import Runner
from hpctrain.launch.folder import RunFolder
from hpctrain.launch.job_script import render_job
from hpctrain.launch.submission import direct_command
from hpctrain.records.run import Run


def run_in_allocation(folder: RunFolder, run: Run, runner: Runner) -> int:
    """Run job.sh in this allocation and wait for it; its exit code comes back.

    Raises:
        StorageError: the run folder cannot be written.
        CommandError: bash cannot be started.
    """
    script = folder.path / "job.sh"
    write_text(script, render_job(run, folder.path, direct_command(folder.path)), mode=0o755)
    process = runner.start(["bash", str(script)])
    code = process.wait()
    return 1 if code is None or code < 0 else code
