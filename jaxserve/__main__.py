"""The command `jaxserve`, also `python -m jaxserve`: exits without a traceback when interrupted, even while
importing.
"""

import sys


def main() -> int:
    """Run the command line's command. Returns its exit code: that of `cli.main`, or 130 (Ctrl-C)."""
    try:
        from jaxserve import interrupts

        with interrupts.exiting_at_once():
            from jaxserve import cli
        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
