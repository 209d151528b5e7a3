"""Which line of the user's code led here?

The user's line is the first frame, going outwards, that lies neither in torch, nor in allranks, nor in the standard
library; and outside site-packages, if there is such a frame (a trainer that is installed is not what the user wrote).
Cheap enough for every step: a file name is judged once, a place in the code is named once.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as in writer.py
if TYPE_CHECKING:
    from types import CodeType, FrameType, TracebackType

    from allranks.record.writer import Writer

_USER, _INSTALLED, _SKIPPED = range(3)
_NO_FRAME = (
    "<"  # "<frozen importlib._bootstrap>"; but "<stdin>", "<string>" and "<ipython-input-3>" are the user's
)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120 - start-up
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep  # noqa: PTH100, PTH120 - start-up
_SITES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_SKIPPED_PACKAGES = tuple(f"{site}{name}{os.sep}" for site in _SITES for name in ("torch", "torchdata"))


def kind_of(filename: str) -> int:
    """Whose file it is: the user's, an installed package's, or one to skip (torch, allranks, standard library)."""
    if filename.startswith(("<frozen ", _OURS)):
        return _SKIPPED
    if any(site in filename for site in _SITES):
        return _SKIPPED if any(name in filename for name in _SKIPPED_PACKAGES) else _INSTALLED
    return _SKIPPED if filename.startswith(_STDLIB) else _USER


class Lines:
    """Names places in the code by number, for one writer."""

    __slots__ = ("_kinds", "_numbers", "writer")

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self._kinds: dict[str, int] = {}
        # By id of the code object and place in it; the code object is kept so that its id stays its own.
        self._numbers: dict[tuple[int, int], tuple[CodeType, int]] = {}
        writer.on_strings_full.append(self._numbers.clear)

    def here(self, depth: int = 2) -> int:
        """The number of the user's line that called; `depth` frames are passed over unseen. 0 if there is none."""
        frame = sys._getframe(depth)
        kinds = self._kinds
        while True:
            code = frame.f_code
            kind = kinds.get(code.co_filename)
            if kind is None:
                kind = kinds[code.co_filename] = kind_of(code.co_filename)
            if kind == _USER:
                break
            if kind == _INSTALLED:
                return self._outside(frame)
            back = frame.f_back
            if back is None:
                return 0
            frame = back
        known = self._numbers.get((id(code), frame.f_lasti))
        return self._name(frame) if known is None else known[1]

    def _outside(self, frame: FrameType) -> int:
        return self._name(user_frame(frame) or frame)

    def _name(self, frame: FrameType) -> int:
        key = (id(frame.f_code), frame.f_lasti)
        known = self._numbers.get(key)
        if known is not None:
            return known[1]
        number = self.writer.string(describe(frame.f_code, frame.f_lineno))
        self._numbers[key] = (frame.f_code, number)
        return number


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
    frame = user_frame(sys._getframe(depth))
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
