"""How much CPU time does tokenizing cost, beside other tools on the same corpus in the same run?

    python benchmarks/tokenize.py corpus --out DIR [--megabytes 330] FOLDER...     texts of Debian and Python packages -> JSONL
    python benchmarks/tokenize.py run --corpus DIR --tokenizer FILE [--peers floor-fastokens,floor-gigatoken,datatrove,megatron-fast] [--repeat 3]
    python benchmarks/tokenize.py read --store DIR
    python benchmarks/tokenize.py skew --corpus DIR --tokenizer FILE [--workers 2]     one file 100 times larger than the others

Time is user + system time of the whole process tree (wall time is shown, but a shared machine makes it worthless). Every row starts
from nothing: imports and loading the tokenizer are part of it. Our own modules are compiled beforehand, as pip compiles whatever it
installs: a checkout has no bytecode yet, the other tools have theirs. FOLDERs: unpacked packages, for example

    apt-get download linux-doc-6.1 python3.11-doc manpages-de libreoffice-help-nl ... && for d in *.deb; do dpkg-deb -x $d x; done

datatrove needs an environment of its own (--datatrove-python), Megatron's fast script a checkout (--megatron DIR).
"""

from __future__ import annotations

import sys

# This file's name is also that of a module of Python's own; its folder must not come first.
sys.path[:] = [p for p in sys.path if not p.endswith("benchmarks")]

if __name__ == "tokenize":  # a script beside this one imports Python's module and finds this file: hand it the real one
    import importlib

    del sys.modules["tokenize"]
    importlib.import_module("tokenize")

import argparse  # noqa: E402
import gzip  # noqa: E402
import hashlib  # noqa: E402
import html  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import random  # noqa: E402
import re  # noqa: E402
import resource  # noqa: E402
import shutil  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

RESULTS = Path(__file__).parent / "results"
_TAGS = re.compile(r"<(script|style)\b.*?</\1>|<!--.*?-->|<[^>]*>", re.S | re.I)
_ROFF = re.compile(r"^[.'].*\n?|\\f[A-Z]|\\(?=-)|\\&|\\\(..", re.M)


# -- corpus --------------------------------------------------------------------------------------------------------


def texts(folder: Path) -> Iterator[tuple[str, str]]:
    """(kind, text) of every readable text below a folder."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
        name = path.name.removesuffix(".gz")
        kind = (
            "man"
            if re.search(r"\.[1-8][a-z]*$", name) and "/man/" in str(path)
            else Path(name).suffix.lstrip(".").lower()
        )
        if kind not in ("man", "html", "htm", "txt", "rst", "md", "py", "page", "po", "dic") and "fortunes" not in str(
            path
        ):
            continue
        try:
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = raw.decode("utf-8")
        except (OSError, UnicodeDecodeError, EOFError):
            continue
        text = (
            html.unescape(_TAGS.sub("", text))
            if kind in ("html", "htm", "page")
            else _ROFF.sub("", text)
            if kind == "man"
            else text
        )
        text = re.sub(r"\n{3,}", "\n\n", text)
        if 200 <= len(text) <= 2_000_000:
            yield kind, text


def make_corpus(folders: list[Path], out: Path, megabytes: int) -> None:
    """One plain JSONL and 16 shards as .jsonl.zst, duplicates dropped, in a fixed shuffle."""
    import zstandard

    seen, kept = set(), []
    for folder in folders:
        for kind, text in texts(folder):
            digest = hashlib.blake2b(text.encode(), digest_size=12).digest()
            if digest not in seen:
                seen.add(digest)
                kept.append((kind, text))
    random.Random(0).shuffle(kept)
    out.mkdir(parents=True, exist_ok=True)
    shards: list[list[bytes]] = [[] for _ in range(16)]
    size, kinds = 0, {}
    with (out / "all.jsonl").open("wb") as whole:
        for number, (kind, text) in enumerate(kept):
            line = json.dumps({"id": number, "kind": kind, "text": text}, ensure_ascii=False).encode() + b"\n"
            whole.write(line)
            shards[number % 16].append(line)
            size, kinds[kind] = size + len(text.encode()), kinds.get(kind, 0) + len(text.encode())
            if size >= megabytes * 1_000_000:
                break
    (out / "shards").mkdir(exist_ok=True)
    for number, part in enumerate(shards):
        (out / "shards" / f"{number:02d}.jsonl.zst").write_bytes(
            zstandard.ZstdCompressor(level=3).compress(b"".join(part))
        )
    facts = {
        "documents": sum(map(len, shards)),
        "text_bytes": size,
        "by_kind": kinds,
        "jsonl_bytes": (out / "all.jsonl").stat().st_size,
    }
    (out / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts))


# -- measuring -----------------------------------------------------------------------------------------------------


class Peak(threading.Thread):
    """The largest memory of a process tree (proportional set size, so that shared pages count once) and of one process in it.

    It also adds up the CPU time of every process seen: some tools leave workers that nobody waits for, which the kernel's sum misses.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.tree, self.one, self.done = pid, 0, 0, threading.Event()
        self.cpu: dict[int, float] = {}

    def run(self) -> None:
        while not self.done.wait(0.1):
            pids = tree(self.pid)
            self.cpu.update((pid, seconds) for pid in pids if (seconds := cpu_of(pid)) is not None)
            sizes = [pss for pid in pids if (pss := pss_of(pid))]
            self.tree, self.one = max(self.tree, sum(sizes)), max([self.one, *sizes])


