"""`megahead convert` in a checkout, see megahead/commands/convert.py."""

from megahead.commands.convert import main
from megahead.errors import run_command

if __name__ == "__main__":
    run_command(main)
