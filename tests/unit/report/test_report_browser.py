"""The page in a real browser: no console errors, the slider shows the library's numbers, tables sort, phones can read it."""

import math
import shutil

import pytest
from report_runs import HOSTILE, make_run

from bayesattn import metrics
from bayesattn.evaluation import runs
from bayesattn.evaluation.report import write_report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium and chromedriver on the path")


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def open_page(browser, page_path):
    def open_(path=page_path):
        browser.get(path.as_uri())
        return browser

    return open_


def set_value(browser, element_id, value):
    browser.execute_script(
        "const e = document.getElementById(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event('input'))",
        element_id,
        str(value),
    )


def numbers(browser, row):
    cells = browser.execute_script(
        "return [...document.querySelectorAll('#threshold-rows tr')[arguments[0]].querySelectorAll('td')]"
        ".map(cell => [cell.dataset.metric, cell.dataset.value])",
        row,
    )
    return {name: float(value) for name, value in cells}


def test_page_loads_without_console_messages(open_page):
    assert open_page().get_log("browser") == []


@pytest.mark.parametrize(("split", "threshold"), [("test", 0.05), ("test", 1e-3), ("noise-1", 0.31), ("validation", 1.0)])
def test_threshold_gives_the_library_s_numbers(open_page, run_folders, split, threshold):
    browser = open_page()
    set_value(browser, "threshold-split", split)
    set_value(browser, "threshold-exact", threshold)
    expected = []
    for folder in run_folders[:2]:
        part = runs.read_predictions(folder).splits[split]
        table = metrics.tabulate_predictions(part.samples["attention"], part.labels)
        certain = table.p_value <= threshold
        expected.append(
            {
                "coverage": float(certain.double().mean()),
                "certain": float(table.accuracy[certain].mean()),
                "accuracy": float(table.accuracy.mean()),
                "pavpu": float(metrics.pavpu(table.accuracy, table.p_value, threshold)),
            }
        )
    found = numbers(browser, 0)
    for name, value in found.items():
        # both sides average 61 zeros and ones in float64
        assert value == pytest.approx(sum(run[name] for run in expected) / 2, abs=1e-12), name


def test_slider_moves_the_numbers_by_keyboard(open_page):
    from selenium.webdriver.common.keys import Keys

    browser = open_page()
    slider = browser.find_element("id", "threshold")
    before = numbers(browser, 0)
    slider.send_keys(Keys.HOME)
    assert float(browser.find_element("id", "threshold-exact").get_property("value")) == 1e-4
    at_home = numbers(browser, 0)
    slider.send_keys(Keys.END)
    assert float(browser.find_element("id", "threshold-exact").get_property("value")) == 1.0
    at_end = numbers(browser, 0)
    assert at_home["coverage"] < before["coverage"] < at_end["coverage"] == 1.0
    assert at_end["certain"] == pytest.approx(at_end["accuracy"], abs=1e-12)
    assert slider.get_attribute("aria-valuetext") == "p-value at most 1"


def test_nonsense_in_the_exact_field_changes_nothing(open_page):
    browser = open_page()
    before = numbers(browser, 0)
    for value in ("", "-1", "2"):
        set_value(browser, "threshold-exact", value)
    assert numbers(browser, 0) == before


def test_heading_sorts_both_ways_by_number(open_page):
    browser = open_page()
    table = "document.querySelector('[data-split=test] table')"
    read = f"return [...{table}.tBodies[0].rows].map(row => Number.parseFloat(row.cells[2].dataset.value))"
    button = browser.find_elements("css selector", "[data-split=test] th button")[2]
    button.click()
    ascending = browser.execute_script(read)
    button.click()
    descending = browser.execute_script(read)
    assert len(ascending) == 4
    assert ascending == sorted(ascending)
    assert descending == sorted(descending, reverse=True)
    assert browser.execute_script(f"return {table}.tHead.rows[0].cells[2].getAttribute('aria-sort')") == "descending"


def test_cells_without_a_number_stay_last(open_page):
    browser = open_page()
    buttons = browser.find_elements("css selector", "[data-split=test] th button")
    column = next(index for index, button in enumerate(buttons) if button.text.startswith("PAvPU"))
    for _ in range(2):
        buttons[column].click()
        values = browser.execute_script(
            "const rows = [...document.querySelector('[data-split=test] tbody').rows];"
            "return rows.map(row => row.cells[arguments[0]].dataset.value)",
            column,
        )
        assert [value == "" for value in values] == [False, False, True, True]


def test_chooser_shows_one_split(open_page):
    browser = open_page()
    set_value(browser, "metric-split", "strange")
    shown = [
        e.get_attribute("data-split") for e in browser.find_elements("css selector", "[data-split]") if e.is_displayed()
    ]
    assert shown == ["strange"]


@pytest.mark.parametrize("width", [360, 1280])
def test_page_is_not_wider_than_the_screen(open_page, browser, width):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    )
    try:
        open_page()
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_schemes(open_page, browser, scheme):
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    try:
        open_page()
        colors = browser.execute_script(
            "const s = e => getComputedStyle(document.querySelector(e)); const paper = s('body').backgroundColor;"
            "return ['body', '.muted', 'nav a', 'caption'].map(e => [s(e).color, paper])"
        )
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    # WCAG 2.2 level AA for text: 4.5 to 1
    assert min(contrast(*pair) for pair in colors) >= 4.5
    assert (luminance(colors[0][1]) < 0.5) == (scheme == "dark")


def test_hostile_names_run_nothing(open_page, tmp_path):
    folder = make_run(
        tmp_path / "x", variant=HOSTILE, class_names=(HOSTILE, "<img src=x onerror=document.title='hit'>", "c", "d")
    )
    browser = open_page(write_report([folder], tmp_path / "page.html", title=HOSTILE))
    assert browser.title == HOSTILE
    assert browser.get_log("browser") == []


def luminance(color):
    channels = [int(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else math.pow((c + 0.055) / 1.055, 2.4) for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    brighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)
