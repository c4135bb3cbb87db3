"""`megahead finetune` in a checkout, see megahead/commands/finetune.py."""

from megahead.commands.finetune import main
from megahead.errors import run_command

if __name__ == "__main__":
    run_command(main)
