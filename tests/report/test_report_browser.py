"""The page in a real browser: no errors, no requests, and every control does what it says."""

import json

import pytest
from browsers import browsing, needs_chromium
from report_cases import ENVIRONMENT, compare_rows, make_case, store_case, sweep_rows

from lowtide.report import style
from lowtide.report.diff_page import render_diff
from lowtide.report.html import render_report
from lowtide.report.payload import with_made
from lowtide.report.side_by_side import ComparedRun

pytestmark = [needs_chromium, pytest.mark.slow]
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (pip install lowtide[dev])")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait

EVIL = "</script><script>document.title='taken'</script><img src=http://localhost:1/x>"


@pytest.fixture(scope="module")
def case():
    return make_case(8)


def compared(case):
    """A run, and the same without a plan."""
    a = ComparedRun(name="a", step=case.step, solution=case.solution, measurement=case.measurement)
    return a, ComparedRun(name="b", step=make_case(4).step)


@pytest.fixture(scope="module")
def pages(case, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    plan = {
        "step": case.step, "before": case.before, "after": case.after, "solution": case.solution,
        "measurement": case.measurement, "tradeoff": case.tradeoff,
    }  # fmt: skip
    evil = make_case(2, module=EVIL + "{layer}")
    store = store_case()
    texts = {
        "store": render_report(title="a store", environment=ENVIRONMENT, **store),
        "run": render_report(title="a step", environment=ENVIRONMENT, **plan),
        "profile": render_report(title="p", environment=ENVIRONMENT, step=case.step, before=case.before),
        "sweep": render_report(
            title="s", environment=ENVIRONMENT, sweep=sweep_rows(), compare=compare_rows()
        ),
        "diff": render_diff(*compared(case), environment=ENVIRONMENT),
        "evil": render_report(
            title=EVIL, environment=ENVIRONMENT, step=evil.step, before=evil.before, after=evil.after,
            solution=evil.solution, tradeoff=evil.tradeoff,
        ),
    }  # fmt: skip
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def open_page(browser, pages):
    """Open a page; afterwards, it must not have complained or asked for anything."""

    def opened(name):
        browser.get("about:blank")
        browser.get_log("browser"), browser.get_log("performance")
        browser.get((pages / f"{name}.html").as_uri())
        return browser

    yield opened
    assert browser.get_log("browser") == []
    assert [url for url in requests(browser) if not url.startswith(("file:", "data:"))] == []


def requests(browser):
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def find(browser, selector):
    return browser.find_element("css selector", selector)


def texts(browser, selector):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].filter(e => !e.closest('[hidden]'))"
        ".map(e => e.textContent)",
        selector,
    )


