"""`python -m jaxrl.doctor`."""

import sys

from jaxrl.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
