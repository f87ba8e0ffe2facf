"""A notebook in JupyterLab as a reader meets it: in Chromium, run through the menu, looked at."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from execute_notebook import SHOWS
from tiny_notebooks import PATIENCE_S, wait_for

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "04_grouped_foreach_plus_dma.ipynb"  # with figures and a live panel
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update --window-size=1400,2000"""
SETTINGS = {  # every cell in the page, nothing asked of the network, no pop-ups
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
ERRORS = '[data-mime-type="application/vnd.jupyter.error"], [data-mime-type="application/vnd.jupyter.stderr"]'

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason="no chromium and chromedriver on the PATH"),
]


@pytest.fixture
def lab(tmp_path):
    """The address of a JupyterLab with its own settings, in a folder with a quick copy of the notebook."""
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert text.count("quick = False") == 1
    (tmp_path / NOTEBOOK.name).write_text(text.replace("quick = False", "quick = True"), encoding="utf-8")
    home = tmp_path / "jupyter"
    for name, settings in SETTINGS.items():
        file = home / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings), encoding="utf-8")
    folders = {f"JUPYTER_{name}_DIR": str(home / name) for name in ("CONFIG", "RUNTIME", "DATA")}
    folders |= {f"JUPYTERLAB_{name}_DIR": str(home / name.lower()) for name in ("SETTINGS", "WORKSPACES")}
    environment = os.environ | folders | {"JUPYTER_PREFER_ENV_PATH": "1"}
    options = ["--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", "--IdentityProvider.token="]
    command = [sys.executable, "-m", "jupyterlab", *options, f"--ServerApp.root_dir={tmp_path}"]
    log = home / "lab.log"

    def about() -> str:  # what the server writes once it listens
        return "".join(file.read_text() for file in home.glob("RUNTIME/jpserver-*.json"))

    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        wait_for(lambda: about() or server.poll() is not None)
        assert server.poll() is None, log.read_text(encoding="utf-8")
        yield json.loads(about())["url"]
    finally:
        server.terminate()  # ends its kernels too
        server.wait(PATIENCE_S)


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


def test_a_notebook_runs_in_jupyterlab(lab, browser):
    code = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    hidden = [cell for cell in code if cell.metadata.get("jupyter", {}).get("source_hidden")]  # no prompt

    def find(selector: str) -> list:
        return browser.find_elements("css selector", selector)

    def texts(selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText.trim())"
        return browser.execute_script(script, selector)

    def is_idle() -> bool:
        return find(".jp-Notebook-ExecutionIndicator")[0].get_attribute("data-status") == "idle"

    browser.get(f"{lab}lab/tree/{NOTEBOOK.name}?reset")
    wait_for(lambda: len(find(".jp-CodeCell")) == len(code) and is_idle())
    browser.find_element("xpath", "//*[contains(@class,'lm-MenuBar-itemLabel')][.='Run']").click()
    entry = ".lm-Menu-item[data-command='runmenu:run-all']"
    wait_for(lambda: find(entry))
    find(entry)[0].click()

    def ended() -> bool:
        prompts = texts(".jp-InputPrompt")
        all_ran = sum(prompt.strip("[]:").isdigit() for prompt in prompts) == len(code) - len(hidden)
        claims = [text for text in texts(".jp-OutputArea-output") if text.startswith("✓")]
        return "[*]:" not in prompts and is_idle() and bool(find(ERRORS) or (all_ran and claims))

    try:
        wait_for(ended)
        assert texts(ERRORS) == []
        figures = find(".jp-OutputArea-output img")
        always = sum(len(SHOWS.findall(cell.source)) for cell in code)  # others depend on the device
        assert len(figures) >= always > 0
        sizes = [browser.execute_script("return arguments[0].naturalWidth", figure) for figure in figures]
        assert min(sizes) > 300  # each is a drawn picture
        assert find(".jp-OutputArea-output .jupyter-widgets")  # the live panel
    finally:
        (ROOT / "runs").mkdir(exist_ok=True)
        browser.save_screenshot(str(ROOT / "runs" / f"browser-{NOTEBOOK.stem}.png"))
