"""Every page in a real browser, of real launches: one that a bad batch stopped, one that runs while it is looked at."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import Browser, needs_chromium
from fleet_harness import TOKEN, Fleet
from launching import environment, launch

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), needs_chromium]

E2E = Path(__file__).parents[1] / "e2e"
WATCHDOG = [sys.executable, "-m", "torch_watchdog.cli"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def stopped(fleet: Fleet) -> None:
    """The job `bad`, from its start to its end."""
    ours = [*WATCHDOG, "--daemon", fleet.socket, "--dir", str(fleet.runs), "--job", "bad"]
    ended = launch(fleet.root, [*ours, *TORCHRUN, str(E2E / "scripts" / "train.py"), "--bad", "45"])
    assert ended.code == 65, ended.err


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """With both jobs: `bad` has ended, `job` is past its tenth step."""
    root = tmp_path_factory.mktemp("f")
    with Fleet(root) as made:
        stopped(made)
        good = [*WATCHDOG, "--daemon", made.socket, "--dir", str(made.runs), "--job", "job", *TORCHRUN, str(E2E / "tiny_train.py")]
        process = subprocess.Popen(
            [*good, "--steps", "4000", "--step-time-s", "0.05"], cwd=root, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )  # fmt: skip
        assert process.stdout is not None
        while not process.stdout.readline().startswith("step 10 "):
            assert process.poll() is None
        yield made
        process.terminate()
        process.communicate(timeout=120)


@pytest.fixture
def shown(window: Browser, fleet: Fleet) -> Browser:
    window.open(f"{fleet.url}login?token={TOKEN}")
    return window


def check(page: Browser, name: str) -> None:
    """In light and dark and on a phone: nothing to complain of, nothing that sticks out."""
    for device, size in {"": (1200, 900), "-phone": (390, 844)}.items():
        page.size(*size)
        assert page.run("return document.documentElement.scrollWidth <= window.innerWidth"), f"{name}{device} is wider than its window"
        for colours in ("light", "dark"):
            page.dark(colours == "dark")
            assert page.violations() == []
            page.picture(f"{name}{device}-{colours}")
    assert page.errors() == []


def test_the_login_lets_in_by_token(window: Browser, fleet: Fleet) -> None:
    window.driver.delete_all_cookies()
    window.open(fleet.url)
    assert window.driver.current_url.endswith("/login?next=/")
    check(window, "login")
    window.driver.find_element("name", "token").send_keys(TOKEN)
    window.press("button")
    window.until(lambda: window.text("h1") == "Jobs", "the first page")
    assert window.errors() == []


def test_the_first_page_lists_both_jobs(shown: Browser, fleet: Fleet) -> None:
    shown.open(fleet.url)
    assert "running" in shown.text("table") and "65" in shown.text("table")
    check(shown, "jobs")


def test_a_running_jobs_page_follows_it_and_draws_its_map(shown: Browser, fleet: Fleet) -> None:
    shown.open(f"{fleet.url}jobs/job")
    step = int(shown.text('[data-fact="step"]'))
    shown.until(lambda: int(shown.text('[data-fact="step"]')) > step, "a newer step without loading the page again")
    shown.until(lambda: shown.run("return document.querySelectorAll('#rows tbody tr').length") == 2, "a row a rank")
    painted = (
        "const c = document.getElementById('map'); return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(byte => byte)"
    )
    assert shown.run(painted)
    shown.until(lambda: shown.run("return document.querySelector('#curve svg') !== null"), "the curve")
    check(shown, "job")


def test_the_map_is_used_by_keyboard_and_leads_to_a_rank(shown: Browser, fleet: Fleet) -> None:
    shown.open(f"{fleet.url}jobs/job")
    shown.until(lambda: shown.run("return document.querySelectorAll('#rows tbody tr').length") == 2, "a row a rank")
    canvas = shown.driver.find_element("id", "map")
    shown.run("arguments[0].focus()", canvas)
    canvas.send_keys("\ue015")  # arrow down
    shown.until(lambda: shown.text("#cell").startswith("rank 1, "), "the cell in words")
    canvas.send_keys("\ue007")  # enter
    shown.until(lambda: shown.text("h1") == "Rank 1", "the rank's page")
    shown.press("tbody a, table a")
    shown.until(lambda: shown.text("#step-title").startswith("The batch of step"), "the step's batch")
    check(shown, "rank")


def test_a_short_job_that_has_ended_is_drawn_until_its_end(shown: Browser, fleet: Fleet) -> None:
    shown.open(f"{fleet.url}jobs/bad")
    shown.until(lambda: "the end" in shown.text("#curve"), "the curve")
    points = shown.run(
        "return document.querySelector('#curve .line').getBoundingClientRect().width + document.querySelectorAll('#curve .dot').length"
    )
    assert points > 0, "a curve of a few seconds shows nothing"
    check(shown, "job-ended")


def test_an_incident_of_a_stopped_job_is_told(shown: Browser, fleet: Fleet) -> None:
    shown.open(f"{fleet.url}jobs/bad")
    shown.driver.find_element("css selector", ".incidents a").click()
    shown.until(lambda: shown.text("h1") == "batch.index_out_of_range", "the incident's page")
    assert "allowed" in shown.text(".lead") and "Look at rank" in shown.text()
    check(shown, "incident")


def test_a_job_of_before_the_daemon_began_is_told_from_its_files(window: Browser, tmp_path: Path) -> None:
    with Fleet(tmp_path) as made:
        stopped(made)
    with Fleet(tmp_path) as later:
        window.open(f"{later.url}login?token={TOKEN}")
        window.open(later.url)
        window.press("table a")
        window.until(lambda: "before this daemon began" in window.text(), "the job's page")
        assert "65" in window.text("dl") and "ids[0,4] = 51" in window.text()
        check(window, "job-past")
        window.press(".incidents a")
        window.until(lambda: window.text("h1") == "batch.index_out_of_range", "the incident's page")
        assert "allowed" in window.text(".lead")
        window.open(f"{later.url}jobs/bad/ranks/1")
        assert window.text("tbody tr th") == "6"
        check(window, "rank-past")


def test_a_runbook_is_read_on_a_phone_without_a_login(window: Browser, fleet: Fleet) -> None:
    window.driver.delete_all_cookies()
    window.open(f"{fleet.url}runbooks/batch.index_out_of_range")
    assert window.text("h1") == "batch.index_out_of_range" and "--quarantine" in window.text("ol")
    check(window, "runbook")


def test_what_is_not_there_is_a_page_that_says_so(shown: Browser, fleet: Fleet) -> None:
    shown.open(f"{fleet.url}jobs/nobody")
    shown.errors()  # the browser's own word for a 404
    assert shown.text("h1") == "Not here"
    check(shown, "missing")


def test_an_operator_asks_for_a_checkpoint(shown: Browser, fleet: Fleet) -> None:
    shown.open(f"{fleet.url}jobs/job")
    shown.press(".actions button")
    shown.until(lambda: shown.text(".said") == "every rank is told", "the answer")
    committed = (fleet.runs / "job" / "checkpoints").glob
    shown.until(lambda: list(committed("*/COMMITTED")), "the checkpoint")
    assert shown.errors() == []


@pytest.mark.parametrize(("command", "says"), [("report", "What happened"), ("timeline", "rank 1")])
def test_a_page_of_its_own_opens_from_a_file_with_the_network_off(
    window: Browser, fleet: Fleet, tmp_path: Path, command: str, says: str
) -> None:
    page = tmp_path / "page.html"
    option = {"report": "-o", "timeline": "--html"}[command]
    done = launch(tmp_path, [*WATCHDOG, command, str(fleet.runs / "bad"), option, str(page)])
    assert done.code == 0, done.err
    window.offline()
    window.open(page.as_uri())
    assert says in window.text() and window.run("return document.querySelectorAll('svg').length") >= 1
    check(window, command)
    window.driver.execute_cdp_cmd("Network.disable", {})


def test_a_report_shows_the_batch_around_the_bad_value(window: Browser, fleet: Fleet, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert launch(tmp_path, [*WATCHDOG, "report", str(fleet.runs / "bad"), "-o", str(page)]).code == 0
    window.open(page.as_uri())
    assert window.text("mark") == "51", window.text()[:2000]
