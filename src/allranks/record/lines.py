"""Which line of the user's code led here?

The user's line is the first frame, going outwards, that lies neither in torch, nor in allranks, nor in the standard
library; and outside site-packages, if there is such a frame (a trainer that is installed is not what the user wrote).
Cheap enough for every step: a file name is judged once, a place in the code is named once.
"""

from __future__ import annotations

import os
from sys import _getframe

TYPE_CHECKING = False  # as in writer.py
if TYPE_CHECKING:
    from types import CodeType, FrameType, TracebackType

    from allranks.record.writer import Writer

USER = _USER = 0
_INSTALLED, _SKIPPED = 1, 2
_NO_FRAME = (
    "<"  # "<frozen importlib._bootstrap>"; but "<stdin>", "<string>" and "<ipython-input-3>" are the user's
)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120 - start-up
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep  # noqa: PTH100, PTH120 - start-up
_SITES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_SKIPPED_PACKAGES = tuple(f"{site}{name}{os.sep}" for site in _SITES for name in ("torch", "torchdata"))


_kinds: dict[str, int] = {}


def kind_of(filename: str) -> int:
    """Whose file it is: the user's, an installed package's, or one to skip (torch, allranks, standard library)."""
    kind = _kinds.get(filename)
    if kind is None:
        kind = _kinds[filename] = _judge(filename)
    return kind


def _judge(filename: str) -> int:
    if filename.startswith(("<frozen ", _OURS)):
        return _SKIPPED
    if any(site in filename for site in _SITES):
        return _SKIPPED if any(name in filename for name in _SKIPPED_PACKAGES) else _INSTALLED
    return _SKIPPED if filename.startswith(_STDLIB) else _USER


class Lines:
    """Names places in the code by number, for one writer."""

    __slots__ = ("_installed", "_places", "writer")

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        # By id of the code object, which is kept so that its id stays its own: None if its frames are passed over,
        # else numbers by the place in it. Strings that are written over take their numbers with them.
        self._places: dict[int, tuple[CodeType, dict[int, int] | None]] = {}
        self._installed: dict[int, tuple[CodeType, dict[int, int] | None]] = {}
        writer.on_strings_full += [self._places.clear, self._installed.clear]

    def here(self, depth: int = 2) -> int:
        """The user's line that called, as a mark takes it (number << 8); 0 if there is none.

        Args:
            depth: Frames that are passed over unseen.
        """
        try:
            frame = _getframe(depth)
        except ValueError:  # C called the mark, such as atexit
            return 0
        return self.of(frame)

    def of(self, frame: FrameType | None) -> int:
        """The same of `frame` and what called it."""
        places = self._places
        while frame is not None:
            found = places.get(id(frame.f_code))
            if found is None:
                return self._judge(frame)
            numbers = found[1]
            if numbers is not None:
                key = numbers.get(frame.f_lasti)
                return self._name(frame, numbers) if key is None else key
            frame = frame.f_back
        return 0

    def _judge(self, frame: FrameType | None) -> int:
        """As here, from a frame whose code is not known yet."""
        while frame is not None:
            kind = kind_of(frame.f_code.co_filename)
            if kind == _INSTALLED:  # never kept as known: what is outside of it differs from call to call
                return self._known(user_frame(frame) or frame)
            if kind == _USER:
                return self._known(frame)
            self._places[id(frame.f_code)] = frame.f_code, None
            frame = frame.f_back
        return 0

    def _known(self, frame: FrameType) -> int:
        places = self._places if kind_of(frame.f_code.co_filename) == _USER else self._installed
        numbers = places.setdefault(id(frame.f_code), (frame.f_code, {}))[1]
        if numbers is None:
            return 0
        key = numbers.get(frame.f_lasti)
        return self._name(frame, numbers) if key is None else key

    def _name(self, frame: FrameType, numbers: dict[int, int]) -> int:
        at, line = (
            frame.f_lasti,
            frame.f_lineno,
        )  # together: of another thread's frame, it may go on in the middle of this
        key = self.writer.string(describe(frame.f_code, line)) << 8
        numbers[at] = key
        return key


def describe(code: CodeType, lineno: int | None) -> str:
    """A place as the record names it, "file:line function"."""
    filename = code.co_filename
    if not filename.startswith(_NO_FRAME):
        filename = os.path.abspath(filename)  # noqa: PTH100 - also of files that do not exist
    return f"{filename}:{lineno or 0} {code.co_name}"


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The first frame of the user's own, else the first of an installed package, else None."""
    installed = None
    while frame is not None:
        kind = kind_of(frame.f_code.co_filename)
        if kind == _USER:
            return frame
        if kind == _INSTALLED and installed is None:
            installed = frame
        frame = frame.f_back
    return installed


def line_of_call(depth: int = 2) -> str:
    """The user's line that called, in words; "" if there is none. Not for every step."""
    frame = user_frame(_getframe(depth))
    return describe(frame.f_code, frame.f_lineno) if frame else ""


def line_of_traceback(traceback: TracebackType | None) -> str:
    """The innermost line of the user's code in a traceback; of an installed package if there is none."""
    found, installed = "", ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        kind = kind_of(code.co_filename)
        if kind == _USER:
            found = describe(code, traceback.tb_lineno)
        elif kind == _INSTALLED:
            installed = describe(code, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found or installed
