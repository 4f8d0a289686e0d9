"""`python -m jaxserve` is the command `jaxserve`."""

import sys

from jaxserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
