"""`python -m specrun.runner` is `specrun`."""

from .cli import main

main()
