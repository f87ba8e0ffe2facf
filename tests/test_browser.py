"""A notebook in JupyterLab as a reader meets it: in Chromium, run through the menu, looked at."""

import os
import re
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
NOTEBOOK = ROOT / "notebooks" / "04_grouped_foreach_plus_dma.ipynb"  # with figures and a live panel
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


@pytest.fixture
def project(tmp_path):
    """A folder with a copy of the notebook, set to quick: saving it leaves the repository alone."""
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert text.count("quick = False") == 1
    (tmp_path / "notebooks").mkdir()
    copied = tmp_path / "notebooks" / NOTEBOOK.name
    copied.write_text(text.replace("quick = False", "quick = True"), encoding="utf-8")
    return tmp_path


@pytest.fixture
def lab(project, tmp_path):
    """The address of a JupyterLab from this environment, with settings of its own."""
    home = tmp_path / "jupyter"
    for name, text in SETTINGS.items():
        (home / "settings/@jupyterlab" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "settings/@jupyterlab" / name).write_text(text, encoding="utf-8")
    folders = {f"JUPYTER_{name}_DIR": str(home / name) for name in ("CONFIG", "RUNTIME", "DATA")}
    folders |= {f"JUPYTERLAB_{name}_DIR": str(home / name.lower()) for name in ("SETTINGS", "WORKSPACES")}
    environment = os.environ | folders | {"JUPYTER_PREFER_ENV_PATH": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    options = ["--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    options += ["--ServerApp.port_retries=0", "--IdentityProvider.token=", f"--ServerApp.root_dir={project}"]
    log = home / "lab.log"
    with log.open("wb") as file:
        command = [sys.executable, "-m", "jupyterlab", *options]
        server = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        wait_for(lambda: answers(f"{address}/api/status") or server.poll() is not None)
        assert server.poll() is None, log.read_text(encoding="utf-8")
        yield address
    finally:
        server.terminate()  # ends its kernels too
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


@pytest.fixture
def browser(tmp_path):
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path / 'chromium'}"]:
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.ChromeService(CHROMEDRIVER))
    yield driver
    driver.quit()


def test_a_notebook_runs_in_jupyterlab(lab, browser, project):
    path = project / "notebooks" / NOTEBOOK.name
    cells = nbformat.read(path, as_version=4).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    hidden = [cell for cell in cells if cell.metadata.get("jupyter", {}).get("source_hidden")]  # no prompt

    def find(selector: str) -> list:
        return browser.find_elements("css selector", f".jp-NotebookPanel {selector}")

    def texts(selector: str, panel: str = ".jp-NotebookPanel") -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText.trim())"
        return browser.execute_script(script, f"{panel} {selector}")

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
        assert find(".jp-OutputArea-output .jupyter-widgets")  # the live panel
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", figures[0])
        browser.find_element("css selector", ".jp-SideBar [data-id='table-of-contents']").click()
        prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        titles = [title.replace("`", "") for title in re.findall(r"^#+ (.*)", prose, re.M)]
        wait_for(lambda: texts(".jp-tocItem-content", ".jp-TableOfContents") == titles)
    finally:
        (ROOT / "runs").mkdir(exist_ok=True)
        browser.save_screenshot(str(ROOT / "runs" / f"browser-{path.stem}.png"))


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200
    except OSError:
        return False
