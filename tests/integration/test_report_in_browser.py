"""The report in a real browser: no error, no request, figures drawn, filter and sort work, readable at any width."""

import importlib.util
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from optpipe.core.events import SilentListener
from optpipe.signoff.collect import SignoffRequest
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.release import sign_off

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Debian's chromium: .ci/install-chromium"
)
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
POLICY = """schema = 1
name = "release"
[build]
precision = "int8"
[[latency]]
p50 = "7 ms"
p99 = "50 ms"
batch_size = 1
[[throughput]]
minimum = "1000000 images/s"
batch_size = 8
"""
ENERGY = """[energy]
maximum = "1 mJ/image"
"""
MILLION = '"1000000 images/s"'
POLICIES = {
    "PASS": POLICY.replace(MILLION, '"10 images/s"'),
    "FAIL": POLICY,
    "INCONCLUSIVE": POLICY + ENERGY,
}
WAIVED = {"INCONCLUSIVE": {"throughput.minimum.b8": "known, ticket 12"}}


def _builders():
    path = Path(__file__).parents[1] / "unit" / "conftest.py"
    spec = importlib.util.spec_from_file_location("report_builders", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["report_builders"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def dossiers(tmp_path_factory):
    """A dossier for each verdict, by its name."""
    found = _builders().Workspace(tmp_path_factory.mktemp("browser") / "workspace")
    for precision in ("fp32", "fp16", "int8"):
        found.bench(found.artifact(precision), batches=(1, 2, 4, 8))
    signed = {}
    for verdict, policy in POLICIES.items():
        wanted = SignoffRequest(
            "digits", policy_from_toml(policy.encode()), None, WAIVED.get(verdict, {})
        )
        signed[verdict] = sign_off(wanted, found.store, None, None, SilentListener())[1]
    return signed


@pytest.fixture(scope="module")
def dossier(dossiers):
    return dossiers["INCONCLUSIVE"]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield started
        started.close()


SCREENS = [(width, scheme) for width in (1280, 768, 390) for scheme in ("light", "dark")]
OPEN_ALL = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"


@contextmanager
def opened(browser, dossier, screen):
    """The opened report; anything it complains of or asks for fails the test."""
    width, scheme = screen
    found = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    complaints = []
    found.on("console", lambda message: complaints.append(message.text))
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on(
        "request",
        lambda one: None if one.url.startswith(("file:", "data:")) else complaints.append(one.url),
    )
    found.goto((dossier / "report.html").as_uri())
    found.evaluate(OPEN_ALL)
    yield found
    found.close()
    assert complaints == []


@pytest.fixture(params=SCREENS, ids=lambda p: f"{p[0]}-{p[1]}")
def page(browser, dossier, request):
    with opened(browser, dossier, request.param) as found:
        yield found


SMALLEST_TEXT = """() => Math.min(...[...document.querySelectorAll('figure svg text')]
    .filter((text) => text.textContent.trim() && text.getBoundingClientRect().width)
    .map((text) => { const m = text.getScreenCTM(); return Math.hypot(m.a, m.b) * parseFloat(getComputedStyle(text).fontSize); }))"""
CUT = """() => [...document.querySelectorAll('tbody td, tbody th, .tiles div, .answer, .lead, figure')]
    .filter((one) => { const box = one.getBoundingClientRect(), table = one.closest('.scroll');
        return box.right > innerWidth + 1 && !(table && getComputedStyle(table).overflowX === 'auto'); })
    .map((one) => one.textContent.trim().slice(0, 40))"""
EMPTY = """() => [...document.querySelectorAll('#criteria-table td[data-label]')]
    .filter((one) => one.getBoundingClientRect().width && !one.textContent.trim()
        && getComputedStyle(one, '::before').content !== 'none').length"""

OUT_OF_SIGHT = """() => [...document.querySelectorAll('#criteria-table tbody :is(td, th)')]
    .filter((one) => one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.textContent)"""
CLIPPED = """() => [...document.querySelectorAll('main :is(td, th, p, li, h1, h2, h3, dd, dt, figcaption, .chip)')]
    .filter((one) => !one.closest('.hidden, thead') && one.clientWidth && getComputedStyle(one).display !== 'inline'
        && one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent.trim().slice(0, 60))"""
OUTSIDE_OF_DRAWING = """() => [...document.querySelectorAll('figure svg')].flatMap((svg) => {
    const frame = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text')].filter((text) => {
        const box = text.getBoundingClientRect();
        return box.width && getComputedStyle(text).opacity !== '0'
            && (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1);
    }).map((text) => text.textContent); })"""
OVERLAPPING = """() => [...document.querySelectorAll('figure svg')].flatMap((svg) => {
    const boxes = [...svg.querySelectorAll('text')].filter((text) => text.textContent.trim() && getComputedStyle(text).opacity !== '0')
        .map((text) => [text.textContent, text.getBoundingClientRect()]).filter(([, box]) => box.width);
    return boxes.flatMap(([name, one], at) => boxes.slice(at + 1).filter(([, other]) =>
        Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1
        && Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 3).map(([other]) => `${name} | ${other}`)); })"""
WHY = """() => [...document.querySelectorAll('#criteria-table tbody td[data-label=why]')].filter((one) => one.textContent.trim())
    .map((one) => one.getBoundingClientRect()).map((box) => [box.left, box.right, box.width])"""
CUT_LABELS = """() => [...document.querySelectorAll('figure svg text')]
    .filter((text) => { const box = text.getBoundingClientRect(), frame = text.closest('figure').getBoundingClientRect();
        return box.width && (box.left < frame.left || box.right > frame.right); }).map((one) => one.textContent)"""


def assert_nothing_is_cut(page):
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(CLIPPED) == []
    assert page.evaluate(CUT_LABELS) == []
    assert page.evaluate(OUTSIDE_OF_DRAWING) == []
    assert page.evaluate(OVERLAPPING) == []
    whys = page.evaluate(WHY)
    assert all(left >= 0 and right <= page.viewport_size["width"] for left, right, _ in whys)
    assert all(width > 140 for *_, width in whys), "a reason stands in a column of words"
    table = page.locator(".scroll:has(#criteria-table)")
    assert not table.count() or table.evaluate("one => one.scrollWidth <= one.clientWidth + 1")


REPORTS = Path(__file__).parents[2] / "reports"
RECORDS = sorted(path.parent for path in REPORTS.rglob("report.html"))


@pytest.mark.parametrize("folder", RECORDS, ids=lambda path: path.name)
@pytest.mark.parametrize("screen", SCREENS, ids=lambda p: f"{p[0]}-{p[1]}")
def test_reports_of_record_and_their_figures_are_readable(browser, folder, screen):
    with opened(browser, folder, screen) as page:
        assert_nothing_is_cut(page)


@pytest.mark.parametrize("verdict", POLICIES)
@pytest.mark.parametrize("screen", SCREENS, ids=lambda p: f"{p[0]}-{p[1]}")
def test_every_verdict_is_readable_on_every_screen(browser, dossiers, verdict, screen, tmp_path):
    with opened(browser, dossiers[verdict], screen) as page:
        assert page.title().startswith(f"{verdict}: ")
        assert page.locator(".verdict").inner_text().endswith(verdict)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(SMALLEST_TEXT) >= 11
        assert page.evaluate(CUT) == []
        assert page.evaluate(EMPTY) == 0, "a label of nothing"
        assert page.evaluate(OUT_OF_SIGHT) == []
        assert_nothing_is_cut(page)
        tally = sum(int(text.split()[0]) for text in page.locator(".tally .chip").all_inner_texts())
        count = page.locator(".table-tools[data-for=criteria-table] .count").inner_text()
        assert count == f"{tally} of {tally}", "one count of criteria in a report"
        assert "`" not in page.locator("main").inner_text()
        assert page.locator(".verdict").bounding_box()["y"] < 200, "the answer comes first"
        if verdict in WAIVED:  # no energy here; what fails is waived
            assert page.locator(".waiver").inner_text().startswith("WAIVED")
        assert page.screenshot(path=tmp_path / "report.png", full_page=True)[:4] == b"\x89PNG"


@pytest.fixture(scope="module")
def long_names(tmp_path_factory):
    """A dossier whose policy, waiver, and build have names and reasons without a space that are longer than any line."""
    folder = tmp_path_factory.mktemp("long")
    found = _builders().Workspace(folder / "workspace")
    found.bench(found.artifact("int8"), batches=(1, 8))
    policy = POLICIES["INCONCLUSIVE"].replace('"release"', f'"{"release_" * 38}"')
    waived = {"throughput.minimum.b8": "ticket-" * 45}
    wanted = SignoffRequest("digits", policy_from_toml(policy.encode()), None, waived)
    return sign_off(wanted, found.store, None, None, SilentListener())[1]


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_long_names_and_reasons_break_no_layout(browser, long_names, width):
    with opened(browser, long_names, (width, "light")) as page:
        assert "release_release_" in page.locator("body").inner_text()
        assert page.evaluate(CUT) == []
        assert page.evaluate(OUT_OF_SIGHT) == []
        assert_nothing_is_cut(page)


def shown(page, table):
    return page.locator(f"#{table} tbody tr:visible").count()


def test_figures_are_drawn_in_the_colours_of_the_scheme(page):
    figures = page.locator("figure")
    assert figures.count() >= 3  # the frontier is drawn in the plane of latency and throughput
    for at in range(figures.count()):
        box = figures.nth(at).locator("svg").bounding_box()
        assert box["width"] > 150
        assert box["height"] > 50
    marks = page.locator("figure svg [role='graphics-symbol'][aria-label]")
    assert marks.count() > 20
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    ink = page.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")
    assert (ink == "rgb(233, 236, 241)") == dark, "the figures' text follows the scheme"
    assert page.locator('figure svg [fill^="#f"], figure svg [stroke^="#f"]').count() == 0


def test_filter_choose_and_sort(page):
    assert shown(page, "builds-table") == 12
    tools = page.locator(".table-tools[data-for=builds-table]")
    tools.locator("input").fill("fp32")
    assert shown(page, "builds-table") == 4
    assert tools.locator(".count").inner_text() == "4 of 12"
    tools.locator("input").fill("")
    tools.get_by_role("button", name="frontier").press("Enter")
    on_frontier = shown(page, "builds-table")
    assert 0 < on_frontier < 12
    tools.get_by_role("button", name="frontier").press("Enter")
    head = page.locator("#builds-table thead th", has_text="images/s")
    head.get_by_role("button").focus()
    for direction in ("ascending", "descending"):
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == direction
        column = page.evaluate("""() => { const heads = [...document.querySelectorAll('#builds-table thead th')];
            const at = heads.findIndex((head) => head.textContent.includes('images/s'));
            return [...document.querySelectorAll('#builds-table tbody tr')].map((row) => Number(row.cells[at].dataset.sort)); }""")
        assert column == sorted(column, reverse=direction == "descending")


def test_it_is_readable_by_keyboard_and_screen_reader(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator("h1").count() == 1
    assert page.locator("html").get_attribute("lang") == "en"
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    assert [each["id"] for each in axe.Axe().run(page).response["violations"]] == []
    assert page.locator("table caption").count() == page.locator("table").count()
    assert page.get_by_role("table").count() == 2, "the stacked form on a phone is still a table"


def test_what_decides_comes_first_and_its_command_can_be_copied(page):
    states = page.locator("#criteria-table tbody tr").evaluate_all(
        "(rows) => rows.map((row) => row.dataset.group)"
    )
    assert (states[0], states[-1]) == ("INCONCLUSIVE", "PASS"), "what fails is waived"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".caution .copy").click()
    assert page.evaluate("navigator.clipboard.readText()") == "optpipe verify ."


@pytest.mark.parametrize("folder", ["digits-cpu", "gallery/fail"])
def test_the_verdict_its_reason_and_the_figures_fit_on_a_phone(browser, folder):
    """The first screen of a phone of usual size, from the brand to the last tile, without scrolling."""
    with opened(browser, REPORTS / folder, (390, "light")) as page:
        for part in (".verdict", ".lead", ".next", ".tally", ".tiles"):
            box = page.locator(part).first.bounding_box()
            assert 0 <= box["y"] <= box["y"] + box["height"] <= 844, part
        assert page.locator(".top").bounding_box()["height"] < 70, "one line, which scrolls"


def test_print_shows_everything(browser, dossier, tmp_path):
    opened = browser.new_page()
    opened.goto((dossier / "report.html").as_uri())
    opened.emulate_media(media="print")
    assert not opened.locator(".table-tools").first.is_visible()
    assert opened.pdf(path=str(tmp_path / "report.pdf"), format="A4")[:5] == b"%PDF-"
    opened.close()
