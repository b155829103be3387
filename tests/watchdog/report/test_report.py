"""A job's report: the story, the evidence around it, and that nothing of the user's data becomes markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy
import pytest
from histories import INCIDENT, RECORD, block, history
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from torch_watchdog.launch.job_end import JobEnd
from torch_watchdog.launch.summary import summarise
from torch_watchdog.report.evidence import Evidence, Excerpt, LogTail, decoder_of, gather
from torch_watchdog.report.history import history_of
from torch_watchdog.report.markdown import markdown_report
from torch_watchdog.report.page import report_page, timeline_page
from torch_watchdog.report.story import facts_of, next_steps, story
from torch_watchdog_proto.messages import GpuSample, NodeReport, StepTable

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
LAST_WORDS = ("job train-1 stopped", "  resume watchdog torchrun train.py --resume runs/train-1", "  more   watchdog timeline train-1")


class Elements(HTMLParser):
    """Names of elements, and every attribute that could load or run something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.loading: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.loading += [(name, value) for name, value in attrs if name in ("src", "href", "action", "srcset") or name.startswith("on")]


def folder_of(tmp_path: Path, *, log: str = "") -> Path:
    incident = tmp_path / "incidents" / "1"
    incident.mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").write_text(log or "\x1b[31mstep 4\nIndexing.cu:1: Assertion `srcIndex < n` failed.\n")
    bound = {"key": "input_ids", "expression": "input_ids", "op": "embedding", "module": "wte", "bound": {"low": 0, "high": 63}}
    (incident / "contract.json").write_text(json.dumps({"guarded": [bound]}))
    rows = numpy.arange(64, dtype=numpy.int64).reshape(4, 16)
    rows[2, 7] = 70
    save_file({"input_ids": rows}, incident / "batch.safetensors")
    return tmp_path


def test_the_story_has_five_sentences_who_why_what_was_done_how_it_ended() -> None:
    told = story(history())
    assert len(told) == 5 and all(sentence.endswith(".") for sentence in told)
    assert "4 ranks of 2 nodes for 6 steps" in told[0] and "input_ids[2,7] is 70" in told[1] and "another model" in told[2]
    assert "4 ranks stopped at step 5 within 0.4 s" in told[3] and told[4] == "It ended with exit code 65 (stopped)."


def test_the_story_of_a_job_that_a_later_attempt_finished_says_so() -> None:
    made = replace(history(), record=RECORD | {"exit_code": 0, "end": {"attempt": 1}})
    assert "the launcher's attempt 1 then came to a good end" in story(made)[3]
    failed = replace(
        made,
        record=RECORD | {"exit_code": 1, "end": {"attempt": 1}},
        incidents=(INCIDENT, INCIDENT | {"id": "2", "attempt": 1, "kind": "rank.died"}),
    )
    assert failed.main_incident is not None and failed.main_incident["kind"] == "rank.died"


def test_a_clean_run_has_a_short_story() -> None:
    assert story(history(incidents=()))[1:] == ["Nothing was found.", "It ended with exit code 65 (stopped)."]


def test_a_requested_stop_is_no_fault() -> None:
    asked = INCIDENT | {
        "kind": "order.stop",
        "severity": "info",
        "summary": "a clean stop of all ranks: ann asked",
        "fix": "nothing is wrong",
    }
    told = story(history(incidents=(asked,)))
    assert told[1] == "Somebody asked for a clean stop of all ranks: ann asked." and len(told) == 4


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("batch.index_out_of_range", "stops the job at a bad batch"),
        ("loss.not_finite", "once a loss or gradient is not finite, and saves nothing"),
        ("grad.not_finite", "once a loss or gradient is not finite, and saves nothing"),
        ("order.preemption", "saves all ranks, and stops them"),
    ],
)
def test_what_a_stop_does_is_told_by_what_it_was_for(kind: str, words: str) -> None:
    assert words in facts_of(INCIDENT | {"kind": kind})["watchdog"]


def test_next_steps_end_with_the_line_that_resumes() -> None:
    assert next_steps(history(), LAST_WORDS) == [
        ("Load the one that matches.", False),
        ("watchdog torchrun train.py --resume runs/train-1", True),
    ]


def test_only_what_is_typed_is_set_as_code() -> None:
    """What the script must call, and what came of a --resume, by the very labels of the summary."""
    end = JobEnd(
        job="x",
        run_dir="/r/x",
        exit_code=65,
        stopped_by_us=True,
        ranks_reported=2,
        command=("torchrun", "t.py"),
        restores=False,
        unused_resume="runs/y",
    )
    checkpoint = {"path": "/r/x/checkpoints/step-5", "updates_applied": 5, "committed": True, "finite": True, "format": "dcp"}
    last_words = summarise([{"kind": "batch.index_out_of_range", "action": {"exit_code": 65, "checkpoint": checkpoint}}], end)
    page = report_page(history(), Evidence(), (*LAST_WORDS, *last_words))
    assert "<li>Load the one that matches.</li>" in page
    assert "<li>--resume runs/y was taken by nobody" in page and "<li>torch_watchdog_agent.restore(" in page
    assert "<li><pre>watchdog torchrun train.py" in page


