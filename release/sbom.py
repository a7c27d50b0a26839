"""Write what an installation of Lockstep brings as a CycloneDX software bill of materials: ``make sbom``.

The packages are those of this Python's environment, of which the ones are left out that Lockstep does not need to run:
what its tests and its documentation use.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HOUSE = Path(__file__).parents[1]
NAME = "torch-lockstep"


def required(name: str, extra: str = "") -> dict[str, set[str]]:
    """What the distribution ``name`` requires itself on this system, each with the extras that it asks for."""
    wanted = map(Requirement, distribution(name).requires or ())
    return {
        canonicalize_name(one.name): one.extras
        for one in wanted
        if one.marker is None or one.marker.evaluate({"extra": extra})
    }


def needed(name: str) -> set[str]:
    """The distributions that ``name`` needs on this system, with itself and without extras that nobody asks for."""
    found: set[str] = set()
    queue = [(name, "")]
    while queue:
        name, extra = queue.pop()
        found.add(canonicalize_name(name))
        for other, extras in required(name, extra).items():
            queue += [(other, each) for each in ("", *extras) if each or other not in found]
    return found


def main(out: Path) -> None:
    """Write it to ``out``, and check it against the schema.

    Raises:
        SystemExit: if what would be written is no CycloneDX document.
    """
    options = [
        "--pyproject",
        str(HOUSE / "pyproject.toml"),
        "--mc-type",
        "library",
        "--output-reproducible",
        "--no-validate",
        "-o",
        "-",
    ]
    command = [sys.executable, "-m", "cyclonedx_py", "environment", *options, sys.executable]
    made = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    try:
        kept = needed(NAME)
    except PackageNotFoundError as error:
        raise SystemExit(f"{error} is not installed in this environment: make sbom") from None
    root = made["metadata"]["component"]
    root["version"] = distribution(NAME).version
    made["components"] = [
        one for one in made["components"] if canonicalize_name(one["name"]) in kept - {canonicalize_name(NAME)}
    ]
    refs = {one["bom-ref"] for one in made["components"]} | {root["bom-ref"]}
    graph = {each["ref"]: refs & set(each.get("dependsOn", ())) for each in made["dependencies"] if each["ref"] in refs}
    # Of the project itself, it has those of the extras, too.
    graph[root["bom-ref"]] = {ref for ref in refs if canonicalize_name(ref.partition("==")[0]) in required(NAME)}
    made["dependencies"] = [{"ref": ref, "dependsOn": sorted(others)} for ref, others in sorted(graph.items())]
    text = json.dumps(made, indent=2, sort_keys=True) + "\n"
    if (fault := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        raise SystemExit(f"no CycloneDX document of version 1.6: {fault}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    print(f"{out}: {len(refs) - 1} packages")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
