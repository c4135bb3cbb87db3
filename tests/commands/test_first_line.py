"""Every command writes its first line within two CPU seconds: slow packages come later, or are announced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megahead.commands import COMMANDS
from megahead.errors import SLOW_PACKAGES, run_command

ROOT = Path(__file__).parents[2]
IMPORT_ALL = f"""
import json, sys, time
from importlib import import_module
for name in sys.argv[1:]:
    import_module(f"megahead.commands.{{name}}")
print(json.dumps([time.process_time(), [name for name in {SLOW_PACKAGES!r} if name in sys.modules]]))
"""


def test_no_command_imports_a_slow_package_before_it_has_read_its_arguments(tmp_path: Path) -> None:
    names = [name for commands in COMMANDS.values() for name in commands]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    cpu_seconds, imported = json.loads(done.stdout)
    assert (cpu_seconds < 2, imported) == (True, []), (cpu_seconds, imported)


@pytest.mark.parametrize(("rank", "stderr"), [("0", "loading torch\n"), ("1", "")], ids=["first rank", "second rank"])
@pytest.mark.parametrize("command", [["doctor"], ["pretrain", "--config", "demo-headless"]], ids=["doctor", "pretrain"])
def test_a_slow_import_is_announced_by_one_rank(command: list[str], rank: str, stderr: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os\nos._exit(7)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "RANK": rank}
    done = subprocess.run(
        [sys.executable, "-m", "megahead", *command], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "", stderr)


def test_a_command_whose_reader_has_read_enough_ends_in_silence() -> None:
    printing = "from megahead.errors import run_command; run_command(lambda: print('a line\\n' * 100_000))"
    with subprocess.Popen(
        [sys.executable, "-c", printing], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        assert (command.stderr.read(), command.wait()) == (b"", 141)


def test_another_closed_pipe_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise BrokenPipeError(32, "Broken pipe", "a socket")

    with pytest.raises(SystemExit, match="2"):
        run_command(main)
    assert capfd.readouterr().err == "error: [Errno 32] Broken pipe: 'a socket'\n"
