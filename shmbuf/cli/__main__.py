import sys

from shmbuf.cli import main

if __name__ == "__main__":
    sys.exit(main())
