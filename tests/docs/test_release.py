"""What a release is made with: the bill of materials, images, the conda recipe, and the command that publishes."""

import json
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import requires

import pytest
import yaml

import lockstep
from doc_blocks import HOUSE, environment

RELEASE = HOUSE / "release"
PROJECT = tomllib.loads((HOUSE / "pyproject.toml").read_text())["project"]
#: What conda-forge calls a package that the Python package index calls otherwise.
CONDA_NAMES = {"torch": "pytorch", "typing-extensions": "typing_extensions", "matplotlib": "matplotlib-base"}
RELEASED = f"## [{lockstep.__version__}] - 2026-12-01"


def run(*command, cwd=HOUSE, **variables):
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=110
    )


def test_the_conda_recipe_needs_what_the_package_needs():
    recipe = yaml.safe_load((RELEASE / "recipe.yaml").read_text())
    needs = {f"python {PROJECT['requires-python']}"}
    for text in PROJECT["dependencies"]:
        name, version = re.fullmatch(r"([\w-]+)(>=[\d.]+)", text).groups()
        needs.add(f"{CONDA_NAMES.get(name, name)} {version}")
    assert set(recipe["requirements"]["run"]) == needs
    assert recipe["context"]["version"] == lockstep.__version__
    (entry,) = PROJECT["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [" = ".join(entry)]


def test_the_conda_recipe_is_one_by_its_own_reader():
    rattler_build = pytest.importorskip("rattler_build")
    (rendered,) = rattler_build.Stage0Recipe.from_file(str(RELEASE / "recipe.yaml")).render()
    assert "torch-lockstep" in str(rendered)


@pytest.mark.campaign
@pytest.mark.long
def test_the_bill_of_materials_has_what_lockstep_needs_and_no_tools_of_the_tests(tmp_path):
    pytest.importorskip("cyclonedx_py")
    done = run(sys.executable, RELEASE / "sbom.py", tmp_path / "sbom.json")
    assert done.returncode == 0, done.stderr
    bill = json.loads((tmp_path / "sbom.json").read_text())
    names = {re.sub(r"[-_.]+", "-", component["name"]).lower() for component in bill["components"]}
    required = [text for text in requires("torch-lockstep") if "extra ==" not in text]
    direct = {re.match(r"[\w-]+", text)[0] for text in required}
    assert direct | {"jinja2"} <= names  # the latter by way of torch
    assert not {"pytest", "mypy", "sphinx", "torch-lockstep"} & names
    root = bill["metadata"]["component"]
    assert (root["name"], root["version"]) == ("torch-lockstep", lockstep.__version__)
    (of_root,) = (each["dependsOn"] for each in bill["dependencies"] if each["ref"] == root["bom-ref"])
    assert {re.sub(r"[-_.]+", "-", ref.partition("==")[0]).lower() for ref in of_root} == direct


@pytest.fixture
def checkout(tmp_path):
    """A repository with this version, committed and tagged, as of a release."""
    for package in ("build", "hatchling", "twine"):
        pytest.importorskip(package)
    root = tmp_path / "checkout"
    shutil.copytree(HOUSE / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "Makefile",
        ".gitignore",
        "tests/harness/public_surface.txt",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(HOUSE / name, root / name)
    text = (HOUSE / "CHANGELOG.md").read_text()
    (root / "CHANGELOG.md").write_text(re.sub(r"(?m)^## \[.*$", RELEASED, text, count=1))
    git(root, "init", "-q")
    commit(root)
    git(root, "tag", f"v{lockstep.__version__}")
    return root


def git(root, *words):
    identity = ("-c", "user.name=Someone", "-c", "user.email=someone@example.org")
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True)


def commit(root):
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "a release")


def publish(root, *words, **variables):
    return run(sys.executable, RELEASE / "publish.py", "--root", root, *words, cwd=root, **variables)


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def uncommitted(root):
    (root / "new.py").touch()


def other_tag(root):
    replace(root / "src/lockstep/__init__.py", f'"{lockstep.__version__}"', '"9.9.9"')
    commit(root)


def no_entry(root):
    replace(root / "CHANGELOG.md", RELEASED, f"## [{lockstep.__version__}] - unreleased")
    commit(root)
    git(root, "tag", "--force", f"v{lockstep.__version__}")


def lost_name(root):
    """A second release, which lacks a name that the first one had."""
    replace(root / "src/lockstep/__init__.py", f'"{lockstep.__version__}"', '"9.9.9"')
    replace(root / "CHANGELOG.md", RELEASED, f"## [9.9.9] - 2027-01-01\n\n### Added\n\n- x\n\n{RELEASED}")
    replace(root / "tests/harness/public_surface.txt", "lockstep.Run.barrier | (self) -> None\n", "")
    commit(root)
    git(root, "tag", "v9.9.9")


@pytest.mark.long
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (uncommitted, "not committed: new.py"),
        (other_tag, r"has the tags \[\], and the version is 9.9.9: git tag v9.9.9"),
        (no_entry, r"begins with '\[.*\] - unreleased'"),
        (lost_name, "not in CHANGELOG.md: lockstep.Run.barrier$"),
    ],
)
def test_what_is_no_release_is_refused(checkout, spoil, says):
    spoil(checkout)
    done = publish(checkout)
    assert done.returncode == 2
    assert re.search(f"^not published: .*{says}", done.stderr.strip()), done.stderr


class Index(BaseHTTPRequestHandler):
    """A package index that takes everything and writes down the names of the files."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received += re.findall(rb'filename="([^"]+)"', body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words):
        pass


@pytest.mark.campaign
@pytest.mark.long
def test_a_release_is_checked_built_and_uploaded(checkout):
    with HTTPServer(("127.0.0.1", 0), Index) as index:
        index.received = []
        serving = threading.Thread(target=index.serve_forever)
        serving.start()
        to_index = {
            "TWINE_REPOSITORY_URL": f"http://127.0.0.1:{index.server_port}/",
            "TWINE_USERNAME": "someone",
            "TWINE_PASSWORD": "a secret",
        }
        try:
            tried = publish(checkout, "--dry-run", **to_index)
            received_by_trial = list(index.received)
            done = publish(checkout, **to_index)
        finally:
            index.shutdown()
            serving.join()
    assert (tried.returncode, received_by_trial) == (0, []), tried.stdout + tried.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    name = f"torch_lockstep-{lockstep.__version__}"
    assert sorted(index.received) == [f"{name}-py3-none-any.whl".encode(), f"{name}.tar.gz".encode()]


def test_images_start_the_command_itself_from_the_package_of_this_checkout():
    image, definition = (RELEASE / "Containerfile").read_text(), (RELEASE / "apptainer.def").read_text()
    assert 'ENTRYPOINT ["lockstep"]' in image
    assert 'exec lockstep "$@"' in definition
    bases = set(re.findall(r"(?:ARG BASE=|From: )(\S+)", image + definition))
    assert len(bases) == 1
    newest = max(PROJECT["classifiers"], key=lambda line: line if "Python :: 3." in line else "")
    assert tuple(map(int, re.search(r"3\.(\d+)", bases.pop()).groups())) <= (int(newest.rsplit(".", 1)[1]),)
