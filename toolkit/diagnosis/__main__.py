"""The child process of `run_apart()`: checks that import libraries."""

import sys

from toolkit.diagnosis.libraries import main

if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
