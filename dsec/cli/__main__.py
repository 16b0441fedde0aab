"""``python -m dsec.cli``: the ``dsec`` program where it isn't installed."""

from dsec.cli import main

main()
