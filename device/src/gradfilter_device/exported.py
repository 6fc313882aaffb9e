"""An exported folder: its manifest, checked, and its two graphs as functions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

FORMAT = 1
MANIFEST, TRAIN, PREDICT = "manifest.json", "train.onnx", "predict.onnx"
PARAMETERS = "parameters.npz"
NEW = "new."  # before the name of what a step puts out
Values = dict[str, np.ndarray]


class Unusable(ValueError):
    """Something that the user has to put right: one line says what."""


class Exported:
    """The folder that `gradfilter export` wrote; refuses one that is damaged or does not fit."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.manifest = _manifest(self.folder / MANIFEST)
        for name, expected in self.manifest["files"].items():
            self._check_hash(name, expected)
        self.parameters: dict[str, list[int]] = self.manifest["parameters"]
        self.state: dict[str, list[int]] = self.manifest["state"]
        self.dtype = np.dtype(self.manifest["dtype"])
        self.batch: int | None = self.manifest["images"][0]
        self.masks = self.manifest["task"] == "segmentation"

    @property
    def digest(self) -> str:
        """Tells this export from others."""
        return hashlib.sha256(
            json.dumps(self.manifest["files"], sort_keys=True).encode()
        ).hexdigest()

    @property
    def size(self) -> tuple[int, int]:
        return tuple(self.manifest["images"][2:])

    @property
    def pictures(self) -> dict:
        """Classes, mean and deviation; an export need not have them."""
        found = self.manifest.get("pictures")
        if found is None:
            raise Unusable(
                f"{self.folder} does not say how to read pictures: export with pictures="
            )
        return found

    def start(self) -> Values:
        """The parameters as exported and the optimizer's state before the first step."""
        with np.load(self.folder / PARAMETERS) as file:
            found = {name: file[name] for name in file.files}
        for name, shape in self.parameters.items():
            if name not in found or list(found[name].shape) != shape:
                raise Unusable(f"{self.folder / PARAMETERS} does not fit {MANIFEST}: {name}")
        return found | {name: np.zeros(s, self.dtype) for name, s in self.state.items()}

    def session(self, name: str, threads: int = 0):
        """A graph, loaded; it must have what the manifest says."""
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # the order of the file frees every map as soon as its patch means are taken
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        options.enable_cpu_mem_arena = False  # memory that is free goes back
        options.enable_mem_pattern = False
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        level = ort.GraphOptimizationLevel
        frozen = self.manifest["frozen"]
        # the highest level reorders constant weights, and without those maps back and forth
        options.graph_optimization_level = (
            level.ORT_ENABLE_ALL if frozen else level.ORT_ENABLE_EXTENDED
        )
        try:
            session = ort.InferenceSession(
                str(self.folder / name), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the runtime has exceptions of its own
            first = str(error).strip().partition("\n")[0]
            raise Unusable(f"ONNX Runtime cannot load {self.folder / name}: {first}") from error
        self._check_fit(session, name)
        return session

    def _check_hash(self, name: str, expected: str) -> None:
        path = self.folder / name
        if not path.is_file():
            raise Unusable(f"{path} is missing: copy the whole exported folder")
        if _digest(path) != expected:
            raise Unusable(f"{path} is damaged or was changed: its hash is not that of {MANIFEST}")

    def _check_fit(self, session, name: str) -> None:
        found = {
            i.name: [s if isinstance(s, int) else None for s in i.shape]
            for i in session.get_inputs()
        }
        expected = dict(self.parameters) | {"images": self.manifest["images"]}
        if name == TRAIN:
            expected |= self.state | {"rate": [], "targets": self.manifest["targets"]}
        names = {o.name for o in session.get_outputs()}
        wanted = {NEW + n for n in (*self.parameters, *self.state)} | {"loss"}
        missing = (wanted if name == TRAIN else {"scores"}) - names
        if found != expected or missing:
            wrong = sorted(missing) or sorted(
                k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k)
            )
            raise Unusable(f"{MANIFEST} does not fit {name}: {wrong[0]}")


def _manifest(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise Unusable(
            f"{path.parent} holds no exported network: there is no {MANIFEST}"
        ) from error
    except (OSError, ValueError) as error:
        raise Unusable(f"{path} cannot be read: {error}") from error
    needed = (
        "format",
        "files",
        "parameters",
        "state",
        "dtype",
        "images",
        "targets",
        "task",
        "frozen",
        "state_in_place",
    )
    missing = [key for key in needed if key not in found] if isinstance(found, dict) else needed
    if missing:
        raise Unusable(f"{path} is no manifest of an export: it has no {missing[0]!r}")
    if found["format"] != FORMAT:
        raise Unusable(f"{path} has format {found['format']}, and this program reads {FORMAT}")
    return found


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
