"""Timelines as numbers, pages, pictures and Chrome traces, and the command that makes one from another."""

import itertools
import json
import re
import struct
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_fsdp import ConfigError
from megatron_fsdp.__main__ import main
from megatron_fsdp.observability.timeline_files import add_to_trace, read_record, write_record
from megatron_fsdp.observability.timeline_page import colours, html_page, stacked, ticks, timeline_svg
from megatron_fsdp.observability.timeline_record import COMPUTE, GATHER, REDUCE, Span, TimelineRecord, UnitTimes

SVG = "{http://www.w3.org/2000/svg}"


def make_record(num_units: int) -> TimelineRecord:
    """Return a record of units with names that HTML must escape; one second each of gather, forward, reduce."""
    units = tuple(f"blocks.{index}<&>" for index in range(num_units))
    spans = []
    for index, unit in enumerate(units):
        spans += [
            Span(GATHER, "gather", unit, index, index + 1.0, 2048),
            Span(COMPUTE, "wait for gather", unit, index + 0.75, index + 1.0),
            Span(COMPUTE, "forward", unit, index + 1.0, index + 1.5),
            Span(REDUCE, "reduce", unit, index + 1.5, index + 2.5, 1024),
            Span(COMPUTE, "wait for reduce", unit, index + 1.5, index + 1.625),
        ]
    spans.append(Span(COMPUTE, "optimizer", "", num_units + 1.75, num_units + 2.0))
    return TimelineRecord(3, units, num_units + 3.0, 1, tuple(sorted(spans, key=lambda span: span.start)))


# ---------------------------------------------------------------------- numbers


def test_the_exposed_share_is_waiting_over_time() -> None:
    record = make_record(5)
    assert (record.waited(GATHER), record.waited(REDUCE)) == (5 * 0.25, 5 * 0.125)
    assert record.exposed_share == pytest.approx(5 * 0.375 / 8)
    assert TimelineRecord(0, (), 0.0, 0, ()).exposed_share == 0.0


def test_communication_of_both_lanes_at_once_counts_once() -> None:
    assert make_record(1).communication == pytest.approx(2.0)
    # Gathers fill [0, 3], reductions [1.5, 4.5].
    assert make_record(3).communication == pytest.approx(4.5)


def test_a_unit_s_gathers_that_are_under_way_at_once_count_once() -> None:
    spans = (Span(GATHER, "gather", "a", 0.0, 2.0), Span(GATHER, "gather", "a", 1.0, 2.5))
    record = TimelineRecord(0, ("a", "b"), 3.0, 1, spans)
    assert record.unit_times() == (UnitTimes("a", num_gathers=2, gather=2.5), UnitTimes("b"))


def test_the_line_says_rank_time_and_share() -> None:
    assert str(make_record(5)) == (
        "rank 3: 1 step in 8000.0 ms, exposed communication 23.4% (waited 1250.0 ms for gathers, 625.0 ms for "
        "reductions)"
    )


# ---------------------------------------------------------------------- page


@pytest.mark.parametrize("num_units", [0, 1, 3, 100])
def test_the_page_has_the_share_a_bar_for_every_span_and_a_row_for_every_unit(num_units: int) -> None:
    record = make_record(num_units)
    page = html_page(record)
    assert f"{record.exposed_share:.1%} exposed communication" in page
    titles = re.findall(r"<title>(.*?)</title></rect>", page)
    assert len(titles) == len(record.spans)
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    assert len(rows) == 1 + num_units + 1
    if num_units:
        assert "gather blocks.0&lt;&amp;&gt;: 1 s from 0 us on, 2.00 KiB" in titles
        cells = re.findall(r"<td>(.*?)</td>", rows[1])[1:]
        assert cells == ["1", "1 s", "250 ms", "1", "1 s", "125 ms", "500 ms", "-", "-"]


def test_the_page_needs_nothing_but_itself() -> None:
    page = html_page(make_record(3)).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|<script|<link|<img|src=|href=|@import", page)


def test_bars_lie_where_their_times_say() -> None:
    drawing = ElementTree.fromstring(timeline_svg(make_record(3)))
    bars = {bar.findtext(f"{SVG}title", "").partition(":")[0]: bar for bar in drawing.iter(f"{SVG}rect")}
    left, width = (float(bars["forward blocks.1<&>"].attrib[name]) for name in ("x", "width"))
    background = next(rect for rect in drawing if rect.tag == f"{SVG}rect")
    scale = float(background.attrib["width"]) / 6.0
    assert (left - float(background.attrib["x"])) / scale == pytest.approx(2.0, abs=0.01)
    assert width / scale == pytest.approx(0.5, abs=0.01)
    assert bars["wait for gather blocks.1<&>"].attrib["fill"] == "url(#wait)"
    tops = [float(bars[f"{name} blocks.1<&>"].attrib["y"]) for name in ("gather", "forward", "reduce")]
    assert tops == sorted(set(tops))


