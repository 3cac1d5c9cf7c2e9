"""Images from this machine's files: the running interpreter, packages of its environment, Leyden itself.

Two layers, since the packages change rarely and Leyden always: `packages_layer` is kept as a tar file under the
versions it holds, `leyden_layer` is made anew each time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata as metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

PYTHON = "/usr/local/bin/python3"
LIBRARY = Path("usr/local/lib") / f"python{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = LIBRARY / "site-packages"
REPOSITORY = Path(__file__).parents[2]
# Required by something, large, and never imported by a harness or by Leyden's parts in a pod.
LEFT_OUT = frozenset({"torch", "transformers", "pandas", "pyarrow", "datasets", "botocore", "boto3", "hf-xet", "numpy"})
NEVER_READ = "litellm/proxy/_experimental/"
UNUSED_S = 7 * 86_400
NOT_IN_PODS = {"test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "site-packages"}


def packages_layer(cache: Path, roots: Iterable[str], busybox: Path, left_out: frozenset[str] = LEFT_OUT) -> Path:
    """A tar file with the interpreter, busybox and the packages that `roots` need, made once."""
    found = distributions(roots, left_out)
    names = [f"{d.metadata['Name']}=={d.version}" for d in found]
    facts = "\n".join([sys.version, sys.base_prefix, Path(__file__).read_text(), *sorted(names)])
    layer = cache / f"packages-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.tar"
    if not layer.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            root = Path(folder, "root")
            _add_system(root, busybox)
            _add_interpreter(root)
            for distribution in found:
                _add_distribution(root, distribution)
            _add_libraries(root)
            _archive(root, Path(folder, "layer.tar"))
            Path(folder, "layer.tar").rename(layer)
    layer.touch()
    _drop_unused(cache)
    return layer


def _drop_unused(cache: Path) -> None:
    """Layers of other versions are half a gigabyte each."""
    for layer in cache.glob("packages-*.tar"):
        if layer.stat().st_mtime < time.time() - UNUSED_S:
            layer.unlink(missing_ok=True)


def leyden_layer(folder: Path) -> Path:
    """Leyden and its examples as they are in the repository, compiled."""
    packages = folder / PACKAGES
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "src" / "leyden", packages / "leyden", ignore=ignore)
    shutil.copytree(REPOSITORY / "examples", folder / "leyden" / "examples", ignore=ignore)
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", packages], check=True
    )
    _add_scripts(folder, metadata.distribution("leyden"))
    return folder


def distributions(roots: Iterable[str], left_out: frozenset[str] = LEFT_OUT) -> list[metadata.Distribution]:
    """The installed packages `roots` and what they require here, without `left_out` and Leyden itself."""
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(root, "") for root in roots]
    while waiting:
        written, extra = waiting.pop()
        name = re.sub(r"[-_.]+", "-", written).lower()
        if (name, extra) in seen or name in left_out:
            continue
        seen.add((name, extra))
        distribution = found[name] = metadata.distribution(name)
        for text in distribution.requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(needed.name, extra) for extra in ("", *needed.extras)]
    return [d for name, d in sorted(found.items()) if name != "leyden"]


def _add_system(root: Path, busybox: Path) -> None:
    for name in ("bin", "tmp", "etc/ssl/certs", "root", "usr/bin", "usr/lib", "usr/local/bin", "var/tmp"):
        (root / name).mkdir(parents=True)
    shutil.copy2(busybox, root / "bin" / "busybox")
    for applet in subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    (root / "usr/bin/env").symlink_to("/bin/env")
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/tmp:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nagent:x:1000:\n")
    for name in ("bash", "sed"):
        if found := shutil.which(name):
            (root / "bin" / name).unlink(missing_ok=True)
            shutil.copy2(found, root / "bin" / name)


def _add_interpreter(root: Path) -> None:
    executable = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
    target = root / PYTHON.lstrip("/")
    shutil.copy2(executable, target)
    for alias in (f"python{sys.version_info.major}.{sys.version_info.minor}", "python"):
        (target.parent / alias).symlink_to(target.name)
    standard = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    shutil.copytree(
        standard, root / LIBRARY, ignore=lambda folder, names: NOT_IN_PODS & set(names) | _static(names), symlinks=True
    )
    (root / PACKAGES).mkdir(exist_ok=True)


def _static(names: list[str]) -> set[str]:
    return {n for n in names if n.endswith(".a") or n.startswith("config-")}


def _add_distribution(root: Path, distribution: metadata.Distribution) -> None:
    source = Path(str(distribution.locate_file(""))).resolve()
    for file in distribution.files or ():
        path = Path(os.path.normpath(source / file))
        wanted = path.suffix != ".pyi" and not str(file).startswith(NEVER_READ)
        if wanted and path.is_relative_to(source) and path.is_file():
            target = root / PACKAGES / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    _add_scripts(root, distribution)


def _add_scripts(root: Path, distribution: metadata.Distribution) -> None:
    for point in distribution.entry_points.select(group="console_scripts"):
        script = root / "usr/local/bin" / point.name
        script.parent.mkdir(parents=True, exist_ok=True)
        module, _, call = point.value.partition("[")[0].strip().partition(":")
        first = call.partition(".")[0]
        script.write_text(f"#!{PYTHON}\nimport sys\nfrom {module} import {first}\nsys.exit({call}())\n")
        script.chmod(0o755)


def _add_libraries(root: Path) -> None:
    """What the copied binaries load, at its own path; what lies with the interpreter, under /usr/lib."""
    binaries = [p for p in root.rglob("*") if p.is_file() and not p.is_symlink() and _is_elf(p)]
    listed = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
    named = set(re.findall(r"=> (/\S+)", listed)) | set(re.findall(r"^\s+(/\S+) \(", listed, re.MULTILINE))
    for library in sorted(named):
        if Path(library).is_relative_to(root):
            continue
        inside = "usr/lib" if library.startswith(sys.base_prefix) else str(Path(library).parent).lstrip("/")
        target = root / inside / Path(library).name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy2(library, target)


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _archive(root: Path, target: Path) -> None:
    def rooted(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(target, "w") as archive:
        archive.add(root, ".", filter=rooted)
