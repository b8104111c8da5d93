"""The cluster pages are up to date with the cluster files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_pages_are_up_to_date(tmp_path):
    script = Path(__file__).parents[2] / "scripts" / "make_cluster_pages.py"
    env = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, f"{done.stdout}{done.stderr} (run scripts/make_cluster_pages.py)"
