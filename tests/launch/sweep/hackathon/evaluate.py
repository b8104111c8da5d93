"""In place of the team's evaluation script: the same options; each rank leaves one file below the output path."""

import argparse
import json
import os
import socket
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("ds", "embedding-path", "pipeline-params-path", "output-path", "num-nodes", "devices"):
    parser.add_argument(f"--{name}", required=True)
for name in ("gpu-type", "accelerator", "retrains"):
    parser.add_argument(f"--{name}")
options = vars(parser.parse_args())
rank = os.environ.get("SLURM_PROCID", "0")
place = {"host": socket.gethostname(), "job": os.environ.get("SLURM_JOB_ID"), "image": Path("/opt/image-name").exists()}
folder = Path(options["output_path"])
folder.mkdir(parents=True, exist_ok=True)
(folder / f"rank-{rank}.json").write_text(json.dumps({**options, **place, "bind": os.environ.get("SINGULARITY_BIND")}))
