"""The command `jaxserve`, which is `python -m jaxserve` too: quiet when interrupted, from its first imports on."""

import sys


def main() -> int:
    """Run the command of the command line. Returns its exit code: that of `cli.main`, or 130 (Ctrl-C)."""
    try:
        from jaxserve import interrupts

        with interrupts.exiting_at_once():
            from jaxserve import cli
        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
