"""A control group whose processes cannot even be killed: such as those a driver does not let go."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

FREEZER = Path("/sys/fs/cgroup/freezer")


@contextlib.contextmanager
def frozen_group() -> Iterator[Path]:
    """Frozen; write a pid to its `cgroup.procs`. It is thawed and gone afterwards. Skips where none can be made."""
    group = FREEZER / f"llmgw-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("this machine has no freezer of version 1 that we may use")
    (group / "freezer.state").write_text("FROZEN")
    try:
        yield group
    finally:
        (group / "freezer.state").write_text("THAWED")
    group.rmdir()
