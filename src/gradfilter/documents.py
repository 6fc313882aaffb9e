"""Settings and plans in files: JSON where the name ends in .json, else YAML."""

from __future__ import annotations

import json
import os
from pathlib import Path


def read(path: str | Path):
    """What the file says; a ValueError that names the file where it cannot be read."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else _yaml(text)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not readable: {error}") from error


def write(path: str | Path, content: dict) -> None:
    """Write a file, whole or not at all, even where the power is cut: a rename may reach the disk
    before what was written does.
    """
    path = Path(path)
    if path.suffix == ".json":
        text = json.dumps(content, indent=1) + "\n"
    else:
        import yaml

        text = yaml.safe_dump(content, sort_keys=False)
    new = path.with_name(path.name + ".new")
    with open(new, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _yaml(text: str):
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
