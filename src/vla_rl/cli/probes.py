"""Tries of what a driver or a runtime can break or hang: `python -m vla_rl.cli.probes egl`, one a process. Each prints
what it found as one line, or fails. GL and Vulkan are asked through ctypes, so that no simulator has to be installed to
know whether it could draw."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from ctypes import c_char_p, c_int, c_uint, c_void_p
from typing import Any

EGL_PLATFORM_DEVICE, EGL_OPENGL_API, EGL_OPENGL_BIT = 0x313F, 0x30A2, 0x0008
EGL_SURFACE_TYPE, EGL_PBUFFER_BIT, EGL_RENDERABLE_TYPE, EGL_NONE = 0x3033, 0x0001, 0x3040, 0x3038
EGL_WIDTH, EGL_HEIGHT = 0x3057, 0x3056
GL_RENDERER, GL_UNSIGNED_BYTE, OSMESA_RGBA = 0x1F01, 0x1401, 0x1908
TASK_S = 40.0
"""Seconds that a worker of Ray gets to start and run a task."""


def egl() -> str:
    """Draw into an off-screen surface of the first device that can, as MuJoCo does with MUJOCO_GL=egl."""
    lib = ctypes.CDLL("libEGL.so.1")
    lib.eglGetProcAddress.restype = c_void_p

    def load_function(name: str, result: Any, *arguments: Any) -> Any:
        address = lib.eglGetProcAddress(name.encode())
        if not address:
            raise RuntimeError(f"libEGL has no {name}")
        return ctypes.CFUNCTYPE(result, *arguments)(address)

    devices, count = (c_void_p * 16)(), c_int()
    query = load_function("eglQueryDevicesEXT", c_uint, c_int, ctypes.POINTER(c_void_p), ctypes.POINTER(c_int))
    if not query(16, devices, ctypes.byref(count)) or not count.value:
        raise RuntimeError("libEGL knows no device")
    display_of = load_function("eglGetPlatformDisplayEXT", c_void_p, c_uint, c_void_p, c_void_p)
    pointer = ctypes.POINTER(c_int)
    lib.eglInitialize.argtypes = (c_void_p, pointer, pointer)
    lib.eglChooseConfig.argtypes = (c_void_p, pointer, ctypes.POINTER(c_void_p), c_int, pointer)
    lib.eglCreatePbufferSurface.argtypes = (c_void_p, c_void_p, pointer)
    lib.eglCreatePbufferSurface.restype = c_void_p
    lib.eglCreateContext.argtypes = (c_void_p, c_void_p, c_void_p, pointer)
    lib.eglCreateContext.restype = c_void_p
    lib.eglMakeCurrent.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p)
    config_attributes = (c_int * 5)(EGL_SURFACE_TYPE, EGL_PBUFFER_BIT, EGL_RENDERABLE_TYPE, EGL_OPENGL_BIT, EGL_NONE)
    size = (c_int * 5)(EGL_WIDTH, 16, EGL_HEIGHT, 16, EGL_NONE)
    for device in devices[: count.value]:
        display = display_of(EGL_PLATFORM_DEVICE, device, None)
        if not display or not lib.eglInitialize(display, None, None):
            continue
        config, config_count = c_void_p(), c_int()
        lib.eglBindAPI(EGL_OPENGL_API)
        if (
            not lib.eglChooseConfig(display, config_attributes, ctypes.byref(config), 1, ctypes.byref(config_count))
            or not config_count.value
        ):
            continue
        surface = lib.eglCreatePbufferSurface(display, config, size)
        context = lib.eglCreateContext(display, config, None, None)
        if surface and context and lib.eglMakeCurrent(display, surface, surface, context):
            name: bytes = load_function("glGetString", c_char_p, c_uint)(GL_RENDERER)
            return name.decode()
    raise RuntimeError(f"none of {count.value} devices gives an OpenGL context")


def osmesa() -> str:
    """Draw into memory, as MuJoCo does with MUJOCO_GL=osmesa."""
    lib: Any = None
    for library in ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so"):
        with suppress(OSError):
            lib = lib or ctypes.CDLL(library)
    if lib is None:
        raise RuntimeError("libOSMesa is not installed")
    lib.OSMesaCreateContextExt.restype = c_void_p
    lib.OSMesaMakeCurrent.argtypes = (c_void_p, c_void_p, c_uint, c_int, c_int)
    lib.OSMesaGetProcAddress.restype = c_void_p
    context = lib.OSMesaCreateContextExt(OSMESA_RGBA, 24, 0, 0, None)
    pixels = ctypes.create_string_buffer(16 * 16 * 4)
    if not context or not lib.OSMesaMakeCurrent(context, pixels, GL_UNSIGNED_BYTE, 16, 16):
        raise RuntimeError("OSMesa gives no context")
    name: bytes = ctypes.CFUNCTYPE(c_char_p, c_uint)(lib.OSMesaGetProcAddress(b"glGetString"))(GL_RENDERER)
    return name.decode()


def vulkan() -> str:
    """Names of the devices that a Vulkan instance lists and SAPIEN can draw with."""
    lib = ctypes.CDLL("libvulkan.so.1")
    create_info = (ctypes.c_uint64 * 8)(1)  # VkInstanceCreateInfo: sType 1, everything else zero
    instance, count = c_void_p(), c_uint()
    code = lib.vkCreateInstance(create_info, None, ctypes.byref(instance))
    if code:
        raise RuntimeError(f"vkCreateInstance failed with {code}; is there a driver?")
    lib.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
    devices = (c_void_p * max(count.value, 1))()
    lib.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), devices)
    if not count.value:
        raise RuntimeError("no device; is there a driver?")
    names: dict[bool, list[str]] = {True: [], False: []}
    for device in devices[: count.value]:
        properties = ctypes.create_string_buffer(4096)
        lib.vkGetPhysicalDeviceProperties(c_void_p(device), properties)
        name = properties.raw[20:276].split(b"\0")[0].decode()  # after five 32-bit numbers
        lib.vkEnumerateDeviceExtensionProperties(c_void_p(device), None, ctypes.byref(count), None)
        extensions = ctypes.create_string_buffer(260 * count.value)  # a name of 256 bytes and a version each
        lib.vkEnumerateDeviceExtensionProperties(c_void_p(device), None, ctypes.byref(count), extensions)
        names[b"VK_EXT_descriptor_indexing\0" in extensions.raw].append(name)
    if not names[True]:
        raise RuntimeError(f"{', '.join(names[False])}: lacks VK_EXT_descriptor_indexing; its driver is too old")
    return ", ".join(names[True])


def cuda() -> str:
    """Devices that torch can compute on, each after a small multiplication."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    names = []
    for index in range(torch.cuda.device_count()):
        x = torch.ones(8, 8, device=f"cuda:{index}")
        if float((x @ x).sum()) != 8**3:
            raise RuntimeError(f"cuda:{index} multiplies wrongly")
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        names.append(f"{torch.cuda.get_device_name(index)} ({memory:.0f} GiB)")
    return ", ".join(names)


def ray() -> str:
    """Start Ray as a run does, run a task in one of its workers, stop it."""
    import time

    from vla_rl.runtime.comm.backends.ray import RayBackend

    start = time.perf_counter()
    no_worker: Any = None
    backend = RayBackend(no_worker, address=None, deadline_s=TASK_S)
    try:
        backend.ray.get(backend.ray.remote(lambda: None).remote(), timeout=TASK_S)
    except backend.ray.exceptions.GetTimeoutError:
        raise RuntimeError(f"starts, but a task in a worker has not ended within {TASK_S:g} s") from None
    finally:
        backend.close()
    return f"starts and runs a task in {time.perf_counter() - start:.1f} s"


PROBES = {probe.__name__: probe for probe in (egl, osmesa, vulkan, cuda, ray)}


if __name__ == "__main__":
    try:
        print(PROBES[sys.argv[1]]())
    except Exception as exc:
        sys.exit(str(exc) if isinstance(exc, OSError | RuntimeError) else f"{type(exc).__name__}: {exc}")
