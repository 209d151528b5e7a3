"""`python -m allranks VERB ...`: the command of this Python, where several are installed or none is on PATH."""

from allranks.cli import main

main()
