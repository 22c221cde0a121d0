"""The HTML page without a browser: its structure, what it embeds, and that nothing in a trace can break out of it."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import diagnosis
from test_cli import trace

from torchweave.cli.main import main
from torchweave.diagnose.model import CauseFound, Diagnosis, Numbers, SidesFound, Where
from torchweave.errors import UsageError
from torchweave.intervals import union
from torchweave.reporting.embed import column, safe_json, section_data, times
from torchweave.reporting.html import VERDICTS, format_ms, format_percent, render_html, write_html
from torchweave.reporting.text import report

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "{{ 7 * 7 }} ${7 * 7} \" ' & ]]> \u2028\u202e\0",
    "half a character: \ud800",
    "kernel" * 2000,
)
_DTYPES = {"u1": "<u1", "u2": "<u2", "u4": "<u4", "f8": "<f8"}
# elements that have no end tag
_VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """A page's elements, and which of them were not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.data: list[str] = []
        self.scripts: list[str] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        tag, attrs = self._open[-1] if self._open else ("", {})
        if tag == "script":
            (self.data if attrs.get("type") == "application/json" else self.scripts).append(data)
        elif tag != "style":
            self.texts.append(data)

    def tags(self, *names: str) -> list[str]:
        return [tag for tag, _ in self.elements if tag in names]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def hostile() -> Diagnosis:
    """Return a diagnosis all of whose texts are hostile."""
    text = HOSTILE[0]
    where = Where(text, 3, text, text, text, text)
    found = diagnosis(
        names=HOSTILE,
        file=text,
        sentence=text,
        sides=SidesFound((text, "range:" + text), text),
        not_known=HOSTILE,
        warnings=HOSTILE,
        device_name=text,
    )
    causes = tuple(
        replace(cause, cause=text, where=where, evidence=f"`{text}` {text}", mend=text) for cause in found.causes
    )
    return replace(found, causes=causes)


def decode(entry):
    return np.frombuffer(base64.b64decode(entry["base64"]), dtype=_DTYPES[entry["type"]]).astype(np.float64)


def decode_times(entry):
    begin = np.cumsum(decode(entry["gap"]))
    return np.column_stack((begin, begin + decode(entry["length"])))


def test_the_page_says_verdict_numbers_causes_and_what_is_not_known():
    page = Page(render_html([diagnosis()]))
    assert page.tags("h1", "h2", "h3")[0] == "h1"
    assert page.tags("h1") == ["h1"]
    for text in (
        "Partly overlapped",
        "were lost.",
        "Span",
        "Busy",
        "Overlapped",
        "Possible",
        "Lost",
        "Idle",
        "Communication hidden",
        "75.0 % of 1.00 ms",
        "Communication exposed",
        "host_sync",
        "12 x cudaStreamSynchronize inside",
        "train.py:41",
        "losses.append(loss.detach())",
        "sm_full",
        "not recoverable",
        "likely",
        "What this trace cannot tell",
        "profile_all_threads",
        "NVIDIA H200",
    ):
        assert text in page.text, text


def test_the_page_has_one_script_that_its_own_policy_allows_and_loads_nothing():
    text = render_html([diagnosis()])
    page = Page(text)
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv"))
    assert f"'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert not page.tags("link", "img", "iframe", "object", "embed")
    assert not [attrs for _, attrs in page.elements if "src" in attrs]
    assert {attrs["href"][0] for _, attrs in page.elements if "href" in attrs} == {"#"}
    # the name of SVG's namespace is an address that nobody visits
    assert set(re.findall(r"https?://[^\s\"'`<)]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in script
    assert not re.search(r"@import|url\((?!#|`|\$)", text)


def test_nothing_in_a_trace_becomes_an_element():
    plain, bad = Page(render_html([diagnosis()])), Page(render_html([hostile()]))
    assert not bad.tags("img")
    assert len(bad.tags("script")) == len(plain.tags("script"))
    assert not [attrs for _, attrs in bad.elements if any(name.startswith("on") for name in attrs)]
    assert bad.text.count("onerror=alert(1)") > 10
    (data,) = bad.data
    assert not set("<>&") & set(data)
    assert tuple(json.loads(data)["names"]) == HOSTILE


def test_halves_of_characters_reach_the_file(tmp_path):
    write_html([hostile()], tmp_path / "page.html")
    assert "half a character: ?" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_ids_are_unique_and_labels_point_to_them():
    page = Page(render_html([diagnosis(rank=rank) for rank in range(3)]))
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for name in ("aria-labelledby", "aria-describedby"):
        assert {attrs[name] for _, attrs in page.elements if name in attrs} <= set(ids)
    assert {attrs["href"][1:] for _, attrs in page.elements if "href" in attrs} <= set(ids)


def test_buttons_have_names_and_headings_do_not_skip():
    page = Page(render_html([diagnosis(), diagnosis()]))
    assert all(attrs.get("type") == "button" for tag, attrs in page.elements if tag == "button")
    levels = [int(tag[1]) for tag in page.tags("h1", "h2", "h3", "h4")]
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels))


