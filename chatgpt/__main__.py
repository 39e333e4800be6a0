"""`python -m chatgpt`, also installed as `chatgpt-rlhf`. A launcher runs this file as the script of every process."""

import os
import sys

if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]  # run by its path, this package's types.py would hide Python's own

from chatgpt.launch.cli.command import main

if __name__ == '__main__':
    main()