def centre(browser, selector):
    element = find(browser, selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    return element


@pytest.mark.parametrize("name", ["run", "profile", "sweep", "evil", "diff"])
@pytest.mark.parametrize("width", [1200, 390])
def test_loads_and_fits_the_screen(browser, open_page, name, width):
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    open_page(name)
    overflow, inner = browser.execute_script(
        "return [document.documentElement.scrollWidth - innerWidth, innerWidth]"
    )
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert inner == width
    assert overflow <= 0


def test_nothing_scrolls_sideways_on_a_wide_screen(browser, open_page):
    screen = {"width": 1400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    open_page("run")
    wide = browser.execute_script(
        "document.querySelectorAll('details').forEach(d => d.open = true);"
        "return [...document.querySelectorAll('.scroll, #decisions-box, .flame, section')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.className + e.id + e.scrollWidth)"
    )
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide == []


def test_charts_follow_the_window(open_page):
    browser = open_page("run")
    width = "return document.querySelector('#timeline-chart .uplot').getBoundingClientRect().width"
    before = browser.execute_script(width)
    browser.set_window_size(700, 900)
    WebDriverWait(browser, 5).until(lambda b: b.execute_script(width) < before - 300)
    browser.set_window_size(1200, 900)
    WebDriverWait(browser, 5).until(lambda b: b.execute_script(width) == before)


def test_requests_would_be_seen(browser, pages):
    """The check for requests and errors can fail."""
    bad = pages / "bad.html"
    bad.write_text("<img src='http://localhost:1/x'><script>throw new Error('x')</script>")
    browser.get(bad.as_uri())
    assert "http://localhost:1/x" in requests(browser)
    assert len(browser.get_log("browser")) >= 1


def test_names_are_only_names(open_page):
    browser = open_page("evil")
    assert browser.title.startswith("</script>")
    assert browser.execute_script("return document.images.length") == 0
    find(browser, "[data-zoom=peak]").click()
    assert EVIL in find(browser, "#timeline-who").text


def test_timeline_opens_at_the_peak_and_follows_the_pointer(open_page, case):
    browser = open_page("run")
    assert case.after.peak_node in find(browser, "#timeline-who").text
    peak = texts(browser, "#timeline-kinds [data-run=after][data-kind=total]")[0]
    assert f"{case.after.peak_bytes / 2**20:.1f} MiB" == peak
    chart = centre(browser, "#timeline-chart .u-over")
    webdriver.ActionChains(browser).move_to_element_with_offset(
        chart, -chart.size["width"] // 2 + 60, 0
    ).perform()
    who = find(browser, "#timeline-who").text
    assert case.after.peak_node not in who
    assert "models/residual.py:" in who
    assert "encoder.stages." in who


def test_timeline_zooms_and_comes_back(open_page):
    browser = open_page("run")
    whole = find(browser, "#timeline-range").text
    assert whole.startswith("whole step")
    chart = centre(browser, "#timeline-chart .u-over")
    actions = webdriver.ActionChains(browser)
    actions.move_to_element_with_offset(chart, -100, 0).click_and_hold().move_by_offset(150, 4).release()
    actions.perform()
    assert " to " in find(browser, "#timeline-range").text
    actions.double_click(chart).perform()
    assert find(browser, "#timeline-range").text == whole
    for target in ("forward", "backward", "optimizer", "peak"):
        centre(browser, f"[data-zoom={target}]").click()
        assert " to " in find(browser, "#timeline-range").text
    find(browser, "[data-zoom=all]").click()
    assert find(browser, "#timeline-range").text == whole


def test_what_is_zoomed_in_on_stays_in_sight(open_page, case):
    browser = open_page("run")
    centre(browser, "[data-zoom=backward]").click()
    zoomed = find(browser, "#timeline-range").text
    browser.execute_script("document.querySelector('[data-stack=before]').click()")
    same = [float(word) for word in zoomed.split() if word.replace(".", "").isdigit()]
    now = [
        float(word)
        for word in find(browser, "#timeline-range").text.split()
        if word.replace(".", "").isdigit()
    ]
    assert now == pytest.approx(same, rel=0.05), "the other areas, at the same place"
    browser.execute_script("document.querySelector('[data-axis=order]').click()")
    words = find(browser, "#timeline-range").text.split()
    first = next(i for i, run in enumerate(case.after.runs) if case.step.nodes[run.rank].region == "backward")
    assert words[0] == "runs" and abs(int(words[1]) - first) <= 2


def test_timeline_by_op_goes_from_run_to_run_by_keys(open_page, case):
    browser = open_page("run")
    centre(browser, "[data-axis=order]").click()
    assert str(len(case.after.order)) in find(browser, "#timeline-range").text
    chart = find(browser, "#timeline-chart")
    chart.send_keys("\ue011")  # Home
    assert case.step.nodes[0].name in find(browser, "#timeline-who").text
    first = next(i for i, rank in enumerate(case.after.order) if rank != i)
    for _ in range(2):
        chart.send_keys("\ue010")  # End
    assert case.step.nodes[-1].name in find(browser, "#timeline-who").text
    again = case.step.nodes[case.after.order[first]].name
    browser.execute_script("document.querySelector('[data-stack=before]').click()")
    chart.send_keys("\ue011" + "\ue014" * first)  # Home, then to the first recompute
    assert f"{again} (recomputed without counting statistics)" in find(browser, "#timeline-who").text


def test_slider_shows_what_changes(open_page, case):
    browser = open_page("run")
    slider = centre(browser, "#tradeoff-slider")
    points = with_made(case.tradeoff, case.solution, None)
    made = points.index(next(p for p in points if p.peak_bytes == case.solution.peak_bytes))
    assert find(browser, "#tradeoff-text").text.startswith(f"this plan, plan {made + 1} of {len(points)}: ")
    slider.send_keys("\ue011")
    assert f"plan 1 of {len(points)}" in find(browser, "#tradeoff-text").text
    added = set(points[0].recomputed) - set(points[1].recomputed)
    assert set(texts(browser, "#tradeoff-added li span:first-child")) == added
    slider.send_keys("\ue014")
    assert f"plan 2 of {len(points)}" in find(browser, "#tradeoff-text").text
    assert set(texts(browser, "#tradeoff-added li span:first-child")) == set(points[1].recomputed) - set(
        points[2].recomputed
    )
    slider.send_keys("\ue010")
    assert f"plan {len(points)} of" in find(browser, "#tradeoff-text").text
    centre(browser, "#tradeoff-made").click()
    assert find(browser, "#tradeoff-text").text.startswith("this plan, ")


def test_a_click_on_the_curve_moves_the_slider(open_page):
    browser = open_page("run")
    chart = centre(browser, "#tradeoff-chart .u-over")
    actions = webdriver.ActionChains(browser)
    actions.move_to_element_with_offset(chart, chart.size["width"] // 2 - 20, 80).click().perform()
    slider = find(browser, "#tradeoff-slider")
    assert slider.get_attribute("value") == slider.get_attribute("max")


def test_decisions_sort(open_page, case):
    browser = open_page("run")
    heading = centre(browser, "#decisions-table th:nth-child(4) button")
    sizes = sorted(d.nbytes for d in case.solution.decisions)
    planned = texts(browser, "#decisions-table td:nth-child(1)")

    def shown():
        return browser.execute_script(
            "return [...document.querySelectorAll('#decisions-table tbody td:nth-child(4)')]"
            ".map(c => Number(c.dataset.value))"
        )

    heading.click()
    assert shown() == sizes[::-1]
    assert find(browser, "#decisions-table th:nth-child(4)").get_attribute("aria-sort") == "descending"
    heading.click()
    assert shown() == sizes
    find(browser, "#decisions-table th:nth-child(1) button").click()
    names = texts(browser, "#decisions-table td:nth-child(1)")
    assert names == sorted(d.name for d in case.solution.decisions)
    browser.execute_script(
        "const order = document.getElementById('order'); order.selectedIndex = 0;"
        "order.dispatchEvent(new Event('change'))"
    )
    assert texts(browser, "#decisions-table td:nth-child(1)") == planned


def test_decisions_search_and_filter(open_page, case):
    browser = open_page("run")
    count = len(case.solution.decisions)
    search = centre(browser, "#search")
    search.send_keys("stages.1 RELU")
    names = texts(browser, "#decisions-table td:nth-child(1)")
    assert 0 < len(names) < count
    assert all(name.startswith("relu") for name in names)
    assert find(browser, "#decisions-count").text == f"{len(names)} of {count} activations"
    search.clear()
    search.send_keys("nothing is called this")
    assert find(browser, "#decisions-count").text.startswith("0 of")
    search.clear()
    search.send_keys("e\ue003")  # a letter and backspace: an empty search shows all
    browser.execute_script(
        "const a = document.getElementById('action'); a.value = 'RECOMPUTE';"
        "a.dispatchEvent(new Event('change'))"
    )
    again = sum(d.action == "RECOMPUTE" for d in case.solution.decisions)
    assert find(browser, "#decisions-count").text == f"{again} of {count} activations"


def test_a_chosen_row_shows_the_graph_around_it(open_page, case):
    browser = open_page("run")
    recomputed = next(d for d in case.solution.decisions if d.action == "RECOMPUTE")
    rows = browser.find_elements("css selector", "#decisions-table tbody tr")
    row = next(r for r in rows if r.find_element("css selector", "td").text == recomputed.name)
    browser.execute_script("arguments[0].click()", row)
    pictures = browser.find_elements("css selector", "#around svg")
    assert [p.get_attribute("aria-label") for p in pictures] == [
        "Baseline",
        "With the plan: freed and recomputed",
    ]
    for picture in pictures:
        titles = [t.get_attribute("textContent") for t in picture.find_elements("css selector", "g title")]
        assert recomputed.name in titles and len(titles) >= 3


def live(browser):
    """Sizes by kind that the section of live tensors shows, once it has drawn them."""
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    return [text.rsplit(" ", 2)[-2:] for text in texts(browser, "#live-kinds li")]


def sizes_at(timeline, position):
    """From the timeline, as the page writes them."""
    parts = (int(timeline.bytes_by_kind[kind][position]) for kind in style.STACK)
    return [style.size(nbytes).split() for nbytes in parts if nbytes]


def test_what_is_live_follows_the_cursor_and_the_switch(open_page, case):
    browser = open_page("run")
    assert live(browser) == sizes_at(case.after, case.after.peak_position)
    assert "its peak" in find(browser, "#live-when").text
    chart = centre(browser, "#timeline-chart")
    centre(browser, "[data-axis=order]").click()
    for keys, position in (("\ue011", 0), ("\ue014" * 9, 9), ("\ue010", len(case.after.runs) - 1)):
        chart.send_keys(keys)
        assert live(browser) == sizes_at(case.after, position)
    browser.execute_script("document.querySelector('#holders [data-stack=before]').click()")
    assert live(browser) == sizes_at(case.before, case.before.peak_position)
    pressed = "#timeline [data-stack=before][aria-pressed=true]"
    assert len(browser.find_elements("css selector", pressed)) == 1, "both switches are one"
    assert "in the baseline" in find(browser, "#live-when").text


def test_a_click_pins_the_time_point(open_page, case):
    browser = open_page("run")
    chart = centre(browser, "#timeline-chart .u-over")
    actions = webdriver.ActionChains(browser)
    actions.move_to_element_with_offset(chart, -200, 0).click().perform()
    there = live(browser)
    assert there != sizes_at(case.after, case.after.peak_position)
    actions.move_by_offset(300, 0).perform()
    assert live(browser) == there and find(browser, "#live-follow").is_displayed()
    centre(browser, "#live-follow").click()
    assert live(browser) != there and not find(browser, "#live-follow").is_displayed()
    centre(browser, "#live-peak").click()
    assert live(browser) == sizes_at(case.after, case.after.peak_position)


def test_the_flame_graph_zooms_by_pointer_and_by_keys(open_page):
    browser = open_page("run")
    live(browser)
    crumbs = "#live-crumbs button"
    assert texts(browser, crumbs) == ["model"] and not find(browser, "#live-reset").is_enabled()
    stage = "#flame [data-path='encoder.stages.0.layers']"
    whole = centre(browser, stage).size["width"]
    find(browser, stage).click()
    assert find(browser, stage).size["width"] > 1.1 * whole
    assert texts(browser, crumbs)[0] == "model" and find(browser, "#live-reset").is_enabled()
    assert find(browser, "#live-inside-head").text.startswith("encoder.stages.0.layers, ")
    assert browser.switch_to.active_element.get_attribute("data-path") == "encoder.stages.0.layers"
    browser.switch_to.active_element.send_keys("\ue015")  # down, into the first module of the stage
    inner = browser.switch_to.active_element
    assert inner.get_attribute("data-parent") == "encoder.stages.0.layers"
    path = inner.get_attribute("data-path")
    inner.send_keys("\ue007")  # Enter
    assert find(browser, "#live-inside-head").text.startswith(f"{path}, ")
    browser.switch_to.active_element.send_keys("\ue00c")  # Escape
    assert texts(browser, crumbs) == ["model"]
    find(browser, stage).click()
    centre(browser, "#live-reset").click()
    assert texts(browser, crumbs) == ["model"] and find(browser, stage).size["width"] == whole


def test_the_flame_graph_can_be_searched(open_page, case):
    browser = open_page("run")
    search = centre(browser, "#live-search")
    search.send_keys("stages.0 CONV")
    live(browser)
    found = find(browser, "#live-found").text
    assert " found, " in found and " % of what is live, in " in found
    assert browser.find_elements("css selector", "#flame .dim")
    assert "dim" not in find(browser, "#flame [data-path='encoder.stages.0.layers']").get_attribute("class")
    search.clear()
    search.send_keys("nothing is called this")
    live(browser)
    assert find(browser, "#live-found").text.startswith("0 B found")


def test_a_frame_shows_its_tensors_and_the_stack_that_made_them(open_page):
    browser = open_page("run")
    live(browser)
    leaf = browser.execute_script(
        "return [...document.querySelectorAll('#flame .leaf')].find(f => f.title.includes('activations'))"
    )
    browser.execute_script("arguments[0].click()", leaf)
    assert "activations" in find(browser, "#live-inside-head").text
    line = centre(browser, "#live-stacks summary")
    assert "models/residual.py:" in line.text
    caller = find(browser, "#live-stacks .caller")
    assert caller.text == "called by models/main.py:7", "the first stack of a chosen frame is open"
    line.click()
    assert not caller.is_displayed()
    browser.execute_script("document.getElementById('live-tensors').open = true")
    WebDriverWait(browser, 5).until(lambda b: texts(b, "#live-tensors tbody tr"))
    assert all("activations" in row for row in texts(browser, "#live-tensors tbody tr"))


def test_the_lines_that_use_the_plan_are_copied(open_page):
    browser = open_page("run")
    grant = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.execute_cdp_cmd("Browser.grantPermissions", grant)
    button = centre(browser, ".copy")
    button.click()
    WebDriverWait(browser, 5).until(lambda b: button.text in ("Copied", "Selected"))


def test_light_and_dark(open_page):
    browser = open_page("run")

    def theme_is(theme):
        script = (
            "return [document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor]"
        )
        WebDriverWait(browser, 5).until(lambda b: b.execute_script(script)[0] == theme)
        return browser.execute_script(script)[1]

    colours = {}
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        colours[scheme] = theme_is(scheme)
    assert colours["light"] != colours["dark"]
    find(browser, "#theme").click()
    assert theme_is("light") == colours["light"]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_page_with_a_store_shows_its_transfers(open_page):
    browser = open_page("store")
    rows = texts(browser, "#store details tbody tr")
    assert rows and all("the store" in row for row in rows)
    find(browser, "[data-axis=order]").click()
    find(browser, "[data-axis=time]").click()
    assert "OFFLOAD" in texts(browser, "#decisions-table .tag")


def test_two_runs_are_in_one_chart(open_page, case):
    browser = open_page("diff")
    rows = texts(browser, "#diff-readout tbody tr")
    assert len(rows) == 3 and style.size(case.after.peak_bytes) in rows[1]
    chart = centre(browser, "#diff-chart")
    chart.send_keys("\ue011")  # Home
    first = texts(browser, "#diff-readout tbody tr")
    assert first != rows and all("convolution_0" in row for row in first)
    centre(browser, "[data-axis=share]").click()
    chart.send_keys("\ue010")  # End: all lines end at 100 %
    assert all("ended" in row for row in texts(browser, "#diff-readout tbody tr"))
