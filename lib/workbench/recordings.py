def launch_kind(name, kind, call=""):
    if "Fill" in name:
        return "fill"
    if kind == "copy_kernel":
        return "elementwise"
    return kind