def test_bars_of_many_units_are_wide_enough_to_be_seen() -> None:
    drawing = ElementTree.fromstring(timeline_svg(make_record(100)))
    bars = [rect for rect in drawing.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(bars) > 400
    assert min(float(bar.attrib["width"]) for bar in bars) > 1


def test_names_are_written_where_there_is_room() -> None:
    few, many = ("".join(ElementTree.fromstring(timeline_svg(make_record(count))).itertext()) for count in (3, 100))
    assert few.count("blocks.1<&>") > len(["gather", "forward", "reduce", "two waits", ""])
    assert many.count("blocks.50<&>") == 5


def test_bars_that_overlap_lie_below_each_other() -> None:
    spans = [Span(GATHER, "gather", str(start), start, start + 2.5) for start in range(4)]
    assert [[span.start for span in row] for row in stacked(spans)] == [[0, 3], [1], [2]]
    crowded = [Span(GATHER, "gather", "", start, 100.0) for start in range(9)]
    assert [len(row) for row in stacked(crowded)] == [1, 1, 1, 6]


@pytest.mark.parametrize("count", [1, 3, 7, 8, 33, 200])
def test_neighbouring_units_have_different_colours(count: int) -> None:
    chosen = list(colours([str(index) for index in range(count)]).values())
    assert len(chosen) == count
    assert all(re.fullmatch(r"#[0-9A-Fa-f]{6}", colour) for colour in chosen)
    assert all(mine != other for mine, other in itertools.pairwise(chosen))


@pytest.mark.parametrize(
    ("seconds", "step"), [(1.0, 0.2), (0.0123, 0.002), (77.0, 10.0), (4.0, 0.5), (0.0, None), (3.3e-6, 5e-7)]
)
def test_ticks_are_round_and_few(seconds: float, step: float | None) -> None:
    found = ticks(seconds, 8)
    assert found[0] == 0.0
    if step is None:
        assert found == [0.0]
    else:
        assert found[1] == pytest.approx(step)
        assert 4 <= len(found) <= 9
        assert found[-1] <= seconds < found[-1] + step * 1.001


# ---------------------------------------------------------------------- picture


@pytest.mark.parametrize("num_units", [0, 3, 40])
def test_a_picture_is_a_png_of_the_size_of_a_screen(num_units: int, tmp_path: Path) -> None:
    write_record(make_record(num_units), tmp_path / "timeline.PNG")
    data = (tmp_path / "timeline.PNG").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1440
    assert 300 < height < 800


def test_without_matplotlib_the_picture_is_refused_and_the_page_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib.*\.html needs nothing"):
        write_record(make_record(1), tmp_path / "timeline.png")


@pytest.mark.parametrize("name", ["timeline", "timeline.svg", "html"])
def test_other_suffixes_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"wanted \.html, \.png or \.json"):
        write_record(make_record(1), tmp_path / name)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for suffix in ("html", "json", "png"):
        with pytest.raises(ConfigError, match="give a file that can be written"):
            write_record(make_record(1), tmp_path / "missing" / f"timeline.{suffix}")


# ---------------------------------------------------------------------- traces and the command


def close(found: TimelineRecord, wanted: TimelineRecord) -> bool:
    """Whether two records are alike but for rounding to a thousandth of a microsecond."""
    facts = [(span.lane, span.action, span.unit, span.num_bytes) for span in found.spans]
    times = [time for span in found.spans for time in (span.start, span.stop)]
    return (
        (found.rank, found.units, found.num_steps) == (wanted.rank, wanted.units, wanted.num_steps)
        and facts == [(span.lane, span.action, span.unit, span.num_bytes) for span in wanted.spans]
        and times == pytest.approx([time for span in wanted.spans for time in (span.start, span.stop)], abs=1e-8)
        and found.seconds == pytest.approx(wanted.seconds, abs=1e-8)
    )


def test_a_trace_gives_the_record_back(tmp_path: Path) -> None:
    record = make_record(3)
    write_record(record, tmp_path / "trace.json")
    assert close(read_record(tmp_path / "trace.json"), record)


def test_lanes_are_added_to_a_profiler_s_trace_where_its_range_begins(tmp_path: Path) -> None:
    path, record = tmp_path / "trace.json", make_record(3)
    theirs = [
        {"ph": "X", "name": "aten::mm", "ts": 4_000_000.0, "dur": 3.0, "pid": 1, "tid": 2},
        {"ph": "X", "name": "megatron_fsdp timeline", "cat": "user_annotation", "ts": 5_000_000.5, "dur": 9.0},
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    ]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": theirs}))
    add_to_trace(record, path)
    trace = json.loads(path.read_text())
    assert trace["schemaVersion"] == 1
    assert trace["traceEvents"][:3] == theirs
    bars = {event["name"]: event for event in trace["traceEvents"][3:]}
    assert bars["gather blocks.1<&>"]["ts"] == pytest.approx(6_000_000.5)
    assert bars["gather blocks.1<&>"]["dur"] == pytest.approx(1_000_000)
    assert close(read_record(path), record)


def test_a_trace_without_the_range_is_left_alone_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ConfigError, match="record inside the profiler"):
        add_to_trace(make_record(1), path)
    assert path.read_text() == '{"traceEvents": []}'


def test_the_command_prints_the_line_and_writes_page_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, page, picture = (tmp_path / f"timeline.{suffix}" for suffix in ("json", "html", "png"))
    write_record(make_record(3), trace)
    assert main(["timeline", str(trace), "--html", str(page), "--png", str(picture)]) == 0
    assert capsys.readouterr().out == f"{make_record(3)}\n"
    assert page.read_text().count("</rect>") > 9
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, (), "is no Chrome trace: .*No such file"),
        ("{", (), "is no Chrome trace"),
        ("[]", (), "is no Chrome trace: no traceEvents in it"),
        ('{"traceEvents": [{"ph": "X", "name": "aten::mm"}]}', (), "has no bars of a recording"),
        ("", ("--html", "timeline.png"), "--html timeline.png: wanted a file that ends in .html"),
    ],
)
def test_the_command_says_what_is_wrong_with_files(
    content: str | None, options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    if content == "":
        write_record(make_record(1), trace)
    elif content is not None:
        trace.write_text(content)
    assert main(["timeline", str(trace), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megatron-fsdp timeline: ")
    assert re.search(message, error)
