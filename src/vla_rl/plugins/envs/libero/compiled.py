"""Cache of compiled MuJoCo models on disk: compiling takes seconds, loading a fifth of a second.

A scene is compiled without its textures, which take most of the space and which many tasks share; each texture is
cached as a separate model that holds nothing else. Physics have a separate model without the meshes that are only
drawn: MuJoCo clears a byte for each of their triangles in every physics step, which pushes all else out of the
processor's cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    import mujoco

FORMAT = "1"
"""Version of the cache; increase it when older files become unusable."""
DRAFTS, ABANDONED = "drafts-", 3600
"""Name prefix of the folders in which models are compiled, and seconds after which one of them counts as abandoned."""
COMPILE = """
import json, sys, mujoco
for xml, file in json.load(sys.stdin):
    mujoco.mj_saveModel(mujoco.MjModel.from_xml_string(xml), file, None)
"""


TETRAHEDRON = "0 0 0 .01 0 0 0 .01 0 0 0 .01"
"""Vertices of the mesh that replaces those that are only drawn."""


class Sources(NamedTuple):
    """A scene's XML, split into what is drawn, what moves, and textures."""

    scene: str
    """XML of the scene, in which each texture is a single pixel."""
    physics: str
    """The same with a tetrahedron for each mesh that is only drawn. Names and numbers of everything are equal, and all
    that physics depend on."""
    texture_xmls: tuple[str | None, ...]
    """Indexed by texture number: XML of a model that holds this texture alone; None for a texture that the scene's own
    XML describes."""


def take_apart(xml: str) -> Sources:
    """Split a scene's XML. Texture numbers stay as they are."""
    root, texture_xmls = ET.fromstring(xml), []  # noqa: S314  robosuite wrote it
    for texture in root.iter("texture"):
        alone = None
        if "file" in texture.attrib:
            attributes = dict(texture.attrib)
            name = attributes.pop("name", Path(attributes["file"]).stem)
            alone = _isolate_texture(attributes)
            texture.attrib.clear()
            texture.attrib.update(name=name, builtin="flat", width="1", height="1")
            texture.attrib.update({key: attributes[key] for key in ("type",) if key in attributes})
        texture_xmls.append(alone)
    scene = ET.tostring(root, "unicode")
    _replace_drawn_meshes(root)
    return Sources(scene, ET.tostring(root, "unicode"), tuple(texture_xmls))


def _replace_drawn_meshes(root: ET.Element) -> None:
    """Replace the meshes of geoms that neither collide nor have mass."""
    compiler = root.find("compiler")
    if compiler is None or compiler.get("inertiagrouprange") != "0 0":
        return  # drawn geoms have mass
    physical = {
        geom.get("mesh")
        for geom in root.iter("geom")
        if (geom.get("contype"), geom.get("conaffinity")) != ("0", "0") or geom.get("group", "0") == "0"
    }
    for mesh in root.iter("mesh"):
        if "name" in mesh.attrib and mesh.get("name") not in physical:
            name = mesh.attrib["name"]
            mesh.attrib.clear()
            mesh.attrib.update(name=name, vertex=TETRAHEDRON)


def _isolate_texture(texture: dict[str, str]) -> str:
    """Return XML of a model with this texture alone, equal for all tasks that use the file, whatever they call it."""
    root = ET.Element("mujoco")
    ET.SubElement(ET.SubElement(root, "asset"), "texture", texture | {"name": "picture"})
    return ET.tostring(root, "unicode")


