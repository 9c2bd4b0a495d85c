"""The line at the bottom of the terminal leaves all other text as it was."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_cli.chat.live import LiveLine

ROWS, COLUMNS = 6, 12
_PART = re.compile(r"\x1b([78D])|\x1b\[([\d;]*)([A-Za-z])|(.)", re.DOTALL)


class Screen:
    """As much of a VT100 as the line needs; `\\n` returns the carriage, as a terminal's driver
    has it."""

    def __init__(self) -> None:
        self.history: list[str] = []
        self.rows = [""] * ROWS
        self.row = self.column = 0
        self.bottom = ROWS - 1
        self.saved = (0, 0)

    def feed(self, text: str) -> None:
        for escape, numbers, command, letter in _PART.findall(text):
            if letter:
                self._put(letter)
            elif escape:
                self._escape(escape)
            else:
                self._control([int(n) for n in numbers.split(";") if n], command)

    def _put(self, letter: str) -> None:
        if letter == "\n":
            self.column = 0
            self._down()
            return
        if self.column == COLUMNS:
            self.column = 0
            self._down()
        row = self.rows[self.row].ljust(COLUMNS)
        self.rows[self.row] = row[: self.column] + letter + row[self.column + 1 :]
        self.column += 1

    def _down(self) -> None:
        if self.row != self.bottom:
            self.row = min(self.row + 1, ROWS - 1)
            return
        self.history.append(self.rows.pop(0))
        self.rows.insert(self.bottom, "")

    def _escape(self, escape: str) -> None:
        if escape == "D":
            self._down()
        elif escape == "7":
            self.saved = (self.row, self.column)
        else:
            self.row, self.column = self.saved

    def _control(self, numbers: list[int], command: str) -> None:
        if command == "A":
            self.row -= numbers[0]
        elif command == "H":
            self.row, self.column = numbers[0] - 1, numbers[1] - 1
        elif command == "K":
            self.rows[self.row] = ""
        elif command == "r":
            self.bottom = numbers[1] - 1 if numbers else ROWS - 1
            self.row = self.column = 0
        else:
            assert command == "m"

    def text(self) -> list[str]:
        """All that was shown, without what is blank at its end."""
        lines = [line.rstrip() for line in (*self.history, *self.rows)]
        while lines and not lines[-1]:
            lines.pop()
        return lines


PIECE = st.text(st.sampled_from("ab \n"), max_size=9)


@given(before=PIECE, pieces=st.lists(PIECE, max_size=8))
def test_text_is_shown_as_without_the_line(before: str, pieces: list[str]) -> None:
    plain, watched = Screen(), Screen()
    plain.feed(before + "".join(pieces))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINES", str(ROWS))
        patch.setenv("COLUMNS", str(COLUMNS))
        patch.setattr("spec_cli.chat.live._write", watched.feed)
        patch.setattr("spec_cli.chat.live._EVERY", 0.0)
        watched.feed(before)
        with LiveLine(lambda: "figures, too long", shown=True) as line:
            for piece in pieces:
                watched.feed(piece)
                line.update()
                assert watched.rows[-1].rstrip() == "figures, to"
                assert watched.row < ROWS - 1
    assert watched.text() == plain.text()
    assert watched.bottom == ROWS - 1


def test_nothing_is_written_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_cli.chat.live._write", lambda _: pytest.fail("written"))
    with LiveLine(lambda: "figures", shown=False) as line:
        line.update()
