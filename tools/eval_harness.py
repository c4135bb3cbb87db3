"""`megahead eval-harness` in a checkout, see megahead/commands/eval_harness.py."""

from megahead.commands.eval_harness import main
from megahead.errors import run_command

if __name__ == "__main__":
    run_command(main)
