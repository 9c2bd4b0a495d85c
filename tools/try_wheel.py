"""Try one installed package: import all of it, look for its data, run its commands.

Run by the session `wheel` in an environment that holds the package's wheel and nothing else
that it did not ask for: `python -I -W error try_wheel.py spec-core`.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

# What a package must bring besides its modules, as globs below its import package.
DATA = {
    "spec-drafters": ["pairs.toml"],
    "spec-server": ["http/page/index.html", "http/page/style.css", "http/page/page.js"],
    "spec-cli": [
        "models/spec-tiny/*.safetensors",
        "models/spec-tiny/*.json",
        "models/spec-tiny/*.jinja",
        "models/spec-tiny-dspark/*.safetensors",
        "models/spec-tiny-dflash/*.safetensors",
        "prompts/*.json",
    ],
}
# Modules that only an extra makes importable, and what they miss without it.
EXTRA = {
    "spec_server.http.protocol": "uvicorn",
    "spec_server.http.serve": "uvicorn",
}
COMMANDS = {
    "spec-cli": [
        ["spec", "--help"],
        ["spec", "--version"],
        ["spec", "models"],
        ["spec", "generate", "--max-tokens", "8", "Write a Python function that adds two numbers."],
    ],
}


def main(name: str) -> None:
    """Raise at the first thing that is missing or does not work."""
    package = name.replace("-", "_")
    modules = import_all(package)
    found = distribution(name)
    folder = Path(str(files(package)))
    if "site-packages" not in folder.parts:
        raise SystemExit(f"{package} was imported from {folder}, not from its wheel")
    for pattern in ["py.typed", *DATA.get(name, [])]:
        if not any(folder.glob(pattern)):
            raise SystemExit(f"{name}: the wheel has no {pattern}")
    if found.metadata["License-Expression"] != "Apache-2.0":
        raise SystemExit(f"{name}: the wheel states no licence")
    commands = COMMANDS.get(name, [])
    for command in commands:
        run(command)
    print(f"{name} {found.version}: {modules} modules, {len(commands)} commands")


def import_all(package: str) -> int:
    """Import a package and everything below it; the number of modules."""
    root = importlib.import_module(package)
    names = [module.name for module in pkgutil.walk_packages(root.__path__, f"{package}.")]
    for name in names:
        if name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if EXTRA.get(name) != error.name:
                raise
    return len(names) + 1


def run(command: list[str]) -> None:
    """Run a command of this environment; it must succeed and say something."""
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout.strip():
        raise SystemExit(f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
    main(sys.argv[1])
