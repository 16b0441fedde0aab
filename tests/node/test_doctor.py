"""`dsec-spawner doctor`, asked by somebody who isn't root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.conftest import require_root

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("DSEC_BIN") or ROOT / ".cache" / "native" / "bin")
NOBODY = 65_534


def findings(program: Path, user: int) -> dict[str, dict[str, str]]:
    done = subprocess.run([program, "doctor"], user=user, group=user, extra_groups=[], capture_output=True, check=True, cwd="/")
    return {finding["feature"]: finding for finding in json.loads(done.stdout)}


def test_what_could_not_be_tried_without_root_is_unknown_and_never_missing() -> None:
    require_root()
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        program = Path(shutil.copy(BIN / "dsec-spawner", directory))
        own, nobodys = findings(program, 0), findings(program, NOBODY)
    for feature in ("idmapped EROFS", "idmapped tmpfs", "EROFS", "EROFS from a file", "overlayfs", "btrfs", "cgroup.kill"):
        assert (nobodys[feature]["state"], nobodys[feature]["detail"]) == ("unknown", "not tried: needs root")
    # Of all else it says what root is told.
    assert {name: found["state"] for name, found in nobodys.items() if found["state"] not in ("unknown", own[name]["state"])} == {}
    assert "unknown" not in {found["state"] for found in own.values()}
