"""The output of ranks: lines, their limit, and what the driver keeps of them."""

from sparkkeras.events import RankReported
from sparkkeras.runner.output import BURST_BYTES, BYTES_PER_SECOND, MAX_LINE, TAIL_LINES, Console, Lines, OutputLimit


def test_lines_are_complete_before_they_are_shown():
    lines = Lines()
    assert lines.split(b"one\ntw") == ["one"]
    assert lines.split(b"o\r\n\nthr") == ["two", ""]
    assert lines.rest() == ["thr"]
    assert lines.rest() == []


def test_progress_bars_and_characters_cut_in_two():
    lines = Lines()
    assert lines.split(b"10%\r20%\r\xc3") == ["10%", "20%"]
    assert lines.split(b"\xa4\n\xff\n") == ["ä", "\ufffd"]


def test_long_lines_are_shown_in_pieces():
    lines = Lines()
    assert lines.split(b"x" * (MAX_LINE + 10)) == ["x" * MAX_LINE]
    assert lines.split(b"\n") == ["x" * 10]
    assert [len(line) for line in lines.split(b"y" * (2 * MAX_LINE + 1) + b"\n")] == [MAX_LINE, MAX_LINE, 1]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_rank_that_writes_too_much_is_cut_and_says_so():
    clock = Clock()
    limit = OutputLimit(clock)
    line = "x" * 999
    assert len(limit.apply([line] * 5000)) == -(-BURST_BYTES // 1000)
    assert limit.apply(["later"]) == []
    clock.now = 1.5
    left_out = 5001 - -(-BURST_BYTES // 1000)
    note, line = limit.apply(["after"])
    assert note == f"... {left_out:,} lines left out (more than {BYTES_PER_SECOND // 1000} KB a second)"
    assert line == "after"
    assert limit.last() == []


def test_the_last_lines_are_kept_for_the_error():
    limit = OutputLimit(Clock())
    limit.apply(["x" * BURST_BYTES])
    limit.apply([str(number) for number in range(1000)])
    note, *last = limit.last()
    assert note.startswith("... 900 lines")
    assert last == [str(number) for number in range(900, 1000)]


def test_the_driver_shows_lines_once_and_keeps_the_last_ones():
    console = Console(2)
    console.add(1, [str(number) for number in range(TAIL_LINES + 5)])
    console.report(RankReported(0, 0, None, {}))
    taken, reports = console.take()
    assert (taken[0], taken[-1], len(taken)) == ((1, "0"), (0, "epoch 1"), TAIL_LINES + 6)
    assert reports == [RankReported(0, 0, None, {})]
    assert console.take() == ([], [])
    assert (console.tail(1)[0], len(console.tail(1)), console.tail(0)) == ("5", TAIL_LINES, [])
