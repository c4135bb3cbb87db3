"""`megahead train-tokenizer` in a checkout, see megahead/commands/train_tokenizer.py."""

from megahead.commands.train_tokenizer import main
from megahead.errors import run_command

if __name__ == "__main__":
    run_command(main)
