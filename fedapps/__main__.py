"""``python -m fedapps`` and the command `fedapps`.

A signal that comes while the package is imported, or while Python ends, ends the process too."""

import signal

from fedapps.common.signals import call_command


def main() -> None:
    """Entry point."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # before and after the command, as SIGTERM
    call_command(_import_and_run)


def _import_and_run() -> None:
    from fedapps.commands.main import cli

    cli()


if __name__ == "__main__":
    main()
