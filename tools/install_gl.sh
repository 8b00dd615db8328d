#!/bin/sh
# Makes sure that simulators can render without a display (EGL, or OSMesa when MUJOCO_GL=osmesa).
# Does nothing when the libraries are there; installs them with apt as root; else prints the command. Always exits 0.
set -u

PACKAGES="libegl1 libegl-mesa0 libgl1-mesa-dri libgl1 libgles2 libosmesa6"

has() { # has NAME...: the loader knows one of these libraries
    for name in "$@"; do
        case "$LIBRARIES" in *"$name"*) return 0 ;; esac
    done
    return 1
}

ready() {
    LIBRARIES=$( (ldconfig -p || /sbin/ldconfig -p) 2>/dev/null)
    if [ "${MUJOCO_GL:-egl}" = osmesa ]; then
        has libOSMesa.so
    else
        has libEGL.so.1 && has libGL.so.1 && has libEGL_mesa.so libEGL_nvidia.so
    fi
}

warn() {
    echo "install_gl: $1" >&2
    echo "install_gl: simulators that render need, once:" >&2
    echo "    sudo apt-get update && sudo apt-get install -y --no-install-recommends $PACKAGES" >&2
    exit 0
}

[ "$(uname -s)" = Linux ] || exit 0 # macOS renders with its own libraries
ready && exit 0
command -v apt-get >/dev/null 2>&1 || warn "GL libraries are missing and there is no apt-get"
[ "$(id -u)" = 0 ] || warn "GL libraries are missing and only root can install them"

echo "install_gl: installing GL libraries"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq || warn "apt-get update failed"
known=""
for package in $PACKAGES; do # newer releases have no libosmesa6
    if apt-cache show "$package" >/dev/null 2>&1; then known="$known $package"; fi
done
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $known >/dev/null || warn "apt-get install failed"
ready || warn "still no GL libraries after installing$known"
echo "install_gl: done"
