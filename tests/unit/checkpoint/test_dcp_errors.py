"""Why DCP could not write, in one line, whatever the file system refuses."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from hpctrain.checkpoint.dcp_errors import failure_reason

READ_ONLY = """
import sys
from pathlib import Path
import torch.distributed.checkpoint as dcp
from hpctrain.checkpoint.dcp_errors import failure_reason
print(failure_reason(dcp.api.CheckpointException("", {}), Path(sys.argv[1])))
"""


def test_the_reason_is_given_where_a_test_file_cannot_be_removed_either(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.write_text("no folder any more")
    reason = failure_reason(dcp.api.CheckpointException("", {}), folder)
    assert reason == f"{folder}: cannot write: {os.strerror(errno.ENOTDIR)}"


@pytest.mark.slow
@pytest.mark.requires("userns")
def test_the_reason_on_a_file_system_that_became_read_only(tmp_path: Path) -> None:
    script = 'mount -t tmpfs tmpfs "$1" && mount -o remount,ro "$1" && exec "$2" -c "$3" "$1"'
    argv = ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, READ_ONLY]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout == f"{tmp_path}: cannot write: {os.strerror(errno.EROFS)}\n", done.stderr
