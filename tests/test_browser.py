"""Notebooks in JupyterLab as a reader meets them: in Chromium, run through the menu, looked at."""

import datetime
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import nbformat
import pytest
from execute_notebook import SHOWS
from tiny_notebooks import wait_for

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update --window-size=1400,2000"""
SETTINGS = {  # every cell in the page, nothing asked of the network, no pop-ups
    "notebook-extension/tracker.jupyterlab-settings": '{"windowingMode": "none"}',
    "apputils-extension/notification.jupyterlab-settings": '{"fetchNews": "false", "checkForUpdates": false}',
}
ERRORS = '[data-mime-type="application/vnd.jupyter.error"], [data-mime-type="application/vnd.jupyter.stderr"]'

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason="no chromium and chromedriver on the PATH"),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Copies of the notebooks, set to quick: saving one here leaves the repository alone."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "notebooks").mkdir()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        text = path.read_text(encoding="utf-8")
        assert text.count("quick = False") == 1, path
        text = text.replace("quick = False", "quick = True")
        (folder / "notebooks" / path.name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def lab(project, tmp_path_factory):
    """The address of a JupyterLab from this environment, with settings of its own."""
    home = tmp_path_factory.mktemp("jupyter")
    for name, text in SETTINGS.items():
        (home / "settings/@jupyterlab" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "settings/@jupyterlab" / name).write_text(text, encoding="utf-8")
    folders = {"CONFIG": "config", "RUNTIME": "runtime", "DATA": "data"}
    environment = {f"JUPYTER_{name}_DIR": str(home / folder) for name, folder in folders.items()}
    environment |= {"JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "JUPYTER_PREFER_ENV_PATH": "1"}
    environment |= {"JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    options = ["--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    options += ["--ServerApp.port_retries=0", "--IdentityProvider.token=", f"--ServerApp.root_dir={project}"]
    log = (home / "lab.log").open("wb")
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options], stdout=log, stderr=log, env=os.environ | environment
    )
    try:
        wait_for(lambda: answers(f"{address}/api/status") or server.poll() is not None)
        assert server.poll() is None, (home / "lab.log").read_text(encoding="utf-8")
        yield address
    finally:
        server.terminate()  # ends its kernels too
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
        log.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.ChromeService(CHROMEDRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def screenshots():
    folder = ROOT / "runs" / f"browser-{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H-%M-%SZ}"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("number", ["00", "04"])
def test_notebooks_run_in_jupyterlab(number, lab, browser, project, screenshots):
    path = next((project / "notebooks").glob(f"{number}_*.ipynb"))
    cells = nbformat.read(path, as_version=4).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    hidden = [cell for cell in cells if cell.metadata.get("jupyter", {}).get("source_hidden")]  # no prompt

    def find(selector: str) -> list:
        return browser.find_elements("css selector", f".jp-NotebookPanel {selector}")

    def texts(selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText.trim())"
        return browser.execute_script(script, f".jp-NotebookPanel {selector}")

    def status() -> str:
        return find(".jp-Notebook-ExecutionIndicator")[0].get_attribute("data-status")

    browser.get(f"{lab}/lab/tree/notebooks/{path.name}?reset")
    wait_for(lambda: len(find(".jp-CodeCell")) == len(code) and status() == "idle")
    browser.find_element("xpath", "//*[contains(@class,'lm-MenuBar-itemLabel')][.='Run']").click()
    entry = ".lm-Menu-item[data-command='runmenu:run-all']"
    wait_for(lambda: browser.find_elements("css selector", entry))
    browser.find_element("css selector", entry).click()

    def ended() -> bool:
        prompts = texts(".jp-InputPrompt")
        all_ran = sum(prompt.strip("[]:").isdigit() for prompt in prompts) == len(code) - len(hidden)
        claims = [text for text in texts(".jp-OutputArea-output") if text.startswith("✓")]
        return "[*]:" not in prompts and status() == "idle" and bool(find(ERRORS) or (all_ran and claims))

    try:
        wait_for(ended)
        assert texts(ERRORS) == []
        figures = find(".jp-OutputArea-output img")
        always = [line for source in code for line in SHOWS.findall(source)]  # others depend on the device
        assert len(figures) >= len(always) > 0
        sizes = [browser.execute_script("return arguments[0].naturalWidth", figure) for figure in figures]
        assert min(sizes) > 300  # each is a drawn picture
        widgets = find('[data-mime-type="application/vnd.jupyter.widget-view+json"]')
        assert all(widget.find_elements("css selector", ".jupyter-widgets") for widget in widgets)
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", figures[0])
        open_contents(browser)
        titles = [line for cell in cells if cell.cell_type == "markdown" for line in headings(cell.source)]
        wait_for(lambda: contents(browser) == titles)
    finally:
        browser.save_screenshot(str(screenshots / f"{path.stem}.png"))


def headings(source: str) -> list[str]:
    return [line.lstrip("#").strip().replace("`", "") for line in source.splitlines() if line.startswith("#")]


def open_contents(browser) -> None:
    tab = browser.find_element("css selector", ".jp-SideBar [data-id='table-of-contents']")
    if "lm-mod-current" not in tab.get_attribute("class"):
        tab.click()


def contents(browser) -> list[str]:
    entries = "document.querySelectorAll('.jp-TableOfContents .jp-tocItem-content')"
    return browser.execute_script(f"return [...{entries}].map(entry => entry.innerText.trim())")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200
    except OSError:
        return False
