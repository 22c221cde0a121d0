"""Grids and pictures show every action, where and as wide as it is."""

import re
from xml.etree import ElementTree

import pytest

from torchweave.schedule.build import build, names
from torchweave.schedule.costs import Costs
from torchweave.schedule.grid import draw, in_time, plain, slots
from torchweave.schedule.simulate import simulate
from torchweave.schedule.svg import Panel, picture


def rows_of(lines, rank):
    """Return what stands in a rank's line of each block."""
    return [line[1:] for line in lines if line and line[0] == (f"rank {rank}".ljust(len(line[0][0])), "rank")]


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("width", [40, 75, 1000])
def test_slots_show_every_action_once_in_its_order_at_any_width(name, width):
    plan = build(name, 4, 8)
    lines = draw(slots(plan), width)
    assert max(len(line) for line in plain(lines).splitlines()) <= width
    for rank, row in enumerate(plan.ranks):
        shown = "".join(text for block in rows_of(lines, rank) for text, _ in block).replace("·", " ").split()
        assert shown == [str(action).replace("OVERLAP_F_B", "").strip("()") for action in row]


def test_columns_of_blocks_are_one_time_for_all_ranks():
    # catches a block in which a rank's cells have moved: each cell begins at its slot's column
    plan = build("1f1b", 4, 6)
    text = plain(draw(slots(plan), 1000))
    assert text.splitlines() == [
        "        slots 0 to 17 of 18",
        "rank 0  0F0 0F1 0F2 0F3 ·   ·   ·   0B0 0F4 0B1 0F5 0B2 ·   0B3 ·   0B4 ·   0B5",
        "rank 1  ·   1F0 1F1 1F2 ·   ·   1B0 1F3 1B1 1F4 1B2 1F5 1B3 ·   1B4 ·   1B5",
        "rank 2  ·   ·   2F0 2F1 ·   2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 ·   2B5",
        "rank 3  ·   ·   ·   3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5",
    ]


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("width", [37, 60, 2000])
@pytest.mark.parametrize("costs", [Costs(comm=0.5), Costs(F=1 / 3, B=0.7, W=0.01, p2p=0.1), Costs(F=900, B=2000)])
def test_cells_in_time_are_as_wide_as_they_are_long(name, width, costs):
    found = simulate(build(name, 4, 8), costs)
    grid = in_time(found)
    lines = draw(grid, width)
    assert max(len(line) for line in plain(lines).splitlines() if line.startswith("rank")) <= width
    for rank, row in enumerate(found.ranks):
        shown = "".join(text for block in rows_of(lines, rank) for text, _ in block)
        assert len(shown) == round(row[-1].end * grid.per_unit)
        for span in row:
            begin, end = round(span.begin * grid.per_unit), round(span.end * grid.per_unit)
            assert "·" not in shown[begin:end]
        busy = sum(round(span.end * grid.per_unit) - round(span.begin * grid.per_unit) for span in row)
        idle = sum(len(text) for block in rows_of(lines, rank) for text, style in block if style == "idle")
        assert idle == len(shown) - busy


def test_a_label_that_is_cut_by_a_block_stands_where_it_fits():
    found = simulate(build("1f1b", 1, 1), Costs(F=1, B=3))
    assert plain(draw(in_time(found), 8 + 9)).splitlines()[1::3] == ["rank 0  0F0 0B0─", "rank 0  ───────"]
    found = simulate(build("1f1b", 1, 1), Costs(F=2, B=2))
    assert plain(draw(in_time(found), 8 + 3)).splitlines()[1::3] == ["rank 0  0F0", "rank 0   B0", "rank 0  ─"]


def test_a_long_grid_is_cut_in_the_middle_and_says_what_is_left_out():
    plan = build("1f1b", 4, 200)
    lines = plain(draw(slots(plan), 100, max_lines=18)).splitlines()
    assert [line.strip() for line in lines if "slots" in line] == [
        "slots 0 to 14 of 406",
        "slots 15 to 29 of 406",
        "... slots 30 to 390 of 406 left out ...",
        "slots 391 to 405 of 406",
    ]
    assert lines[-4].endswith("0B199")
    assert len(lines) == 3 * 5 + 4


SVG = "{http://www.w3.org/2000/svg}"


def outlines(root):
    """Return x, y, width, height of every box by its colour."""
    found = {}
    for path in root.iter(f"{SVG}path"):
        boxes = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z", path.get("d"))
        if boxes:
            found[path.get("fill") if path.get("fill") != "none" else "border"] = [tuple(map(float, b)) for b in boxes]
    return found


@pytest.mark.parametrize("name", names())
def test_the_picture_has_a_box_for_each_half_and_a_border_for_each_pair(name):
    found = simulate(build(name, 4, 8), Costs(comm=0.5))
    root = ElementTree.fromstring(picture([Panel("a < b & c", found)]))
    boxes = outlines(root)
    spans = [span for row in found.ranks for span in row]
    pairs = [span for span in spans if span.action.parts]
    assert len(boxes.pop("border", [])) == len(pairs)
    assert sum(map(len, boxes.values())) == len(spans) + len(pairs)
    # nothing overlaps: the area of the boxes is the busy time of all ranks
    area = sum(wide * high for found_boxes in boxes.values() for _, _, wide, high in found_boxes)
    scale = max(x + wide for found_boxes in boxes.values() for x, _, wide, _ in found_boxes) - min(
        x for found_boxes in boxes.values() for x, _, _, _ in found_boxes
    )
    row = max(high for found_boxes in boxes.values() for _, _, _, high in found_boxes)
    assert area == pytest.approx(sum(found.busy) / found.step_time * scale * row, rel=0.01)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts[0] == "a < b & c"
    assert {"rank 0", "rank 3", "forward"} <= set(texts)
    numbers = [text for text in texts if text.isdigit()]
    assert len(numbers) >= len(spans) + len(pairs)  # every half has its number; the axis has some too


def test_a_large_picture_leaves_out_numbers_that_do_not_fit_and_stays_small():
    found = simulate(build("1f1b", 16, 128))
    text = picture([Panel("large", found)])
    width = float(ElementTree.fromstring(text).get("width"))
    assert width < 3000
    assert len(text) < 60 * 2 * 16 * 128


def test_a_step_of_no_time_can_be_drawn():
    found = simulate(build("1f1b", 2, 2), Costs(F=0, B=0, W=0))
    ElementTree.fromstring(picture([Panel("nothing", found)]))
    assert plain(draw(in_time(found), 80)).splitlines()[0].strip() == "time 0 to 0 of 0"
