"""`python -m torchweave` is the command line."""

import sys

from torchweave.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
