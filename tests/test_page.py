"""The page of a comparison, opened and clicked through in headless Chromium."""

import io
import json
import shutil

import contest
import pytest

from gradfilter.recipes import page

HOSTILE = "</script><img src=x onerror=alert(1)> & co"


def test_no_text_can_break_out_of_the_numbers():
    content = contest.comparison().to_dict()
    content["about"]["data"] = HOSTILE
    text = page.render(content)
    assert text.count("</script>") == 2 and "<img" not in text
    inside = text.split('id="numbers">')[1].split("</script>")[0]
    assert json.loads(inside) == content


def test_names_that_look_like_places_of_the_page_stay_as_they_are():
    content = contest.comparison().to_dict()
    content["about"]["data"] = "{{style}} {{numbers}} {{script}}"
    text = page.render(content)
    assert "<title>" + content["about"]["model"] + " on {{style}} {{numbers}} {{script}}" in text
    inside = text.split('id="numbers">')[1].split("</script>")[0]
    assert json.loads(inside) == content


def test_the_page_refers_to_nothing_outside():
    text = page.render(contest.comparison().to_dict())
    for word in ("http://", "https://", "src=", "@import", "url("):
        assert word not in text.replace("http://www.w3.org/2000/svg", ""), word
    assert 'name="viewport"' in text and "{{" not in text


@pytest.fixture(scope="module")
def chromium():
    """A window of Chromium, and what it says and asks for."""
    selenium = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = binary
    for word in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    window = selenium.Chrome(options=options, service=Service(driver))
    yield window
    window.quit()


