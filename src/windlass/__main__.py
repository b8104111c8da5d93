"""`python -m windlass` is the same as `windlass`."""

from windlass.cli import main

if __name__ == "__main__":
    main()
