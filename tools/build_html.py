"""Build the HTML of the book and print the path of its first page as the last line.

Knows: the one command that builds the book, warnings counted as errors.
Does not know: kvbook, torch, or what the pages say; no notebook is run.

    python -m tools.build_html
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build(root: Path = ROOT, env: dict[str, str] | None = None) -> Path:
    """Build the book whose `_config.yml` lies in `root`; return the path of its index.html.

    `env` is the environment of the build; None is the caller's own.
    Each build starts anew: a kept one would hide the warnings of unchanged pages
    and keep the pages of removed chapters.
    Raises ValueError if Jupyter Book is missing, subprocess.CalledProcessError if the build fails.
    """
    command = shutil.which("jupyter-book", path=str(Path(sys.executable).parent))
    if command is None:
        raise ValueError(
            f"no jupyter-book beside {sys.executable}; "
            "run `make book`, or `pip install -r requirements.txt` into this Python"
        )
    for folder in ("html", ".doctrees"):
        shutil.rmtree(root / "_build" / folder, ignore_errors=True)
    arguments = ["build", ".", "-W", "-n", "--keep-going", "-q"]
    subprocess.run([command, *arguments], cwd=root, env=env, check=True)
    return root / "_build" / "html" / "index.html"


if __name__ == "__main__":
    try:
        print(build())
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"The HTML was not built: {error}")
