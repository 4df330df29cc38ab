"""`python -m mpx` is `mpx`."""

from mpx.cli import main

main()
