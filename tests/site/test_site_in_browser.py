"""The built site in a real browser, as a desktop and as a phone; `make docs` builds it and runs this."""

import functools
import http.server
import shutil
import threading
from pathlib import Path

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

SITE = Path(__file__).parents[2] / "build" / "site"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium and chromedriver on the path"),
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="the site is not built; run: make docs"),
]
PAGES = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
DESKTOP, PHONE = (1280, 1000), (390, 844)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(20)
    yield driver
    driver.quit()


def show(browser, url, size):
    width, height = size
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get(url)


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("page", PAGES)
def test_page_is_in_order(browser, address, page, size):
    show(browser, address + page, size)
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []
    assert browser.execute_script("return document.documentElement.scrollWidth - innerWidth") <= 0
    pictures = browser.execute_script("return [...document.images].map(i => [i.src, i.alt.trim(), i.naturalWidth])")
    assert [picture for picture in pictures if not picture[1] or not picture[2]] == []
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert loaded
    assert [name for name in loaded if not name.startswith((address, "data:", "blob:"))] == []


def test_examples_of_the_reference_are_shown_as_code(browser, address):
    show(browser, address + "reference/api/doubt.html", DESKTOP)
    code = browser.execute_script("return [...document.querySelectorAll('.doc-contents pre code')].map(c => c.textContent)")
    # one per class and function of the page; `>>>` in Markdown is a quotation
    assert sum(">>> " in text for text in code) >= 5
    assert browser.execute_script("return document.querySelectorAll('blockquote').length") == 0


def test_tutorial_shows_its_plots(browser, address):
    show(browser, address + "tutorials/doubt_of_a_classifier.html", DESKTOP)
    assert browser.execute_script("return document.querySelectorAll('.tutorial-output img').length") >= 2


def test_search_finds_a_function(browser, address):
    show(browser, address + "index.html", DESKTOP)
    # the index is read in a worker; the results come as elements
    found = browser.execute_async_script(
        """
        const done = arguments[0], field = document.querySelector('.md-search__input');
        const results = document.querySelector('.md-search-result__list');
        new MutationObserver(() => {
          const links = [...results.querySelectorAll('a')].map(link => link.href);
          if (links.length) done(links);
        }).observe(results, {childList: true, subtree: true});
        field.focus();
        field.value = 'tune_noise';
        field.dispatchEvent(new Event('input', {bubbles: true}));
        field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true, key: 'e'}));
        """
    )
    assert any("reference/api/doubt.html" in link for link in found)


def test_the_two_colors_can_be_switched(browser, address):
    show(browser, address + "index.html", DESKTOP)
    scheme = "return document.body.getAttribute('data-md-color-scheme')"
    before = browser.execute_script(scheme)
    browser.execute_script("document.querySelector('[data-md-component=palette] label:not([hidden])').click()")
    after = browser.execute_script(scheme)
    assert {before, after} == {"default", "slate"}
