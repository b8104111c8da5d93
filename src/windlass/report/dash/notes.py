"""Notes and tags that people give a run in the browser: one small file of its folder, notes.json."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from windlass.config.base import Table
from windlass.config.load import validate
from windlass.errors import RunError, WindlassError
from windlass.files import read_json, write_json
from windlass.runs.folder import Run
from windlass.units import print_text

MAX_FILE_BYTES = 64 << 10


class RunNotes(Table):
    text: str = Field(default="", max_length=4000)
    tags: tuple[Annotated[str, Field(min_length=1, max_length=40)], ...] = Field(default=(), max_length=12)

    @field_validator("text")
    @classmethod
    def _show_text(cls, value: str) -> str:
        return print_text(value, lines=True)

    @field_validator("tags")
    @classmethod
    def _show_tags(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(print_text, value)))


def read_notes(run: Run) -> RunNotes:
    """Empty where there are none, or where the file is not ours."""
    try:
        if run.notes_file.stat().st_size > MAX_FILE_BYTES:
            return RunNotes()
        return validate(RunNotes, read_json(run.notes_file) or {}, run.notes_file.name)
    except (OSError, WindlassError):
        return RunNotes()


def write_notes(run: Run, raw: dict[str, Any]) -> RunNotes:
    notes = validate(RunNotes, raw, "notes")
    try:
        write_json(run.notes_file, notes.model_dump(mode="json"))
    except OSError as error:
        raise RunError(
            "report.notes-not-written",
            f"{run.name}/{run.notes_file.name} cannot be written: {error.strerror}",
            hint="you need write permission in the run folder to keep notes",
        ) from None
    return notes
