"""Build both packages, install them into an empty environment and try them; `make package` runs it.

The environment sees the third-party packages of the one that runs this script through links, so nothing is downloaded;
pip still checks every requirement of the wheels against them. An editable install of this project is not among them.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
PROJECTS = {"bayesattn": (ROOT, "src/bayesattn"), "bayesattn_recipes": (ROOT / "recipes", "bayesattn_recipes")}
# nothing but code, what code reads, and metadata; kB are well above what the packages have now
SUFFIXES = {"bayesattn": {".py", ".typed", ".html", ".css", ".js", ".jinja"}, "bayesattn_recipes": {".py", ".yaml"}}
KILOBYTES = {"bayesattn": 450, "bayesattn_recipes": 550}

TRY_LIBRARY = """
import sys, torch
from importlib.metadata import metadata, version
import bayesattn as ba

assert ba.__file__.startswith(sys.prefix), ba.__file__
assert ba.__version__ == version("bayesattn")
assert "Typing :: Typed" in metadata("bayesattn").get_all("Classifier")
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 2), torch.nn.Flatten(), torch.nn.Linear(5 * 8, 3)).eval()
inputs = torch.randn(4, 5, 8)
doubt = ba.uncertainty(model, inputs)
assert torch.equal(doubt.label, model(inputs).argmax(dim=1)) and bool((doubt.std > 0).all())
print("ba.uncertainty:", [round(value, 2) for value in doubt.score.tolist()])
"""


def main() -> None:
    """Build, look inside, install, try."""
    release = check_versions()
    DIST.mkdir(exist_ok=True)
    wheels = [build(name, release) for name in PROJECTS]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder)
        places = sysconfig.get_paths(vars={"base": folder, "platbase": folder})
        for package in Path(sysconfig.get_path("purelib")).iterdir():
            if not package.name.startswith(("bayesattn", "__editable__", "__pycache__")):
                Path(places["purelib"], package.name).symlink_to(package)
        scripts = Path(places["scripts"])

        def install(wheel: Path) -> None:
            call(scripts / "python", "-m", "pip", "install", "--quiet", "--no-index", wheel, cwd=folder)

        def shown(*arguments: str) -> str:
            return call(scripts / "bayesattn", *arguments, cwd=folder)

        install(wheels[0])
        print(call(scripts / "python", "-W", "error", "-c", TRY_LIBRARY, cwd=folder).strip())
        expect(shown("--version"), f"bayesattn {release}")
        expect(shown("--help"), "doubt")
        install(wheels[1])
        expect(shown("list"), "digits", "graph", "language", "translation", "captioning", "vqa")
        expect(shown("train", "--help"), "--resume")
    print(f"bayesattn {release}: both packages build, install and run")


def check_versions() -> str:
    """Return the version, which is written once in each package, once for citations and once in the changelog."""
    found = {
        "src/bayesattn/__init__.py": r'^__version__ = "(.+)"$',
        "recipes/bayesattn_recipes/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## \[(\d.*?)\]",
    }
    versions = {}
    for path, pattern in found.items():
        match = re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        versions[path] = match.group(1) if match else None
    if len(set(versions.values())) != 1:
        raise SystemExit(f"the versions differ: {versions}")
    if (ROOT / "LICENSE").read_bytes() != (ROOT / "recipes/LICENSE").read_bytes():
        raise SystemExit("LICENSE and recipes/LICENSE differ")
    return versions["CITATION.cff"]


def build(name: str, release: str) -> Path:
    """Build the sdist, and the wheel from it; return the wheel."""
    folder, sources = PROJECTS[name]
    for old in DIST.glob(f"{name}-*"):
        old.unlink()
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, folder, cwd=ROOT)
    wheel, sdist = DIST / f"{name}-{release}-py3-none-any.whl", DIST / f"{name}-{release}.tar.gz"
    with zipfile.ZipFile(wheel) as archive:
        inside = {path for path in archive.namelist() if ".dist-info/" not in path}
        described = archive.read(f"{name}-{release}.dist-info/METADATA").decode()
        licensed = any(path.endswith("/LICENSE") for path in archive.namelist())
    kept = {path for path in (folder / sources).rglob("*") if path.suffix in SUFFIXES[name] and path.is_file()}
    wanted = {path.relative_to((folder / sources).parent).as_posix() for path in kept}
    if inside != wanted:
        raise SystemExit(f"{wheel.name}: what is in it and what should be differ in {sorted(inside ^ wanted)[:8]}")
    if not licensed or "Description-Content-Type: text/markdown" not in described:
        raise SystemExit(f"{wheel.name} lacks its license or its readme")
    with tarfile.open(sdist) as archive:
        missing = {"LICENSE", "README.md", "pyproject.toml"} - {Path(path).name for path in archive.getnames()}
    if missing:
        raise SystemExit(f"{sdist.name} lacks {sorted(missing)}")
    kilobytes = {path.name: path.stat().st_size / 1000 for path in (wheel, sdist)}
    if kilobytes[wheel.name] > KILOBYTES[name]:
        raise SystemExit(f"{wheel.name} has {kilobytes[wheel.name]:.0f} kB; {KILOBYTES[name]} are the most")
    extras = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    absent = [extra for extra in extras if f"Provides-Extra: {extra}\n" not in described]
    if absent:
        raise SystemExit(f"{wheel.name} does not offer the extras {absent}")
    print(", ".join(f"{file} {size:.0f} kB" for file, size in kilobytes.items()), f"({len(inside)} files)")
    return wheel


def call(*words: object, cwd: object) -> str:
    """Run a program; show everything it said where it fails."""
    # the sources must not be found by way of the caller's environment
    result = subprocess.run([*map(str, words)], cwd=cwd, env=environment(), capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, words))}\n{result.stdout}{result.stderr}")
    return result.stdout


def environment() -> dict[str, str]:
    """Return the environment without what leads Python to other sources."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def expect(text: str, *words: str) -> None:
    """Stop unless all words are in the text."""
    missing = [word for word in words if word not in text]
    if missing:
        raise SystemExit(f"{missing} not in:\n{text}")


if __name__ == "__main__":
    main()
