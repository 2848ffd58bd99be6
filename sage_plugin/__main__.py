"""`python -m sage_plugin` is the `sage` command under a name that nothing else uses."""

from sage_plugin.cli import main

if __name__ == "__main__":
    main()
