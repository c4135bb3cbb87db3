"""`megahead doctor` in a checkout, also in one where nothing is installed yet; see megahead/commands/doctor.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megahead.commands.doctor import main
from megahead.errors import run_command

if __name__ == "__main__":
    run_command(main)