def test_the_evidence_of_the_culprit_is_found(tmp_path: Path) -> None:
    found = gather(folder_of(tmp_path), history(), None)
    assert [(tail.rank, tail.lines, tail.telling) for tail in found.logs] == [
        (1, ["step 4", "Indexing.cu:1: Assertion `srcIndex < n` failed."], {1})
    ]
    assert found.excerpt is not None and (found.excerpt.values[found.excerpt.bad], found.excerpt.first) == (70, 0)
    assert found.contract[0]["module"] == "wte"


def test_of_a_log_of_several_attempts_the_incidents_own_is_shown_without_the_line_between(tmp_path: Path) -> None:
    mark = "[torch-watchdog] attempt 1, 2026-12-01 15:30:12\n"
    folder = folder_of(tmp_path, log=f"Traceback (most recent call last) in attempt 0\n{mark}step 4\n")
    for attempt, shown in ((0, ["Traceback (most recent call last) in attempt 0"]), (1, ["step 4"])):
        found = gather(folder, history(incidents=(INCIDENT | {"attempt": attempt},)), None)
        assert [tail.lines for tail in found.logs] == [shown]


def test_a_batch_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "incidents" / "1" / "batch.safetensors").write_bytes(b"torn")
    assert gather(folder, history(), None).excerpt is None


def test_the_bundle_that_the_incident_names_is_read_and_none_outside_of_the_run(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run")
    (folder / "bundles").mkdir()
    (folder / "incidents" / "1" / "batch.safetensors").rename(folder / "bundles" / "0-1.safetensors")

    def excerpt_of(bundle: str) -> object:
        named = INCIDENT | {"evidence": {"bundle": bundle}}
        return gather(folder, history(incidents=(named,)), None).excerpt

    assert excerpt_of("bundles/0-1.safetensors") is not None
    (tmp_path / "other.safetensors").write_bytes((folder / "bundles" / "0-1.safetensors").read_bytes())
    assert excerpt_of("../other.safetensors") is None


def test_a_local_tokenizer_shows_ids_as_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({f"w{number}": number for number in range(80)}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    found = gather(folder_of(tmp_path / "run"), history(), decoder_of(tmp_path))
    assert found.excerpt is not None and "w38 w70 w40" in (found.excerpt.text or "")


def test_the_page_holds_everything_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = report_page(history(), gather(folder_of(tmp_path), history(), None), LAST_WORDS)
    for words in (
        "What happened",
        "--resume runs/train-1",
        "input_ids[2,7] = 70",
        "<mark>70</mark>",
        "wte",
        "H100",
        "Step time",
        "Peak memory",
    ):
        assert words in page
    assert "<mark>Indexing.cu:1: Assertion `srcIndex &lt; n` failed.</mark>" in page
    elements = Elements(page)
    assert "script" not in elements.names and elements.loading == []
    assert not re.search(r"url\(|@import", page) and len(page) < 40_000


def test_nothing_of_the_users_data_becomes_markup() -> None:
    evil = json.loads(json.dumps({**INCIDENT}).replace("input_ids", "KEY")) | {"summary": EVIL, "cause": EVIL, "fix": EVIL, "kind": EVIL}
    evil["batch"] = {"key": EVIL, "element": [1], "value": EVIL}
    evil["origin"] = {"rank": 1, "node": EVIL}
    record = RECORD | {"command": [EVIL], "exit_reason": EVIL, "versions": {EVIL: EVIL}}
    reports = [
        (
            EVIL,
            "s",
            NodeReport(
                seq=1,
                time_ns=1,
                steps=StepTable.of((block(1, 6),)),
                gpus=(GpuSample(time_ns=1, index=0, uuid=EVIL, name=EVIL, memory_used_bytes=1, memory_total_bytes=1),),
            ),
        )
    ]
    found = history_of(EVIL, record, reports, incidents=(evil,))
    evidence = Evidence(
        logs=[LogTail(rank=1, lines=[EVIL, "Assertion" + EVIL], telling=frozenset({1}))], stacks={EVIL: EVIL}, contract=[{"key": EVIL}]
    )
    for page in (report_page(found, evidence, (f"  resume {EVIL}",)), timeline_page(found)):
        elements = Elements(page)
        assert not elements.names & {"script", "img"} and elements.loading == []


def markdown_of(summary: str) -> str:
    return markdown_report(history(incidents=(INCIDENT | {"summary": summary, "cause": "c"},)), Evidence(), LAST_WORDS)


def without_code(text: str) -> str:
    """What a tracker reads as Markdown."""
    text = re.sub(r"(?ms)^(`{3,})text\n.*?^\1$", "", text)
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)


@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=12), max_size=8))
@example(["`x`", "@everyone", "<b>![i](http://e)</b>|", "#12", "GH-7", "deadbeefdeadbeef", "www.e.com", "_x_", "**", "(`", "``)"])
@example(["(\x7f"])
def test_markdown_keeps_the_users_data_in_code(words: list[str]) -> None:
    read = without_code(markdown_of(" ".join(words)))
    assert not re.search(r"[@<>\[\]_`~\\&\"]|://|www\.|!\[|#\d|GH-\d|\b[0-9a-f]{7}", read)


