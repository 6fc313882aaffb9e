"""An exported folder: its manifest, checked, and its two graphs as functions."""

from __future__ import annotations

import hashlib
import json
import math
from functools import cached_property
from pathlib import Path

import numpy as np

FORMAT = 4
MANIFEST, TRAIN, PREDICT = "manifest.json", "train.onnx", "predict.onnx"
PROBE, IN_BLOCKS = "probe.onnx", "-blocked.onnx"  # the end of the name of a graph in blocks
PARAMETERS, CONSTANTS = "parameters.npz", "constants.bin"
NEW = "new."  # before the name of what a step puts out
Values = dict[str, np.ndarray]
TYPES = {"float32": "tensor(float)", "float64": "tensor(double)"}  # NumPy's name -> ONNX Runtime's
NEEDED = {
    "format": int, "files": dict, "parameters": dict, "state": dict, "dtype": str, "images": list,
    "targets": list, "task": str, "frozen": bool, "in_place": bool, "optimizer": dict,
    "layers": dict, "outputs": int, "check": dict, "rows": list, "digest": str,
}  # fmt: skip
TASKS = {"classification": 1, "segmentation": 3}  # axes of the targets
LARGEST = 3e38  # of float32
SUMS = 4  # beside its norm, that the manifest has of the change of a tensor


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
        """Tells this export from others: by its files, and by what the manifest says of them."""
        return self.manifest["digest"]

    @property
    def size(self) -> tuple[int, int]:
        return tuple(self.manifest["images"][2:])

    @property
    def pictures(self) -> dict:
        """Classes, mean and deviation; an export need not have them."""
        found = self.manifest.get("pictures")
        if found is None:
            raise Unusable(f"{self.folder} does not say how to read pictures: export with runner=")
        if self.manifest["images"][1] != 3:
            raise Unusable("the network does not take pictures of red, green and blue")
        return found

    def start(self) -> Values:
        """The parameters as exported and the optimizer's state before the first step."""
        path, found = self.folder / PARAMETERS, {}
        try:
            with np.load(path) as file:
                found = {name: file[name] for name in file.files}
        except MemoryError:
            raise
        except Exception as error:  # NumPy and zipfile fail in many ways
            raise Unusable(f"{path} cannot be read: {reason(error)}") from error
        if (wrong := self.unlike(found, self.parameters)) is not None:
            raise Unusable(f"{path} does not fit {MANIFEST}: {wrong}")
        return found | {name: np.zeros(s, self.dtype) for name, s in self.state.items()}

    def unlike(self, values: Values, shapes: dict[str, list[int]]) -> str | None:
        """The first tensor that is missing or is not of its shape and type."""
        for name, shape in shapes.items():
            own = values.get(name)
            if own is None or list(own.shape) != shape or own.dtype != self.dtype:
                return name
        return None

    def session(self, name: str, threads: int = 0):
        """A graph, loaded; it must have what the manifest says."""
        quick = name.removesuffix(".onnx") + IN_BLOCKS
        file = quick if quick in self.manifest["files"] and self.blocks else name
        session = self._loaded(file, threads)
        self._check_fit(session, name)
        return session

    @cached_property
    def blocks(self) -> bool:
        """Whether a convolution in blocks of channels gives here what a plain one gives."""
        if PROBE not in self.manifest["files"]:
            return False
        try:
            session = self._loaded(PROBE, 1)
            random = np.random.RandomState(0)
            given = {
                t.name: random.standard_normal(t.shape).astype(np.float32)
                for t in session.get_inputs()
            }
            plain, blocked = session.run(["plain", "blocked"], given)
        except Exception:  # no such kernels for this processor; the plain graphs do without
            return False
        return bool(np.allclose(plain, blocked, rtol=1e-4, atol=1e-5))

    def _loaded(self, name: str, threads: int):
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
        if self.manifest["frozen"]:
            # reorders constant weights, and where there are none maps back and forth
            options.graph_optimization_level = level.ORT_ENABLE_ALL
        elif IN_BLOCKS in name:  # what is put in another's place is run later than that
            options.graph_optimization_level = level.ORT_ENABLE_BASIC
        else:
            options.graph_optimization_level = level.ORT_ENABLE_EXTENDED
        try:
            session = ort.InferenceSession(
                str(self.folder / name), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the runtime has exceptions of its own
            told = f"ONNX Runtime cannot load {self.folder / name}: {reason(error)}"
            raise Unusable(told) from error
        return session

    def _check_hash(self, name: str, expected: str) -> None:
        path = self.folder / name
        if not path.is_file():
            raise Unusable(f"{path} is missing: copy the whole exported folder")
        if _digest(path) != expected:
            raise Unusable(f"{path} is damaged or was changed: its hash is not that of {MANIFEST}")

    def _check_fit(self, session, name: str) -> None:
        images, targets = self.manifest["images"], self.manifest["targets"]
        own = TYPES[self.manifest["dtype"]]
        inputs = {n: (s, own) for n, s in (self.parameters | {"images": images}).items()}
        if name == TRAIN:
            inputs |= {n: ([1, math.prod(self.parameters[n])], own) for n in self.manifest["rows"]}
            state = {n: (s, own) for n, s in self.state.items()}
            outputs = {NEW + n: made for n, made in (inputs | state).items() if n != "images"}
            outputs |= {"loss": ([], own)}
            inputs |= state | {"rate": ([], own), "targets": (targets, "tensor(int64)")}
        else:
            outputs = {"scores": ([images[0], self.manifest["outputs"], *targets[1:]], own)}
        for found, expected in (
            (_described(session.get_inputs()), inputs),
            (_described(session.get_outputs()), outputs),
        ):
            names = sorted(found.keys() | expected.keys())
            wrong = [n for n in names if found.get(n) != expected.get(n)]
            if wrong:
                raise Unusable(f"{MANIFEST} does not fit {name}: {wrong[0]}")


def reason(error: Exception) -> str:
    """Why something failed, in a line that names no file."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _described(tensors) -> dict[str, tuple[list[int | None], str]]:
    """Shape and type by name; a size that is free is None."""
    return {t.name: ([s if isinstance(s, int) else None for s in t.shape], t.type) for t in tensors}


def _manifest(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise Unusable(
            f"{path.parent} holds no exported network: there is no {MANIFEST}"
        ) from error
    except (OSError, ValueError) as error:
        raise Unusable(f"{path} cannot be read: {reason(error)}") from error
    if not isinstance(found, dict) or not isinstance(found.get("format"), int):
        raise Unusable(f"{path} is no manifest of an export: it has no 'format'")
    if found["format"] != FORMAT:
        raise Unusable(f"{path} has format {found['format']}, and this program reads {FORMAT}")
    for key, kind in NEEDED.items():
        if not isinstance(found.get(key), kind):
            raise Unusable(f"{path} is no manifest of an export: it has no {key!r}")
    if found["digest"] != signature(found):
        raise Unusable(f"{path} was changed or damaged since the export")
    for name in (TRAIN, PREDICT, PARAMETERS, CONSTANTS):
        if name not in found["files"]:
            raise Unusable(f"{path} is no manifest of an export: it has no hash of {name}")
    wrong = next((key for key, right in _right(found).items() if not right), None)
    if wrong is not None:
        raise Unusable(f"{path} is no manifest of an export: its {wrong!r} cannot be")
    if found.get("pictures") is not None:
        _check_pictures(found["pictures"], found["outputs"])
    return found


def signature(manifest: dict) -> str:
    """The hash of all that a manifest says beside it. The same as gradfilter's."""
    said = {key: value for key, value in manifest.items() if key != "digest"}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _right(found: dict) -> dict[str, bool]:
    """Whether what the manifest says can be, by key."""
    images, targets = found["images"], found["targets"]
    batch = images[0] if images else 0
    return {
        "dtype": found["dtype"] in TYPES,
        "task": found["task"] in TASKS,
        "outputs": _whole(found["outputs"]),
        "images": len(images) == 4 and _sizes(images[1:]) and (batch is None or _whole(batch)),
        "targets": len(targets) == TASKS.get(found["task"]) and _sizes(targets[1:]),
        **{key: all(map(_sizes, found[key].values())) for key in ("parameters", "state")},
        "rows": all(isinstance(n, str) and n in found["parameters"] for n in found["rows"]),
        "optimizer": isinstance(found["optimizer"].get("name"), str),
        "recipe": isinstance(found.get("recipe", {}), dict),
        "check": _can_be_checked(found["check"], batch)
        and _can_be_moves(found["check"].get("moves"), {*found["parameters"], *found["state"]}),
    }


def _can_be_checked(check: dict, batch: int | None) -> bool:
    """Whether these are images, a rate and losses, which need not be finite."""
    losses, count = check.get("losses"), check.get("images")
    return (
        isinstance(losses, list)
        and len(losses) > 0
        and _any_numbers(losses)
        and _numbers([check.get("rate")])
        and _whole(count)
        and batch in (None, count)
    )


def _can_be_moves(moves, names: set[str]) -> bool:
    """Whether these are a norm and sums for every tensor, which need not be finite."""
    return (
        isinstance(moves, dict)
        and moves.keys() == names
        and all(isinstance(m, list) and len(m) == 1 + SUMS for m in moves.values())
        and all(map(_any_numbers, moves.values()))
    )


def _check_pictures(found, outputs: int) -> None:
    """Refuse what pictures could not be prepared with."""
    lengths = {"classes": outputs, "mean": 3, "std": 3}
    for key, length in lengths.items():
        part = found.get(key) if isinstance(found, dict) else None
        if not isinstance(part, list) or len(part) != length:
            raise Unusable(f"{MANIFEST} does not fit the network: it needs {length} of {key!r}")
    right = {
        "classes": all(isinstance(name, str) for name in found["classes"]),
        "mean": _numbers(found["mean"]),
        "std": _numbers(found["std"]) and min(found["std"]) > 0,
        "ignore": found.get("ignore") is None or _numbers([found["ignore"]]),
    }
    for key in right:
        if not right[key]:
            raise Unusable(f"{MANIFEST} does not say how to read pictures: its {key!r} cannot be")


def _whole(x) -> bool:
    return type(x) is int and 0 < x < 2**31


def _sizes(x) -> bool:
    return isinstance(x, list) and all(map(_whole, x))


def _numbers(x) -> bool:
    """Whether it is a list of numbers that float32 has."""
    return isinstance(x, list) and all(type(v) in (int, float) and abs(v) < LARGEST for v in x)


def _any_numbers(x: list) -> bool:
    """Whether it is a list of numbers, of which any may be infinite or none."""
    return all(type(v) is float or _numbers([v]) for v in x)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise Unusable(f"cannot read {path}: {reason(error)}") from error
    return digest.hexdigest()
