"""Why a process of Flower ended, by its log: the error, and its first cause."""

import traceback

from fedapps.engines.flower import cause_in_log, logged_error


def logged(error):
    """The lines of a log with the error's traceback."""
    text = "".join(traceback.format_exception(error))
    return ["INFO: start", *(line.strip() for line in text.splitlines()), "INFO: end"]


def raised(outer, inner, *, cause):
    """`outer`, raised from `inner` or while it was handled."""
    try:
        try:
            raise inner
        except OSError as error:
            if cause:
                raise outer from error
            raise outer  # noqa: B904
    except (RuntimeError, ValueError) as error:
        return error


def test_the_first_cause_stands_beside_the_last_exception():
    inner = OSError("AF_UNIX path length cannot exceed 107 bytes")
    for cause in (True, False):
        outer = RuntimeError("An error was encountered. Ending simulation.")
        assert cause_in_log(logged(raised(outer, inner, cause=cause))) == (
            "RuntimeError: An error was encountered. Ending simulation. "
            "Its cause: OSError: AF_UNIX path length cannot exceed 107 bytes"
        )


def test_an_error_before_that_was_survived_is_no_cause():
    survived = logged(ValueError("client 3 has no samples"))
    assert cause_in_log([*survived, *logged(RuntimeError("2 valid replies"))]) == (
        "RuntimeError: 2 valid replies"
    )
    lost = logged(RuntimeError("An error was encountered. Ending simulation."))
    assert cause_in_log([*survived, *lost]).endswith(
        "Its cause: ValueError: client 3 has no samples"
    )
    assert cause_in_log(["INFO: start"]) == ""


def test_the_last_error_of_this_start_is_found_in_a_log(tmp_path):
    """Flower's, its web server's, that of its options, and a traceback's."""
    log = tmp_path / "superlink.log"
    assert logged_error(log) == ""
    former = "ValueError: of an earlier start\n"
    for line, expected in (
        (
            "\x1b[91mERROR \x1b[0m:    Address (x) cannot be parsed.",
            "Address (x) cannot be parsed.",
        ),
        ("2026-01-01T00:00:00.0Z ERROR [uvicorn.error] [Errno 98] in use", "[Errno 98] in use"),
        ("flower-superlink: error: unrecognized arguments: --x", "unrecognized arguments: --x"),
        ("PermissionError: [Errno 13] 'a\x1b[2J'", r"PermissionError: [Errno 13] 'a\x1b[2J'"),
        ("INFO: an Error: of no line", ""),
    ):
        log.write_text(f"{former}INFO: x\n{line}\nINFO: ends\n")
        assert logged_error(log, len(former)) == expected
