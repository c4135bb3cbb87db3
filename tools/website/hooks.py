"""Adds pages to the site of docs/*.md: README as front page, other files of the repository, commands' `--help`.

Hooks of mkdocs (`make docs`; settings in mkdocs.yml). Pages link to each other by paths in the repository, which these
hooks replace by paths of the site.
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
# Pages of the site from outside docs/: name on the site, and path in the repository
SOURCE_BY_PAGE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "tests.md": "tests/README.md",
    "changelog.md": "CHANGELOG.md",
}
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, path in SOURCE_BY_PAGE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8")))
    files.append(File.generated(config, "commands.md", content="\n".join(commands_page())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces links to files of the repository by links to pages of the site."""
    name = page.file.src_uri
    folder = posixpath.dirname(SOURCE_BY_PAGE.get(name, f"docs/{name}"))
    page_by_source = {path: site for site, path in SOURCE_BY_PAGE.items()}

    def rewrite_link(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        return posixpath.relpath(page_by_source.get(path, path.removeprefix("docs/")), posixpath.dirname(name) or ".")

    return LINK.sub(rewrite_link, markdown)


def commands_page() -> Iterator[str]:
    """The `--help` of each command, by group."""
    yield "# Commands\n\nWhat `megahead NAME --help` prints. In a checkout `python tools/NAME.py` does the same.\n"
    for group, commands in COMMANDS.items():
        yield f"## To {group}\n"
        for name, sentence in commands.items():
            text = command_help(name)
            yield f"### {name.replace('_', '-')}\n\n{sentence[0].upper()}{sentence[1:]}.\n\n```text\n{text}```\n"
            subcommands = re.search(r"\{([\w,-]+)\} \.\.\.", text)
            for subcommand in subcommands[1].split(",") if subcommands else []:
                yield f"```text\n{command_help(name, subcommand)}```\n"


def command_help(*words: str) -> str:
    """The `--help` of a command, 100 characters wide."""
    arguments = patch.object(sys, "argv", ["megahead", *words, "--help"])
    environment = patch.dict(os.environ, {"COLUMNS": "100"})
    with environment, arguments, redirect_stdout(StringIO()) as text, suppress(SystemExit):
        dispatch()
    return text.getvalue()