class CompiledModels:
    """Cache of compiled models in a folder of the user, limited in bytes; the least recently used are deleted first."""

    def __init__(self, limit: int, folder: Path | None = None) -> None:
        self._limit = limit
        self._folder = folder or usual_folder()
        self._checked: set[Path] = set()

    def load_model(self, xml: str) -> mujoco.MjModel:
        import mujoco

        self.ensure_compiled([xml])
        return mujoco.MjModel.from_binary_path(str(self._find_file(_hash_model(xml))))

    def ensure_compiled(self, xmls: Sequence[str]) -> None:
        """Compile the models that are missing or damaged, in a subprocess whose end frees the compiler's memory. Raise
        RuntimeError with its output if it fails."""
        names = {_hash_model(xml): xml for xml in xmls}
        if all(map(self._is_sound, names)):
            return
        with self._lock_model(next(iter(names))):
            missing = {name: xml for name, xml in names.items() if not self._is_sound(name)}
            self._compile_models(missing)
        self._prune_models(names)

    def _compile_models(self, missing: dict[str, str]) -> None:
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=DRAFTS) as drafts:
            files = {name: Path(drafts, name) for name in missing}
            jobs = [(xml, str(files[name])) for name, xml in missing.items()]
            done = subprocess.run(
                [sys.executable, "-c", COMPILE],
                input=json.dumps(jobs),
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                check=False,
                start_new_session=True,  # keeps Ctrl-C from it
            )
            if done.returncode != 0:
                raise RuntimeError(f"MuJoCo could not compile a model (exit code {done.returncode}):\n{done.stderr}")
            for name, file in files.items():
                file.replace(self._folder / f"{name}-{_compute_checksum(file):08x}.mjb")

    def _is_sound(self, name: str) -> bool:
        """Return whether the model is cached and undamaged (checked at its first use), and mark it as used now."""
        try:
            file = self._find_file(name)
            if file in self._checked or file.stem.endswith(f"-{_compute_checksum(file):08x}"):
                self._checked.add(file)
                os.utime(file)
                return True
            file.unlink()
        except FileNotFoundError:
            pass
        return False

    def _find_file(self, name: str) -> Path:
        file = next(self._folder.glob(f"{name}-*.mjb"), None)
        if file is None:
            raise FileNotFoundError(f"no {name} in {self._folder}")
        return file

    @contextmanager
    def _lock_model(self, name: str) -> Iterator[None]:
        """Lock a model between processes while it is compiled: a process that waited finds it in the cache."""
        with (self._folder / f"{name}.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _prune_models(self, spared: Collection[str]) -> None:
        """Delete least recently used models above the limit. Safe with other processes that prune or load at the same
        time: an open file stays readable after its deletion."""
        for drafts in self._folder.glob(f"{DRAFTS}*"):
            with suppress(FileNotFoundError):
                if time.time() - drafts.stat().st_mtime > ABANDONED:  # its process was killed
                    shutil.rmtree(drafts, ignore_errors=True)
        models = []
        for file in self._folder.glob("*.mjb"):
            with suppress(FileNotFoundError):
                facts = file.stat()
                models.append((facts.st_mtime_ns, facts.st_size, file))
        total = sum(size for _, size, _ in models)
        for _, size, file in sorted(models):
            name = file.stem.partition("-")[0]
            if total > self._limit and name not in spared:
                total -= size
                file.unlink(missing_ok=True)
                (self._folder / f"{name}.lock").unlink(missing_ok=True)


def _hash_model(xml: str) -> str:
    """Return a hash of what the compiled model depends on: the XML, size and date of its files, and the compiler."""
    digest = hashlib.sha256(f"{FORMAT} {version('mujoco')} {xml}".encode())
    for file in sorted(set(re.findall(r'file="([^"]+)"', xml))):
        with suppress(OSError):  # the compiler will report it
            facts = Path(file).stat()
            digest.update(f"{facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def _compute_checksum(file: Path) -> int:
    if not file.stat().st_size:
        return 0  # an empty file cannot be mapped
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return zlib.crc32(content)


@cache
def usual_folder() -> Path:
    """Return the cache folder of the user, or where it cannot be written a temporary one that this process deletes."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "vla-rl/libero")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return Path(_temporary_folder().name)
    return folder


@cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="vla-rl-libero-")
