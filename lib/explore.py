"""Choose a strategy, sizes and a device, and see the launches and the timeline of one step's copies."""

from __future__ import annotations

import os

from lib import plots, step
from lib.device_model import DeviceProfile
from lib.eagle import EagleConfig
from lib.strategies import STRATEGIES


def explore(
    strategy: str = "grouped_foreach_dma",
    batch_size: int = 8,
    topk: int = 4,
    num_steps: int = 3,
    hidden_size: int = 4096,
    padding: bool = False,
    profile: str = "v100",
) -> None:
    """Display the launches of one step, per copy and by `strategy`, and their modelled timelines.

    Args:
        padding: replay a graph that was captured for one request more, so that the pad rows are filled.
        profile: the name of a device profile in data/devices/.
    """
    import pandas as pd
    from IPython.display import display

    config = EagleConfig.preset(
        "llama3-8b",
        hidden_size=hidden_size,
        topk=topk,
        num_steps=num_steps,
        capture_batch_sizes=(batch_size + padding,),
    )
    names = dict.fromkeys(("per_copy", strategy))
    launches = {name: step.StepCopies.build(config, name, batch_size).launches() for name in names}
    device = DeviceProfile.load(profile)
    table = pd.DataFrame({name: step.launch_rows(made) for name, made in launches.items()}).T
    display(table.assign(**{"modelled (µs)": [round(step.span_us(x, device), 1) for x in launches.values()]}))
    lanes = {name: step.modelled_lanes(made, device) for name, made in launches.items()}
    counts = " and ".join(f"{name} {len(made)}" for name, made in launches.items())
    size = f"{batch_size} requests{', padded' if padding else ''}, hidden size {hidden_size}"
    title = f"{size}, top-k {topk}, {num_steps} steps"
    plots.show(
        plots.timeline(lanes, title),
        f"explore_{strategy}",
        f"Modelled timelines of one step's copies; launches: {counts}.",
        device.label(),
    )


def panel(live: bool | None, **chosen) -> None:
    """Controls for `explore`, starting from `chosen`; without a reader at the screen, one call of it.

    live: None asks whether a Jupyter server or an editor runs the kernel, which papermill is not.
    """
    if live is None:
        live = not os.environ.keys().isdisjoint(("JPY_SESSION_NAME", "VSCODE_PID"))
    if not live:
        return explore(**chosen)
    import ipywidgets as widgets
    from IPython.display import display

    controls = {
        "strategy": widgets.Dropdown(options=list(STRATEGIES), value="grouped_foreach_dma"),
        "batch_size": widgets.IntSlider(8, 1, 64),
        "topk": widgets.IntSlider(4, 1, 8),
        "num_steps": widgets.IntSlider(3, 2, 6),
        "hidden_size": widgets.Dropdown(options=[2048, 4096, 5120, 7168, 8192], value=4096),
        "padding": widgets.Checkbox(False),
        "profile": widgets.Dropdown(options=DeviceProfile.available(), value="v100"),
    }
    for name, control in controls.items():
        control.description = name.replace("_", " ")
        if hasattr(control, "continuous_update"):
            control.continuous_update = False
        control.value = chosen.get(name, control.value)
    columns = widgets.GridBox(
        list(controls.values()),
        layout=widgets.Layout(grid_template_columns="repeat(auto-fill, minmax(310px, 1fr))"),
    )
    return display(columns, widgets.interactive_output(explore, controls))