class Page:
    """The page in a window of some size, and its script's answers."""

    def __init__(self, window, path):
        self.window, self.path = window, path

    def open(self, width: int = 1100, dark: bool = False) -> "Page":
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width)
        self.window.get(self.path.as_uri())
        self.run("try { localStorage.clear(); } catch {}")
        self.window.refresh()
        return self

    def resize(self, width: int, height: int = 4500) -> None:
        """Tall enough for all of the page to be on a screenshot."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.tell("Emulation.setDeviceMetricsOverride", **size)

    def tell(self, command: str, **arguments):
        return self.window.execute_cdp_cmd(command, arguments)

    def run(self, script: str, *arguments):
        return self.window.execute_script(script, *arguments)

    def find(self, selector: str):
        return self.window.find_element("css selector", selector)

    def all(self, selector: str) -> list:
        return self.window.find_elements("css selector", selector)

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def wait(self, until) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.window, 5).until(lambda _: until())

    def centre(self, selector: str) -> tuple[int, int]:
        script = "const r = document.querySelector(arguments[0]).getBoundingClientRect();"
        x, y = self.run(script + "return [r.x + r.width / 2, r.y + r.height / 2];", selector)
        return round(x), round(y)

    def picture(self):
        from PIL import Image

        return Image.open(io.BytesIO(self.window.get_screenshot_as_png())).convert("RGB")

    def colour(self, selector: str, what: str) -> tuple[int, ...]:
        script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
        text = self.run(script, selector, what)
        return tuple(int(v) for v in text[text.index("(") + 1 : -1].split(",")[:3])

    def complaints(self) -> list[str]:
        return [e["message"] for e in self.window.get_log("browser")]

    def requests(self) -> list[str]:
        events = (json.loads(e["message"])["message"] for e in self.window.get_log("performance"))
        asked = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [e["request"]["url"] for e in asked]


@pytest.fixture
def comparison_page(chromium, tmp_path):
    path = tmp_path / "a folder" / "comparison.html"
    path.parent.mkdir()
    path.write_text(page.render(contest.comparison().to_dict()))
    found = Page(chromium, path)
    yield found
    assert found.complaints() == []
    outside = [url for url in found.requests() if not url.startswith(("file://", "data:"))]
    assert outside == []


def point(name: str) -> str:
    return f'.point[data-name="{name}"]'


GALERKIN, PLAIN = "galerkin-grid7-all", "gradient-filter-patch2-all"


def test_the_answer_and_every_contender_are_there(comparison_page):
    page = comparison_page.open()
    assert page.find("h1").text == "mobilenet_v2 on photos"
    answer = page.find("#answer").text
    assert answer.startswith("galerkin grid=7, all layers keeps 8.00 MiB for the backward pass")
    assert "10.0× less memory, within noise of exact (89.5% against 90.0%)" in answer
    assert len(page.all("#cards button")) == 4
    assert len(page.all(".point[data-name]")) == 8
    assert len(page.all("#table tbody tr")) == 8
    assert len(page.all("[data-curve]")) == 8
    assert "3 runs failed" in page.find("#failures").text
    assert "stopped being a number <at step 15> & more" in page.find("#failures").text
    rings = {e.get_attribute("data-name") for e in page.all(".point:has(.ring)")}
    assert rings == {"exact-all", GALERKIN}


def test_the_axis_switch(comparison_page):
    page = comparison_page.open()
    before = page.centre(point(GALERKIN)), page.find("#pareto svg").text
    page.click('#cost [data-key="seconds"]')
    after = page.centre(point(GALERKIN)), page.find("#pareto svg").text
    assert before[0] != after[0] and "kept memory, MiB" in before[1]
    assert "step time, ms" in after[1] and "inference" in after[1]
    assert page.find('#cost [data-key="seconds"]').get_attribute("aria-pressed") == "true"
    order = ["galerkin-grid7-all", "exact-all"]  # 70 and 200 ms: a step further right
    assert page.centre(point(order[0]))[0] < page.centre(point(order[1]))[0]
    page.click("#log")
    linear = page.centre(point(GALERKIN))[0]
    assert linear != after[0][0]


def test_collapsed_contenders_lie_below_the_range_until_all_is_shown(comparison_page):
    page = comparison_page.open()
    assert page.find('#zoom [data-key="near"]').get_attribute("aria-pressed") == "true"
    assert page.find(f"{point(PLAIN)} text").text == "15.0%"
    page.click('#zoom [data-key="all"]')
    assert page.all(f"{point(PLAIN)} text") == []
    assert page.centre(point(PLAIN))[1] > page.centre(point("exact-last4"))[1] + 100


def test_the_legend_hides_and_shows(comparison_page):
    page = comparison_page.open()
    page.click('#methods [data-key="galerkin grid=7"]')
    assert len(page.all(".point[data-name]")) == 6 and not page.all(point(GALERKIN))
    assert len(page.all("[data-curve]")) == 6 and len(page.all("#table tbody tr")) == 6
    page.click('#depths2 [data-key="last 4"]')
    assert len(page.all(".point[data-name]")) == len(page.all("[data-curve]")) == 3
    page.click('#methods [data-key="galerkin grid=7"]')
    assert page.all(point(GALERKIN)) and len(page.all("#table tbody tr")) == 4


def test_nothing_shown_is_said(comparison_page):
    page = comparison_page.open()
    for button in range(2):
        page.all("#depths button")[button].click()
    assert "choose a method" in page.find("#pareto svg").text
    assert "choose a method" in page.find("#curves svg").text


def test_hover_keyboard_and_click_show_details(comparison_page):
    from selenium.webdriver import ActionChains, Keys

    page = comparison_page.open()
    box = page.find("#pareto .tip")
    assert not box.is_displayed()
    ActionChains(page.window).move_to_element(page.find(point(GALERKIN))).perform()
    assert box.is_displayed() and "galerkin grid=7, all layers" in box.text
    assert "89.5% ± 1.0" in box.text and "−0.5 points" in box.text
    page.run("arguments[0].focus()", page.find(point(PLAIN)))
    assert "gradient-filter patch=2" in box.text
    page.find(point(PLAIN)).send_keys(Keys.ENTER)
    assert "seed 1: 20.0%" in page.find("#detail").text
    assert "gradient-filter" in page.find("#table tr.chosen").text
    assert page.find("#entry").get_attribute("value") == PLAIN
    name = page.find(point(GALERKIN)).get_attribute("aria-label")
    assert name.startswith("galerkin grid=7, all layers: 89.5%") and "within noise" in name


def test_a_failed_contender_is_marked_on_its_cost(comparison_page):
    page = comparison_page.open()
    failed = point("hosvd-energy0.8-all")
    assert page.find(failed).get_attribute("aria-label").count("no run came to its end") == 1
    assert page.all(f"{failed} .open") and not page.all(f"{failed} .mark")


def test_curves_by_keyboard(comparison_page):
    from selenium.webdriver import Keys

    page = comparison_page.open()
    area = page.find("#curves rect[tabindex]")
    page.run("arguments[0].focus()", area)
    area.send_keys(Keys.ARROW_LEFT)
    box = page.find("#curves .tip").text
    assert "epoch 1" in box and "50.0%" in box  # halfway from 10 to 90 for exact
    page.click('#measure [data-key="train_loss"]')
    page.click('#time [data-key="seconds"]')
    told = page.find("#curves svg").text
    assert "training loss" in told and "seconds of training steps" in told


def test_layer_by_layer(comparison_page):
    page = comparison_page.open()
    bars = page.all("#layers .bar[data-layer]")
    assert [b.get_attribute("data-layer") for b in bars] == [f"block.{k}" for k in range(4)]
    page.click('#quantity [data-key="cosine"]')
    heights = [float(d.get_attribute("cy")) for d in page.all("#layers .dot[data-layer]")]
    assert heights == sorted(heights, reverse=True) and len(set(heights)) == 4
    page.click('#entry option[value="exact-all"]')
    assert "nothing to compare" in page.find("#layers svg").text
    page.click("#layers-all summary")
    page.wait(lambda: len(page.all("#layers-table tbody tr")) == 4)


def test_the_command_can_be_copied(comparison_page):
    page = comparison_page.open()
    assert page.find(".command pre").text == "gradfilter compare --data photos --out 'a folder'"
    page.click(".command button")
    page.wait(lambda: page.find(".command button").text == "Copied")


def test_the_screenshot_has_the_points_in_their_colours(comparison_page):
    for dark in (False, True):
        page = comparison_page.open(dark=dark)
        picture = page.picture()
        paper = picture.getpixel((3, 3))
        assert max(paper) < 40 if dark else min(paper) > 240
        seen = set()
        for name in (GALERKIN, "exact-all", "gradient-filter-patch2-last4"):
            wanted = page.colour(f"{point(name)} .mark", "fill")
            assert picture.getpixel(page.centre(f"{point(name)} .mark")) == wanted
            seen.add(wanted)
        assert len(seen) == 3
        x, y = page.centre("#layers .bar[data-layer]")
        assert picture.getpixel((x, y)) == page.colour("#layers .bar[data-layer]", "fill")


def test_the_switch_of_colours_overrides_the_system(comparison_page):
    page = comparison_page.open(dark=False)
    theme = page.find("#theme")
    theme.click()
    assert "Light" in theme.text
    theme.click()
    assert "Dark" in theme.text and max(page.picture().getpixel((3, 3))) < 40
    assert page.colour("body", "color") > (200, 200, 200)
    page.window.refresh()
    assert max(page.picture().getpixel((3, 3))) < 40  # it is remembered


@pytest.mark.parametrize("width", [320, 360, 768])
def test_nothing_is_wider_than_a_phone(comparison_page, width):
    page = comparison_page.open(width=width)
    for selector in ("#layers-all summary", "details:nth-of-type(1) summary", point(GALERKIN)):
        page.click(selector)
    assert page.run("return document.documentElement.scrollWidth") <= width
    inside = "const s = document.querySelector('#pareto svg').getBoundingClientRect();"
    assert page.run(inside + "return s.left >= 0 && s.right <= innerWidth")
    small = [
        b.text for b in page.all("button") if b.is_displayed() and b.size["height"] < 24
        and not b.find_elements("xpath", "./ancestor::th")
    ]  # fmt: skip
    assert small == []  # for fingers


def test_every_control_has_a_name(comparison_page):
    page = comparison_page.open()
    nameless = page.run("""
        return [...document.querySelectorAll('button, select, input, [tabindex]')].filter(e =>
            !(e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label'))).length
    """)
    assert nameless == 0
    assert page.run("return document.documentElement.lang") == "en"


def test_one_seed_claims_no_noise(comparison_page, tmp_path):
    numbers = {name: (s[:1], *costs) for name, (s, *costs) in contest.NUMBERS.items()}
    path = tmp_path / "one.html"
    path.write_text(page.render(contest.comparison(numbers).to_dict()))
    one = Page(comparison_page.window, path).open()
    assert "within 1 point of exact" in one.find("#answer").text
    assert "Use several seeds" in one.find("#caveat").text
    assert "within noise" not in one.find("main").text


def test_a_comparison_that_has_just_begun(comparison_page, tmp_path):
    from dataclasses import replace

    found = contest.comparison()
    waiting = [
        replace(e, runs=[replace(r, status="waiting", rows=[], failure=None) for r in e.runs])
        for e in found.entries
    ]
    path = tmp_path / "begun.html"
    path.write_text(page.render(replace(found, entries=waiting).to_dict()))
    begun = Page(comparison_page.window, path).open()
    assert "nothing to compare with yet" in begun.find("#answer").text
    assert "0 of 24 runs done" in begun.find("#facts").text
    assert "no run has begun yet" in begun.find("#curves svg").text
    assert len(begun.all("#layers .bar[data-layer]")) == 4  # costs are known before any training
