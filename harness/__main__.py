"""`python -m harness`, the same as `kvgate`."""

import sys

from harness.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