def test_several_ranks_have_a_table_and_a_section_each():
    found = [diagnosis(rank=rank, seed=rank, file=f"rank{rank}.json") for rank in range(3)]
    page = Page(render_html(found, ["Rank 2 came late."]))
    assert len(page.data) == len(page.tags("section")) == 3
    assert page.tags("h1") == ["h1"]
    for text in ("3 traces", "Rank 0", "Rank 2", "rank1.json", "Rank 2 came late.", "First cause"):
        assert text in page.text, text


@pytest.mark.parametrize("verdict", VERDICTS)
def test_every_verdict_has_a_page(verdict):
    found = replace(diagnosis(), verdict=verdict)
    assert VERDICTS[verdict][0] in Page(render_html([found])).text


def test_a_diagnosis_with_nothing_in_it_has_a_page():
    nothing = Diagnosis(
        "t.json",
        None,
        "nothing_to_overlap",
        "Nothing.",
        SidesFound((), "One stream."),
        Numbers(),
        None,
        (),
        (),
        (),
        (),
    )
    page = Page(render_html([nothing]))
    assert "Nothing to overlap" in page.text
    assert "Possible" not in page.text


def test_no_diagnosis_is_refused():
    with pytest.raises(UsageError, match="has to have a diagnosis"):
        render_html([])


def test_a_file_that_cannot_be_written_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="can be written"):
        write_html([diagnosis()], tmp_path / "no such folder" / "page.html")


def test_scaled_moments_are_told():
    times_of_one_ms = union([[0, 1_000_000]])
    cause = CauseFound("sm_full", 0.5, 0.0, False, "shown", Where(), "", "", (), times_of_one_ms)
    assert "last 1.00 ms together" in Page(render_html([replace(diagnosis(), causes=(cause,))])).text
    exact = replace(cause, lost_ms=1.0)
    assert "together" not in Page(render_html([replace(diagnosis(), causes=(exact,))])).text


def test_what_mending_could_bring_counts_only_what_can_be_mended():
    found = diagnosis()
    text = Page(render_html([found])).text
    lost, idle = format_ms(found.causes[0].lost_ms), format_ms(found.causes[0].idle_ms)
    assert f"could bring back: {lost} of" in text
    assert f"and {idle} of" in text
    nothing = replace(found, causes=found.causes[1:])
    assert "None of these causes" in Page(render_html([nothing])).text


def test_the_embedded_columns_are_the_lanes_and_the_moments():
    found = diagnosis()
    data = json.loads(safe_json(section_data(found)))
    for lane, entry in zip(found.lanes, data["lanes"], strict=True):
        assert np.array_equal(decode_times(entry), np.column_stack((lane.begin, lane.end)))
        assert np.array_equal(decode(entry["side"]), lane.side)
        assert [data["names"][int(code)] for code in decode(entry["name"])] == [found.names[code] for code in lane.name]
    for cause, entry in zip(found.causes, data["causes"], strict=True):
        assert np.array_equal(decode_times(entry["lost"]), cause.lost_intervals)
        assert np.array_equal(decode_times(entry["idle"]), cause.idle_intervals)


def test_only_names_that_are_drawn_are_embedded():
    found = replace(diagnosis(), names=(*diagnosis().names, "an operator of the host"))
    assert "an operator of the host" not in safe_json(section_data(found))


@given(st.lists(st.integers(-(2**52), 2**52)))
def test_columns_keep_every_number(values):
    assert decode(column(np.array(values, dtype=np.int64))).tolist() == values


@given(st.lists(st.tuples(st.integers(0, 2**45), st.integers(0, 2**40))))
def test_times_keep_every_nanosecond(pairs):
    array = np.array(sorted((begin, begin + length) for begin, length in pairs), dtype=np.int64).reshape(-1, 2)
    assert np.array_equal(decode_times(times(array[:, 0], array[:, 1])), array)


def test_numbers_are_not_rounded_to_nothing_or_to_all():
    assert [format_ms(value) for value in (-1e-9, 0.0134, 2.806, 1234.5)] == ["0.000", "0.013", "2.81", "1,234"]
    shares = (0.0, 1e-5, 0.163, 0.99999, 1.0)
    assert [format_percent(share) for share in shares] == ["0 %", "< 0.1 %", "16.3 %", "> 99.9 %", "100 %"]


def test_the_command_writes_the_page_beside_the_report(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["why", trace("causes/item_each_step.full"), "--html", str(page)]) == 1
    printed = capsys.readouterr()
    assert "host_sync" in printed.out
    assert str(page) in printed.err
    assert "host_sync" in Page(page.read_text(encoding="utf-8")).text


def test_a_cause_has_the_same_letter_on_the_page_as_on_a_terminal():
    """Catches two names for one cause: who compares the page with the printed report looks for the letter."""
    found = diagnosis()
    assert len(found.causes) > 1
    page = render_html([found])
    letters = re.findall(r'<b class="badge">(.)</b>\s*<span class="cause-name"><code>(\w+)</code>', page)
    told = re.findall(r"^([a-z])\. (\w+):", "\n".join(line.text for line in report(found, 100)), re.MULTILINE)
    assert letters == told
