"""Take the pictures of the built site in docs/pictures/site; needs Chromium and `make docs`.

python tools/site_pictures.py [CHROMIUM]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from PIL import Image

TOP = Path(__file__).parents[1]
FOLDER = TOP / "docs" / "pictures" / "site"
PICTURES = {  # -> page, width and height in pixels, colors
    "first-screen": ("", 1440, 900, "light"),
    "first-screen-phone": ("", 375, 812, "dark"),
    "chapter": ("learn/rate-limiter/", 768, 900, "light"),
    "table": ("reference/config/", 1440, 900, "dark"),
    "api": ("api/", 1440, 900, "light"),
    "comparison-phone": ("compare/", 375, 812, "light"),
}
SCHEMES = {"dark": 0, "light": 1}  # Chromium's preferredColorScheme
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
FLAGS += "--disable-background-networking --disable-component-update --disable-sync"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def main(arguments: list[str]) -> int:
    chromium = arguments[0] if arguments else "chromium"
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=TOP / "site"))
    Thread(target=server.serve_forever, daemon=True).start()
    FOLDER.mkdir(exist_ok=True)
    for name, (page, width, height, scheme) in PICTURES.items():
        path = FOLDER / f"{name}.png"
        with tempfile.TemporaryDirectory() as profile:
            command = [
                chromium,
                *FLAGS.split(),
                f"--user-data-dir={profile}",
                f"--window-size={width},{height}",
                f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
                "--virtual-time-budget=3000",  # milliseconds for the scripts of the page
                f"--screenshot={path}",
                f"http://127.0.0.1:{server.server_port}/{page}",
            ]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        picture = Image.open(path).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
        picture.save(path, optimize=True)
        print(f"{path}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
