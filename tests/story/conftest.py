"""A folder like a checkout in which the stories' own commands run, and the small corpus that all of them share."""

import importlib.util
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]


def script(name):
    spec = importlib.util.spec_from_file_location(name, TOP / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def stories():
    """scripts/stories.py: reads a page's "on this machine" blocks and runs their lines."""
    return script("stories")


@pytest.fixture(scope="session")
def place(stories, tmp_path_factory):
    """The folder and the environment, with the token store in it; `walk(story)` runs a page's commands once and gives what each printed."""
    folder = tmp_path_factory.mktemp("stories")
    env, done = stories.prepare(folder), {}

    def walk(story):
        if story not in done:
            done[story] = {c: stories.run(c, folder, env) for c in stories.commands(stories.page_of(story))}
        return done[story]

    walk("start")
    return folder, walk
