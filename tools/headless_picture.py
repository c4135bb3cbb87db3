"""Draws docs/headless.png, the picture of what *headless* means: what each kind of model compares a hidden state with.

python tools/headless_picture.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "docs/headless.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=PICTURE, help="the PNG (default: the one in docs)")
    output = parser.parse_args().output
    from megahead.report.figures import draw  # needs matplotlib

    print(f"wrote {draw(output)}")


if __name__ == "__main__":
    main()
