"""Makes the pictures of the docs from a run: python docs/screenshots.py runs/searchr1-demo

The run's own picture, and the page of `rlflow view` as headless Chromium shows it (Debian:
apt install chromium). Each is a PNG in docs/images.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image
from rlflow_tools.view.page import write_page
from rlflow_tools.view.recorded import RunFiles

IMAGES = Path(__file__).parent / "images"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--virtual-time-budget=4000")  # fmt: skip
COLORS = 256  # of a palette: a screen of text needs no more, and a clone stays small
LIMIT_S = 120


def main() -> None:
    """Makes them all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="the directory of a finished run")
    run = RunFiles.open(parser.parse_args().run)
    shutil.copyfile(run.path / "progress.png", IMAGES / "searchr1_demo.png")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "view.html"
        write_page(run, page)
        with page.open(
            "a"
        ) as file:  # a group whose attempts differ: the policy is not sure of its words yet
            file.write(
                "<script>setTimeout(() => { setStep(2); $('outcome').value = 'mixed'; list(); }, 500)</script>\n"
            )
        take(page.as_uri(), IMAGES / "view.png", 1400, 900)


def take(url: str, out: Path, width: int, height: int) -> None:
    """A picture of the page's top in a window of that size."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("docs/screenshots.py: chromium is not installed: apt install chromium")
    with tempfile.TemporaryDirectory() as profile:
        shot = Path(profile) / "shot.png"
        arguments = [
            f"--user-data-dir={profile}",
            f"--screenshot={shot}",
            f"--window-size={width},{height}",
            url,
        ]
        subprocess.run(
            [program, *FLAGS, *arguments], check=True, timeout=LIMIT_S, capture_output=True
        )
        Image.open(shot).convert("RGB").quantize(COLORS).save(out, optimize=True)
    print(f"{out}: {out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
