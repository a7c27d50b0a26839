"""Check that this commit is a release, build it, upload it: ``make publish``; ``make check-release`` does not upload.

The upload is twine's: its own variables and files say to which index, and as whom.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HOUSE = Path(__file__).parents[1]
SURFACE = "tests/harness/public_surface.txt"
sys.path[:0] = [str(HOUSE / "tests" / "harness"), str(HOUSE / "src")]

from installed import build  # noqa: E402
from public_surface import read, unannounced  # noqa: E402


class Refused(Exception):
    """Something is not as a release must be; the message says what, and the way out."""


def git(root: Path, *words: str) -> str:
    """What git prints."""
    return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True).stdout.strip()


def version_of(root: Path) -> str:
    """The version that the package in ``root`` says it is of."""
    found = re.search(r'^__version__ = "(.+)"$', (root / "src/lockstep/__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise Refused("src/lockstep/__init__.py sets no __version__")
    return found[1]


def check(root: Path) -> None:
    """Check that the checkout in ``root`` is the one of a release.

    Raises:
        Refused: if files differ from the commit, the tag of the commit is not that of the version, the changelog does
            not begin with the version and its date, or something public is gone that it does not name.
    """
    version = version_of(root)
    if changed := git(root, "status", "--porcelain"):
        raise Refused(
            f"not committed: {', '.join(line.split()[-1] for line in changed.splitlines())}; commit, or remove"
        )
    tags = git(root, "tag", "--points-at", "HEAD").split()
    if f"v{version}" not in tags:
        raise Refused(f"this commit has the tags {tags}, and the version is {version}: git tag v{version}")
    changelog = (root / "CHANGELOG.md").read_text()
    heading = changelog.split("\n## ", 1)[1].split("\n", 1)[0]
    if not re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", heading):
        raise Refused(f"CHANGELOG.md begins with '{heading}'; give it '[{version}] - ' and the date")
    earlier = git(root, "tag", "--merged", "HEAD", "--no-contains", "HEAD", "--sort=-creatordate", "v*").split()
    if earlier and (lost := _lost(root, earlier[0], changelog)):
        raise Refused(f"public in {earlier[0]}, gone or changed, and not in CHANGELOG.md: {', '.join(lost)}")


def _lost(root: Path, tag: str, changelog: str) -> list[str]:
    return unannounced(read(git(root, "show", f"{tag}:{SURFACE}")), read((root / SURFACE).read_text()), changelog)


def main() -> int:
    """Carry out the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="do all but the upload")
    parser.add_argument("--root", type=Path, default=HOUSE, help="the checkout (default: this one)")
    asked = parser.parse_args()
    try:
        check(asked.root)
    except Refused as why:
        print(f"not published: {why}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as place:
        made = list(map(str, build(Path(place), asked.root)))
        twine = [sys.executable, "-m", "twine"]
        subprocess.run([*twine, "check", "--strict", *made], check=True)
        if not asked.dry_run:
            subprocess.run([*twine, "upload", "--non-interactive", *made], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