def tree(root: int) -> list[int]:
    found, queue = [], [root]
    while queue:
        pid = queue.pop()
        found.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                queue += [int(child) for child in task.read_text().split()]
            except OSError:
                continue
    return found


def cpu_of(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pss_of(pid: int) -> int:
    try:
        return next(
            int(line.split()[1]) * 1024
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            if line.startswith("Pss:")
        )
    except (OSError, StopIteration):
        return 0


def measure(command: list[str], env: dict[str, str] | None = None) -> dict[str, float]:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    process = subprocess.Popen(
        command, env={**os.environ, **(env or {})}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    peak = Peak(process.pid)
    peak.start()
    _, errors = process.communicate()
    peak.done.set()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise RuntimeError(f"{command[:4]} failed with {process.returncode}: {errors[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "cpu_seconds": max(cpu, sum(peak.cpu.values())),
        "wall_seconds": time.monotonic() - began,
        "peak_bytes": peak.tree,
        "peak_process_bytes": peak.one,
    }


# -- the competitors -----------------------------------------------------------------------------------------------

FLOOR = """
import sys, os, glob, multiprocessing
os.environ.setdefault("RAYON_NUM_THREADS", "1")
import numpy as np, orjson, zstandard
engine, tokenizer, out, eos, *files = sys.argv[1:]
def work(part):
    number, files = part
    if engine == "fastokens":
        import fastokens
        inner = fastokens.Tokenizer.from_file(tokenizer)
        def encode(texts):
            ids, offsets = inner.encode_batch_flat(texts, split_special_tokens=True)
            return np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<u8").astype(np.int64)
    else:
        import gigatoken
        inner = gigatoken.Tokenizer(tokenizer)
        def encode(texts):
            layout = inner.encode_batch(texts, parallel=False).layout
            return np.asarray(layout.content.data), np.asarray(layout.offsets.data)
    with open(f"{out}/{number}.bin", "wb") as binary, open(f"{out}/{number}.ends", "wb") as ends:
        done = 0
        def flush(texts):
            nonlocal done
            ids, offsets = encode(texts)
            lengths = np.diff(offsets)
            flat = np.empty(len(ids) + len(texts), np.uint32)
            places = np.cumsum(lengths + 1) - 1
            body = np.ones(len(flat), bool); body[places] = False
            flat[body] = ids; flat[places] = int(eos)
            binary.write(flat.data); ends.write((places + 1 + done).data); done += len(flat)
        for file in files:
            texts, size, rest = [], 0, b""
            for block in zstandard.ZstdDecompressor().read_to_iter(open(file, "rb"), write_size=1 << 20):
                lines = (rest + block).split(b"\\n"); rest = lines.pop()
                for line in lines:
                    text = orjson.loads(line)["text"]; texts.append(text); size += len(text)
                    if size > 1 << 20: flush(texts); texts, size = [], 0
            if rest: texts.append(orjson.loads(rest)["text"])
            if texts: flush(texts)
with multiprocessing.Pool(2) as pool:
    pool.map(work, [(i, files[i::2]) for i in range(2)])
"""

DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
folder, tokenizer, out, tasks = sys.argv[1:]
if __name__ == "__main__":
    LocalPipelineExecutor(pipeline=[JsonlReader(folder, compression="zstd"), DocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token="<|end_of_text|>", shuffle_documents=False)], tasks=int(tasks), workers=2, logging_dir=out + "/logs").run()
"""


def run_windlass(shards: list[Path], args: argparse.Namespace, out: Path) -> dict[str, Any]:
    paths = ", ".join(f'"{path}"' for path in shards)
    (out / "data.toml").write_text(
        f'output = "{out / "store"}"\ntokenizer = "{args.tokenizer_json}"\nworkers = 2\nmax_rejects = 0\n[sources.all]\npaths = [{paths}]\n'
    )
    facts = measure([sys.executable, "-m", "windlass", "tokenize", str(out / "data.toml"), "--json"])
    size = sum(p.stat().st_size for p in (out / "store").iterdir() if p.suffix in (".bin", ".idx"))
    manifest = json.loads((out / "store" / "manifest.json").read_text())
    return {**facts, "tokens": manifest["tokens"], "documents": manifest["documents"], "bytes": size}


def run_floor(engine: str, shards: list[Path], args: argparse.Namespace, out: Path) -> dict[str, Any]:
    script = out / "floor.py"
    script.write_text(FLOOR)
    facts = measure(
        [sys.executable, str(script), engine, str(args.tokenizer_json), str(out), str(args.eos), *map(str, shards)]
    )
    size = sum(p.stat().st_size for p in out.iterdir() if p.suffix in (".bin", ".ends"))
    return {
        **facts,
        "tokens": sum(p.stat().st_size for p in out.glob("*.bin")) // 4,
        "documents": sum(p.stat().st_size for p in out.glob("*.ends")) // 8,
        "bytes": size,
    }


def run_datatrove(shards: list[Path], args: argparse.Namespace, out: Path) -> dict[str, Any]:
    folder = out / "in"
    folder.mkdir()
    for path in shards:
        (folder / path.name).symlink_to(path.resolve())
    (out / "run.py").write_text(DATATROVE)
    facts = measure(
        [
            args.datatrove_python,
            str(out / "run.py"),
            str(folder),
            str(args.tokenizer_json),
            str(out / "out"),
            str(len(shards)),
        ]
    )
    files = [p for p in (out / "out").rglob("*") if p.suffix in (".ds", ".index")]
    return {
        **facts,
        "tokens": sum(p.stat().st_size for p in files if p.suffix == ".ds") // 4,
        "documents": sum(p.stat().st_size for p in files if p.suffix == ".index") // 8,
        "bytes": sum(p.stat().st_size for p in files),
    }


def run_megatron_fast(shards: list[Path], args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Megatron's script reads plain JSONL only: unpacking is done before and not counted."""
    import zstandard

    plain = out / "all.jsonl"
    with plain.open("wb") as file:
        for path in shards:
            zstandard.ZstdDecompressor().copy_stream(path.open("rb"), file)
    script = Path(args.megatron) / "tools" / "preprocess_data_fast.py"
    command = [
        args.megatron_python or sys.executable,
        str(script),
        "--input",
        str(plain),
        "--output-prefix",
        str(out / "m"),
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(Path(args.tokenizer_json).parent),
    ]
    command += args.megatron_options
    facts = measure(command, {"PYTHONPATH": str(args.megatron)})
    binary = next(out.glob("m*.bin"))
    index = binary.with_suffix(".idx")
    documents = int.from_bytes(index.read_bytes()[18:26], "little")
    return {
        **facts,
        "tokens": binary.stat().st_size // 4,
        "documents": documents,
        "bytes": binary.stat().st_size + index.stat().st_size,
    }


RUNNERS = {
    "windlass": run_windlass,
    "floor-fastokens": lambda *a: run_floor("fastokens", *a),
    "floor-gigatoken": lambda *a: run_floor("gigatoken", *a),
    "datatrove": run_datatrove,
    "megatron-fast": run_megatron_fast,
}


def run(args: argparse.Namespace) -> None:
    import compileall

    import windlass
    from windlass.data.tokenizer import load_tokenizer, ranks_to_json

    compileall.compile_dir(Path(windlass.__file__).parent, quiet=1)
    tokenizer = load_tokenizer(args.tokenizer)
    args.eos = tokenizer.eos
    shards = sorted((Path(args.corpus) / "shards").glob("*.zst"))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        args.tokenizer_json = args.tokenizer
        if tokenizer.kind != "json":  # the others read only this, so all get it
            args.tokenizer_json = Path(scratch) / "tokenizer.json"
            value = json.loads(ranks_to_json(tokenizer.ranks, tokenizer.pattern))
            value["added_tokens"] = [
                {
                    "id": i,
                    "content": n,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for n, i in tokenizer.specials
            ]
            args.tokenizer_json.write_text(json.dumps(value, ensure_ascii=False))
        for count in args.shards:
            for repeat in range(args.repeat):
                for name in ["windlass", *args.peers]:
                    if name in args.small and (count > args.small_shards or repeat):
                        continue
                    out = Path(scratch) / "out"
                    out.mkdir()
                    row = {
                        "tool": name,
                        "shards": count,
                        "repeat": repeat,
                        "load": os.getloadavg()[0],
                        **RUNNERS[name](shards[:count], args, out),
                    }
                    shutil.rmtree(out)
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    report(rows, args)


# -- results: a section per measurement, each with its own command, day, commit and machine ----------------------------

GOALS = {"megatron-fast": 1 / 1.8, "datatrove": 1 / 18, "floor-fastokens": 1.0, "floor-gigatoken": 1.0}
"""windlass's CPU time as a share of the other's, at most."""


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    facts = json.loads((Path(args.corpus) / "facts.json").read_text())
    if args.append:  # what is measured anew takes the place of its old rows
        old = stored().get(args.section, {"corpus": facts, "rows": []})
        if old["corpus"] != facts:
            raise SystemExit("--append: the earlier results are of another corpus")
        anew = {(n["tool"], n["shards"]) for n in rows}
        rows = [r for r in old["rows"] if (r["tool"], r["shards"]) not in anew] + rows
        args.note = args.note or old.get("note")
        args.earlier = old.get("command")
    facts = {"corpus": facts, "tokenizer": Path(args.tokenizer).name, "note": args.note}
    keep(args.section, rows, earlier=getattr(args, "earlier", None), **facts)


def stored() -> dict[str, Any]:
    path = RESULTS / "tokenize.json"
    return json.loads(path.read_text()).get("sections", {}) if path.is_file() else {}


def keep(name: str, rows: list[dict[str, Any]], *, earlier: str | None = None, **facts: Any) -> None:
    """Replace one section; the others stay as they were, and the page is written from all of them."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False, cwd=Path(__file__).parent).stdout.strip()
    about = {
        "command": (f"{earlier}; " if earlier else "") + "python benchmarks/tokenize.py " + " ".join(_unplaced(sys.argv[1:])), "date": time.strftime("%Y-%m-%d"), "commit": commit,
        "machine": f"{os.cpu_count()} cores, {cpu_name()}, Python {platform.python_version()}", "versions": versions(),
    }  # fmt: skip
    sections = {**stored(), name: {**about, **facts, "rows": rows}}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "tokenize.json").write_text(json.dumps({"sections": sections}, indent=1) + "\n")
    (RESULTS / "tokenize.md").write_text(page(sections))
    print(page({name: sections[name]}))


def _unplaced(words: list[str]) -> list[str]:
    """Paths of this machine say nothing to a reader: only their last part stays."""
    return [Path(word).name if "/" in word else word for word in words]


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("fastokens", "gigatoken", "tiktoken", "tokenizers", "orjson", "zstandard", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def page(sections: dict[str, Any]) -> str:
    """The whole page from the stored sections: nothing in it is written by hand, so nothing is lost by measuring again."""
    text = ["# Tokenizing: CPU time compared with other tools", "", "Written by `benchmarks/tokenize.py` from `tokenize.json`; a section is replaced when it is measured again.", ""]  # fmt: skip
    for name, section in sections.items():
        drawn = {"skew": skew_text, "read": read_text}.get(name.partition("-")[0], run_text)
        text += [
            f"## {section.get('title') or TITLES.get(name, name)}",
            "",
            _measured(section),
            "",
            *drawn(section),
            "",
        ]
    return "\n".join(text).rstrip() + "\n"


TITLES = {
    "run": "Compared with other tools", "run-big": "Compared with other tools, three times the corpus", "skew": "One file 100 times larger than the others",
    "read": "Reading a store",
}  # fmt: skip


def _measured(section: dict[str, Any]) -> str:
    loads = [row["load"] for row in section["rows"] if "load" in row]
    busy = f" Load {min(loads):.0f} to {max(loads):.0f} on these cores, shared with other work." if loads else ""
    packages = ", ".join(f"{name} {number}" for name, number in section.get("versions", {}).items())
    return f"`{section['command']}`, commit {section['commit']}, {section['date']}. {section['machine']}.{busy}" + (
        f" {packages}." if packages else ""
    )


def middle(rows: list[dict[str, Any]], shards: int, tool: str) -> dict[str, Any] | None:
    here = sorted((r for r in rows if (r["shards"], r["tool"]) == (shards, tool)), key=lambda r: r["cpu_seconds"])
    return {**here[(len(here) - 1) // 2], "all": [r["cpu_seconds"] for r in here]} if here else None


def by_round(rows: list[dict[str, Any]], shards: int, tool: str) -> list[float]:
    """windlass's share of a tool's CPU time in each round, in order of size: the two run one after the other, so that a spell in which the
    machine is slow hits both."""
    spent = {(r["tool"], r["repeat"]): r["cpu_seconds"] for r in rows if r["shards"] == shards}
    return sorted(spent["windlass", n] / cpu for (name, n), cpu in spent.items() if name == tool and ("windlass", n) in spent)  # fmt: skip


def run_text(section: dict[str, Any]) -> list[str]:
    rows, facts = section["rows"], section["corpus"]
    text = [
        f"Corpus: {facts['documents']:,} documents, {facts['text_bytes'] / 1e6:.0f} MB of text from Debian and Python packages, 16 shards of .jsonl.zst. Tokenizer: {section['tokenizer']}. 2 workers each; medians (of two runs the lower).", "",
        "| tool | shards | runs | M tokens | CPU s (median) | min - max | Mtok/CPU-s | wall s | peak MB, tree | peak MB, one process | bytes/token | documents |", "|---|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for shards, tool in sorted({(r["shards"], r["tool"]) for r in rows}):
        if (mid := middle(rows, shards, tool)) is not None:
            text.append(
                f"| {tool} | {shards} | {len(mid['all'])} | {mid['tokens'] / 1e6:.2f} | {mid['cpu_seconds']:.1f} | {mid['all'][0]:.1f} - {mid['all'][-1]:.1f} | {mid['tokens'] / 1e6 / mid['cpu_seconds']:.2f} | {mid['wall_seconds']:.1f} | {mid['peak_bytes'] / 1e6:.0f} | {mid['peak_process_bytes'] / 1e6:.0f} | {mid['bytes'] / mid['tokens']:.4f} | {mid['documents']:,} |"
            )
    note = [f"- {section['note']}"] if section.get("note") else []
    return [*text, "", *note, *goals(rows, max(r["shards"] for r in rows))]


def goals(rows: list[dict[str, Any]], shards: int) -> Iterator[str]:
    """What the table says about the goals, by its own numbers."""
    ours = middle(rows, shards, "windlass")
    if ours is None:
        return
    for tool, limit in GOALS.items():
        if (peer := middle(rows, shards, tool)) is None:
            yield f"- {tool}: not measured in this section."
            continue
        shares = by_round(rows, shards, tool)
        share = statistics.median(shares)
        rounds = f"median of {len(shares)} rounds, {shares[0]:.2f} to {shares[-1]:.2f}; " if len(shares) > 1 else ""
        whole = ours["cpu_seconds"] / peer["cpu_seconds"]
        yield (
            f"- {tool}: windlass takes {share:.2f} of its CPU time on {shards} shards ({rounds}{whole:.2f} by the table's medians; goal at most {limit:.2f}): "
            f"{'met' if share <= limit else '**not met**'}."
        )
    first = middle(rows, min(r["shards"] for r in rows), "windlass") or ours
    yield f"- First token within 3 CPU-seconds: a complete run on {first['shards']} shard{'s' if first['shards'] > 1 else ''} takes {first['cpu_seconds']:.1f}."
    yield f"- At most 350 MB per process: {ours['peak_process_bytes'] / 1e6:.0f} MB."
    extra = (ours["bytes"] - 4 * ours["tokens"]) / ours["documents"]
    size, length = ours["bytes"] / ours["tokens"], ours["tokens"] / ours["documents"]
    yield (
        f"- At most 4.01 bytes per token: {size:.4f}, {'met' if size <= 4.01 else '**not met** on this corpus'}. The tokens take 4 bytes each, the .idx {extra:.1f} bytes per document "
        f"(of {length:,.0f} tokens here)."
    )


def cpu_name() -> str:
    found = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return found[0] if found else platform.machine()


# -- reading -------------------------------------------------------------------------------------------------------


def read(args: argparse.Namespace) -> None:
    """Shuffled sequences of 2,048 tokens in one process, page cache warm."""
    import numpy as np

    from windlass.config import DataConfig
    from windlass.data.stream import open_stream

    began = time.process_time()
    stream = open_stream(DataConfig(store=str(args.store), seq_len=2048, max_epochs=1e6), seed=0)
    opened = time.process_time() - began
    stream.sequences(np.arange(2048))
    results: list[float] = []
    for repeat in range(5):
        began, count = time.process_time(), 0
        for step in range(200):
            count += stream.sequences(np.arange(64) + 64 * (step + 1000 * repeat)).size
        results.append(count / 1e6 / (time.process_time() - began))
    tokens = sum(source.tokens for source in stream.store.sources.values()) if stream.store else 0
    row = {
        "load": os.getloadavg()[0],
        "tokens": tokens,
        "open_cpu_seconds": opened,
        "mtok_per_cpu_second": sorted(results),
    }
    keep("read", [row])


def read_text(section: dict[str, Any]) -> list[str]:
    return [
        f"Sequences of 2,048 tokens in shuffled order from {row['tokens'] / 1e6:.1f} M tokens, one process, page cache warm: {row['mtok_per_cpu_second'][0]:.0f} to {row['mtok_per_cpu_second'][-1]:.0f} Mtok per CPU-second over {len(row['mtok_per_cpu_second'])} rounds (goal at least 200), opened in {1e3 * row['open_cpu_seconds']:.1f} ms of CPU time."
        for row in section["rows"]
    ]


# -- one big file --------------------------------------------------------------------------------------------------


def skew(args: argparse.Namespace) -> None:
    """The corpus as one file beside small ones of a hundredth of it: which share of the wall time goes to the last tenth of the tokens?"""
    import zstandard

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        whole = (args.corpus / "all.jsonl").read_bytes()
        for packing in ("", ".zst"):
            folder = Path(scratch) / f"in{packing}"
            folder.mkdir()
            pack = zstandard.ZstdCompressor(level=3).compress if packing else bytes
            (folder / f"big.jsonl{packing}").write_bytes(pack(whole))
            for number in range(args.small_files):
                (folder / f"small-{number:02d}.jsonl{packing}").write_bytes(pack(_stretch(whole, number)))
            for repeat in range(args.repeat):
                row = _tail(folder, Path(scratch) / f"store{packing}-{repeat}", args)
                rows.append({"packing": packing or "plain", "repeat": repeat, "load": os.getloadavg()[0], **row})
                print(json.dumps(rows[-1]), flush=True)
    keep("skew", rows, small_files=args.small_files, big_bytes=len(whole))


def skew_text(section: dict[str, Any]) -> list[str]:
    rows = section["rows"]
    within = "met" if all(row["last_tenth_of_work"] <= 0.15 for row in rows) else "**not met** in every run"
    return [
        f"The corpus as one file of {section['big_bytes'] / 1e6:.0f} MB beside {section['small_files']} files of a hundredth of it, {rows[0]['tokens'] / 1e6:.1f} M tokens, {rows[0]['workers']} workers. "
        f"Share of the wall time that the last tenth of the tokens takes, goal at most 15 %: {within}.", "",
        "| files | run | of the tokenizing | of the complete command, with start and join |", "|---|---:|---:|---:|",
        *(f"| {'.jsonl' + row['packing'] if row['packing'] != 'plain' else 'plain .jsonl'} | {row['repeat'] + 1} | {row['last_tenth_of_work']:.1%} | {row['last_tenth_of_command']:.1%} |" for row in rows),
    ]  # fmt: skip


def _stretch(whole: bytes, number: int) -> bytes:
    """Whole lines, about a hundredth of the file, each from another place."""
    size = len(whole) // 100
    start = whole.index(b"\n", number * size) + 1
    return whole[start : whole.index(b"\n", start + size) + 1]


def _tail(folder: Path, store: Path, args: argparse.Namespace) -> dict[str, Any]:
    from windlass.config.sources import DataFile, DataSource
    from windlass.data.tokenize import tokenize

    marks: list[tuple[float, int]] = []
    source = DataSource(paths=[str(folder)])
    file = DataFile(output=str(store), tokenizer=str(args.tokenizer), sources={"all": source}, workers=args.workers)
    began = time.monotonic()
    result = tokenize(file, on_progress=lambda now: marks.append((time.monotonic(), now.tokens)))
    ended, working = time.monotonic(), marks[-1][0]  # the last call says that joining begins
    late = next(at for at, tokens in marks if tokens >= 0.9 * result.tokens)
    return {
        "workers": args.workers, "tokens": result.tokens, "wall_seconds": ended - began,
        "last_tenth_of_work": (working - late) / (working - marks[0][0]), "last_tenth_of_command": (ended - late) / (ended - began),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    corpus = commands.add_parser("corpus")
    corpus.add_argument("folders", nargs="+", type=Path)
    corpus.add_argument("--out", required=True, type=Path)
    corpus.add_argument("--megabytes", type=int, default=330)
    corpus.set_defaults(do=lambda a: make_corpus(a.folders, a.out, a.megabytes))
    bench = commands.add_parser("run")
    bench.add_argument("--corpus", required=True, type=Path)
    bench.add_argument("--tokenizer", required=True, type=Path)
    bench.add_argument(
        "--peers", type=lambda s: [p for p in s.split(",") if p], default=["floor-fastokens", "floor-gigatoken"]
    )
    bench.add_argument(
        "--small",
        type=lambda s: s.split(","),
        default=["datatrove"],
        help="tools that are run once and on few shards only, being slow",
    )
    bench.add_argument("--small-shards", type=int, default=1)
    bench.add_argument("--shards", type=int, nargs="+", default=[1, 16])
    bench.add_argument("--repeat", type=int, default=3)
    bench.add_argument("--scratch", default=None)
    bench.add_argument("--append", action="store_true", help="add to the results of an earlier run")
    bench.add_argument("--datatrove-python", default=sys.executable)
    bench.add_argument(
        "--megatron", default=None, help="checkout of Megatron-LM; its tools/preprocess_data_fast.py is run"
    )
    bench.add_argument("--megatron-options", type=str.split, default=[], help="further words for that script")
    bench.add_argument("--note", default=None, help="a sentence about these results that stands above them")
    bench.add_argument("--section", default="run", help="section of the results: run, or run-big for a larger corpus")
    bench.add_argument("--megatron-python", default=None)
    bench.set_defaults(do=run)
    reading = commands.add_parser("read")
    reading.add_argument("--store", required=True, type=Path)
    reading.set_defaults(do=read)
    uneven = commands.add_parser("skew")
    uneven.add_argument("--corpus", required=True, type=Path)
    uneven.add_argument("--tokenizer", required=True, type=Path)
    uneven.add_argument("--workers", type=int, default=2)
    uneven.add_argument("--small-files", type=int, default=20)
    uneven.add_argument("--repeat", type=int, default=3)
    uneven.add_argument("--scratch", default=None)
    uneven.set_defaults(do=skew)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
