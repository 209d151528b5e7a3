"""What are the last words of a process? Its exception, who called exit, or that it came to its end.

Written before anything is printed, into the page; the hooks that were there are called as before.
"""

from __future__ import annotations

import atexit
import os
import sys
from time import monotonic_ns

from allranks.record import layout as at
from allranks.record import process
from allranks.record.lines import line_of_call, line_of_traceback

TYPE_CHECKING = False  # as in writer.py
if TYPE_CHECKING:
    from types import ModuleType

_RUNTIME = os.path.join("multiprocessing", "")  # noqa: PTH118 - its own sys.exit and os._exit tell nothing
_last_mark = -1  # before sys.exit was called
_exit_call = (0, 0)  # code, number of the line
_is_installed = False


def install() -> None:
    """Watch for the end of this process; a second time does nothing."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    _watch_excepthook()
    _watch_exits()
    atexit.register(_at_exit)


def record_exception(error: BaseException, place: int = at.EXCEPTION, thread: str = "") -> None:
    """Write an exception as last words."""
    try:
        line = line_of_traceback(error.__traceback__)
        if not line and isinstance(error, SyntaxError) and error.filename:
            line = f"{error.filename}:{error.lineno} <module>"
        process.WRITER.last_words(place, _type_name(error), _message(error), line, thread)
    except Exception:  # noqa: BLE001 - the user's own error must come through, whatever its __str__ does
        process.WRITER.last_words(place, type(error).__name__, "", "", thread)
    if isinstance(error, TypeError):
        _note_unpicklable(error)


def _note_unpicklable(error: TypeError) -> None:
    try:
        from allranks.record import notes, unpicklable

        if path := unpicklable.path_in(error):
            notes.note("unpicklable", path=path)
    except Exception:  # noqa: BLE001 - as above; the last words are written
        return


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _message(error: BaseException) -> str:
    notes = getattr(error, "__notes__", ())
    return "\n".join([str(error), *(str(note) for note in notes)])


def _watch_excepthook() -> None:
    previous = sys.excepthook

    def excepthook(kind, error, traceback):
        if not issubclass(kind, SystemExit):
            record_exception(error)
            process.WRITER.exited(at.ENDED_BY_EXCEPTION, 1)
        previous(kind, error, traceback)

    sys.excepthook = excepthook


def _watch_exits() -> None:
    leave, leave_hard = sys.exit, os._exit

    def exit(status=None, /):
        _note_exit(_code_of(status))
        leave(status)

    def _exit(status: int):
        frame = sys._getframe(1)
        if _RUNTIME not in frame.f_code.co_filename:
            process.WRITER.exited(at.HARD_EXIT, status, process.LINES.here(2) >> 8)
        else:
            process.WRITER.exited(at.ENDED, status)
        leave_hard(status)

    exit.__doc__, _exit.__doc__ = leave.__doc__, leave_hard.__doc__
    sys.exit, os._exit = exit, _exit


def _note_exit(code: int) -> None:
    """sys.exit was called; whether somebody catches it shows later."""
    global _last_mark, _exit_call
    if _RUNTIME in sys._getframe(2).f_code.co_filename:
        return
    error = sys.exc_info()[1]
    if code and error is not None and not isinstance(error, SystemExit):
        record_exception(error)  # "except Exception: ...; sys.exit(1)" would hide it
    process.WRITER.end_light(monotonic_ns())  # every mark from now on is seen
    _last_mark = process.WRITER.words[at.W_SINCE_NS]
    _exit_call = (code, process.WRITER.string(line_of_call(3)))


def _code_of(status: object) -> int:
    if status is None:
        return 0
    return status if isinstance(status, int) else 1


def _at_exit() -> None:
    """The interpreter ends: after the script, its threads and the user's own atexit functions."""
    writer = process.WRITER
    error = getattr(sys, "last_value", None)
    if error is not None and not writer.words[at.EXCEPTION] and not isinstance(error, SystemExit):
        record_exception(error)  # somebody put another excepthook in place of ours
    if writer.words[at.EXCEPTION] and error is not None:
        writer.exited(at.ENDED_BY_EXCEPTION, 1)
    elif _last_mark == writer.words[at.W_SINCE_NS]:
        writer.exited(at.SYSTEM_EXIT, *_exit_call)
    else:
        writer.exited(at.ENDED)
    enter_exit_phase()
    writer.flush()
    if not writer.words[at.W_ROLE] and not writer.words[at.W_FLAGS] & at.TORCH_IMPORTED:
        process.remove_files()  # a tool that the script ran


def enter_exit_phase() -> None:
    """The script is over; the interpreter is not."""
    if process.WRITER.words[at.W_PHASE] != at.EXIT:
        process.WRITER.mark(at.EXIT)


def watch_threads() -> None:
    """Watch for exceptions that end threads; from the import of torch on, which imports threading anyway."""
    import threading

    from allranks.record import compat

    compat.call_at_script_end(_script_ended)
    previous = threading.excepthook

    def excepthook(args):
        error = args.exc_value
        if error is not None and not isinstance(error, SystemExit):
            name = args.thread.name if args.thread else ""
            record_exception(error, at.THREAD_EXCEPTION, name or "a thread")
        previous(args)

    threading.excepthook = excepthook


def _script_ended() -> None:
    if _last_mark != process.WRITER.words[at.W_SINCE_NS]:  # keep the sign that sys.exit was the last thing
        enter_exit_phase()


def watch_children(module: ModuleType) -> None:
    """Record what ends a multiprocessing child: its exception never reaches sys.excepthook."""
    base = module.BaseProcess
    run = base.run

    def run_and_tell(self):
        try:
            run(self)
        except BaseException as error:
            told = error.__context__ if isinstance(error, SystemExit) and error.code else error
            if told is not None and not isinstance(told, SystemExit):
                record_exception(told)
                process.WRITER.exited(at.ENDED_BY_EXCEPTION, 1)
            raise

    run_and_tell.__name__, run_and_tell.__qualname__, run_and_tell.__doc__ = (
        "run",
        run.__qualname__,
        run.__doc__,
    )
    base.run = run_and_tell
