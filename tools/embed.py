from megahead.__main__ import run_script

run_script(__name__, "embed")
