"""`python -m jaxrl.eval`."""

import sys

from jaxrl.eval.command import main

if __name__ == "__main__":
    sys.exit(main())
