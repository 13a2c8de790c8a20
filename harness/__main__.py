"""`python -m harness` is the command `proptable`."""

from harness.cli import main

if __name__ == "__main__":
    main()
