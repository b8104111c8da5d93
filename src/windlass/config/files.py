"""Kinds of TOML files, and suggestions for a file that is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

Kind = Literal["recipe", "data", "sweep"]
CALLED = {"recipe": "a recipe", "data": "a data file", "sweep": "a sweep file"}
TAKEN_BY = {
    "recipe": "windlass plan, train and launch take recipes",
    "data": "windlass tokenize takes data files",
    "sweep": "windlass sweep takes sweep files",
}


def kind_of(raw: Mapping[str, Any]) -> Kind | None:
    """The kind of file, by its tables; None: not one of ours, or not clear."""
    if "sources" in raw:
        return "data"
    if {"matrix", "zip", "include"} & raw.keys():
        return "sweep"
    return "recipe" if "model" in raw else None


def missing_hint(path: Path) -> str:
    """Hint for a file that does not exist: a file with a similar name, or a recipe that comes with windlass."""
    near = [str(path.parent / name) for name in _near(path)]
    if near:
        return f"did you mean {' or '.join(near)}?"
    own = shipped(path)
    if own is not None:
        return f"windlass brings it along as {own}; copy it here and make it yours"
    folder = shipped(Path("recipes"))
    return "check the path" if folder is None else f"check the path; recipes to start from are in {folder}"


def _near(path: Path) -> list[str]:
    # Without the ending, which would make all of them alike.
    stems = [p.stem for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
    wanted = path.name.removesuffix(".toml")
    return [f"{stem}.toml" for stem in get_close_matches(wanted, stems, n=3, cutoff=0.6)]


def shipped(path: Path) -> Path | None:
    """`recipes/tiny_cpu.toml`, `tiny_cpu.toml` or `tiny_cpu` as windlass brings it: beside the package in a wheel, at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    words = () if path.is_absolute() else path.parts[1:] if path.parts[:1] == ("recipes",) else path.parts
    for top in (package / "recipes", package.parents[1] / "recipes"):
        found = next((p for p in _spellings(top.joinpath(*words)) if p.exists()), None)
        if top.is_dir() and found is not None and not path.is_absolute():
            return found
    return None


def _spellings(path: Path) -> Iterator[Path]:
    yield path
    yield path.with_name(f"{path.name}.toml")
