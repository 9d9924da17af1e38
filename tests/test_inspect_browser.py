"""The page of `pyinertia inspect` in a headless Chromium.

Not part of what a clean clone installs: a browser is hundreds of megabytes and wants libraries of
the system. Debian: apt-get install chromium chromium-driver; pip install 'pyinertia[browser]'.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from inspect_page import N_PREDICT, ODD, RUN, SHOWN, by_hand, invoke

webdriver = pytest.importorskip("selenium.webdriver", reason="the extra `browser` is missing")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="there is no Chromium, or no chromedriver"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def tiny(folder) -> Path:
    return tiny_models.write_llama(folder / "llama.gguf")


@pytest.fixture(scope="module")
def odd(folder, tiny) -> Path:
    prompt, path = folder / "odd.txt", folder / "odd.html"
    prompt.write_text(ODD * 2, encoding="utf-8", newline="\n")
    invoke(prompt, "-m", tiny, *RUN, "--html", path)
    return path


@pytest.fixture(scope="module")
def cells(tiny) -> list[np.ndarray]:
    return by_hand(tiny, ODD * 2)


@pytest.fixture(scope="module")
def chromium():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium, odd):
    chromium.set_window_size(1200, 900)
    chromium.get(odd.as_uri())
    yield chromium
    assert chromium.get_log("browser") == []  # no error, nothing that the page's policy refused


def state(browser) -> str:
    return browser.find_element(By.ID, "state").text


def kept(browser) -> dict[int, tuple[int, bool]]:
    """Tokens of a piece, and whether it is shown as kept, by the position that it begins at."""
    return {
        start: (n, "x" not in classes.split() and "f" not in classes.split())
        for start, n, classes in browser.execute_script(
            "return pieces.map((p) => [p.start, p.n, p.span.className])"
        )
    }


def check(browser, resident: np.ndarray) -> None:
    positions = {*resident["pos"].tolist()}
    for start, (n, shown) in kept(browser).items():
        assert shown == bool(positions & {*range(start, start + n)}), start


def test_the_end_is_shown_first(browser, cells):
    check(browser, cells[-1])
    n_tokens = int(cells[-1]["pos"][-1]) + 1
    assert state(browser).startswith(f"{n_tokens - len(cells[-1]):,} of {n_tokens:,} tokens")
    assert browser.find_element(By.ID, "number").text == f"{N_PREDICT} of {N_PREDICT}"


def test_shades_follow_the_scores(browser, cells):
    """Higher scores never have weaker shades, and all shades are in use."""
    last = dict(zip(cells[-1]["pos"].tolist(), cells[-1]["score"].tolist(), strict=True))
    found = [
        (last[start], int(classes[1]))
        for start, n, classes in browser.execute_script(
            "return pieces.map((p) => [p.start, p.n, p.span.className])"
        )
        if n == 1 and start in last
    ]
    shades = [shade for _, shade in sorted(found)]
    assert shades == sorted(shades)
    assert {*shades} >= {*range(1, 8)}


def test_keys_move_over_the_steps(browser, cells):
    slider = browser.find_element(By.ID, "step")
    for key, step in (
        (Keys.HOME, 0),
        (Keys.ARROW_RIGHT, 1),
        (Keys.ARROW_UP, 2),
        (Keys.ARROW_LEFT, 1),
        (Keys.END, N_PREDICT),
    ):
        slider.send_keys(key)
        check(browser, cells[step])
        assert slider.get_attribute("aria-valuetext") == f"{step} of {N_PREDICT}"
        n_tokens = int(cells[step]["pos"][-1]) + 1
        assert f"{len(cells[step]):,} are in the cache" in state(browser)
        assert f"{n_tokens:,} tokens" in state(browser)
        assert ("No token has a score yet" in state(browser)) == (step == 0)


def test_a_character_that_is_not_all_read_is_not_partly_dropped(browser):
    """Tokens of the answer that come later are not missing yet."""
    for step in range(N_PREDICT + 1):
        wrong = browser.execute_script(
            """
            show(arguments[0]);
            return pieces.filter((p) => {
              const read = [];
              for (let pos = p.start; pos < p.start + p.n; pos++)
                if (pos < data.n_tokens[step]) read.push(isKept(pos, step));
              const isPart = read.includes(true) && read.includes(false);
              return isPart !== p.span.classList.contains("part");
            }).length;
            """,
            step,
        )
        assert wrong == 0


def test_the_text_is_the_prompt_and_does_not_run(browser):
    text = browser.execute_script("return document.getElementById('prompt').textContent")
    assert text == "<s>" + (ODD * 2).removesuffix("\n").translate(SHOWN)
    assert browser.execute_script("return window.ran") is None
    assert browser.find_elements(By.CSS_SELECTOR, "#text b, #text script") == []


def test_lines_have_their_own_direction(browser):
    """A right-to-left line begins at the right edge of the text, others at the left one."""
    edges = browser.execute_script(
        """
        const box = document.getElementById("prompt").getBoundingClientRect();
        const first = (start) => pieces.find((p) => p.text.startsWith(start)).span;
        const [latin, arabic] = [first("T"), first("م")].map((s) => s.getBoundingClientRect());
        return [latin.left - box.left, box.right - arabic.right];
        """
    )
    assert edges[0] < 60  # <s> stands before it
    assert edges[1] < 2


def test_only_what_is_left(browser):
    def visible() -> str:
        return browser.execute_script(
            "return pieces.filter((p) => getComputedStyle(p.span).visibility === 'visible'"
            " && getComputedStyle(p.span).display !== 'none').map((p) => p.text).join('')"
        )

    left = browser.execute_script(
        "return pieces.filter((p) => !/^[xf]/.test(p.shown)).map((p) => p.text).join('')"
    )
    assert visible() != left
    browser.find_element(By.ID, "hide").click()
    assert visible() == left


def test_tokens_can_be_read_with_keys(browser, cells):
    text = browser.find_element(By.ID, "text")
    for _ in range(2):
        text.send_keys(Keys.ARROW_RIGHT)
    readout = browser.find_element(By.ID, "readout")
    assert readout.text.startswith('Position 1, "T": in the cache, score ')
    lost_at: dict[int, int] = {}  # position -> the first step that lacks it
    for step, resident in enumerate(cells):
        gone = np.setdiff1d(np.arange(resident["pos"][-1]), resident["pos"])
        lost_at |= {pos: step for pos in gone.tolist() if pos not in lost_at}
    single = [start for start, (n, _) in kept(browser).items() if n == 1 and start in lost_at]
    early = next(pos for pos in single if lost_at[pos] == 0)
    late = next(pos for pos in single if lost_at[pos] > 2)
    for pos, says in (
        (early, "dropped while the prompt was read."),
        (late, f"dropped by decode step {lost_at[late]}."),
    ):
        browser.execute_script(f"point(pieces.findIndex((p) => p.start === {pos}))")
        assert readout.text.endswith(says)


def test_everything_that_acts_has_a_name(browser):
    for element in browser.find_elements(By.CSS_SELECTOR, "input, svg, [tabindex], summary"):
        assert element.accessible_name, element.get_attribute("outerHTML")[:80]
    roles = [e.get_attribute("id") for e in browser.find_elements(By.CSS_SELECTOR, "[role=status]")]
    assert roles == ["state", "readout"]


@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_is_wider_than_the_window(browser, width):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False},
    )
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide <= width


def test_20_000_tokens_and_a_line_without_spaces_stay_usable(chromium, folder, tiny):
    prompt, path = folder / "long.txt", folder / "long.html"
    prompt.write_text("abcdefghij" * 2000)
    options = ["-t", 1, "-c", 32768, "-b", 512, "-n", 40, "--html", path]
    invoke(prompt, "-m", tiny, *options)
    chromium.set_window_size(1200, 900)
    chromium.get(path.as_uri())
    times = chromium.execute_script(
        """
        return [0, 20, 39, 40].map((step) => {
          const start = performance.now();
          show(step);
          document.body.getBoundingClientRect(); // with layout
          return performance.now() - start;
        });
        """
    )
    assert max(times) < 1500, times  # milliseconds, on a busy machine
    assert chromium.execute_script("return document.documentElement.scrollWidth") <= 1200
    assert chromium.get_log("browser") == []
