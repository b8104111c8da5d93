#!/usr/bin/env bash
# Builds a folder of wheels from which pip installs windlass on a cluster without internet.
#
#   scripts/wheelhouse.sh FOLDER [--torch] [--extras train,data] [--python 3.12] [--platform manylinux_2_28_x86_64]
#
# Without --torch the site's own PyTorch is used (python -m venv --system-site-packages). --python and --platform download for
# another machine; pip then uses prebuilt wheels only. Run it again after an interruption: existing wheels are kept.
set -euo pipefail

usage() { sed -n '2,7p' "$0" | sed 's/^# \{0,1\}//'; }
# A machine with glibc 2.28 also accepts wheels for older versions, but pip looks only for the given tag.
platform() {
  local tag="$1" minor arch
  if [[ "$tag" =~ ^manylinux_2_([0-9]+)_(.+)$ ]]; then
    arch="${BASH_REMATCH[2]}"
    for ((minor = BASH_REMATCH[1]; minor >= 17; minor--)); do target+=(--platform "manylinux_2_${minor}_$arch"); done
    target+=(--platform "manylinux2014_$arch")
  else
    target+=(--platform "$tag")
  fi
}
fail() { echo "wheelhouse: $*" >&2; exit 2; }

folder="" extras="train,data" torch=no target=()
while [ $# -gt 0 ]; do
  case "$1" in
    --torch) torch=yes ;;
    --extras) [ $# -gt 1 ] || fail "--extras needs a list, for example train,data,eval"; extras="$2"; shift ;;
    --python) [ $# -gt 1 ] || fail "--python needs a version, for example 3.12"; target+=(--python-version "$2"); shift ;;
    --platform) [ $# -gt 1 ] || fail "--platform needs a tag, for example manylinux_2_28_aarch64"; platform "$2"; shift ;;
    -h|--help) usage; exit 0 ;;
    -*) fail "unknown option $1 (scripts/wheelhouse.sh --help)" ;;
    *) [ -z "$folder" ] || fail "only one folder is allowed: $folder or $1"; folder="$1" ;;
  esac
  shift
done
[ -n "$folder" ] || fail "missing argument: FOLDER (for example scripts/wheelhouse.sh wheelhouse)"

top="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-python3}"
mkdir -p "$folder"
[ ${#target[@]} -eq 0 ] || target+=(--only-binary=:all:)

"$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" "$top"
wheel="$(ls -t "$folder"/windlass-*.whl | head -1)"

# The requirements are read from the wheel itself.
requirements="$folder/requirements.txt"
"$python" - "$wheel" "$extras" "$torch" > "$requirements" <<'PYTHON'
import re, sys, zipfile
wheel, extras, torch = sys.argv[1], set(filter(None, sys.argv[2].split(","))), sys.argv[3] == "yes"
archive = zipfile.ZipFile(wheel)
text = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode().split("\n\n")[0]
provided = set(re.findall(r"^Provides-Extra: (\S+)", text, re.M))
if extras - provided:
    sys.exit(f"wheelhouse: unknown extra {', '.join(sorted(extras - provided))}; there are {', '.join(sorted(provided))}")
for line in re.findall(r"^Requires-Dist: (.*)", text, re.M):
    extra = re.search(r"extra == '([^']+)'", line)
    if extra and extra.group(1) not in extras:
        continue
    if not torch and re.match(r"torch\b", line):
        continue
    plain = re.sub(r"\s*(and )?\(?extra == '[^']+'\)?", "", line).strip()
    print(plain.rstrip("; ").strip())
PYTHON
if [ "$torch" = yes ]; then
  "$python" -m pip download --quiet --dest "$folder" "${target[@]}" -c "$top/constraints.txt" -r "$requirements"
else
  # Some packages (accelerate, lm-eval, torchao, deepspeed) ask for torch, and pip would download gigabytes. So pip first resolves the complete
  # list from the packages' metadata, and torch and its packages are removed from it.
  resolved="$(mktemp -d)"
  trap 'rm -rf "$resolved"' EXIT
  [ ${#target[@]} -eq 0 ] || target+=(--target "$resolved/nothing")
  "$python" -m pip install --quiet --dry-run --ignore-installed "${target[@]}" --report "$resolved/report.json" -r "$requirements"
  "$python" - "$resolved/report.json" > "$resolved/list.txt" <<'PYTHON'
import json, re, sys
packages = json.load(open(sys.argv[1]))["install"]
names = {re.sub(r"[-_.]+", "-", f["metadata"]["name"]).lower(): f["metadata"]["version"] for f in packages}
for name, version in sorted(names.items()):
    if name not in ("torch", "triton", "pytorch-triton") and not re.match(r"(nvidia|cuda)-(?!ml-py)", name):
        print(f"{name}=={version}")
PYTHON
  [ ${#target[@]} -eq 0 ] || target=("${target[@]:0:${#target[@]}-2}")
  "$python" -m pip download --quiet --no-deps --dest "$folder" "${target[@]}" -r "$resolved/list.txt"
fi
echo "$(ls "$folder" | grep -c '\.whl$') wheels in $folder ($(du -sh "$folder" | cut -f1)); on the cluster:"
echo "  python3 -m venv --system-site-packages venv"
echo "  venv/bin/pip install --no-index --find-links '$(basename "$folder")' 'windlass${extras:+[$extras]}'"
