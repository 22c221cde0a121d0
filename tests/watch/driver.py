"""The command line with the made-up device of `fake.py`: `python driver.py [KERNEL_US] -- WORDS OF torchweave`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fake import FakeDevice

from torchweave.cli import live
from torchweave.cli.main import main

if __name__ == "__main__":
    live.find_device = FakeDevice
    sys.exit(main(sys.argv[1:]))
