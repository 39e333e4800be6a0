"""`python -m chatgpt`, which is also installed as `chatgpt-rlhf`; a launcher starts this file as the script of every
process."""

import os
import sys

if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]  # started by its path: this package's types.py would stand before Python's own

from chatgpt.launch.cli.command import main

if __name__ == '__main__':
    main()
