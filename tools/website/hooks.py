"""What the site has beside docs/*.md: README as front page, other pages of the repository, commands' `--help`.

Read by mkdocs (`make docs`; settings in mkdocs.yml beside this file). Pages link to each other by paths in the
repository, so that they read well there, too; here these become the site's.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from megahead.__main__ import dispatch
from megahead.commands import COMMANDS

ROOT = Path(__file__).parents[2]
# Pages of the site that lie outside of docs: their name there, and their path in the repository
OTHERS = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "tests.md": "tests/README.md",
    "changelog.md": "CHANGELOG.md",
}
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, path in OTHERS.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8")))
    files.append(File.generated(config, "commands.md", content="\n".join(commands_page())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links as the site has them."""
    name = page.file.src_uri
    folder = posixpath.dirname(OTHERS.get(name, f"docs/{name}"))
    moved = {path: site for site, path in OTHERS.items()}

    def on_the_site(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        return posixpath.relpath(moved.get(path, path.removeprefix("docs/")), posixpath.dirname(name) or ".")

    return LINK.sub(on_the_site, markdown)


def commands_page() -> Iterator[str]:
    """What each command answers to `--help`, group by group."""
    yield "# Commands\n\nWhat `megahead NAME --help` prints. In a checkout `python tools/NAME.py` does the same.\n"
    for group, commands in COMMANDS.items():
        yield f"## To {group}\n"
        for name, sentence in commands.items():
            text = help_of(name)
            yield f"### {name.replace('_', '-')}\n\n{sentence[0].upper()}{sentence[1:]}.\n\n```text\n{text}```\n"
            parts = re.search(r"\{([\w,-]+)\} \.\.\.", text)
            for part in parts[1].split(",") if parts else []:
                yield f"```text\n{help_of(name, part)}```\n"


def help_of(*words: str) -> str:
    """A command's answer, on lines of 100 characters."""
    width, line = patch.dict(os.environ, {"COLUMNS": "100"}), patch.object(sys, "argv", ["megahead", *words, "--help"])
    with width, line, redirect_stdout(StringIO()) as text, suppress(SystemExit):
        dispatch()
    return text.getvalue()
