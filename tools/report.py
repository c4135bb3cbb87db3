"""`megahead report` in a checkout, see megahead/commands/report.py."""

from megahead.commands.report import main
from megahead.errors import run_command

if __name__ == "__main__":
    run_command(main)
