"""The folder that `export` and `import` write: under a temporary name until it is complete."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from windlass.errors import RunError
from windlass.files import NO_SPACE_ERRNOS
from windlass.units import print_bytes


def refuse_existing(target: Path, option: str) -> None:
    """An existing folder is never overwritten; `option` is the one that names another."""
    if target.exists() or target.is_symlink():
        raise RunError("convert.target-exists", f"{target} exists", hint=f"choose another folder with {option}")


def check_space(folder: Path, needed_bytes: int) -> None:
    """Refuse weights that do not fit before they are written."""
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise RunError(
            "convert.no-space",
            f"the weights need {print_bytes(needed_bytes)}, and {print_bytes(free_bytes)} are free in {folder.parent}",
            hint="free some space, or choose a folder on another disk",
        )


@contextlib.contextmanager
def new_folder(target: Path, option: str) -> Iterator[Path]:
    """A temporary folder that is renamed to `target` at the end of the block, and removed after an error.

    What a killed process left is removed by the next one. While a process writes a target, a second one is refused.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    handle = os.open(temporary, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_busy = False
        except OSError as error:  # another error: no flock on this file system
            is_busy = isinstance(error, BlockingIOError)
        # The folder of another number: its writer has renamed or removed it since.
        if is_busy or not temporary.exists() or temporary.stat().st_ino != os.fstat(handle).st_ino:
            raise RunError(
                "convert.target-busy",
                f"another process is writing {target}",
                hint=f"wait for it, or choose another folder with {option}",
            )
        try:
            refuse_existing(target, option)
            for path in temporary.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            yield temporary
            temporary.rename(target)
        except BaseException as error:
            written_bytes = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
            shutil.rmtree(temporary, ignore_errors=True)
            if not isinstance(error, OSError) or error.errno not in NO_SPACE_ERRNOS:
                raise
            free_bytes = shutil.disk_usage(target.parent).free
            raise RunError(
                "convert.no-space",
                f"{error.strerror}: {print_bytes(written_bytes)} of {target} were written and removed again; "
                f"{print_bytes(free_bytes)} are free",
                hint=f"free some space, or choose another folder with {option}",
            ) from None
    finally:
        os.close(handle)
