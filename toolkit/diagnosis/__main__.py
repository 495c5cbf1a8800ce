"""The child process of `run_apart()`: checks that import libraries."""

import sys

from toolkit.diagnosis.checks import main

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