def test_a_sentence_in_markdown_reads_as_one() -> None:
    lines = markdown_of("rank 1, step 5: labels[2] is 7, allowed 0..6 (see num_labels), in the loss").splitlines()
    assert lines[3] == (
        "* `2023-11-14 22:13:25` UTC, `batch.index_out_of_range`: rank 1, step 5: `labels[2]` is 7, allowed `0..6` (see `num_labels`), in the loss."
    )
    assert "watchdog torchrun train.py --resume runs/train-1" in "\n".join(lines)


def test_code_of_a_sentence_is_code_of_its_markdown() -> None:
    line = markdown_of("see `watchdog status job`, or call `resize_token_embeddings(len(tokenizer))` (`a``b`) first")
    assert "see `watchdog status job`, or call `resize_token_embeddings(len(tokenizer))` (`ab`) first" in line
    assert "``" not in line.replace("```", "")


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({"status": "firing"}, "goes on"),
        ({"status": "resolved"}, "over: the job has ended"),
        ({"status": "resolved", "action": {"policy": "skip", "exit_code": None}}, "over"),
        ({"status": "resolved", "kind": "order.stop"}, "over"),
        ({"status": "resolved", "kind": "rank.hang", "action": {"policy": "rescue", "exit_code": None}}, "over: its ranks have ended"),
        ({"status": "resolved", "kind": "rank.died", "action": {"policy": "none", "exit_code": None}}, "over: its ranks have ended"),
        ({"status": "resolved", "kind": "rank.died", "severity": "warning", "action": None}, "over"),
    ],
)
def test_what_a_job_died_of_does_not_read_as_mended(more: dict[str, Any], state: str) -> None:
    assert facts_of(INCIDENT | more)["state"] == state


def test_what_was_done_names_all_that_stopped_or_the_others_that_were_freed() -> None:
    action = INCIDENT["action"]
    assert story(history())[3].startswith("All 4 ranks stopped at step 5 within 0.4 s, ")
    some = INCIDENT | {"action": action | {"ranks_stopped": [0, 1]}}
    assert story(history(incidents=(some,)))[3].startswith("2 of 4 ranks stopped at step 5")
    freed = INCIDENT | {"action": action | {"policy": "rescue", "prevented": False, "ranks_stopped": [0, 2, 3]}}
    assert story(history(incidents=(freed,)))[3].startswith("The 3 other ranks were freed within 0.4 s, a checkpoint")
    for checkpoint in (action["checkpoint"], None):  # said of both, so that it must not claim a save
        told = facts_of(freed | {"action": freed["action"] | {"checkpoint": checkpoint}})
        assert told["watchdog"] == "freed the ranks that had not failed, and asked them for what they held"


def test_every_bound_of_the_contract_says_what_it_asks_for() -> None:
    kinds = ("some", "rows", "groups", "float", "spread", "starts", "count", "sum", "")
    contract = [{"key": kind, "kind": kind, "bound": {"low": 0, "high": 4, "ignored": [-100]}} for kind in kinds]
    page = report_page(history(), Evidence(contract=contract), ())
    assert "not -100 everywhere" in page and "0..4 or -100 (ignored)" in page
    cells = [
        row.split("</td><td>")[2] for row in re.findall(r"<tr>\n?(<td>.*?)</tr>", page.partition("What every batch was held to")[2], re.S)
    ]
    assert len(cells) == len(kinds) and all(cells)


def test_many_ranks_share_rows_and_the_page_stays_small() -> None:
    page = timeline_page(history(40, ranks=1_000))
    assert len(page) < 200_000 and "0 to 10" in page and "more ranks" in page


def test_the_batch_for_a_tracker_says_where_it_is_and_which_value_is_bad() -> None:
    excerpt = Excerpt(key="ids", row=(2,), first=14, bad=3, values=(5, 6, 7, 733, 8), text="a b ? c")
    told = markdown_report(history(incidents=(INCIDENT,)), Evidence(excerpt=excerpt), LAST_WORDS)
    assert "`ids[2]`, values 14 to 18, the bad one in brackets:" in told
    assert "5 6 7 [733] 8" in told
    assert "a b ? c" in told


def test_the_ranks_that_an_incident_reached_are_called_so() -> None:
    assert facts_of(INCIDENT | {"ranks_affected": [0]})["also affected"] == "rank 0"
