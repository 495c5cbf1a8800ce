"""`python -m toolkit`, the same as `toolkit`."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
